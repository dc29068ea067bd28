"""Classes of SGLang as it was released, beside those that our patches change."""

from __future__ import annotations

from importlib.util import find_spec, module_from_spec, spec_from_file_location
from typing import Any


def shipped(module: str, name: str) -> Any:
    """`name` of `module` without our patches: the released file, loaded a second time."""
    found = find_spec(module)
    assert found is not None and found.origin is not None
    spec = spec_from_file_location(f"{module}_as_shipped", found.origin)
    assert spec is not None and spec.loader is not None
    loaded = module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return getattr(loaded, name)
