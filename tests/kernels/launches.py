"""Launches of our Triton kernels, noted instead of run, and what Triton would compile for them.

Triton decides on the host which variant of a kernel a launch needs, from its arguments, so no GPU
is asked for here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import compute_cache_key, create_function_from_signature

from sglang_hybrid.kernels import checkpoint_states_triton as kernels

NAMES = ("ssd_state", "delta_state", "lightning_state", "conv_window")
TARGET = GPUTarget("cuda", 90, 32)


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel, its grid, and its arguments as they were given."""

    name: str
    kernel: Any
    grid: tuple[int, ...]
    positional: tuple[Any, ...]
    named: dict[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments by the kernel's names for them."""
        given = dict(zip(self.kernel.arg_names, self.positional, strict=False)) | self.named
        return {name: given[name] for name in self.kernel.arg_names}

    def _bound(self, target: GPUTarget) -> tuple[Any, ...]:
        backend = make_backend(target)
        bind = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        return backend, *bind(*self.positional, **self.named)

    def variant(self) -> str:
        """The key under which Triton keeps the compiled kernel of this launch."""
        _, _, specialization, options = self._bound(TARGET)
        return str(compute_cache_key({}, specialization, options))

    def aligned(self) -> set[str]:
        """Arguments of which the variant knows that they are multiples of 16."""
        _, bound, specialization, _ = self._bound(TARGET)
        return {name for name, (_, mark) in zip(bound, specialization, strict=True) if mark == "D"}

    def compiled(self, capability: int) -> Any:
        """The kernel that Triton compiles for this launch on a GPU of that compute capability (90:
        9.0).
        """
        target = GPUTarget("cuda", capability, 32)
        backend, bound, specialization, options = self._bound(target)
        parsed, signature, constants, attributes = self.kernel._pack_args(
            backend, self.named, bound, specialization, options
        )
        source = ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=target, options=parsed.__dict__)


def noted(
    run: Callable[[], object], module: ModuleType = kernels, names: Sequence[str] = NAMES
) -> list[Launch]:
    """The launches of these kernels of `module` that `run` makes on what it takes for a GPU; none
    of them happens.
    """
    found: list[Launch] = []

    class Noting:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(module, name)

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *given, **named: found.append(
                Launch(self.name, self.kernel, grid, given, named)
            )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
        for name in names:
            patch.setattr(module, name, Noting(name))
        run()
    return found
