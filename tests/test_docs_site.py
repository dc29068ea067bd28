"""The site has all pages, its links lead somewhere, and it loads nothing from another host."""

from __future__ import annotations

import ast
import html
import re
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from tests.documented import PAGES, ROOT

ROOMS = sorted(file.parent.name for file in ROOT.glob("sglang_hybrid/*/__init__.py"))

ROOM = "hooks"
"""A small one."""

_LOADED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"']?([^\"' >]+)")
_LINKED = re.compile(r"<a\b[^>]*\bhref=\"([^\"#:]+)[\"#]")  # without a colon: in the site


def make_site(folder: Path, **settings: object) -> Path:
    """The site that `scripts/docs.sh` makes. A broken link, or a page that no menu shows, ends the
    test.
    """
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), **settings))
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site with the API of one room. All rooms take several times as long."""
    return make_site(tmp_path_factory.mktemp("site"), extra={"rooms": [ROOM]})


def has_docstring(site: Path, room: str) -> bool:
    """True if the page of a room has the first words of the room's docstring."""
    source = ROOT / "sglang_hybrid" / room / "__init__.py"
    docstring = ast.get_docstring(ast.parse(source.read_text())) or ""
    shown = re.sub(r"<[^>]+>", "", (site / "api" / f"{room}.html").read_text())
    return plain(docstring.partition(".")[0]) in plain(html.unescape(shown))


def plain(text: str) -> str:
    return " ".join(text.replace("`", "").split())


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_in_the_site(page: str, site: Path) -> None:
    path = site / page.replace("README.md", "index.html").replace(".md", ".html")
    title = re.search(r"^# (.+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert title and f">{title[1]}<" in html.unescape(path.read_text())


def test_what_is_loaded_or_linked_is_in_the_site(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        paths = {path.partition("?")[0] for path in _LOADED.findall(text)}
        assert not [path for path in paths if "//" in path], page
        assert "class=mermaid" not in text.replace('"', "")  # the theme would load its program
        if page.name != "404.html":  # its links begin at the root of the host
            missing = [
                one for one in paths | {*_LINKED.findall(text)} if not (page.parent / one).exists()
            ]
            assert not missing, page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//|@import", style.read_text()), style


def test_docstrings_are_in_the_site(site: Path) -> None:
    assert has_docstring(site, ROOM)


@pytest.mark.slow
def test_each_room_has_a_page(tmp_path: Path) -> None:
    make_site(tmp_path)
    assert {file.stem for file in tmp_path.glob("api/*.html")} == {*ROOMS}
    assert [room for room in ROOMS if not has_docstring(tmp_path, room)] == []
