"""The pages of docs/results: read, written, listed, and made again."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from scripts.bench.commands import about as about_command
from scripts.bench.report import RESULTS, ROOT, BenchFailed

CONTENTS = "README.md"
"""The page that lists the others."""

_TABLE = re.compile(
    r"^<!-- bench (?P<name>[\w-]+)(?P<long> \(long\))?: (?P<command>.+?) -->\n"
    r"(?P<body>.*?)^<!-- end (?P=name) -->$",
    re.MULTILINE | re.DOTALL,
)
_OPENED = re.compile(r"^<!-- bench ([\w-]+)", re.MULTILINE)
_DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")
_HEAD = """# Results

Each page has a table, what was measured, and what there is to say of the numbers.
`python scripts/bench.py results NAME` makes its table again. [benchmarks.md](../benchmarks.md) has
the conclusions. This list is made by `python scripts/bench.py results --contents`.

Notes are about the numbers of the date given. Run without a name, `results` leaves out what takes
from some minutes to hours.

| page | what | date | made by |
|---|---|---|---|
"""


@dataclass(frozen=True)
class Page:
    """A page of results. arguments: of scripts/bench.py, none for a table that no command makes;
    title: of the page, without its name; date: of its numbers, as YYYY-MM-DD.
    """

    name: str
    title: str
    date: str
    long: bool = False
    arguments: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        return shlex.join(["python", "scripts/bench.py", *self.arguments])


def read_page(path: Path) -> Page:
    """Raises BenchFailed where the comments around the table are wrong."""
    text = path.read_text()
    title = text.partition("\n")[0].removeprefix("# ").partition(": ")[2]
    table = _TABLE.search(text)
    opened = _OPENED.findall(text)
    dates = _DATE.findall(text if table is None else table["body"])
    date = dates[0] if dates else ""
    if table is None and not opened:
        return Page(path.stem, title, date)
    if table is None or opened != [path.stem]:
        raise BenchFailed(
            f"{path.name} needs one table, between `<!-- bench {path.stem}: COMMAND -->` and "
            f"`<!-- end {path.stem} -->`"
        )
    arguments = tuple(shlex.split(table["command"]))
    return Page(path.stem, title, date, table["long"] is not None, arguments)


def pages(folder: Path = RESULTS) -> list[Page]:
    """All pages, by their names."""
    return [read_page(path) for path in sorted(folder.glob("*.md")) if path.name != CONTENTS]


def write_table(name: str, arguments: Sequence[str], printed: str, folder: Path = RESULTS) -> None:
    """Put what a command printed into the page `name`, in the place of its table, and list it in
    the table of contents. A page that is not there is made, and says what the benchmark measures.
    """
    path = folder / f"{name}.md"
    if path.exists():
        before = read_page(path)
        if not before.arguments:
            raise BenchFailed(f"no command makes the table of {path.name}; choose another name")
        text, long = path.read_text(), before.long
    else:
        folder.mkdir(exist_ok=True)
        text, long = f"{_about(name, arguments[0])}\n\n<!-- bench {name}: - -->\n", False
        text += f"<!-- end {name} -->\n"
    mark = " (long)" if long else ""
    opening = f"<!-- bench {name}{mark}: {shlex.join(arguments)} -->"
    table = f"{opening}\n\n{printed.strip()}\n\n<!-- end {name} -->"
    path.write_text(_TABLE.sub(lambda _: table, text))
    (folder / CONTENTS).write_text(contents(pages(folder)))


def _about(name: str, command: str) -> str:
    """Title and first paragraph of a new page, from the subcommand's docstring."""
    about = about_command(command).split("\n\n")
    paragraphs = [one for one in about[1:] if not one.startswith(" ")]
    return "\n\n".join([f"# {name}: {about[0].rstrip('.')}", *paragraphs])


def contents(found: Sequence[Page]) -> str:
    """The text of the page that lists the others."""
    rows = (
        f"| [{page.name}]({page.name}.md) | {page.title} | {page.date} | "
        f"{f'`{page.command}`' if page.arguments else 'by hand'} |\n"
        for page in found
    )
    return _HEAD + "".join(rows)


def chosen(found: Sequence[Page], names: Sequence[str]) -> list[Page]:
    """The named pages, or all that do not take long. Raises BenchFailed for a wrong name."""
    made = [page for page in found if page.arguments]
    wrong = [name for name in names if name not in {page.name for page in made}]
    if wrong:
        known = ", ".join(page.name for page in made)
        raise BenchFailed(f"no command makes {', '.join(wrong)}; there are {known}")
    return [page for page in made if page.name in names or not (names or page.long)]


def make_again(
    found: Sequence[Page], names: Sequence[str], execute: Callable[[Page], None]
) -> None:
    """Run the commands of these pages one after another, and say which one is running."""
    for page in chosen(found, names):
        print(f"{page.name} ...", file=sys.stderr, flush=True)
        execute(page)


def execute(page: Page) -> None:
    """Run a page's command, which writes the page. Raises BenchFailed if it fails."""
    program = [sys.executable, str(ROOT / "scripts" / "bench.py")]
    done = subprocess.run([*program, "--write", page.name, *page.arguments], cwd=ROOT)
    if done.returncode != 0:
        raise BenchFailed(f"`{page.command}` ended with status {done.returncode}")


def results(
    *names: Annotated[str, {"metavar": "NAME"}, "pages"],
    list_: Annotated[bool, "names and commands; nothing runs"] = False,
    contents_: Annotated[bool, "only the table of contents"] = False,
    figure: Annotated[bool, "only README's figure, docs/worth.svg"] = False,
) -> None:
    """Makes the pages of docs/results again, each by the command that it carries.

        python scripts/bench.py results                # all but those that take long
        python scripts/bench.py results rounds ab      # these
        python scripts/bench.py results --list         # names and commands; nothing runs
        python scripts/bench.py results --contents     # their table of contents; nothing runs
        python scripts/bench.py results --figure       # README's figure of them; nothing runs

    A page has its table between two comments, of which the first carries the command:

        <!-- bench rounds: rounds --tokens 1024 16384 -->
        ...
        <!-- end rounds -->

    Everything between them is replaced by what the command prints; what is written around them
    stays. `<!-- bench NAME (long): ... -->` marks what takes more than some minutes: it runs only
    where it is named. Where a command fails, its page stays as it is. `bench.py --write NAME
    SUBCOMMAND ...` writes what another command prints into the page NAME, and makes that page where
    there is none.
    """
    found = pages()
    if figure:
        from scripts.bench.figure import draw_figure

        draw_figure()
    elif contents_:
        (RESULTS / CONTENTS).write_text(contents(found))
    elif not list_:
        make_again(found, names, execute)
    else:
        for page in found:
            if page.arguments:
                print(f"{page.name:22}{'(long) ' if page.long else '       '}{page.command}")
