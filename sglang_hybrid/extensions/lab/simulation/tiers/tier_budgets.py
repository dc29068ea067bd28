"""The tiers of a replay: how many bytes each holds, how fast it is, and how much smaller its copies
are under `--hybrid-tier-codec`, without making any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.tiers.places import Way
from sglang_hybrid.core.tiers.rates import INSTANT, TIERS, TIERS_BELOW, Link, Speeds, Tier
from sglang_hybrid.extensions.lab.simulation.prefill_time import PAPER, PrefillTime
from sglang_hybrid.extensions.lab.simulation.sizes import parse_bytes, parse_rate

LATENCY = {Tier.HOST: 20e-6, Tier.DISK: 100e-6}
"""Seconds that a transfer takes besides its bytes: a copy over PCIe, a read of an NVMe disk."""

BANDWIDTH = {Tier.HOST: 25e9, Tier.DISK: 3e9}
"""Bytes per second where nothing is said."""

EXAMPLE = "device=20GB,host=200GB@25GB/s,disk=2TB@3GB/s:int8"

PREFILL_OF = 8_192
"""Tokens of the prefill that a model's FLOPs per second are taken from."""

ROW: Final = 128
"""Numbers that share a scale: `head_dim` and the last dimension of a state in most models."""

SCALE_BYTES: Final = 2
KV_VALUE_BYTES: Final = 2


class CopyCodec(Enum):
    """The codecs of `sglang_hybrid.storage.codecs.codecs`, by the bytes of a row of ROW numbers."""

    EXACT = "exact"
    BF16 = "bf16"
    INT8 = "int8"

    def bytes_of(self, size: int, value_bytes: int) -> int:
        """Bytes of a copy of `size` bytes of numbers of `value_bytes` each; as many as before where
        the codec saves nothing.
        """
        row = {
            CopyCodec.EXACT: ROW * value_bytes,
            CopyCodec.BF16: ROW * 2,
            CopyCodec.INT8: ROW + SCALE_BYTES,
        }[self]
        return min(size, -(-size * row // (ROW * value_bytes)))

    def is_exact(self, value_bytes: int) -> bool:
        """True if copies of numbers of `value_bytes` each are what was on the device."""
        return self is CopyCodec.EXACT or (self is CopyCodec.BF16 and value_bytes <= 2)


@dataclass(frozen=True)
class TierBudgets:
    """Bytes, links and codecs of the tiers of one cache, each indexed by `Tier`. A tier of 0 bytes
    does not exist; the device always does. The device's link is not used, and its codec is exact.
    """

    sizes: tuple[int, int, int]
    links: tuple[Link, Link, Link]
    codecs: tuple[CopyCodec, CopyCodec, CopyCodec] = (CopyCodec.EXACT,) * 3

    @classmethod
    def parse(cls, text: str) -> TierBudgets:
        """Read what EXAMPLE shows. Raises ValueError, in one sentence."""
        names = {tier.name.lower(): tier for tier in TIERS}
        sizes = dict.fromkeys(TIERS, 0)
        bandwidths = dict(BANDWIDTH)
        codecs = dict.fromkeys(TIERS, CopyCodec.EXACT)
        for part in text.split(","):
            name, _, rest = part.strip().partition("=")
            rest, _, codec = rest.partition(":")
            size, _, rate = rest.partition("@")
            if name not in names or not size or sizes[names[name]]:
                raise ValueError(f"{part.strip()!r} is no tier; write {EXAMPLE}")
            tier = names[name]
            if codec:
                codecs[tier] = _codec(codec, tier)
            sizes[tier] = parse_bytes(size)
            if rate and tier is Tier.DEVICE:
                raise ValueError("the device needs no bandwidth: nothing is loaded from it")
            if rate:
                bandwidths[tier] = parse_rate(rate)
        on_device, on_host, on_disk = (sizes[tier] for tier in TIERS)
        tiers = cls.of(on_device, on_host, on_disk, bandwidths)
        return tiers.with_codecs(codecs[Tier.HOST], codecs[Tier.DISK])

    @classmethod
    def of(
        cls,
        device: int,
        host: int,
        disk: int = 0,
        bandwidths: dict[Tier, float] | None = None,
    ) -> TierBudgets:
        """Raises ValueError where there is no device, or nothing below it."""
        if not device or not (host or disk):
            raise ValueError("tiers need a device and a host or a disk")
        to_host, to_disk = (
            Link((bandwidths or BANDWIDTH)[tier], LATENCY[tier]) for tier in TIERS_BELOW
        )
        return cls((device, host, disk), (INSTANT, to_host, to_disk))

    def with_codecs(self, host: CopyCodec, disk: CopyCodec) -> TierBudgets:
        """The same tiers with copies of these kinds."""
        return replace(self, codecs=(CopyCodec.EXACT, host, disk))

    def __str__(self) -> str:
        names = [f"{self.sizes[tier] / 1e9:g}{self._codec_name(tier)}" for tier in self.present]
        return " + ".join(names) + " GB"

    def _codec_name(self, tier: Tier) -> str:
        codec = self.codecs[tier]
        return "" if codec is CopyCodec.EXACT else f" ({codec.value})"

    @property
    def exact(self) -> bool:
        """True if no tier has a codec."""
        return set(self.codecs) == {CopyCodec.EXACT}

    def with_copies(self, cost: CostModel) -> CostModel:
        """`cost` with the bytes of KV and states in each tier."""
        if self.exact:
            return cost
        sizes = [
            (
                codec.bytes_of(cost.kv_bytes_per_token, KV_VALUE_BYTES),
                codec.bytes_of(cost.state_bytes, cost.state_value_bytes),
            )
            for codec in self.codecs
        ]
        return replace(cost, copies=tuple(sizes))

    def inexact_in(self, cost: CostModel) -> list[tuple[bool, bool]]:
        """True for each tier's copies of KV, and of states, if they differ from the device's."""
        values = KV_VALUE_BYTES, cost.state_value_bytes
        kinds = [[not codec.is_exact(value) for value in values] for codec in self.codecs]
        return [(kv, state) for kv, state in kinds]

    @property
    def present(self) -> list[Tier]:
        """The tiers that there are, the fastest first."""
        return [tier for tier in TIERS if self.sizes[tier]]

    def below(self, tier: Tier) -> Tier | None:
        """The next slower tier that there is."""
        return next((one for one in self.present if one > tier), None)

    def speeds(self, cost: CostModel, time: PrefillTime | None) -> Speeds:
        """The speeds to decide with, where prefills take `time`, by default the paper's."""
        time = time or PAPER
        seconds = time.seconds(0, PREFILL_OF) - time.base
        _, host, disk = self.links
        return Speeds.of(cost.flops(PREFILL_OF) / seconds, host, disk)


def _codec(name: str, tier: Tier) -> CopyCodec:
    if tier is Tier.DEVICE:
        raise ValueError("the device has no codec: what it holds is exact")
    names = [codec.value for codec in CopyCodec]
    if name not in names:
        raise ValueError(f"{name!r} is no codec; there are {', '.join(names)}")
    return CopyCodec(name)


@dataclass
class TierCounts:
    """Counts of the tiers of a replayed cache.

    hit_tokens: tokens that were skipped. The device counts those that could be skipped without
    loads, the host those that its copies added, the disk those that its copies added to both.
    loads, loaded: requests that loaded from a tier, and bytes. load_seconds: of all loads. written,
    evicted: bytes that were copied to a tier, and evicted from it. inexact_hits, inexact_tokens:
    requests that resumed from what is not exact or was computed behind it, and the tokens that they
    skipped; these are in hit_tokens, too.
    """

    hit_tokens: Counter[Tier] = field(default_factory=Counter)
    loads: Counter[Tier] = field(default_factory=Counter)
    loaded: Counter[Tier] = field(default_factory=Counter)
    load_seconds: float = 0.0
    written: Counter[Tier] = field(default_factory=Counter)
    evicted: Counter[Tier] = field(default_factory=Counter)
    inexact_hits: int = 0
    inexact_tokens: int = 0

    def count_way(self, way: Way, known: Sequence[Way], tiers: Iterable[Tier]) -> None:
        """A request takes `way`, of all that are `known` in these tiers, the fastest first."""
        reached = 0
        for tier in tiers:
            without_slower = (w.depth for w in known if not any(w.load_bytes[tier + 1 :]))
            depth = min(max(without_slower), way.depth)
            self.hit_tokens[tier] += max(depth - reached, 0)
            reached = max(reached, depth)
            self.loads[tier] += way.load_bytes[tier] > 0
            self.loaded[tier] += way.load_bytes[tier]
        self.load_seconds += way.load_seconds

    def count_resumed(self, depth: int, *, exact: bool) -> None:
        """A request resumed at `depth` tokens."""
        if depth and not exact:
            self.inexact_hits += 1
            self.inexact_tokens += depth

    @property
    def written_per_hit_token(self) -> float:
        """Bytes copied down for each token that was skipped."""
        return sum(self.written.values()) / max(sum(self.hit_tokens.values()), 1)

    def as_dict(self) -> dict[str, Any]:
        """The counts, for JSON."""
        counted: dict[str, Any] = {
            name: {tier.name.lower(): counter[tier] for tier in TIERS}
            for name, counter in self.__dict__.items()
            if isinstance(counter, Counter)
        }
        counted["load_seconds"] = self.load_seconds
        counted["inexact_hits"] = self.inexact_hits
        counted["inexact_tokens"] = self.inexact_tokens
        counted["written_per_hit_token"] = self.written_per_hit_token
        return counted
