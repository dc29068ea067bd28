"""FLOPs and bytes of a prefix: what a hit saves and what an entry costs.

A prefix of L tokens costs F(L) = quadratic * L^2 + linear * L, plus sliding windows counted pair by
pair. Embedding and LM head are not in it: the embedding is a lookup, and the head runs for the last
token whether or not the prefix was hit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.costs.layers import Layer
from sglang_hybrid.core.costs.model_config import read_layers

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

TOKENS_PER_STATE = 1_000
SHARE_OF_SLOTS = 0.5
"""Share of the usual slots that states get if states without a slot may lie in the place of KV: the
slots that requests hold, of those that they count for. Requests then count for about 1.25 times the
slots that they hold, so 0.8 times as many run."""
SMALLEST_SPILLED = 50
"""Tokens of KV that a state must take the place of to lie there. With fewer, states take less than
a twentieth of the memory in a pool of their own, and one takes as many launches to move as a large
one."""
LARGE_STATE_TOKENS, LARGE_STATES_TO_KV, MOST_STATES_TO_KV = 5_500, 0.2, 1.5
"""Constants for two pools, see `CostModel.states_to_kv`."""

MIN_BRANCH_TOKENS = 16
"""Tokens that a branch point must gain over the hit to get a checkpoint, by default."""

DISPLACED: Final = 1.0
"""The cost of a token that one of several servers computes, beside its own prefill, in prefills of
a token, where the cache has no room left: it takes the place of others, which are computed again.
"""

SIMILAR: Final = 1.1
"""Servers whose prices are within so many times the least are as good: not more, since speeds are
measured."""

STATES_OF_A_PREFILL: Final = 3
"""State slots that a server needs free to compute a prompt without an eviction: the request's own,
and those that it leaves at a branch and at its end."""

UNBOUNDED: Final = 2**62
"""More tokens, slots or bytes than any pool has."""

ENDLESS: Final = 1 << 40
"""More tokens than any sequence has. SGLang can add to it and multiply it within 64 bits."""


@dataclass(frozen=True)
class CostModel:
    """Cost of a model's prefixes.

    linear, quadratic: coefficients of L and L^2. windows: (window, FLOPs per pair) of
    sliding-window attention. kv_bytes_per_token, state_bytes: over all layers of the model;
    `with_sizes` puts measured ones in their place. assumed: what had to be guessed because the
    config does not say it; empty for a known architecture. state_value_bytes: of one number of a
    state. copies: KV bytes per token and state bytes in each tier (`core.tiers.rates.Tier`), where
    copies below the device are smaller; empty where they are as large. coded: bytes of a token's KV
    and of a state that are kept coded on the device (core/victims/coding.py); empty where nothing
    is.
    """

    linear: int
    quadratic: int
    windows: tuple[tuple[int, int], ...]
    kv_bytes_per_token: int
    state_bytes: int
    assumed: str = ""
    state_value_bytes: int = 4
    copies: tuple[tuple[int, int], ...] = ()
    coded: tuple[int, int] | tuple[()] = ()

    @classmethod
    def from_layers(
        cls,
        layers: Iterable[Layer],
        *,
        kv_value_bytes: int = 2,
        ssm_value_bytes: int = 4,
        conv_value_bytes: int = 2,
        assumed: str = "",
    ) -> CostModel:
        """Add up layers. Bytes per value default to what SGLang allocates: bf16 KV and convolution,
        fp32 SSM state.
        """
        layers = list(layers)
        pairs: Counter[int] = Counter()
        for layer in layers:
            pairs[layer.window] += layer.per_pair
        causal = pairs.pop(0, 0)  # L (L + 1) / 2 pairs; per_pair is a multiple of 4
        return cls(
            linear=sum(layer.per_token for layer in layers) + causal // 2,
            quadratic=causal // 2,
            windows=tuple(sorted((w, p) for w, p in pairs.items() if p)),
            kv_bytes_per_token=kv_value_bytes * sum(layer.kv_values for layer in layers),
            state_bytes=ssm_value_bytes * sum(layer.ssm_values for layer in layers)
            + conv_value_bytes * sum(layer.conv_values for layer in layers),
            assumed=assumed,
            state_value_bytes=ssm_value_bytes,
        )

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, kv_value_bytes: int = 2, conv_value_bytes: int = 2
    ) -> CostModel:
        """Read a Hugging Face config (the content of config.json). Raises ValueError naming a field
        that is missing.
        """
        read = read_layers(config)
        return cls.from_layers(
            read.layers,
            kv_value_bytes=kv_value_bytes,
            ssm_value_bytes=read.ssm_value_bytes,
            conv_value_bytes=conv_value_bytes,
            assumed=read.assumed,
        )

    @classmethod
    def paper(
        cls, *, hidden: int, state: int, ssm_layers: int, attention_layers: int, mlp_layers: int
    ) -> CostModel:
        """Marconi's own formulas (marconi-notes.md 1.1), for comparison with its figures.

        They count all L^2 pairs, no grouped heads, an ungated MLP of width 4 D and a Mamba-1 scan
        of inner width 2 D, all in FP16. A state is D N values and four convolution columns of 2 D +
        2 N; real engines keep two to four times as much.
        """
        d, n = hidden, state
        return cls(
            linear=attention_layers * 8 * d * d
            + mlp_layers * 16 * d * d
            + ssm_layers * (12 * d * d + 16 * d * n + 10 * d),
            quadratic=attention_layers * 4 * d,
            windows=(),
            kv_bytes_per_token=attention_layers * 4 * d,
            state_bytes=ssm_layers * (2 * d * n + 2 * 4 * (2 * d + 2 * n)),
            state_value_bytes=2,
        )

    @classmethod
    def paper_7b(cls) -> CostModel:
        """The paper's 7B hybrid: D = 4096, N = 128, 24 SSM + 4 attention + 28 MLP layers."""
        return cls.paper(hidden=4096, state=128, ssm_layers=24, attention_layers=4, mlp_layers=28)

    def with_sizes(self, *, kv_bytes_per_token: int, state_bytes: int) -> CostModel:
        """The same FLOPs with the bytes that the pools really allocated."""
        return replace(self, kv_bytes_per_token=kv_bytes_per_token, state_bytes=state_bytes)

    def kv_bytes_in(self, tier: int) -> int:
        """Bytes of a token's KV in a tier."""
        return self.copies[tier][0] if self.copies else self.kv_bytes_per_token

    def state_bytes_in(self, tier: int) -> int:
        """Bytes of a state in a tier."""
        return self.copies[tier][1] if self.copies else self.state_bytes

    def bytes_in(self, tier: int, kv_tokens: int, states: int) -> int:
        """Bytes that so many tokens of KV and states take in a tier."""
        return kv_tokens * self.kv_bytes_in(tier) + states * self.state_bytes_in(tier)

    def kv_bytes_of(self, tokens: int, coded: bool) -> int:
        """Bytes of so many tokens of KV on the device, coded or not."""
        return tokens * (self.coded[0] if coded and self.coded else self.kv_bytes_per_token)

    def state_bytes_of(self, coded: bool) -> int:
        """Bytes of a state on the device, coded or not."""
        return self.coded[1] if coded and self.coded else self.state_bytes

    @property
    def states_to_kv(self) -> float:
        """Bytes of states for each byte of KV in two pools, where checkpoints are planned: one
        state per 1,000 tokens, but of states as large as n tokens of KV no more than 0.2 + n /
        5,500, and 1.5 at most.

        That loses least against the best split of each kind of traffic, where the loss is largest
        (docs/benchmarks.md, how memory is divided). SGLang's 0.9 is meant for a state per chunk of
        a prefill.
        """
        if not self.kv_bytes_per_token:
            return MOST_STATES_TO_KV
        tokens = self.state_bytes / self.kv_bytes_per_token
        large = LARGE_STATES_TO_KV + tokens / LARGE_STATE_TOKENS
        return min(tokens / TOKENS_PER_STATE, large, MOST_STATES_TO_KV)

    @property
    def spilled_tokens(self) -> int:
        """Tokens of KV in whose place a state can lie; 0 where that is worth no copies."""
        tokens = -(-self.state_bytes // max(1, self.kv_bytes_per_token))
        return tokens if self.kv_bytes_per_token and tokens >= SMALLEST_SPILLED else 0

    def spilling_states_to_kv(self, share_of_slots: float = SHARE_OF_SLOTS) -> float:
        """The same where states without a slot may lie in the place of KV: with so many of the
        slots.
        """
        share = share_of_slots * self.states_to_kv / (1 + self.states_to_kv)
        return share / (1 - share)

    @overload
    def flops(self, depth: int) -> int: ...
    @overload
    def flops(self, depth: FloatArray) -> FloatArray: ...
    def flops(self, depth: int | FloatArray) -> int | FloatArray:
        """FLOPs to prefill `depth` tokens from nothing: exact for an int, float64 [n] for an array
        [n].
        """
        if isinstance(depth, np.ndarray):
            depth = depth.astype(np.float64)
            total = (self.quadratic * depth + self.linear) * depth
            for window, per_pair in self.windows:
                full = np.minimum(depth, window)
                total += per_pair * (full * (full + 1) / 2 + (depth - full) * window)
            return total
        total_int = (self.quadratic * depth + self.linear) * depth
        for window, per_pair in self.windows:
            full_int = min(depth, window)
            total_int += per_pair * (full_int * (full_int + 1) // 2 + (depth - full_int) * window)
        return total_int

    def savings(self, depth: int, anchor_depth: int) -> int:
        """FLOPs that a hit at `depth` saves over a hit at the nearest state above it."""
        return self.flops(depth) - self.flops(anchor_depth)
