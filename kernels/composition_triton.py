"""The Triton kernel behind ``composition.delta_rule_transitions``: one program per head and rows.

A row of a transition is what a delta rule makes of a row of the identity, and no row reads another
one. So each program takes its rows through all tokens of a segment, in registers and in float32;
plain torch launches some hundred kernels for a thousand tokens, and thousands where each channel
has a decay. Not measured on a GPU yet.
"""

# Triton's decorator and its kernels' arguments have no types that mypy reads.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

VARYING = ("tokens",)
ANYWHERE = ("keys", "decays", "strengths")
"""Pointers to a segment's part of a packed batch, which begins anywhere in a tensor."""


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=ANYWHERE)
def delta_transition(
    transitions,
    keys,
    decays,
    strengths,
    tokens,
    stride_keys_token,
    stride_keys_head,
    stride_decays_token,
    stride_decays_head,
    stride_strengths_token,
    stride_strengths_head,
    eps,
    KEY: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    NORMALISE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEY: tl.constexpr,
):
    """The transition [KEY, KEY] of each head, dense in `transitions` [heads, KEY, KEY]. Grid:
    heads, tiles of rows. There is one token at least.
    """
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    c = tl.arange(0, TILE_KEY)
    inside = c < KEY
    keys += head // HEADS_PER_KEY * stride_keys_head + c
    strengths += head * stride_strengths_head
    decays += head * stride_decays_head
    if PER_CHANNEL:
        decays += c
    else:
        decays += 0 * c  # the head's one decay, at every channel

    state = tl.where(row == c[None, :], 1.0, 0.0)
    next_key = tl.load(keys, mask=inside, other=0)
    next_decay = tl.load(decays, mask=inside, other=0)
    next_strength = tl.load(strengths)
    for t in range(1, tokens + 1):
        key, decay = next_key.to(tl.float32), next_decay.to(tl.float32)
        strength = next_strength.to(tl.float32)
        # The next token is on its way while this one is computed.
        at = tl.minimum(t, tokens - 1).to(tl.int64)
        next_key = tl.load(keys + at * stride_keys_token, mask=inside, other=0)
        next_decay = tl.load(decays + at * stride_decays_token, mask=inside, other=0)
        next_strength = tl.load(strengths + at * stride_strengths_token)
        if NORMALISE:
            key = key / tl.sqrt(tl.sum(key * key) + eps)
        state *= tl.exp(decay)[None, :]
        recalled = tl.sum(state * key[None, :], axis=1)
        state -= (strength * recalled)[:, None] * key[None, :]
    out = transitions + head * KEY * KEY + row * KEY + c[None, :]
    tl.store(out, state, mask=(row < KEY) & inside[None, :])
