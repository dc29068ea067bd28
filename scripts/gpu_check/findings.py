"""Findings of a step: rows that it prints for the process that has started it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

MARK = "FOUND "


@dataclass(frozen=True)
class Finding:
    """One row of the table. ``ok`` is None where there is nothing to be right or wrong."""

    what: str
    found: str
    ok: bool | None = None

    @property
    def verdict(self) -> str:
        return {True: "ok", False: "WRONG", None: ""}[self.ok]


def tell(what: str, found: str, ok: bool | None = None) -> None:
    """Report a finding from inside a step."""
    print(MARK + json.dumps(asdict(Finding(what, found, ok))), flush=True)


def told(line: str) -> Finding | None:
    """The finding in a line of a step's output; None if it has none."""
    return Finding(**json.loads(line.removeprefix(MARK))) if line.startswith(MARK) else None
