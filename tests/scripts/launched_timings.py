"""The layers that gpu_check times, with SGLang's scans in Triton's interpreter: a program for
test_gpu_check. The interpreter cannot run SGLang's convolution, which is left out.
"""

import torch
from sglang.kernels.ops.mamba import causal_conv1d_triton
from torch import Tensor

from scripts.gpu_check import interpreter, timings  # noqa: F401
from scripts.gpu_check.layers import SMALL, TAPS
from tests.checkpoints.launched_scans import run_without_a_device


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: list[int],
    cache_indices: Tensor,
    has_initial_state: Tensor,
) -> Tensor:
    """Checks what SGLang's takes, in its order."""
    channels, tokens = x.shape
    assert weight.shape == (channels, TAPS) and bias is None
    assert conv_states.shape[1:] == (channels, TAPS - 1)
    assert query_start_loc.tolist() == [0, tokens] and seq_lens_cpu == [tokens]
    assert cache_indices.tolist() == [0] and has_initial_state.tolist() == [False]
    return x.clone()


if __name__ == "__main__":
    causal_conv1d_triton.causal_conv1d_fn = convolution
    run_without_a_device()
    for layer in SMALL:
        out = timings.Prefill(layer, 130, with_sglang=True)()
        leaves = timings.Prefill(layer, 130, [40, 64, 130], with_sglang=True)
        assert leaves().isfinite().all(), layer
        assert leaves.states[2:].flatten(1).any(1).all(), layer
        assert out.shape == (130, layer.hidden) and out.isfinite().all() and out.any(), layer
    print(torch.__version__)
