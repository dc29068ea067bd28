"""Counts of what one cache did, and the report of one request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from sglang_hybrid.core.records.nodes import Kind


class Evicted(Enum):
    """The part of a node that an eviction took."""

    LEAF = "leaf"  # KV and state of a leaf
    STATE = "state"  # a state whose KV lives on under the node's children
    KV = "kv"  # KV of a leaf that held no state


class Missed(Enum):
    """The reason why a request's hit is not longer."""

    NOTHING = "nothing"  # the whole usable prompt was hit
    NOT_STORED = "not_stored"  # the rest of the prompt was never seen, or its KV is gone
    GRID = "grid"  # it was sent before, but SGLang keeps no state, and no KV, behind its grid
    NO_STATE = "no_state"  # KV reaches further, but no state does
    NO_SLOT = "no_slot"  # a state was there, but no slot to copy it into
    COMPUTED = "computed"  # more was below the device, and computing it is faster than loading
    NOT_LOADED = "not_loaded"  # more was below the device, which had no room to load it
    CHANGING_TEXT = "changing_text"  # most of the rest was sent before, behind another short text


@dataclass(frozen=True, slots=True)
class ChangingText:
    """A short text in which a prompt differs from an earlier one of its tenant, while what stands
    behind it is the same.

    position: tokens before it. tokens: of it. same_tokens: behind it, which are the same. message:
    number of the client's message that has it, from 1 on (the assistant's are not counted); 0 where
    that is not known.
    """

    position: int
    tokens: int
    same_tokens: int
    message: int = 0

    def as_dict(self) -> dict[str, int]:
        """The value of `meta_info.hybrid_cache.changing_text` in the response."""
        return asdict(self)


@dataclass(frozen=True)
class Found:
    """The tokens that a request resumes from, by tier.

    device_tokens, host_tokens: of the hit, whose KV was there. state: the tier of its state, None
    for no hit. stored_tokens: how far a request could resume at all, over all tiers. load_seconds,
    compute_seconds: expected of the way that was chosen.
    """

    device_tokens: int
    host_tokens: int
    state: str | None
    stored_tokens: int
    load_seconds: float
    compute_seconds: float

    @property
    def way(self) -> str:
        """`load`: all that is stored; `load in part` and compute the rest; `compute` though more is
        stored; `resume` on the device; `cold`: nothing is stored.
        """
        hit = self.device_tokens + self.host_tokens
        if self.host_tokens or self.state == "host":
            return "load" if hit == self.stored_tokens else "load in part"
        if hit < self.stored_tokens:
            return "compute"
        return "resume" if hit else "cold"

    def as_dict(self) -> dict[str, Any]:
        """The value of `meta_info.hybrid_cache.tiers` in the response."""
        return {**vars(self), "way": self.way}


@dataclass
class RequestReport:
    """The report of one request; `meta_info.hybrid_cache` of its response.

    hit_tokens: prompt tokens whose prefill was skipped. kv_only_tokens: further prompt tokens whose
    KV is stored, but without a state to resume from. checkpoints: (position, kind) of each state
    that the request left in the tree. started: its prefill has begun, the numbers are final.
    declared: positions at which the client asked for a checkpoint. pinned: those that are kept for
    their lifetime, as far as eviction can help it. has_states: the model has
    recurrent state, so only positions with a checkpoint can be hit. found: what each tier gave,
    None without tiers. exact: nothing that was hit comes from a smaller copy; None where there
    are none. composed: tokens of modules that were computed apart, 0 if the whole prompt was
    computed instead; None for other prompts. not_composed: `missing_segments`, the numbers of those
    modules that were not there, or `composes_nothing`, why no prompt is composed. full_hit: its
    first token needed no forward. changing_text: why it missed, under `CHANGING_TEXT`.
    """

    prompt_tokens: int
    hit_tokens: int
    kv_only_tokens: int
    missed: Missed
    checkpoints: list[tuple[int, Kind]] = field(default_factory=list)
    started: bool = False
    declared: Sequence[int] = ()
    has_states: bool = True
    found: Found | None = None
    exact: bool | None = None
    composed: int | None = None
    not_composed: Mapping[str, Any] = field(default_factory=dict)
    pinned: Sequence[int] = ()
    full_hit: bool = False
    changing_text: ChangingText | None = None

    def as_dict(self) -> dict[str, Any]:
        """A request that declared positions is also told which of them behind the hit were kept,
        and how many tokens that makes a later request save beside those that were hit.
        """
        kept = self.kept
        declared: dict[str, Any] = {
            "kept": kept,
            "written_tokens": kept[-1] - self.hit_tokens if kept else 0,
        }
        if self.pinned:
            declared["pinned"] = list(self.pinned)
        return {
            "hit_tokens": self.hit_tokens,
            "kv_only_tokens": self.kv_only_tokens,
            "missed": self.missed.value,
            "checkpoints": [
                {"position": position, "kind": kind.value} for position, kind in self.checkpoints
            ],
            **({"declared": declared} if self.declared else {}),
            **({} if self.found is None else {"tiers": self.found.as_dict()}),
            **({} if self.exact is None else {"exact": self.exact}),
            **({} if self.composed is None else {"composed_tokens": self.composed}),
            **self.not_composed,
            **({"full_hit": True} if self.full_hit else {}),
            **(
                {}
                if self.changing_text is None
                else {"changing_text": self.changing_text.as_dict()}
            ),
        }

    @property
    def kept(self) -> list[int]:
        """Declared positions behind the hit that later requests can resume from, ascending."""
        kept = [position for position, kind in self.checkpoints if kind is Kind.DECLARED]
        if not self.has_states:
            kept = list(self.declared)
        return sorted(at for at in kept if at > self.hit_tokens)


@dataclass
class CacheStats:
    """Totals since the cache was built."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    inexact_hit_tokens: int = 0  # from smaller copies, or behind them
    kv_only_tokens: int = 0
    flops_saved: int = 0
    saved_seconds: float = 0.0  # of prefills, at the rate measured by then
    waited: int = 0  # requests that waited for another one's checkpoint
    admitted: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    evicted: Counter[str] = field(default_factory=Counter)
    missed_requests: Counter[str] = field(default_factory=Counter)  # by `Missed`, as the next
    missed_tokens: Counter[str] = field(
        default_factory=Counter
    )  # prompt tokens that were prefilled

    def on_prefill(
        self, report: RequestReport, flops_saved: int, saved_seconds: float = 0.0
    ) -> None:
        """A request began its prefill with what `report` says."""
        self.missed_requests[report.missed.value] += 1
        self.missed_tokens[report.missed.value] += report.prompt_tokens - report.hit_tokens
        self.saved_seconds += saved_seconds
        self.requests += 1
        self.prompt_tokens += report.prompt_tokens
        self.hit_tokens += report.hit_tokens
        self.inexact_hit_tokens += report.hit_tokens * (report.exact is False)
        self.kv_only_tokens += report.kv_only_tokens
        self.flops_saved += flops_saved

    def as_dict(self) -> dict[str, Any]:
        """The values for /server_info."""
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "inexact_hit_tokens": self.inexact_hit_tokens,
            "kv_only_tokens": self.kv_only_tokens,
            "hit_rate": self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0,
            "flops_saved": float(
                self.flops_saved
            ),  # beyond 64 bits SGLang's messages refuse an int
            "saved_seconds": round(self.saved_seconds, 3),
            "missed_requests": dict(self.missed_requests),
            "missed_tokens": dict(self.missed_tokens),
            "waited_for_prefix": self.waited,
            "checkpoints_admitted": dict(self.admitted),
            "checkpoints_skipped": dict(self.skipped),
            "evicted": dict(self.evicted),
        }
