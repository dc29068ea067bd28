"""What SGLang's processes have of ours, however they are entered: patches, hooks and bindings, and
another resolution of arguments.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.models import ensure_tiny_model
from tests.entered import entered


@pytest.mark.parametrize("what", ["unpatched", "unhooked", "unbound"])
def test_nothing_is_imported_without_our_part(what: str) -> None:
    """Nobody but SGLang's own look-up of platforms and plugins has asked for it."""
    assert entered()[what] == []


def test_pools_are_split_for_planned_checkpoints_unless_the_user_says_how() -> None:
    config = json.loads((Path(ensure_tiny_model()) / "config.json").read_text())
    resolved = entered()["resolved"]
    assert resolved["SGLang's pools"] is None
    assert resolved["our pools"] == round(CostModel.from_config(config).states_to_kv, 3)
    assert resolved["the user's pools"] == 0.7


def test_the_cpu_platform_has_an_attention_of_its_own() -> None:
    resolved = entered()["resolved"]
    assert resolved["our attention"] == "hybrid_cpu"
    assert resolved["the user's attention"] == "torch_native"


@pytest.mark.parametrize(
    ("code", "environment", "sentence"),
    [
        pytest.param(
            "import sys, types\n"
            "sys.modules['sglang.srt.managers.scheduler'] = types.ModuleType('late')\n"
            "from sglang.srt.platforms import current_platform\n",
            {},
            "sglang_hybrid: sglang.srt.managers.scheduler was imported before",
            id="too late",
        ),
        pytest.param(
            "from sglang.srt.plugins import load_plugins\nload_plugins()\n",
            {"SGLANG_HYBRID_EVICTION": "bogus"},
            "sglang_hybrid: argument --hybrid-eviction: 'bogus' is none of",
            id="a bad variable",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_process_that_cannot_have_our_part_ends_with_a_sentence(
    code: str, environment: dict[str, str], sentence: str
) -> None:
    """SGLang logs what a plugin raises and goes on without it."""
    program = [sys.executable, "-c", f"{code}print('went on')"]
    variables = {**os.environ, **environment}
    done = subprocess.run(program, capture_output=True, text=True, timeout=250, env=variables)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith(sentence)
