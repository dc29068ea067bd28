"""The answer of the index for a prompt, from the positions and the bits of the replicas there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sglang_hybrid.core.tiers.rates import TIERS, Tier
from sglang_hybrid.extensions.router.tokens import TOKEN_BYTES
from sglang_hybrid.extensions.router.tree import TIER_COUNT


class Resumable(NamedTuple):
    """The position at which a replica can resume a prompt.

    position: tokens from the start that need no prefill; 0 if there is no state. tier: the slowest
    of the tiers from which the KV up to there and the state are loaded. device_position: the
    deepest position for which nothing has to be loaded.
    """

    replica: str
    position: int
    tier: Tier
    device_position: int


def note_deepest(deepest: list[int], ends: Sequence[int], holders: Sequence[int]) -> None:
    """Note for each bit of `holders` in tokens the last of the positions `ends`, in bytes, that has
    the bit. Bits without a position keep what was noted.
    """
    seen = 0
    for end, bits in zip(reversed(ends), reversed(holders), strict=True):
        new = bits & ~seen
        seen |= new
        position = end // TOKEN_BYTES
        while new:
            low = new & -new
            deepest[low.bit_length() - 1] = position
            new ^= low


def answers(names: Sequence[str | None], deepest: Sequence[int]) -> list[Resumable]:
    """deepest: for each name and tier, the deepest position that comes from it or a faster one."""
    new, step = tuple.__new__, TIER_COUNT  # twice as fast as Resumable(...)
    return [
        new(Resumable, (name, disk, TIERS[(device < disk) + (host < disk)], device))
        for name, device, host, disk in zip(
            names, deepest[::step], deepest[1::step], deepest[2::step], strict=True
        )
        if name is not None
    ]
