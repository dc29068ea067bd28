"""Set names in SGLang's modules at the moment those modules are imported.

The only place, with patching.py, where an attribute of an SGLang module is assigned. Binding on
import keeps the order of SGLang's own imports (several of the modules import each other) and costs
nothing for the modules that a model does not use.
"""

import sys
from collections import defaultdict
from types import ModuleType
from typing import Any

import wrapt

from sglang_hybrid.extensions.cpu.ops.bindings import BINDINGS, STAND_INS, Binding

_registered = False


class BindingError(RuntimeError):
    """Raised if SGLang's module lacks a name that the platform replaces."""


def bind_on_import() -> None:
    """Register every binding; modules that are imported already are bound at once."""
    global _registered
    if _registered:
        return
    _registered = True
    for name, stand_in in STAND_INS.items():
        sys.modules[name] = stand_in
    by_module: defaultdict[str, list[Binding]] = defaultdict(list)
    for binding in BINDINGS:
        by_module[binding.module].append(binding)
    for module, bindings in by_module.items():

        def bind(loaded: ModuleType, bindings: list[Binding] = bindings) -> None:
            for binding in bindings:
                bind_one(loaded, binding)

        wrapt.register_post_import_hook(bind, module)


def bind_one(module: ModuleType, binding: Binding) -> None:
    """Set the attribute that a binding names (dotted for a class member). Raises `BindingError` if
    the module has no such attribute.
    """
    owner: Any = module
    *path, name = binding.attribute.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    if owner is None or not (binding.creates or hasattr(owner, name)):
        raise BindingError(
            f"{binding.module} has no {binding.attribute}, which the CPU platform replaces; this "
            "SGLang is not the release that sglang_hybrid extends."
        )
    if binding.wraps:
        setattr(owner, name, binding.function(getattr(owner, name)))
        return
    in_class = path and callable(binding.function)
    setattr(owner, name, staticmethod(binding.function) if in_class else binding.function)
