"""gpu_check counts compilations without a GPU: Triton compiles for one that is pretended, and the
launches are left out. A program for test_gpu_check; with an argument, a kernel is specialised on
something that changes from prefill to prefill.
"""

import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

torch.cuda.is_available = lambda: True

from scripts.gpu_check import kernels  # noqa: E402
from scripts.gpu_check.layers import LAYERS, SMALL  # noqa: E402
from sglang_hybrid.kernels import checkpoint_states_triton  # noqa: E402


class Driver:
    """The part of a driver that choosing and compiling a variant needs."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


if __name__ == "__main__":
    driver.set_active(Driver())
    CompiledKernel.run = property(lambda self: lambda *launch: None)
    CompiledKernel.launch_metadata = lambda self, *launch: None
    CompiledKernel.function = property(lambda self: None, lambda self, value: None)
    torch.Tensor.is_cuda = property(lambda self: True)
    kernels.DEVICE = "cpu"
    if sys.argv[1:]:
        for parameter in checkpoint_states_triton.ssd_state.params:
            parameter.do_not_specialize = False
    for layer in (*SMALL, *LAYERS):
        kernels.check_compilations(layer)
