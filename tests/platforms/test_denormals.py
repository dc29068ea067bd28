"""Numbers too small for float32's normal form are zero on all threads of a server that computes."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch
torch.set_num_threads(2)
from sglang_hybrid.platforms import activate
activate()
from sglang.srt.platforms import current_platform
current_platform.init_backend()
small = torch.full((1 << 20,), 1e-30)  # for all threads
print((small * 1e-10).count_nonzero().item())
"""


@pytest.mark.slow
def test_all_threads_have_them_as_zero() -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1:] == ["0"], done.stderr
