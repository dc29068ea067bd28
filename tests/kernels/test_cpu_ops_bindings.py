"""The table of bindings fits the installed SGLang."""

import importlib
import subprocess
import sys

import pytest

pytest.importorskip("sglang")
binder = pytest.importorskip("sglang_hybrid.platforms.binder")
bindings = pytest.importorskip("sglang_hybrid.platforms.cpu_ops.bindings")

CHECK = """
import importlib, sys
from sglang_hybrid.platforms.binder import bind_on_import
from sglang_hybrid.platforms.cpu_ops.bindings import BINDINGS
bind_on_import()
for binding in BINDINGS:
    owner = importlib.import_module(binding.module)
    for part in binding.attribute.split("."):
        owner = getattr(owner, part)
    bound = hasattr(owner, "__wrapped__") if binding.wraps else owner is binding.function
    assert bound, f"{binding.module}.{binding.attribute}"
"""


def test_every_name_is_bound_in_a_fresh_process():
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_no_name_is_bound_twice():
    names = [(b.module, b.attribute) for b in bindings.BINDINGS]
    assert len(names) == len(set(names))


def test_a_name_that_sglang_no_longer_has_is_one_clear_error():
    name = "sglang.srt.layers.attention.mamba.prefill_track_metadata"
    gone = bindings.Binding(name, "no_such_kernel", print)
    with pytest.raises(binder.BindingError, match="has no no_such_kernel"):
        binder.bind_one(importlib.import_module(name), gone)
