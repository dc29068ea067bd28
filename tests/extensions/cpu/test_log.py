"""A log on the CPU has no lines about what only a GPU has."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import sglang

from sglang_hybrid.extensions.cpu import activation


def test_lines_are_left_out_by_how_they_begin(caplog: pytest.LogCaptureFixture) -> None:
    activation.leave_out({"sglang.a": "no GPU", "sglang.b": "graphs"})
    for name in ("sglang.a", "sglang.b"):
        for line in ("no GPU %s", "graphs %s", "100 % of it"):
            logging.getLogger(name).warning(line, *["here"] * line.count("%s"))
    said = [(record.name, record.getMessage()) for record in caplog.records]
    assert said == [
        ("sglang.a", "graphs here"),
        ("sglang.a", "100 % of it"),
        ("sglang.b", "no GPU here"),
        ("sglang.b", "100 % of it"),
    ]


@pytest.mark.parametrize(("logger", "start"), activation.GPU_LINES.items())
def test_sglang_has_the_lines(logger: str, start: str) -> None:
    """The lines are where they are looked for; another release may have moved them."""
    root = Path(sglang.__file__).parents[1]
    source = (root / (logger.replace(".", "/") + ".py")).read_text()
    assert start in source and "logger = logging.getLogger(__name__)" in source
