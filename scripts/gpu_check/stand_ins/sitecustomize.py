"""SGLang's CUDA packages in plain torch, for a machine with a GPU and without them.

A folder for PYTHONPATH: Python imports this module at the start of each process, so a server's
ranks have it as well. A package that is installed is never replaced. Only what the servers of
`gpu_check` call is here; anything else raises NotImplementedError when it is called. Nothing of it
is fast, and no server for users should run with it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import MagicMock

import wrapt

REPLACED = frozenset({"sgl_kernel"})
"""Packages that SGLang imports on every NVIDIA GPU. It can do without the others, as flashinfer."""

LANGUAGES = frozenset({"cutlass", "quack"})
"""Languages for kernels: what they decorate, and whatever they are asked at import, is a mock."""

os.environ.update(
    SGLANG_IS_FLASHINFER_AVAILABLE="false",
    SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK="1",
    SGLANG_FORCE_FUSED_OP_BACKEND="torch",
)


def functions() -> dict[str, Callable[..., Any]]:
    """The functions that are here, by the name of their module and their own."""
    from torch import Tensor

    def weak_ref_tensor(tensor: Tensor) -> Tensor:
        """A reference that keeps the memory, where `sgl_kernel` has one that does not."""
        return tensor

    def is_arch_support_pdl() -> bool:
        return False

    def moe_align_block_size(*arguments: Any) -> None:
        from sglang.kernels.ops.moe.moe_align import moe_align_block_size as compiled_here

        compiled_here(*arguments[:8])

    def moe_sum_reduce(input: Tensor, output: Tensor, routed_scaling_factor: float) -> None:
        """input [tokens, experts of each, hidden]; output [tokens, hidden]."""
        output.copy_(input.float().sum(1) * routed_scaling_factor)

    return {
        "sgl_kernel.weak_ref_tensor": weak_ref_tensor,
        "sgl_kernel.utils.is_arch_support_pdl": is_arch_support_pdl,
        "sgl_kernel.moe_align_block_size": moe_align_block_size,
        "sgl_kernel.moe_sum_reduce": moe_sum_reduce,
    }


class StandIn(types.ModuleType):
    """A module in which every name is something that cannot be called, but for `functions`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if full.partition(".")[0] in LANGUAGES:
            return MagicMock(name=full)
        found = functions().get(full)
        if found is None:
            found = type(name, (), {}) if name[0].isupper() else Missing(full)
        setattr(self, name, found)
        return found


class Missing:
    """Something that is not here, and whose parts are not here, either."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"gpu_check has nothing in place of {self._name}")


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `REPLACED` where nothing else does."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in REPLACED | LANGUAGES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: a stand-in has no code."""


def with_triton(module: types.ModuleType) -> None:
    """Experts are computed by Triton: in plain torch they wait for the GPU, and no graph can."""
    method = module.UnquantizedFusedMoEMethod
    method.forward_native = method.forward_cuda


sys.meta_path.append(StandIns())
wrapt.when_imported("sglang.srt.layers.quantization.unquant")(with_triton)
