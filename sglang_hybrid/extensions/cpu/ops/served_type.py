"""Parts of models that SGLang makes in bfloat16, whatever a model is served in."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def in_served_type(make: Callable[..., Any]) -> Callable[..., Any]:
    """Makes Qwen4-Exp's residual streams and tables of n-grams: in the type in which the model is,
    which is torch's default one while it is made.
    """

    @wraps(make)
    def made(*given: Any, **named: Any) -> Any:
        types = {
            name: torch.get_default_dtype() for name, it in named.items() if it is torch.bfloat16
        }
        return make(*given, **named | types)

    return made
