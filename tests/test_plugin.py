"""What the plugin changes in SGLang's resolution of its arguments."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.models import ensure_default_model

RESOLVE = """
import json, sys
from sglang_hybrid.hooks import patching
patching.install()
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args
load_plugins()
for flags, field in json.loads(sys.argv[1]):
    server_args = prepare_server_args(flags)
    server_args.resolve_once()
    print("found", getattr(resolving_view(server_args), field))
"""
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
def resolved() -> dict[str, str]:
    """What an argument resolves to with some flags; "None" leaves SGLang's default."""
    model = ["--model-path", str(ensure_default_model())]
    asked = json.dumps([[[*model, *flags], field] for flags, field in ASKED.values()])
    program = [sys.executable, "-c", RESOLVE, asked]
    done = subprocess.run(program, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("found")]
    return dict(zip(ASKED, found, strict=True))


def test_pools_are_split_for_planned_checkpoints_unless_the_user_says_how(
    resolved: dict[str, str],
) -> None:
    config = json.loads((Path(ensure_default_model()) / "config.json").read_text())
    assert resolved["SGLang's pools"] == "None"
    assert resolved["our pools"] == str(round(CostModel.from_config(config).states_to_kv, 3))
    assert resolved["the user's pools"] == "0.7"


def test_the_cpu_platform_has_an_attention_of_its_own(resolved: dict[str, str]) -> None:
    assert resolved["our attention"] == "hybrid_cpu"
    assert resolved["the user's attention"] == "torch_native"


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
