"""The table of bindings; tests/test_plugin.py looks whether it fits the installed SGLang."""

import importlib

import pytest

pytest.importorskip("sglang")
binder = pytest.importorskip("sglang_hybrid.extensions.cpu.binder")
bindings = pytest.importorskip("sglang_hybrid.extensions.cpu.ops.bindings")


def test_no_name_is_bound_twice():
    names = [(b.module, b.attribute) for b in bindings.BINDINGS]
    assert len(names) == len(set(names))


def test_a_name_that_sglang_no_longer_has_is_one_clear_error():
    name = "sglang.srt.layers.attention.mamba.prefill_track_metadata"
    gone = bindings.Binding(name, "no_such_kernel", print)
    with pytest.raises(binder.BindingError, match="has no no_such_kernel"):
        binder.bind_one(importlib.import_module(name), gone)
