"""Writes the table of rooms into docs/architecture.md.

    python scripts/house.py            # writes it
    python scripts/house.py --print    # prints it

A room is a folder or a file right below `sglang_hybrid/`; floors are those of the contracts in
pyproject.toml, which the tests check. The purpose of a room is its docstring's first paragraph.
Lines are rounded to hundreds, so that the page does not change with every commit.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grimp

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the package of this checkout, wherever another one is installed
PAGE = ROOT / "docs" / "architecture.md"
PACKAGE = "sglang_hybrid"
RELEASE = ROOT / "patches" / "sglang-0.5.23"

_SECTION = re.compile(
    r"(?<=^<!-- house: python scripts/house\.py -->\n).*?(?=^<!-- end house -->$)",
    re.MULTILINE | re.DOTALL,
)


class HouseFailed(Exception):
    """The table cannot be written; the sentence says why."""


def floors() -> list[list[str]]:
    """Rooms of each floor, from the top floor down, as the contract of layers has them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = (each["layers"] for each in settings["contracts"] if each["type"] == "layers")
    return [[room.strip() for room in layer.split("|")] for layer in layers]


def table(graph: grimp.ImportGraph) -> str:
    """All tables, as Markdown, of the package whose imports are `graph`."""
    return "\n".join([*_sums(graph), "", *_rooms(graph), "", *_folders(), ""])


def imported_rooms(graph: grimp.ImportGraph, room: str) -> list[str]:
    """Rooms that files of `room` import, in alphabetical order."""
    inside = {f"{PACKAGE}.{room}"} | graph.find_descendants(f"{PACKAGE}.{room}")
    imported = {
        one.split(".")[1]
        for file in inside
        for one in graph.find_modules_directly_imported_by(file) - inside
        if one != PACKAGE
    }
    return sorted(imported)


def circles(graph: grimp.ImportGraph) -> int:
    """Packages whose folders and files cannot be put into an order of imports."""
    packages = {PACKAGE} | {one.rpartition(".")[0] for one in graph.modules if one != PACKAGE}
    return sum(bool(graph.nominate_cycle_breakers(package)) for package in packages)


def lines(files: Iterator[Path]) -> int:
    return sum(file.read_text().count("\n") for file in files)


def _sums(graph: grimp.ImportGraph) -> list[str]:
    files = list((ROOT / PACKAGE).rglob("*.py"))
    sums = {
        "rooms": sum(len(floor) for floor in floors()) - sum(1 for _ in _entries()),
        "files above them": sum(1 for _ in _entries()),
        "floors": len(floors()),
        "circles": circles(graph),
        "files": len(files),
        "lines": _rounded(lines(iter(files))),
        "lines of tests": _rounded(lines((ROOT / "tests").rglob("*.py"))),
        "lines of scripts": _rounded(lines((ROOT / "scripts").rglob("*.py"))),
        "flags": _flags(),
        "patches": len(list(RELEASE.glob("*.patch"))),
    }
    return [_row(*sums), "|" + "---:|" * len(sums), _row(*sums.values())]


def _rooms(graph: grimp.ImportGraph) -> Iterator[str]:
    yield from (
        _row("floor", "room", "lines", "what is in it", "imports"),
        "|---:|---|---:|---|---|",
    )
    for number, floor in zip(range(len(floors()), 0, -1), floors(), strict=True):
        for room in floor:
            imports = ", ".join(imported_rooms(graph, room)) or "none"
            path = ROOT / PACKAGE / room
            if path.is_dir():
                size, name = lines(path.rglob("*.py")), f"`{room}/`"
            else:
                path = path.with_suffix(".py")
                size, name = lines(iter([path])), f"`{room}.py`"
            yield _row(number, name, _rounded(size), about(path), imports)


def _folders() -> Iterator[str]:
    yield _row("folder", "lines", "what is in it")
    yield "|---|---:|---|"
    for file in sorted((ROOT / PACKAGE).glob("*/**/__init__.py")):
        folder = file.parent.relative_to(ROOT / PACKAGE)
        if len(folder.parts) == 2:
            size = _rounded(lines(file.parent.rglob("*.py")))
            yield _row(f"`{folder}/`", size, about(file.parent))


def about(path: Path) -> str:
    """The first paragraph of the docstring of a folder or a file. Raises `HouseFailed` without."""
    file = path / "__init__.py" if path.is_dir() else path
    text = ast.get_docstring(ast.parse(file.read_text()))
    if not text:
        raise HouseFailed(f"{file.relative_to(ROOT)} has no docstring; say in one what is there.")
    return " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")


def _entries() -> Iterator[str]:
    """Files right below the package, where their users look for them."""
    yield from (one for floor in floors() for one in floor if not (ROOT / PACKAGE / one).is_dir())


def _flags() -> int:
    from sglang_hybrid.serving.config import HybridConfig

    parser = argparse.ArgumentParser(add_help=False)
    HybridConfig.add_flags(parser)
    return len(vars(parser.parse_args([])))


def _rounded(count: int) -> str:
    return f"{round(count, -2):,}"


def _row(*cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def page(text: str, made: str) -> str:
    """`text` with `made` between its two markers. Raises `HouseFailed` where they are missing."""
    found, count = _SECTION.subn(lambda _: made, text)
    if count != 1:
        raise HouseFailed(f"{PAGE.relative_to(ROOT)} has {count} places for the table, not 1.")
    return found


def build_graph() -> grimp.ImportGraph:
    """Imports of the package: those inside functions are among them, those for types are not."""
    return grimp.build_graph(PACKAGE, cache_dir=None, exclude_type_checking_imports=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--print", action="store_true", help="leave the page as it is")
    options = parser.parse_args(arguments)
    try:
        made = table(build_graph())
        if options.print:
            print(made, end="")
        else:
            PAGE.write_text(page(PAGE.read_text(), made))
    except HouseFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
