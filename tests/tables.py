"""Tables in docs/ whose rows are written by the tests that show them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def table(page: Path, name: str, columns: Sequence[str], order: Sequence[str]) -> Iterator[dict]:
    """The rows of a page's table between ``<!-- NAME: ... -->`` and ``<!-- end NAME -->``, by their
    first cells, as lists of cells. Rows are written as they are at the end, those in `order` only.
    """
    text = page.read_text()
    marks = rf"(^<!-- {name}: [^\n]* -->\n)(.*?)(?=^<!-- end {name} -->$)"
    (found,) = re.finditer(marks, text, re.MULTILINE | re.DOTALL)
    lines = [line.removeprefix("| ").removesuffix(" |") for line in found[2].splitlines()[2:]]
    rows = {line.split(" | ")[0]: line.split(" | ") for line in lines}
    yield rows
    written = [
        list(columns),
        ["---"] * len(columns),
        *(rows[name] for name in order if name in rows),
    ]
    made = "".join(f"| {' | '.join(cells)} |\n" for cells in written)
    page.write_text(text[: found.start(2)] + made + text[found.end(2) :])
