"""The platform of this process: the CPU platform of this package, or one that SGLang has."""

from __future__ import annotations

import os
from typing import Final

CPU_PLATFORM: Final = "sglang_hybrid.extensions.cpu.platform.HybridCpuPlatform"
"""The class of our platform."""


def serves_on_cpu() -> bool:
    """True if SGLang's platform in this process is ours."""
    from sglang.srt.platforms import current_platform

    of = type(current_platform)
    return f"{of.__module__}.{of.__qualname__}" == CPU_PLATFORM


def is_ours() -> bool:
    """True if SGLang has no platform of its own for this machine."""
    return os.environ.get("SGLANG_USE_CPU_ENGINE", "0") != "1" and not accelerator_available()


def accelerator_available() -> bool:
    """True if torch sees a device that SGLang serves on without our help."""
    import torch

    if torch.cuda.is_available() or torch.xpu.is_available() or torch.backends.mps.is_available():
        return True
    return any(
        hasattr(torch, name) and getattr(torch, name).is_available() for name in ("npu", "musa")
    )
