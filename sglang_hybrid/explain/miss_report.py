"""The report why a prompt was not hit further.

The server fills a `MissReport` (`explanation.py`) and sends it as JSON; `render.py` says it in
words. Positions are tokens from the prompt's start. Times are seconds, counted back from
the newest request of the same tenant; None where they are not recorded.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from sglang_hybrid.serving.telemetry.stats import ChangingText


class Reason(Enum):
    """The reason why no checkpoint is at a position."""

    NOT_WANTED = "not_wanted"  # nobody asked for one there
    MICRO_BRANCH = "micro_branch"  # it would have gained too few tokens
    NO_SLOT = "no_slot"  # nothing was free and nothing could be pushed out
    NOT_WORTH = "not_worth"  # it was worth no more than what it would have pushed out
    GRID = "grid"  # SGLang tracks states at multiples of its grid only
    EVICTED = "evicted"
    UNKNOWN = "unknown"  # nothing is remembered about it


class UnstoredReason(Enum):
    """The reason why KV is not stored further than it is."""

    NEW = "new"  # never sent before
    EVICTED = "evicted"
    GRID = "grid"  # SGLang keeps KV up to the last state on its grid
    GONE = "gone"  # sent before and no longer stored; when it went is not remembered
    CHANGING_TEXT = "changing_text"  # most of it was sent before, behind another short text
    UNKNOWN = "unknown"  # never sent, or no longer stored: what was sent is not remembered


class ResumedCheckpoint(msgspec.Struct):
    """A state in the tree; what is None is not recorded. return_expected: the probability of a
    return by the last answer there, or by the client's hint; None if they tell nothing. pinned_for:
    seconds, from the newest request on, for which it stays pinned if nobody uses it.
    """

    position: int
    kind: str | None = None
    taken: float | None = None
    last_used: float | None = None
    hits: int | None = None
    return_expected: float | None = None
    pinned_for: float | None = None


class SlotRecipient(msgspec.Struct):
    """The state that got an evicted state's slot. request: id of the request whose prefill took it.
    score: its worth, in the unit of the evicted state's score; None if the two were not compared.
    """

    position: int
    kind: str
    request: str
    score: float | None = None


class MissedCheckpoint(msgspec.Struct):
    """A position at which a checkpoint would have helped.

    gain: tokens that it would have saved. kind: of the checkpoint that was wanted or evicted. when:
    seconds since the decision. request: id of the request whose prefill wanted it. short: "states"
    or "kv", the pool that ran short when it was evicted. score, victim_score: what `policy` gave
    it, and what it gave the cheapest state that could be evicted; below 0 no return is expected;
    None once several tenants have sent requests. recipient: the same tenant's state that got its
    slot. with_kv: its KV was evicted with it. return_expected: as in `ResumedCheckpoint`, when it
    was evicted. pinned: a client had pinned it.
    """

    position: int
    gain: int
    reason: Reason
    kind: str | None = None
    when: float | None = None
    request: str | None = None
    policy: str | None = None
    short: str | None = None
    score: float | None = None
    victim_score: float | None = None
    recipient: SlotRecipient | None = None
    hits: int | None = None
    unused: float | None = None
    with_kv: bool = False
    return_expected: float | None = None
    pinned: bool = False


class Unstored(msgspec.Struct):
    """Tokens [start, end) of the usable prompt, whose KV is not stored.

    known: position up to which they were sent before, None if that is not remembered. when, short,
    policy: of the eviction, as in `MissedCheckpoint`. changing_text: that keeps them from being
    found. line: of the prompt, on which it begins, from 1 on; None where there is no text.
    """

    start: int
    end: int
    why: UnstoredReason
    known: int | None = None
    when: float | None = None
    short: str | None = None
    policy: str | None = None
    changing_text: ChangingText | None = None
    line: int | None = None


class ExplainedRequest(msgspec.Struct):
    """The part of a report on a recent request: what it found and left when it came.

    missed: as in its response. left: positions and kinds of the states that it left. refused: those
    that it wanted to leave and did not get. now: where it would resume if it were sent again.
    """

    request_id: str
    when: float | None
    missed: str
    started: bool
    left: list[tuple[int, str]]
    refused: list[MissedCheckpoint]
    now: int


class CacheSnapshot(msgspec.Struct):
    """The memory of the server, and what it remembers.

    states: the model has recurrent state. recorded: skipped and evicted states are remembered.
    grid: tokens between the states that SGLang tracks, None if the cache takes them where it wants.
    unplanned: what keeps it from that, as "speculative decoding"; "" if nothing does.
    kv_room: KV tokens at most. shared_bytes: of one memory for KV and states, None for two pools.
    full: older decisions about this tenant's prompts are forgotten. emptied: when the cache was.
    """

    policy: str
    admission: str
    states: bool
    recorded: bool
    page_size: int
    min_branch_tokens: int
    grid: int | None
    state_slots: int | None
    kv_room: int
    shared_bytes: int | None
    full: bool
    emptied: float | None = None
    unplanned: str = ""


class BelowDevice(msgspec.Struct):
    """The deepest point that is stored, if not all of it is on the device.

    state: the tier of its state. host_tokens: whose KV is in host memory. load_seconds: to load it.
    compute_seconds: to compute instead what that saves. resumes_at: what the faster way resumes at.
    """

    position: int
    state: str
    host_tokens: int
    load_seconds: float
    compute_seconds: float
    resumes_at: int


class MissReport(msgspec.Struct):
    """The match of a prompt, and the reasons why it is not deeper.

    usable: tokens that can be hit: all but the last one, in whole pages. kv: how far KV is stored.
    hit: where the prefill resumes. checkpoint: the state that it resumes from. deeper: where one
    would have helped, deepest first. unstored: what lies behind `kv`. leaves: positions and kinds
    of the states that a prefill of this prompt would leave now. below: what must be loaded to
    resume deepest, None if nothing must.
    """

    prompt: int
    usable: int
    kv: int
    hit: int
    checkpoint: ResumedCheckpoint | None
    deeper: list[MissedCheckpoint]
    unstored: Unstored | None
    leaves: list[tuple[int, str]]
    cache: CacheSnapshot
    request: ExplainedRequest | None = None
    below: BelowDevice | None = None
