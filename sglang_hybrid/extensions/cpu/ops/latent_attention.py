"""Multi-head latent attention: which of SGLang's forms of it the CPU platform computes, and how
keys are turned by their positions in it.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any


def always_on_latent_keys(backend: str) -> Callable[[Any, Any], Any]:
    """A chooser of a form for ``backend``: always attention on the latent keys as they are cached.

    Our attention backend reads keys from the pool, where there are no others. SGLang would project
    them first in a prefill without a prefix, as its Triton backend wants it.
    """
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    return lambda attention, forward_batch: AttnForwardMethod.MLA


def turn_in_torch(get_rope_wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Rotary embeddings of every kind; SGLang has those of DeepSeek's YaRN only for a CPU."""

    @wraps(get_rope_wrapper)
    def get_rope(*arguments: Any, device: str | None = None, **options: Any) -> Any:
        from sglang.srt.layers.rotary_embedding import factory

        return factory.get_rope(*arguments, **options)

    return get_rope


def without_cuda_rotation(init: Callable[..., None]) -> Callable[..., None]:
    """Makes Ling's latent attention: as DeepSeek's, which it is otherwise. SGLang's has the
    rotation's CUDA kernel called on every device.
    """

    @wraps(init)
    def made(attention: Any, **options: Any) -> None:
        deepseeks: Any = type(attention).__mro__[1]
        deepseeks.__init__(attention, **options)

    return made
