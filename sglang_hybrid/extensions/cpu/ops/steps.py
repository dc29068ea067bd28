"""Layers of SGLang whose decode steps the native kernels compute in one call.

Each function takes SGLang's own method and returns one that calls it wherever the kernels do not
serve.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from sglang_hybrid.extensions.cpu.native import steps
from sglang_hybrid.extensions.cpu.native.library import library

Method = Callable[..., Any]


def mixer_forward(original: Method) -> Method:
    """`MambaMixer2.forward` for batches that only decode."""

    @wraps(original)
    def forward(
        self: Any,
        *,
        hidden_states: Tensor,
        layer_cache: Any,
        metadata: Any,
        output: Tensor | None = None,
        mup_vector: Tensor | None = None,
        **more: Any,
    ) -> Any:
        kernels = library()
        rows = hidden_states.shape[0]
        if (
            kernels is not None
            and metadata.num_prefills == 0
            and metadata.num_decodes == rows
            and not metadata.is_target_verify
        ):
            slots = metadata.mamba_cache_indices[:rows]
            y = steps.mamba2(kernels, self, hidden_states, layer_cache, slots, mup_vector)
            if y is not None:
                if output is not None:
                    output[:rows].copy_(y)
                return y, None, None
        return original(
            self,
            hidden_states=hidden_states,
            output=output,
            layer_cache=layer_cache,
            metadata=metadata,
            mup_vector=mup_vector,
            **more,
        )

    return forward


def norm_forward(original: Method) -> Method:
    """`RMSNorm.forward_native` for few rows of float32."""

    @wraps(original)
    def forward_native(
        self: Any, x: Tensor, residual: Tensor | None = None, *more: Any, **named: Any
    ) -> Any:
        kernels = library()
        whole = self.variance_size_override is None and self.override_orig_dtype is None
        if (
            kernels is not None
            and whole
            and not any(one is not None for one in (*more, *named.values()))
        ):
            y = steps.rms_norm(kernels, x, residual, self.weight, self.variance_epsilon)
            if y is not None:
                return y
        return original(self, x, residual, *more, **named)

    return forward_native


def mlp_forward(original: Method) -> Method:
    """`NemotronHMLP.forward` for few rows of float32."""

    @wraps(original)
    def forward(self: Any, x: Tensor) -> Any:
        kernels = library()
        y = None if kernels is None else steps.mlp(kernels, self, x)
        return original(self, x) if y is None else y

    return forward
