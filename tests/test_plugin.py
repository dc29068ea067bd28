"""What the plugin changes in SGLang's resolution of its arguments."""

import json
import subprocess
import sys
from pathlib import Path

from sglang_hybrid.core.cost import CostModel
from sglang_hybrid.models import ensure_default_model

RESOLVE = """
import json, sys
from sglang_hybrid import patching
patching.install()
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args
load_plugins()
for flags in json.loads(sys.argv[1]):
    server_args = prepare_server_args(flags)
    server_args.resolve_once()
    print("found", getattr(resolving_view(server_args), sys.argv[2]))
"""


def resolved(field: str, *flags: list[str]) -> list[str]:
    """What an argument resolves to with each of some flags; "None" leaves SGLang's default."""
    model = ["--model-path", str(ensure_default_model())]
    program = [
        sys.executable,
        "-c",
        RESOLVE,
        json.dumps([[*model, *more] for more in flags]),
        field,
    ]
    done = subprocess.run(program, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split()[1] for line in done.stdout.splitlines() if line.startswith("found")]


def test_pools_are_split_for_planned_checkpoints_unless_the_user_says_how() -> None:
    config = json.loads((Path(ensure_default_model()) / "config.json").read_text())
    ours = ["--radix-cache-backend", "hybrid"]
    pinned = [*ours, "--mamba-full-memory-ratio", "0.7"]
    found = resolved("mamba_full_memory_ratio", [], ours, pinned)
    assert found == ["None", str(round(CostModel.from_config(config).states_to_kv, 3)), "0.7"]


def test_the_cpu_platform_has_an_attention_of_its_own() -> None:
    found = resolved("attention_backend", [], ["--attention-backend", "torch_native"])
    assert found == ["hybrid_cpu", "torch_native"]
