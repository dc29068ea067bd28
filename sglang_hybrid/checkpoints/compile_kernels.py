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

from sglang_hybrid.checkpoints.scans import (
    Save,
    launched_kernel,
    linear_backend,
    scans_in_float32,
)
from sglang_hybrid.checkpoints.tracks import PrefillTracks, StateTracks
from sglang_hybrid.kernels.checkpoint_states import (
    save_delta_states,
    save_kda_states,
    save_lightning_states,
    save_ssd_states,
)

logger = logging.getLogger(__name__)

TOKENS = 2


def compile_kernels(model_runner: Any, *, tell: bool) -> None:
    """Compile what prefills of this SGLang ``ModelRunner``, on a CUDA device, will launch to write
    states, which its layers can (`why_split` is None). ``tell``: log the progress.
    """
    pool = model_runner.req_to_token_pool.mamba_pool
    cache = pool.mamba_cache.at_layer_idx(0)
    windows = cache.conv[0]
    if windows.shape[1] < windows.shape[2]:  # [slots, K-1, D], as SGLang keeps those of KDA
        windows = windows.transpose(1, 2)
    steps = warm_up(
        windows,
        cache.temporal,
        torch.float32 if scans_in_float32(model_runner) else model_runner.dtype,
        launched_kernel(model_runner),
        int(linear_backend(model_runner).mamba_chunk_size),
    )
    beside = [it.conv_state[0] for it in pool._slot_siblings if hasattr(it, "conv_state")]
    for others in (*cache.conv[1:], *beside):  # of ZAYA1: the last hidden state, a window of one
        (run,) = warm_up(others, cache.temporal, model_runner.dtype, None, 0).values()
        steps[f"windows of {others.shape[2]} beside it"] = run
    for done, (what, run) in enumerate(steps.items(), 1):
        if tell:
            logger.info("sglang_hybrid: compiling kernel %d of %d: %s.", done, len(steps), what)
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if tell:
            logger.info("sglang_hybrid: compiled in %.1f s.", time.perf_counter() - start)


def warm_up(
    windows: Tensor, states: Tensor, dtype: torch.dtype, save: Save | None, chunk: int
) -> dict[str, Callable[[], None]]:
    """Functions that launch each kernel once, by a name for people.

    ``windows`` [slots, D, K-1] and ``states`` are the pools of one layer, of which only types,
    shapes and strides are used. ``dtype`` is that of a layer's inputs. ``save`` is the kernel that
    takes states from the scan (None: no kernel does), and ``chunk`` the tokens between Mamba2's
    chunk states.
    """
    inputs = torch.zeros(TOKENS, windows.shape[1], dtype=dtype, device=states.device)
    return prefill(_two_slots_like(windows), _two_slots_like(states), inputs, [1], save, chunk)


def prefill(
    windows: Tensor,
    states: Tensor,
    inputs: Tensor,
    positions: list[int],
    save: Save | None,
    chunk: int,
) -> dict[str, Callable[[], None]]:
    """The launches of one layer in a prefill of one sequence that leaves states, by kernel.

    ``inputs`` [T, D] is what the layer's convolution reads; each of the ``positions``, tokens of
    this prefill, goes to a slot of its own from 1 on. The sequence's own slot is 0, and it has a
    prefix. See `warm_up`. All that the scan holds is zero.
    """
    device, tokens = states.device, len(inputs)
    owners = torch.zeros(1, dtype=torch.int32, device=device)
    cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    slots = torch.arange(1, 1 + len(positions), device=device)
    wanted = StateTracks([0] * len(positions), [1 + at for at in positions], slots)
    tracks = PrefillTracks(wanted, [1], [tokens], slots, owners, cu_seqlens)
    launches: dict[str, Callable[[], None]] = {}
    if windows.numel():
        launches["windows of the convolution"] = lambda: tracks.save_windows(windows, inputs)
    if save is not None:
        scan = _SCANS[save](states, inputs, chunk)
        writer = tracks.into(states)
        if save in (save_delta_states, save_kda_states):
            chunks = writer.choose_chunks()
            assert chunks is not None, "states are wanted"
            scan |= {"chunk_states": chunks.states.zero_(), "rows": chunks.rows}
        launches["states inside the scan"] = lambda: writer.save(
            save, cu_seqlens=cu_seqlens, **scan
        )
    return launches


def _two_slots_like(pool: Tensor) -> Tensor:
    """Two slots with the type and the strides of a pool."""
    shape = (2, *pool.shape[1:])
    return torch.empty_strided(shape, pool.stride(), dtype=pool.dtype, device=pool.device)


def _mamba2_scan(states: Tensor, inputs: Tensor, chunk: int) -> dict[str, Tensor]:
    """The inputs of Mamba2's scan after its state passing; convolution channels are x, B, C."""
    tokens, channels = inputs.shape
    _, heads, width, size = states.shape
    inner, chunks = heads * width, -(-tokens // chunk)
    groups = (channels - inner) // (2 * size)
    mixed = torch.zeros_like(inputs, memory_format=torch.contiguous_format)
    return {
        "x": mixed[:, :inner].view(tokens, heads, width),
        "dt": torch.zeros(heads, chunks, chunk, device=states.device),
        "A": torch.zeros(heads, device=states.device),
        "B": mixed[:, inner:][:, : groups * size].view(tokens, groups, size),
        "chunk_states": states.new_zeros(chunks, heads, width, size),
    }


def _delta_scan(states: Tensor, inputs: Tensor, _: int) -> dict[str, Tensor]:
    """The inputs of the gated delta net's scan after its chunk states, of which it was asked for
    some in float32; its convolution's channels are queries, keys and values.
    """
    tokens, channels = inputs.shape
    _, heads, value, key = states.shape
    key_heads = (channels - heads * value) // (2 * key)
    return {
        "keys": inputs.new_zeros(tokens, key_heads, key),
        "corrections": inputs.new_zeros(tokens, heads, value),
        "decays": torch.zeros(tokens, heads, device=states.device),
    }


def _kda_scan(states: Tensor, inputs: Tensor, chunk: int) -> dict[str, Tensor]:
    """The same of KDA: a decay for every channel of a key."""
    scan = _delta_scan(states, inputs, chunk)
    decays = torch.zeros(*scan["decays"].shape, states.shape[-1], device=states.device)
    return scan | {"decays": decays}


def _lightning_scan(states: Tensor, inputs: Tensor, _: int) -> dict[str, Tensor]:
    """The inputs of lightning attention's backend in front of its scan: values as they were
    projected together with queries and keys.
    """
    _, heads, key, value = states.shape
    keys = inputs.new_zeros(len(inputs), heads, key)
    projected = inputs.new_zeros(len(inputs), 3 * heads, value)
    return {
        "keys": keys,
        "values": projected[:, 2 * heads :],
        "slopes": torch.zeros(heads, 1, 1, device=states.device),
        "state_indices": torch.zeros(1, dtype=torch.int32, device=states.device),
        "resumed": torch.ones(1, dtype=torch.bool, device=states.device),
    }


_SCANS: dict[Save, Callable[[Tensor, Tensor, int], dict[str, Tensor]]] = {
    save_ssd_states: _mamba2_scan,
    save_delta_states: _delta_scan,
    save_kda_states: _kda_scan,
    save_lightning_states: _lightning_scan,
}
"""The inputs of a scan when it calls a kernel: from the layer's pool of states, the inputs of its
convolution, and the tokens between Mamba2's chunk states.
"""
