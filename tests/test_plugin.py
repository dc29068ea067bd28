"""The parts of ours in SGLang's processes, however they are entered: patches, hooks and bindings,
and another resolution of arguments.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_hybrid import SGLANG_VERSION
from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.extensions.cpu.models import ensure_tiny_model
from sglang_hybrid.hooks.needs import Need
from tests.entered import entered


@pytest.mark.parametrize("what", ["unpatched", "unhooked", "unbound"])
def test_nothing_is_imported_without_our_part(what: str) -> None:
    """Nobody but SGLang's own look-up of platforms and plugins has asked for it."""
    assert entered()[what] == []


def test_pools_are_split_for_planned_checkpoints_unless_the_user_says_how() -> None:
    config = json.loads((Path(ensure_tiny_model()) / "config.json").read_text())
    resolved, cost = entered()["resolved"], CostModel.from_config(config)
    longest = config["max_position_embeddings"] * cost.kv_bytes_per_token
    assert 2.1 * cost.state_bytes / longest < cost.states_to_kv
    assert resolved["SGLang's pools"] is None
    assert resolved["our pools"] == round(cost.states_to_kv, 3)
    assert resolved["the user's pools"] == 0.7


def test_the_cpu_platform_has_an_attention_of_its_own() -> None:
    resolved = entered()["resolved"]
    assert resolved["our attention"] == "hybrid_cpu"
    assert resolved["the user's attention"] == "torch_native"


GO_ON = """
from sglang.srt.platforms import current_platform
from sglang.srt.plugins import load_plugins
load_plugins()
print("went on as", type(current_platform).__module__)
"""
OTHER = """
import importlib.metadata
version = importlib.metadata.version
importlib.metadata.version = lambda name: {found!r} if name == "sglang" else version(name)
"""
LATE = """
import sys, types
sys.modules["sglang.srt.managers.scheduler"] = types.ModuleType("late")
"""
CHANGED = """
from sglang_hybrid.hooks import sources
from sglang_hybrid.hooks.hook import HookError
from sglang_hybrid.hooks import patching

def changed():
    raise HookError("a function is another one")

patching.verify = changed
"""

LACKING = """
from sglang_hybrid.hooks import patching
from sglang_hybrid.hooks.needs import Misfit, Need
patching.lacking = lambda: {Need.SPEEDS: Misfit(Need.SPEEDS, "a.module:piece", "It is gone.")}
"""


def went_on(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-W", "ignore", "-c", code + GO_ON]
    variables = {**os.environ, **environment}
    return subprocess.run(program, capture_output=True, text=True, timeout=250, env=variables)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        pytest.param(
            OTHER.format(found="0.5.24"),
            "sglang 0.5.24 is installed, but this release",
            id="another release",
        ),
        pytest.param(
            LATE,
            "sglang.srt.managers.scheduler was imported before",
            id="too late",
            marks=pytest.mark.slow,
        ),
        pytest.param(CHANGED, "a function is another one", id="changed", marks=pytest.mark.slow),
    ],
)
def test_sglang_goes_on_where_it_cannot_be_extended(code: str, why: str) -> None:
    """Nobody may have asked for us. One line says why; nothing of SGLang is changed."""
    done = went_on(code + "import logging; logging.basicConfig()")
    assert done.returncode == 0, done.stderr
    assert "went on as" in done.stdout and "sglang_hybrid" not in done.stdout
    assert done.stderr.count("sglang_hybrid does nothing here:") == 1 and why in done.stderr


@pytest.mark.slow
def test_plugins_that_are_listed_without_us_are_alone() -> None:
    done = went_on("", SGLANG_PLUGINS="another")
    assert "went on as" in done.stdout and "sglang_hybrid" not in done.stdout + done.stderr


@pytest.mark.slow
def test_a_post_release_with_the_same_pieces_is_extended() -> None:
    done = went_on(OTHER.format(found=f"{SGLANG_VERSION}.post1"))
    assert done.stdout == "went on as sglang_hybrid.extensions.cpu.platform\n", done.stderr


@pytest.mark.slow
def test_what_is_lacking_is_one_line() -> None:
    done = went_on(LACKING)
    assert done.stdout == "went on as sglang_hybrid.extensions.cpu.platform\n", done.stderr
    line = f"sglang_hybrid: not available beside this SGLang: {Need.SPEEDS.what}"
    assert done.stderr.count(f"{line} (a.module:piece)\n") == 1


@pytest.mark.slow
def test_a_wrong_setting_of_ours_ends_the_process_with_a_sentence() -> None:
    """SGLang logs what a plugin raises and goes on without it."""
    done = went_on("", SGLANG_HYBRID_EVICTION="bogus")
    assert (done.returncode, done.stdout) == (1, "")
    sentence = "sglang_hybrid: argument --hybrid-eviction: 'bogus' is none of"
    assert done.stderr.splitlines()[-1].startswith(sentence)
