"""A pretended H100 whose last server found a better split: its pools."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from sglang_hybrid.cache.learnt_split import LearntSplit
from tests.rehearsal.start import Start

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

STARTS = """
import sys
from pathlib import Path
from tests.rehearsal.start import Rehearsal
rehearsal = Rehearsal("H100", Path(sys.argv[1]))
from sglang_hybrid.cache import resolution
resolution.split_path = lambda server_args: Path(sys.argv[1]) / "learnt"
given = ["--mamba-full-memory-ratio", "1.0"]
apart = ["--hybrid-memory", "split"]
for flags in (apart, apart + given, apart + ["--max-mamba-cache-size", "300"], []):
    print("start", rehearsal.start("Nemotron-H-8B", flags).to_json())
"""


def starts(folder: Path) -> list[Start]:
    """Starts with pools that lend nothing: with no more flags, a ratio, a number of slots; and by
    default, where they lend.
    """
    done = subprocess.run(
        [sys.executable, "-c", STARTS, str(folder)],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("start ")]
    return [Start.from_json(line.removeprefix("start ")) for line in lines]


def test_memory_is_divided_as_the_last_traffic_asked_for(tmp_path: Path) -> None:
    learnt = LearntSplit(3.0, 0.712, 0.612, 2_048)
    (tmp_path / "learnt").write_bytes(msgspec.json.encode(learnt))
    by_traffic, by_ratio, by_slots, lending = starts(tmp_path)
    for start in (by_traffic, by_ratio, by_slots, lending):
        assert start.stopped is None
        assert start.spills == (start is lending)
    states = by_traffic.slots * by_traffic.state_bytes
    assert states / (by_traffic.tokens * by_traffic.kv_bytes) == pytest.approx(3.0, rel=0.02)
    assert any("71.2 % would have been hit instead of 61.2 %" in line for line in by_traffic.log)
    states = by_ratio.slots * by_ratio.state_bytes
    assert states / (by_ratio.tokens * by_ratio.kv_bytes) == pytest.approx(1.0, rel=0.02)
    assert by_slots.slots == 300
    others = (*by_ratio.log, *by_slots.log, *lending.log)
    assert not any("last server" in line for line in others)
