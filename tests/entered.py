"""The patches, hooks and routes in a process that SGLang starts, as far as its scheduler and its
routes. Two files of tests ask the same one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from typing import Any

from sglang_hybrid.extensions.cpu.models import ensure_tiny_model

ENTER = """
import asyncio, importlib, json, operator, sys
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args
load_plugins()
found = {"resolved": []}
for flags, field in json.loads(sys.argv[1]):
    server_args = prepare_server_args(flags)
    server_args.resolve_once()
    found["resolved"].append(getattr(resolving_view(server_args), field))

from sglang.srt.entrypoints.engine import _server_args_for_logging

keys = ["--api-key", "sk-told", "--admin-api-key", "adm-told"]
server_args = prepare_server_args([*json.loads(sys.argv[1])[0][0], *keys])
found["logged"] = [f"server_args={_server_args_for_logging(server_args)}"]
found["logged"].append(server_args.launch_command)
import sglang.srt.managers.scheduler
from sglang_hybrid.hooks import patching
from sglang_hybrid.hooks.hook import is_in_place
from sglang_hybrid.hooks.table import HOOKS
from sglang_hybrid.extensions.cpu.binder import bind_on_import
from sglang_hybrid.extensions.cpu.ops.bindings import BINDINGS

bind_on_import()  # as the platform has done, where there is no GPU
patched = [patch.module for patch in patching.load_patches().values()]
found["unpatched"] = [
    name for name in patched
    if name in sys.modules and type(sys.modules[name].__loader__).__name__ != "_PatchedLoader"
]
targets = []
for target in {hook.target for hook in HOOKS}:
    try:
        importlib.import_module(target.partition(":")[0])
    except ModuleNotFoundError as error:
        if error.name != "cutlass":  # which Inkling's attention needs, and no CPU has
            raise
    else:
        targets.append(target)
found["unhooked"] = [target for target in targets if not is_in_place(target)]

def is_bound(binding):
    owner = operator.attrgetter(binding.attribute)(importlib.import_module(binding.module))
    if binding.wraps and not callable(owner):  # a value, to which ours adds nothing more
        return binding.function(owner) == owner
    return hasattr(owner, "__wrapped__") if binding.wraps else owner is binding.function

found["unbound"] = [f"{it.module}.{it.attribute}" for it in BINDINGS if not is_bound(it)]

from tests.keys_of_routes import foreign, rows
from sglang.srt.entrypoints.http_server import app

found["routes"] = asyncio.run(rows())
found["foreign"] = asyncio.run(foreign(app))
with open(sys.argv[2], "w") as file:
    json.dump(found, file)
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
"""Flags, and the argument that is asked for."""


@cache
def entered() -> dict[str, Any]:
    """The findings of such a process. `resolved`: an argument with some flags; None leaves SGLang's
    default. `logged`: what a start with keys writes into its log. `routes`, `foreign`: what
    `tests.keys_of_routes` says.
    """
    model = ["--model-path", str(ensure_tiny_model())]
    asked = json.dumps([[[*model, *flags], field] for flags, field in ASKED.values()])
    with tempfile.NamedTemporaryFile() as file:  # a pipe holds less
        program = [sys.executable, "-c", ENTER, asked, file.name]
        environment = {**os.environ, "SGLANG_HYBRID_UI": "text"}  # its routes are among them
        done = subprocess.run(program, capture_output=True, text=True, timeout=250, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.load(file)
    return {**found, "resolved": dict(zip(ASKED, found["resolved"], strict=True))}
