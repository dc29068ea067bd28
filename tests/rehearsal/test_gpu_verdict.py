"""A pretended H100 where scripts/gpu_check.sh has passed, failed or never ran: how `auto` divides
its memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from sglang_hybrid.core.own_files import OWN_FOLDER
from sglang_hybrid.serving.gpu_verdict import FILE, Row, Verdict
from tests.rehearsal.machine import MACHINES
from tests.rehearsal.start import Start

pytestmark = [pytest.mark.timeout(1_200), pytest.mark.slow]

MODEL = "Nemotron-H-8B"
HERE = MACHINES["H100"].name
PASSED = Verdict(HERE, "580.159", version("sglang"), "2.14.1", True, {"hits": Row(True, "all")})
FAILED = msgspec.structs.replace(
    PASSED, passed=False, rows={"hits": Row(True, "all"), "decode steps": Row(False, "1.07 times")}
)


class Given(NamedTuple):
    """The content of the file of verdicts, and a start's flags; the line that it logs, and whether
    it has one memory.
    """

    content: Sequence[Verdict] | bytes | None
    flags: str
    said: str
    one: bool = False


STARTS = [
    Given(None, "", f"one memory was not checked on {HERE} with SGLang {version('sglang')}; scr"),
    Given([PASSED], "", "KV and states share one memory, SGLang's unified pool: that was ch", True),
    Given([FAILED], "", f"gpu_check.sh found decode steps wrong with one memory on {HERE}"),
    Given([msgspec.structs.replace(PASSED, gpu="NVIDIA H200")], "", "was not checked on"),
    Given([msgspec.structs.replace(PASSED, sglang="0.5.22")], "", "was not checked on"),
    Given(b'[{"gpu": 3}]', "", "was not checked on"),
    Given([PASSED], "--mamba-full-memory-ratio 1.0", "--mamba-full-memory-ratio, which may"),
    Given([PASSED], "--disaggregation-mode prefill", "with --disaggregation-mode"),
    Given([PASSED], "--linear-attn-decode-backend cutedsl", "by SGLang, --enable-page-major"),
    Given([PASSED], "--hybrid-memory split", ""),
    Given([PASSED], "--tp-size 2 --kv-cache-dtype fp8_e4m3", "KV and states share", True),
]

PROGRAM = """
import json, sys
from pathlib import Path
from tests.rehearsal.start import Rehearsal
folder, file = Path(sys.argv[1]), Path(sys.argv[2])
rehearsal = Rehearsal("H100", folder)
for content, flags in json.loads(sys.stdin.read()):
    file.unlink(missing_ok=True)
    if content is not None:
        file.write_text(content)
    print("start", rehearsal.start("Nemotron-H-8B", flags).to_json())
"""


def text_of(content: Sequence[Verdict] | bytes | None) -> str | None:
    if content is None or isinstance(content, bytes):
        return None if content is None else content.decode()
    return msgspec.json.encode(list(content)).decode()


def test_the_check_decides(tmp_path: Path) -> None:
    file = tmp_path / OWN_FOLDER / FILE
    file.parent.mkdir()
    asked = [(text_of(given.content), given.flags.split()) for given in STARTS]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(file)],
        input=json.dumps(asked),
        env=os.environ | {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=1_100,
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("start ")]
    starts = [Start.from_json(line.removeprefix("start ")) for line in lines]
    for given, start in zip(STARTS, starts, strict=True):
        assert start.stopped is None, (given, start.stopped)
        assert bool(start.budget) is given.one, given
        said = [line for line in start.log if line.startswith("KV and states ")]
        assert len(said) == bool(given.said), (given, start.log)
        assert not said or given.said in said[0], (given, said)
    broken = starts[[given.content for given in STARTS].index(b'[{"gpu": 3}]')]
    assert any("are not used: its content cannot be read" in line for line in broken.log)
