"""Adds the pages to the site that are not in docs/: a hook of MkDocs, named in mkdocs.yml.

A page has the path in the site that it has in the repository, so that a link between pages is right
in both. The API has one page for each room, a folder right below `sglang_hybrid/`; mkdocstrings
fills it with the docstrings of the room's files.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("docker", "kernels", "patches")  # whose README.md is a page
ROOMS = sorted(path.parent.name for path in ROOT.glob("sglang_hybrid/*/__init__.py"))

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:)([^)#]+)[^)]*\)")


def on_config(config: MkDocsConfig) -> None:
    """Add the pages of docs/results/ and of the API to the navigation."""
    sections = {name: pages for section in config.nav or [] for name, pages in section.items()}
    sections["Results"] += [_path(page) for page in sorted(ROOT.glob("docs/results/*.md"))]
    sections["API"] += [f"api/{room}.md" for room in _rooms(config)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The theme's files, pages and figures of docs/, pages beside docs/, and pages of the API."""
    theme = [file for file in files if file.src_dir != config.docs_dir]
    sources = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.*")]
    sources += [ROOT / folder / "README.md" for folder in FOLDERS]
    urls = config.use_directory_urls
    pages = [File(_path(source), str(ROOT), config.site_dir, urls) for source in sources]
    for room in _rooms(config):
        content = f"# {room}\n\n::: sglang_hybrid.{room}\n"
        pages.append(File.generated(config, f"api/{room}.md", content=content))
    return Files([*theme, *pages])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page without links to files that are not in the site, such as programs: their text stays.

    A link to a file that does not exist stays too, and is an error of MkDocs.
    """
    folder = (ROOT / page.file.src_uri).parent

    def shown(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        is_outside = target.exists() and _path(target) not in files.src_uris
        return link[1] if is_outside else link[0]

    return _LINK.sub(shown, markdown)


def _rooms(config: MkDocsConfig) -> list[str]:
    """Rooms that get a page: all, if the configuration does not name some."""
    return list(config.extra.get("rooms", ROOMS))


def _path(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()
