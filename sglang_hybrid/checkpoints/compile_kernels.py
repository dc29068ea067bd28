"""Triton compiles the kernels of checkpoint states (tracks.py) at the server's start.

Otherwise the first prefill that leaves a state would wait for it, a second or more per kernel. Each
kernel is launched once, for one state of a prefill of two tokens, on tensors of its own that have
the shapes, types and strides of the model's layers. tests/kernels/test_kernel_variants.py compares
what this compiles with what prefills launch.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_hybrid.checkpoints.tracks import PrefillTracks, StateTracks

logger = logging.getLogger(__name__)

TOKENS = 2


def compile_kernels(model_runner: Any, *, tell: bool) -> None:
    """Compile what prefills of this SGLang ``ModelRunner`` will launch to write states, which its
    layers can (`why_split` is None). On other devices than CUDA nothing is compiled. ``tell``: log
    the progress.
    """
    if model_runner.device != "cuda":
        return
    backend = model_runner.attn_backend
    chunk = _chunk_of_mamba2(getattr(backend, "linear_attn_backend", backend))
    cache = model_runner.req_to_token_pool.mamba_pool.mamba_cache.at_layer_idx(0)
    steps = warm_up(cache.conv[0], cache.temporal, model_runner.dtype, chunk)
    for done, (what, run) in enumerate(steps.items(), 1):
        if tell:
            logger.info("sglang_hybrid: compiling kernel %d of %d: %s.", done, len(steps), what)
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if tell:
            logger.info("sglang_hybrid: compiled in %.1f s.", time.perf_counter() - start)


def _chunk_of_mamba2(backend: Any) -> int | None:
    """Tokens between the chunk states of this linear-attention backend; None if it is the gated
    delta net's, which always has 64."""
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import Mamba2AttnBackend

    return int(backend.mamba_chunk_size) if isinstance(backend, Mamba2AttnBackend) else None


def warm_up(
    windows: Tensor, states: Tensor, dtype: torch.dtype, chunk: int | None
) -> dict[str, Callable[[], None]]:
    """What launches each kernel once, by a name for people.

    ``windows`` [slots, D, K-1] and ``states`` are the pools of one layer, of which only types,
    shapes and strides are used: [slots, H, P, N] of Mamba2 with ``chunk`` tokens between its chunk
    states, [slots, Hv, Dv, Dk] of the gated delta net if ``chunk`` is None. ``dtype`` is the
    model's.
    """
    device = states.device
    owners = torch.zeros(1, dtype=torch.int32, device=device)
    cu_seqlens = torch.tensor([0, TOKENS], dtype=torch.int32, device=device)
    slots = torch.ones(1, dtype=torch.int64, device=device)
    tracks = PrefillTracks(StateTracks([0], [2], slots), [1], [TOKENS], slots, owners, cu_seqlens)
    inputs = torch.zeros(TOKENS, windows.shape[1], dtype=dtype, device=device)
    writer = tracks.into(_two_slots_like(states))

    def scan() -> None:
        if chunk is None:
            writer.save_delta_states(**_delta_scan(states, inputs, cu_seqlens))
        else:
            writer.save_ssd_states(**_mamba2_scan(states, inputs, cu_seqlens, chunk))

    return {
        "windows of the convolution": lambda: tracks.save_windows(_two_slots_like(windows), inputs),
        "states inside the scan": scan,
    }


def _two_slots_like(pool: Tensor) -> Tensor:
    """Two slots with the type and the strides of a pool."""
    shape = (2, *pool.shape[1:])
    return torch.empty_strided(shape, pool.stride(), dtype=pool.dtype, device=pool.device)


def _mamba2_scan(
    states: Tensor, inputs: Tensor, cu_seqlens: Tensor, chunk: int
) -> dict[str, Tensor]:
    """What Mamba2's scan holds after its state passing; its convolution's channels are x, B, C."""
    _, heads, width, size = states.shape
    groups = (inputs.shape[1] - heads * width) // (2 * size)
    x, B = inputs[:, : heads * width], inputs[:, heads * width :][:, : groups * size]
    return {
        "x": x.view(TOKENS, heads, width),
        "dt": torch.zeros(heads, 1, chunk, device=states.device),
        "A": torch.zeros(heads, device=states.device),
        "B": B.view(TOKENS, groups, size),
        "chunk_states": states.new_zeros(1, heads, width, size),
        "cu_seqlens": cu_seqlens,
    }


def _delta_scan(states: Tensor, inputs: Tensor, cu_seqlens: Tensor) -> dict[str, Tensor]:
    """What the gated delta net's scan holds after its chunk states; its convolution's channels are
    queries, keys and values."""
    _, heads, value, key = states.shape
    key_heads = (inputs.shape[1] - heads * value) // (2 * key)
    return {
        "keys": inputs.new_zeros(TOKENS, key_heads, key),
        "corrections": inputs.new_zeros(TOKENS, heads, value),
        "decays": torch.zeros(TOKENS, heads, device=states.device),
        "chunk_states": inputs.new_zeros(1, heads, value, key),
        "chunk_offsets": torch.zeros(2, dtype=torch.int64, device=states.device),
        "cu_seqlens": cu_seqlens,
    }
