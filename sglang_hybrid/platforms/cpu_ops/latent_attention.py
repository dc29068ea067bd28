"""Multi-head latent attention: which of SGLang's forms of it the CPU platform computes."""

from collections.abc import Callable
from typing import Any


def always_on_latent_keys(backend: str) -> Callable[[Any, Any], Any]:
    """What chooses a form for ``backend``: always attention on the latent keys as they are cached.

    Our attention backend reads keys from the pool, where there are no others. SGLang would project
    them first in a prefill without a prefix, as its Triton backend wants it.
    """
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    return lambda attention, forward_batch: AttnForwardMethod.MLA
