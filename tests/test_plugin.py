"""What SGLang's processes have of ours, however they are entered: patches, hooks and bindings, and
another resolution of arguments.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.models import ensure_tiny_model

ENTER = """
import importlib, json, operator, sys
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args
load_plugins()
found = {"resolved": []}
for flags, field in json.loads(sys.argv[1]):
    server_args = prepare_server_args(flags)
    server_args.resolve_once()
    found["resolved"].append(getattr(resolving_view(server_args), field))

import sglang.srt.managers.scheduler
from sglang_hybrid.hooks import patching
from sglang_hybrid.hooks.hook import is_in_place
from sglang_hybrid.hooks.table import HOOKS
from sglang_hybrid.platforms.binder import bind_on_import
from sglang_hybrid.platforms.cpu_ops.bindings import BINDINGS

bind_on_import()  # as the platform has done, where there is no GPU
patched = [patch.module for patch in patching.load_patches().values()]
found["unpatched"] = [
    name for name in patched
    if name in sys.modules and type(sys.modules[name].__loader__).__name__ != "_PatchedLoader"
]
for target in {hook.target for hook in HOOKS}:
    importlib.import_module(target.partition(":")[0])
found["unhooked"] = [hook.target for hook in HOOKS if not is_in_place(hook.target)]

def is_bound(binding):
    owner = operator.attrgetter(binding.attribute)(importlib.import_module(binding.module))
    return hasattr(owner, "__wrapped__") if binding.wraps else owner is binding.function

found["unbound"] = [f"{it.module}.{it.attribute}" for it in BINDINGS if not is_bound(it)]
print(json.dumps(found))
"""
"""A process that SGLang starts, as far as its scheduler."""

RATIO, ATTENTION = "mamba_full_memory_ratio", "attention_backend"
OURS = ["--radix-cache-backend", "hybrid"]
ASKED = {
    "SGLang's pools": ([], RATIO),
    "our pools": (OURS, RATIO),
    "the user's pools": ([*OURS, "--mamba-full-memory-ratio", "0.7"], RATIO),
    "our attention": ([], ATTENTION),
    "the user's attention": (["--attention-backend", "torch_native"], ATTENTION),
}


@pytest.fixture(scope="module")
def entered() -> dict[str, Any]:
    """What such a process finds. `resolved`: an argument with some flags; None leaves SGLang's
    default.
    """
    model = ["--model-path", str(ensure_tiny_model())]
    asked = json.dumps([[[*model, *flags], field] for flags, field in ASKED.values()])
    program = [sys.executable, "-c", ENTER, asked]
    done = subprocess.run(program, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {**found, "resolved": dict(zip(ASKED, found["resolved"], strict=True))}


@pytest.mark.parametrize("what", ["unpatched", "unhooked", "unbound"])
def test_nothing_is_imported_without_our_part(entered: dict[str, Any], what: str) -> None:
    """Nobody but SGLang's own look-up of platforms and plugins has asked for it."""
    assert entered[what] == []


def test_pools_are_split_for_planned_checkpoints_unless_the_user_says_how(
    entered: dict[str, Any],
) -> None:
    config = json.loads((Path(ensure_tiny_model()) / "config.json").read_text())
    resolved = entered["resolved"]
    assert resolved["SGLang's pools"] is None
    assert resolved["our pools"] == round(CostModel.from_config(config).states_to_kv, 3)
    assert resolved["the user's pools"] == 0.7


def test_the_cpu_platform_has_an_attention_of_its_own(entered: dict[str, Any]) -> None:
    assert entered["resolved"]["our attention"] == "hybrid_cpu"
    assert entered["resolved"]["the user's attention"] == "torch_native"


@pytest.mark.parametrize(
    ("code", "environment", "sentence"),
    [
        (
            "import sys, types\n"
            "sys.modules['sglang.srt.managers.scheduler'] = types.ModuleType('late')\n"
            "from sglang.srt.platforms import current_platform\n",
            {},
            "sglang_hybrid: sglang.srt.managers.scheduler was imported before",
        ),
        (
            "from sglang.srt.plugins import load_plugins\nload_plugins()\n",
            {"SGLANG_HYBRID_EVICTION": "bogus"},
            "sglang_hybrid: argument --hybrid-eviction: 'bogus' is none of",
        ),
    ],
    ids=["too late", "a bad variable"],
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
