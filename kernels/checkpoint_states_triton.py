"""The Triton kernels behind ``checkpoint_states``: one program per state, head and tile.

Every program writes its tile of its slot whole, whatever the slot held before. Offsets that grow
with the tokens or the slots are 64 bits wide. Sums are float32; ``DOT`` is the precision of a
product of float32 tiles ("ieee": no tf32), 16-bit tiles multiply exactly into float32 anyway.

Triton compiles a kernel again for integers that are 1 or multiples of 16 and for pointers that are
not 16-byte aligned. Arguments that vary from prefill to prefill are excluded (``VARYING``,
``ANYWHERE``), so that a server runs one variant of each kernel, which its start has compiled.
"""

# Triton's decorator and its kernels' arguments have no types that mypy reads.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

DOT = tl.constexpr("ieee")

VARYING = ("chunks", "targets", "stride_dt_head", "stride_inputs_token")
"""Integers that depend on the number of tokens or states, or on what a layer projects together."""

ANYWHERE = (
    *("cu_seqlens", "sequences", "ends", "slots", "rows", "state_indices", "resumed"),
    "inputs",
)
"""Pointers to lists and to a part of what a layer projects, which begin anywhere in a tensor."""


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=ANYWHERE)
def ssd_state(
    pool,
    x,
    dt,
    A,
    B,
    chunk_states,
    initial_states,
    cu_seqlens,
    sequences,
    ends,
    slots,
    chunks,
    has_initial,
    stride_pool,
    stride_x_token,
    stride_x_head,
    stride_dt_head,
    stride_B_token,
    stride_B_group,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    TILE_SIZE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """Mamba2; see ``checkpoint_states.save_ssd_states``. Grid: states, heads, tiles of [P, N]."""
    i, head, tile = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    heads = tl.num_programs(1)
    sequence = tl.load(sequences + i)
    end = tl.load(ends + i).to(tl.int64)
    slot = tl.load(slots + i).to(tl.int64)
    start = tl.load(cu_seqlens + sequence).to(tl.int64)
    chunk = tl.minimum(end // CHUNK, chunks - 1)
    entered = chunk * CHUNK
    begin = tl.maximum(start, entered)

    columns: tl.constexpr = (SIZE + TILE_SIZE - 1) // TILE_SIZE
    p = tile // columns * TILE_WIDTH + tl.arange(0, TILE_WIDTH)
    n = tile % columns * TILE_SIZE + tl.arange(0, TILE_SIZE)
    rate = tl.load(A + head).to(tl.float32)
    x += head * stride_x_head + p[:, None]
    B += head // HEADS_PER_GROUP * stride_B_group + n[None, :]
    dt += head * stride_dt_head

    # From the position back to the chunk's start: a token's decay is the sum of the steps behind
    # it, which is small and so precise wherever the decay leaves anything of the token.
    added = tl.zeros((TILE_WIDTH, TILE_SIZE), dtype=tl.float32)
    behind = 0.0
    total = 0.0
    for block in range(tl.cdiv(end - begin, TILE_TOKENS) - 1, -1, -1):
        t = begin + block * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
        step = tl.load(dt + t, mask=t < end, other=0.0)
        next_step = tl.load(dt + t + 1, mask=t + 1 < end, other=0.0)
        weight = step * tl.exp(rate * (behind + tl.cumsum(next_step, reverse=True)))
        inputs = tl.load(
            x + t[None, :] * stride_x_token, mask=(p[:, None] < WIDTH) & (t[None, :] < end), other=0
        )
        keys = tl.load(
            B + t[:, None] * stride_B_token, mask=(t[:, None] < end) & (n[None, :] < SIZE), other=0
        )
        weighted = (keys.to(tl.float32) * weight[:, None]).to(inputs.dtype)
        added = tl.dot(inputs, weighted, added, input_precision=DOT)
        behind += tl.sum(next_step)
        total += tl.sum(step)

    inside = (p[:, None] < WIDTH) & (n[None, :] < SIZE)
    element = p[:, None] * SIZE + n[None, :]
    state = tl.zeros((TILE_WIDTH, TILE_SIZE), dtype=tl.float32)
    if start < entered:
        row = chunk_states + (chunk * heads + head) * WIDTH * SIZE
        state = tl.load(row + element, mask=inside, other=0).to(tl.float32)
    elif has_initial:
        row = initial_states + (sequence.to(tl.int64) * heads + head) * WIDTH * SIZE
        state = tl.load(row + element, mask=inside, other=0).to(tl.float32)
    state = state * tl.exp(rate * total) + added
    row = pool + slot * stride_pool + head * WIDTH * SIZE
    tl.store(row + element, state.to(pool.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=ANYWHERE)
def delta_state(
    pool,
    keys,
    corrections,
    decays,
    chunk_states,
    rows,
    cu_seqlens,
    sequences,
    ends,
    slots,
    unit,
    stride_pool,
    stride_keys_token,
    stride_keys_head,
    stride_corrections_token,
    stride_corrections_head,
    stride_decays_token,
    stride_decays_head,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    CHUNK: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    TILE_KEY: tl.constexpr,
    TILE_VALUE: tl.constexpr,
):
    """Delta rule; see ``checkpoint_states.save_delta_states``. Grid: states, heads, tiles of
    [Dv, Dk]."""
    i, head, tile = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    heads = tl.num_programs(1)
    sequence = tl.load(sequences + i)
    end = tl.load(ends + i).to(tl.int64)
    slot = tl.load(slots + i).to(tl.int64)
    start = tl.load(cu_seqlens + sequence).to(tl.int64)
    length = tl.load(cu_seqlens + sequence + 1).to(tl.int64) - start
    nth = tl.minimum((end - start) // CHUNK, tl.cdiv(length, CHUNK) - 1)
    begin = start + nth * CHUNK

    columns: tl.constexpr = (KEY + TILE_KEY - 1) // TILE_KEY
    a = tile // columns * TILE_VALUE + tl.arange(0, TILE_VALUE)
    b = tile % columns * TILE_KEY + tl.arange(0, TILE_KEY)
    t = begin + tl.arange(0, CHUNK)
    read = (t[:, None] < end) & (b[None, :] < KEY)
    key = tl.load(
        keys
        + t[:, None] * stride_keys_token
        + head // HEADS_PER_KEY * stride_keys_head
        + b[None, :],
        mask=read,
        other=0,
    )
    correction = tl.load(
        corrections
        + t[None, :] * stride_corrections_token
        + head * stride_corrections_head
        + a[:, None],
        mask=(t[None, :] < end) & (a[:, None] < VALUE),
        other=0,
    )
    decays += head * stride_decays_head
    if PER_CHANNEL:
        decays += b[None, :]
    else:
        decays += 0 * b[None, :]  # the head's one decay, at every channel
    decayed = b[None, :] < KEY
    last = tl.load(decays + tl.maximum(end - 1, begin) * stride_decays_token, mask=decayed)
    total = tl.where(begin < end, last, 0.0)
    since = tl.load(decays + t[:, None] * stride_decays_token, mask=read, other=0.0)
    weighted = key.to(tl.float32) * tl.exp(unit * (total - since))
    added = tl.dot(correction, weighted.to(correction.dtype), input_precision=DOT)

    inside = (a[:, None] < VALUE) & (b[None, :] < KEY)
    element = a[:, None] * KEY + b[None, :]
    entered = tl.load(rows + i).to(tl.int64)
    row = chunk_states + (entered * heads + head) * VALUE * KEY
    state = tl.load(row + element, mask=inside, other=0)
    state = state.to(tl.float32) * tl.exp(unit * total) + added
    row = pool + slot * stride_pool + head * VALUE * KEY
    tl.store(row + element, state.to(pool.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=ANYWHERE)
def lightning_state(
    pool,
    keys,
    values,
    slopes,
    state_indices,
    resumed,
    cu_seqlens,
    sequences,
    ends,
    slots,
    targets,
    stride_pool,
    stride_keys_token,
    stride_keys_head,
    stride_values_token,
    stride_values_head,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    TILE_KEY: tl.constexpr,
    TILE_VALUE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """Lightning attention; see ``checkpoint_states.save_lightning_states``. Grid: states, heads,
    tiles of [Dk, Dv]. The program of a sequence's first state writes all states of the sequence.
    """
    i, head, tile = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    sequence = tl.load(sequences + i)
    before = tl.load(sequences + tl.maximum(i - 1, 0))
    if (i > 0) & (before == sequence):
        return
    columns: tl.constexpr = (VALUE + TILE_VALUE - 1) // TILE_VALUE
    a = tile // columns * TILE_KEY + tl.arange(0, TILE_KEY)
    b = tile % columns * TILE_VALUE + tl.arange(0, TILE_VALUE)
    inside = (a[:, None] < KEY) & (b[None, :] < VALUE)
    element = head * KEY * VALUE + a[:, None] * VALUE + b[None, :]
    slope = tl.load(slopes + head).to(tl.float32)
    keys += head * stride_keys_head + a[None, :]
    values += head * stride_values_head + b[None, :]

    start = tl.load(state_indices + sequence).to(tl.int64)
    state = tl.zeros((TILE_KEY, TILE_VALUE), dtype=tl.float32)
    if tl.load(resumed + sequence) != 0:
        state = tl.load(pool + start * stride_pool + element, mask=inside, other=0).to(tl.float32)
    begin = tl.load(cu_seqlens + sequence).to(tl.int64)
    going = True
    while going:
        end = tl.load(ends + i).to(tl.int64)
        for first in range(begin, end, TILE_TOKENS):
            t = first + tl.arange(0, TILE_TOKENS)
            read = (t < end)[:, None]
            key = tl.load(
                keys + t[:, None] * stride_keys_token, mask=read & (a[None, :] < KEY), other=0
            )
            value = tl.load(
                values + t[:, None] * stride_values_token, mask=read & (b[None, :] < VALUE), other=0
            )
            count = tl.minimum(end - first, TILE_TOKENS)
            behind = tl.maximum(first + count - 1 - t, 0).to(tl.float32)
            weighted = key.to(tl.float32) * tl.exp(-slope * behind)[:, None]
            state *= tl.exp(-slope * count.to(tl.float32))
            state = tl.dot(tl.trans(weighted), value.to(tl.float32), state, input_precision=DOT)
        slot = tl.load(slots + i).to(tl.int64)
        tl.store(pool + slot * stride_pool + element, state.to(pool.dtype.element_ty), mask=inside)
        begin = end
        i += 1
        going = i < targets
        if going:
            going = tl.load(sequences + i) == sequence


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=ANYWHERE)
def conv_window(
    pool,
    inputs,
    state_indices,
    resumed,
    cu_seqlens,
    sequences,
    ends,
    slots,
    channels,
    stride_pool,
    stride_pool_channel,
    stride_pool_step,
    stride_inputs_token,
    stride_inputs_channel,
    PAST: tl.constexpr,
    TILE_CHANNELS: tl.constexpr,
    TILE_PAST: tl.constexpr,
):
    """See ``checkpoint_states.save_windows``. Grid: states, tiles of the channels."""
    i, tile = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(sequences + i)
    end = tl.load(ends + i).to(tl.int64)
    slot = tl.load(slots + i).to(tl.int64)
    state_index = tl.load(state_indices + sequence).to(tl.int64)
    has_prefix = tl.load(resumed + sequence) != 0
    start = tl.load(cu_seqlens + sequence).to(tl.int64)

    d = (tile * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)).to(tl.int64)[:, None]
    step = tl.arange(0, TILE_PAST)[None, :]
    inside = (d < channels) & (step < PAST)
    t = end - PAST + step
    new = tl.load(
        inputs + t * stride_inputs_token + d * stride_inputs_channel,
        mask=inside & (t >= start),
        other=0,
    )
    window = new.to(pool.dtype.element_ty)
    if has_prefix:
        before = pool + state_index * stride_pool + d * stride_pool_channel
        step_before = end - start + step
        old = tl.load(before + step_before * stride_pool_step, mask=inside & (t < start), other=0)
        window = tl.where(t < start, old, window)
    tl.store(
        pool + slot * stride_pool + d * stride_pool_channel + step * stride_pool_step,
        window,
        mask=inside,
    )
