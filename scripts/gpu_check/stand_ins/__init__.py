"""Stand-ins for SGLang's CUDA packages, on a machine with a GPU and without them."""

from __future__ import annotations

import os
from pathlib import Path

FLAGS = (
    *("--attention-backend", "triton", "--sampling-backend", "pytorch"),
    *("--moe-runner-backend", "triton"),
)
"""Flags of a server without SGLang's own kernels."""


def environment_with(*, stand_ins: bool) -> dict[str, str]:
    """Variables that a process needs beside this one's environment; see sitecustomize.py."""
    if not stand_ins:
        return {}
    folders = (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    return {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
