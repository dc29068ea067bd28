"""Judges which positions of a prefill deserve a checkpoint, and why the others do not.

Pure decisions over numbers: how much of the prompt is in the cache and in the history, which slots
are free, what a checkpoint would be worth. Nothing is allocated here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from sglang_hybrid.core.costs.cost import MIN_BRANCH_TOKENS
from sglang_hybrid.core.records.nodes import Kind

ALWAYS_EXACT = (Kind.DECLARED, Kind.PROMPT_END)
"""Kinds that are taken however few tokens they gain."""


class Skip(Enum):
    """The reason why a position gets no checkpoint."""

    DUPLICATE = "duplicate"  # there is one already, or another reason took it
    NOT_COMPUTED = "not_computed"  # inside the hit, or past the usable prompt
    MICRO_BRANCH = "micro_branch"  # gains too few tokens over the hit
    NO_SLOT = "no_slot"  # nothing is free and nothing may be pushed out
    NOT_WORTH = "not_worth"  # worth no more than what it would push out


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A position (tokens from the start) and its kind; `skip` is None where it is admitted."""

    position: int
    kind: Kind
    skip: Skip | None = None

    @property
    def admitted(self) -> bool:
        return self.skip is None


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt before its prefill.

    prompt_len: its tokens; hits end before the last one. hit_len: where it resumes. kv_len: how far
    KV alone is stored. known_branch: where the history would branch it (`HistoryMatch.branch`), 0
    if it does not know. next_branch: where the next prompt is expected to branch from it
    (`HistoryMatch.next_branch`), 0 if that is not known. shared: lengths of the prefixes that
    waiting requests share with it, ascending. message_starts: positions at which the client's
    messages begin. reply_start: where the reply's own opener begins, if the chat template writes
    more behind it than stays there once the reply is history, as `<think>` does; 0 if it writes no
    more, or that is not known. declared: positions at which the client asked for a checkpoint.
    page_size: positions are rounded down to multiples of it. is_repeated: the prompt was asked
    before, and the state behind its last token is wanted.
    """

    prompt_len: int
    hit_len: int
    kv_len: int
    known_branch: int = 0
    next_branch: int = 0
    shared: Sequence[int] = ()
    message_starts: Sequence[int] = ()
    reply_start: int = 0
    declared: Sequence[int] = ()
    page_size: int = 1
    is_repeated: bool = False

    @property
    def end(self) -> int:
        """The last position at which a state may be wanted."""
        return self.prompt_len if self.is_repeated else self.prompt_len - 1

    def branch_points(self) -> list[int]:
        """The positions where this prompt leaves what was seen before, deepest first: by the
        history, and by the stored KV.
        """
        known = {min(self.kv_len, self.prompt_len - 1), self.known_branch}
        return sorted(known - {0}, reverse=True)


@dataclass(frozen=True, slots=True)
class SlotBudget:
    """Slots that are free, and whether a state may be pushed out.

    beats_victim: whether a checkpoint at a position would be worth more than the cheapest victim;
    None if what is new always is, as with LRU. knows_returns: that says how likely a position comes
    back, by what was seen.
    """

    free_slots: int
    evictable: bool = False
    beats_victim: Callable[[int, Kind], bool] | None = None
    knows_returns: bool = False


def judicious(prefill: Prefill) -> list[tuple[int, Kind]]:
    """Positions that a later prompt may resume from, most likely first: what the client declared,
    deepest first; the reply's start, if the next turn leaves the prompt there; where it branches
    from what was seen and from what waits; where the next prompt is expected to branch from it;
    start of the last message; prompt end, if the next turn has all of the prompt.
    """
    wanted = [(position, Kind.DECLARED) for position in sorted(prefill.declared, reverse=True)]
    if prefill.reply_start:
        wanted.append((prefill.reply_start, Kind.MESSAGE))
    wanted += [(branch, Kind.BRANCH) for branch in prefill.branch_points()]
    wanted += [(length, Kind.BRANCH) for length in reversed(prefill.shared)]
    if prefill.next_branch:
        wanted.append((prefill.next_branch, Kind.BRANCH))
    if prefill.message_starts:
        wanted.append((prefill.message_starts[-1], Kind.MESSAGE))
    if prefill.is_repeated or not prefill.reply_start:
        wanted.append((prefill.end, Kind.PROMPT_END))
    return wanted


def last_boundary(start: int, end: int, grid: int) -> int | None:
    """The position at which the forward of tokens [start, end) of a prompt passes a boundary that
    SGLang would keep a state at: the last multiple of `grid` from `start`; None if there is none.

    It is unknown where other prompts will leave this one, and when KV runs short its end is evicted
    first: a state in between is worth a free slot.
    """
    boundary = start + (end - start) // grid * grid
    return boundary if boundary > start else None


def screen_positions(
    wanted: Sequence[tuple[int, Kind]], prefill: Prefill, min_branch_tokens: int = MIN_BRANCH_TOKENS
) -> list[Checkpoint]:
    """Each wanted position on its page, skipped if it is not computed, there already, or too close
    to the hit or to one before it; whether there is room is not asked. Positions that the client
    declared, and the prompt's end, may be close to others.
    """
    screened: list[Checkpoint] = []
    taken = [prefill.hit_len]
    for asked, kind in wanted:
        position = asked - asked % prefill.page_size
        skip = None
        if position in taken:
            skip = Skip.DUPLICATE
        elif not prefill.hit_len < position <= prefill.end:
            skip = Skip.NOT_COMPUTED
        elif kind not in ALWAYS_EXACT and any(
            abs(position - other) < min_branch_tokens for other in taken
        ):
            skip = Skip.MICRO_BRANCH
        if skip is None:
            taken.append(position)
        screened.append(Checkpoint(position, kind, skip))
    return screened


def skip_reason(position: int, kind: Kind, slot_budget: SlotBudget) -> Skip | None:
    """The reason why a checkpoint is not taken where no slot is free; None if it is worth what it
    pushes out.

    A declared position is worth the cheapest victim: the client said that it comes back. A chunk's
    end is worth a free slot only, and so is a prompt's, which serves the same prompt again, unless
    it is known how often that happens.
    """
    if not slot_budget.evictable:
        return Skip.NO_SLOT
    if kind is Kind.DECLARED:
        return None
    if kind is Kind.CHUNK or (kind is Kind.PROMPT_END and not slot_budget.knows_returns):
        return Skip.NOT_WORTH
    if slot_budget.beats_victim is not None and not slot_budget.beats_victim(position, kind):
        return Skip.NOT_WORTH
    return None
