"""The loaded library and its functions, with their arguments' types."""

from __future__ import annotations

import ctypes
import logging
from ctypes import c_float as real
from ctypes import c_int as number
from ctypes import c_long as long
from ctypes import c_void_p as address
from functools import cache
from time import perf_counter

from sglang_hybrid.extensions.cpu.native.build import NotBuilt, build
from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.flag_values import NativeKernels

logger = logging.getLogger(__name__)

_LAYER = (address, address, real, real, number)
ARGUMENTS = {
    "hybrid_attention": (
        *(address, long, address, long, address, long, long, address, address),
        *(address, address, address, number, number, number, number, number),
        *(real, real, long, number, number),
    ),
    "hybrid_product": (address, long, address, address, long, long, number, address),
    "hybrid_mlp": (address, long, *[address] * 4, long, long, address, address),
    "hybrid_mamba2": (
        *(address, long, long, *[address] * 12, address, long, address, long),
        *(*[long] * 6, real, *[address] * 4),
    ),
    "hybrid_rms_norm": (*[address] * 5, long, long, real),
    "hybrid_model": (long, real, number, address),
    "hybrid_model_free": (address,),
    "hybrid_model_mlp": (*_LAYER, *[address] * 4, long, number, real),
    "hybrid_model_mamba2": (
        *(*_LAYER, *[address] * 12, long, number, address, long),
        *(*[long] * 6, real),
    ),
    "hybrid_model_mamba1": (
        *(*_LAYER, *[address] * 13, long, number, address, long),
        *(*[long] * 4, number, real),
    ),
    "hybrid_model_attention": (
        *(*_LAYER, *[address] * 4, address, long, address, long, number, number, number, number),
        *(real, real, long, real, address, long),
    ),
    "hybrid_model_step": (address, long, *[address] * 8),
}
"""Types of arguments of the functions in ``kernels/native``."""

RESULTS = {"hybrid_model": address}
"""The types of results of functions that return any."""


@cache
def library() -> ctypes.CDLL | None:
    """The native kernels, or None where they are off or cannot be built; once per process."""
    if HybridConfig.from_environment().hybrid_native_kernels is NativeKernels.OFF:
        logger.info("sglang_hybrid: native kernels are off; plain torch stands for them.")
        return None
    begin = perf_counter()
    try:
        path, compiled = build()
        found = ctypes.CDLL(str(path))
        for name, arguments in ARGUMENTS.items():
            function = getattr(found, name)
            function.argtypes, function.restype = arguments, RESULTS.get(name)
    except (NotBuilt, OSError, AttributeError) as error:
        logger.warning(
            "sglang_hybrid: no native kernels, plain torch stands for them, and decoding is slower:"
            " %s.",
            error,
        )
        return None
    how = f"compiled in {perf_counter() - begin:.0f} s" if compiled else "loaded"
    logger.info("sglang_hybrid: native kernels %s (%s).", how, path)
    return found
