"""Which states a running prefill takes, from the wish to the tree.

An `Intent` of `core` holds what admission wants of one request's prompt. Before each forward the
wanted positions that it passes get a slot, if they are worth one, and become tracks, which the
kernels write; or, where a model's kernels cannot stop at a position, the prefill is cut there and
the state is copied when the next forward begins. After the forward the cache publishes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakKeyDictionary

import torch

from sglang_hybrid.checkpoints.tracks import StateTracks
from sglang_hybrid.core import intent as plans
from sglang_hybrid.core.admission import Prefill, Skip
from sglang_hybrid.tenants import tenant_of

if TYPE_CHECKING:
    from collections import Counter

    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_hybrid.core.history import Meeting

# Slots are int64 [1], on the device.
Planned: TypeAlias = plans.Planned[torch.Tensor]
Intent: TypeAlias = plans.Intent[torch.Tensor]
Slots: TypeAlias = plans.Slots[torch.Tensor]

Note: TypeAlias = "Callable[[Req, plans.Wish, Skip], None]"


class Planner:
    """The intents of all requests that are being prefilled.

    Args:
        slots: the state pool.
        skipped: counts of why a position was not taken.
        page_size: positions fall on multiples of it.
        min_branch_tokens: what a branch must gain.
        grid: tokens between the boundaries at which SGLang would keep a state.
        one_pass: the kernels can take states in the middle of a forward.
        note: is told what is not taken.
    """

    def __init__(
        self,
        slots: Slots,
        skipped: Counter[str],
        *,
        page_size: int,
        min_branch_tokens: int,
        grid: int,
        one_pass: bool,
        note: Note | None = None,
    ) -> None:
        self.one_pass = one_pass
        self._note = note
        self._slots = slots
        self._skipped = skipped
        self._page_size = page_size
        self._min_branch_tokens = min_branch_tokens
        self._grid = grid
        self._intents: WeakKeyDictionary[Req, Intent] = WeakKeyDictionary()
        self._micro_branches: WeakKeyDictionary[Req, list[plans.Wish]] = WeakKeyDictionary()

    def intend(
        self,
        req: Req,
        prompt_len: int,
        kv_len: int,
        *,
        meeting: Meeting | None = None,
        shared: Sequence[int] = (),
        message_starts: Sequence[int] = (),
    ) -> None:
        """`req` may be admitted with `req.prefix_len` tokens hit: say what its prefill should
        leave. Nothing is counted before `admitted`.
        """
        prefill = Prefill(
            prompt_len,
            req.prefix_len,
            kv_len,
            known_branch=0 if meeting is None else meeting.branch,
            shared=shared,
            message_starts=message_starts,
            page_size=self._page_size,
        )
        intent: Intent
        intent, micro_branches = plans.intend(prefill, meeting, self._min_branch_tokens)
        intent.owner, intent.tenant = req.rid, tenant_of(req)
        self.drop(req)
        self._intents[req] = intent
        self._micro_branches[req] = [
            plans.Wish(branch.position, branch.kind, intent.owner, tenant=intent.tenant)
            for branch in micro_branches
        ]

    def admitted(self, req: Req) -> None:
        """`req` joined a batch: what it will not leave is counted, once."""
        for wish in self._micro_branches.pop(req, ()):
            self._skip(req, wish, Skip.MICRO_BRANCH)

    def in_flight(self) -> list[tuple[Req, Intent]]:
        """Requests whose prefill is to leave states that are not published yet."""
        return [(req, intent) for req, intent in self._intents.items() if intent.pending]

    def next_cut(self, req: Req, start: int, end: int) -> int | None:
        """Where a forward of tokens [start, end) must stop for a state, if kernels need that."""
        intent = self._intents.get(req)
        if self.one_pass or intent is None:
            return None
        return min((at for at in intent.wanted if start < at < end), default=None)

    def plan(self, batch: ScheduleBatch) -> None:
        """Give slots to the states that the forward of `batch`, which is about to start, passes."""
        tracked: list[tuple[int, Planned]] = []
        copied: list[tuple[Req, Planned]] = []
        for row, req in enumerate(batch.reqs):
            intent = self._intents.get(req)
            if intent is None:
                continue
            if self.one_pass:
                tracked += [(row, planned) for planned in self._pass(req, intent)]
            else:
                copied += [(req, planned) for planned in self._stop(req, intent)]
        batch.state_tracks = _tracks(tracked)
        if copied:
            _copy_at_the_start(batch, copied)

    def due(self, req: Req, up_to: int) -> list[Planned]:
        """Take over the states under way at `up_to` tokens and before, the deepest first."""
        intent = self._intents.get(req)
        return [] if intent is None else intent.due(up_to)

    def drop(self, req: Req) -> None:
        """`req` goes away: what is under way for it will not be published."""
        self._micro_branches.pop(req, None)
        intent = self._intents.pop(req, None)
        if intent is not None:
            for planned in intent.planned:
                self._slots.give_back(planned.slot)

    def forget_all(self) -> None:
        """The pools were emptied: nothing is under way, and no slot needs to be given back."""
        self._intents.clear()

    def slots_under_way(self) -> int:
        """Slots of states that are not published yet."""
        return sum(len(intent.planned) for intent in self._intents.values())

    def _pass(self, req: Req, intent: Intent) -> list[Planned]:
        taken, skipped = intent.passed(
            self._slots, req.prefix_len, req.extend_end, self._grid, self._min_branch_tokens
        )
        for wish, skip in skipped:
            self._skip(req, wish, skip)
        return taken

    def _stop(self, req: Req, intent: Intent) -> list[Planned]:
        """The state at which this forward begins, if it is wanted."""
        start = req.prefix_len
        here = [at for at in intent.wanted if at == start > intent.hit_len]
        taken, skipped = intent.take(self._slots, here, start)
        for wish, skip in skipped:
            self._skip(req, wish, skip)
        return taken

    def _skip(self, req: Req, wish: plans.Wish, skip: Skip) -> None:
        self._skipped[skip.value] += 1
        if self._note is not None:
            self._note(req, wish, skip)


def _tracks(tracked: list[tuple[int, Planned]]) -> StateTracks | None:
    if not tracked:
        return None
    return StateTracks(
        rows=[row for row, _ in tracked],
        positions=[planned.position for _, planned in tracked],
        slots=torch.cat([planned.slot for _, planned in tracked]).to(torch.int64),
    )


def _copy_at_the_start(batch: ScheduleBatch, copied: list[tuple[Req, Planned]]) -> None:
    """Copy live states into slots on the forward's stream, before the forward changes them."""
    sources = [req.kv.mamba_pool_idx.unsqueeze(0) for req, _ in copied]
    targets = [planned.slot for _, planned in copied]
    if batch.mamba_cow_src_indices is not None:
        sources.insert(0, batch.mamba_cow_src_indices)
        targets.insert(0, batch.mamba_cow_dst_indices)
    batch.mamba_cow_src_indices = torch.cat(sources)
    batch.mamba_cow_dst_indices = torch.cat(targets)
