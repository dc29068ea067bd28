"""States that a running prefill takes, from the request for a checkpoint to the tree.

A `CheckpointPlan` of `core` holds what admission wants of one request's prompt. Before each
forward the wanted positions that it passes get a slot, if they are worth one, and become tracks,
which the kernels write; or, where a model's kernels cannot stop at a position, the prefill is cut
there and the state is copied when the next forward begins. After the forward the cache publishes
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakKeyDictionary

import torch

from sglang_hybrid.checkpoints.tracks import StateTracks
from sglang_hybrid.core.checkpoints import checkpoint_plan as plans
from sglang_hybrid.core.checkpoints.admission import Checkpoint, Prefill, Skip
from sglang_hybrid.serving.per_request import PerRequest
from sglang_hybrid.serving.requests.ids import shown_id
from sglang_hybrid.serving.tenants import tenant_of

if TYPE_CHECKING:
    from collections import Counter

    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_hybrid.core.returns.history import HistoryMatch

# Slots are int64 [1], on the device.
PendingCheckpoint: TypeAlias = plans.PendingCheckpoint[torch.Tensor]
CheckpointPlan: TypeAlias = plans.CheckpointPlan[torch.Tensor]
StateSlots: TypeAlias = plans.StateSlots[torch.Tensor]

Note: TypeAlias = "Callable[[Req, plans.CheckpointRequest, Skip], None]"


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
        slots: StateSlots,
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
        self._plans: PerRequest[CheckpointPlan] = PerRequest()
        self._open: WeakKeyDictionary[Req, CheckpointPlan] = WeakKeyDictionary()  # a part of them
        self._answers: WeakKeyDictionary[Req, CheckpointPlan] = WeakKeyDictionary()  # another part
        self._micro_branches: PerRequest[list[Checkpoint]] = PerRequest()

    def plan_request(
        self,
        req: Req,
        prompt_len: int,
        hit_len: int,
        kv_len: int,
        *,
        history_match: HistoryMatch | None = None,
        shared: Sequence[int] = (),
        message_starts: Sequence[int] = (),
        reply_start: int = 0,
        declared: Sequence[int] = (),
        is_repeated: bool = False,
    ) -> None:
        """`req` may be admitted with `hit_len` tokens hit or loaded: say what its prefill should
        leave. Nothing is counted before `on_admission`.
        """
        prefill = Prefill(
            prompt_len,
            hit_len,
            kv_len,
            known_branch=0 if history_match is None else history_match.branch,
            next_branch=0 if history_match is None else history_match.next_branch(message_starts),
            shared=shared,
            message_starts=message_starts,
            reply_start=reply_start,
            declared=declared,
            page_size=self._page_size,
            is_repeated=is_repeated,
        )
        plan: CheckpointPlan
        plan, micro_branches = plans.plan_checkpoints(
            prefill, history_match, self._min_branch_tokens
        )
        plan.request_id, plan.tenant = shown_id(req.rid), tenant_of(req)
        self.drop(req)
        self._plans[req] = plan
        if plan.is_open:
            self._open[req] = plan
        if plan.answer_grid(self._grid):
            self._answers[req] = plan
        if micro_branches:
            self._micro_branches[req] = micro_branches

    def on_admission(self, req: Req) -> None:
        """`req` joined a batch: what it will not leave is counted, once."""
        for branch in self._micro_branches.pop(req) or ():
            request = plans.CheckpointRequest(
                branch.position, branch.kind, shown_id(req.rid), tenant=tenant_of(req)
            )
            self._skip(req, request, Skip.MICRO_BRANCH)

    def want_branches(self, req: Req, lengths: Sequence[int]) -> None:
        """The prefill of `req` goes on, and requests that have come since share prefixes of so
        many tokens (ascending) with its prompt: its next chunks leave states there, too.
        """
        plan = self._plans.get(req)
        if plan is None:
            return
        was_open = plan.is_open
        plan.want_branches(lengths, req.prefix_len, self._page_size, self._min_branch_tokens)
        self._note_whether_open(req, plan, was_open)

    def in_flight(self) -> list[tuple[Req, CheckpointPlan]]:
        """Requests whose prefill is to leave states that are not published yet."""
        return list(self._open.items())

    def next_cut(self, req: Req, start: int, end: int) -> int | None:
        """The position where a forward of tokens [start, end) must stop for a state, if kernels
        need that.
        """
        plan = self._plans.get(req)
        if self.one_pass or plan is None:
            return None
        return min((at for at in plan.wanted if start < at < end), default=None)

    def assign_slots(self, batch: ScheduleBatch) -> None:
        """Give slots to the states that the forward of `batch`, which is about to start, passes."""
        tracked: list[tuple[int, PendingCheckpoint]] = []
        copied: list[tuple[Req, PendingCheckpoint]] = []
        for row, req in enumerate(batch.reqs):
            plan = self._plans.get(req)
            if plan is None:
                continue
            was_open = plan.is_open
            if self.one_pass:
                tracked += [(row, checkpoint) for checkpoint in self._pass(req, plan)]
            else:
                copied += [(req, checkpoint) for checkpoint in self._stop(req, plan)]
            self._note_whether_open(req, plan, was_open)
        batch.state_tracks = _tracks(tracked)
        if copied:
            _copy_live_states(batch, copied)

    def plan_decode(self, batch: ScheduleBatch) -> None:
        """Say which live states are copied before the decode step of `batch`, which is about to
        start, and where to: those of answers that are expected to come back shortened.
        """
        batch.state_copies = None
        if not self._answers:
            return
        copied: list[tuple[Req, PendingCheckpoint]] = []
        # Rows of beams come behind those of the requests.
        for req, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=False):
            checkpoint = self.take_in_answer(req, length - 1)
            if checkpoint is not None:
                copied.append((req, checkpoint))
        if copied:
            batch.state_copies = _live_states(copied), _slots_of(copied)

    def take_in_answer(self, req: Req, length: int) -> PendingCheckpoint | None:
        """The state that `req`, which decodes, leaves behind its first `length` tokens; None if it
        leaves none there.
        """
        plan = self._answers.get(req)
        if plan is None or length <= plan.prompt_len or length % plan.answer_grid(self._grid):
            return None
        return plan.take_in_answer(self._slots, length)

    def answer_state(self, req: Req) -> int:
        """Position of the state that `req`, which ended, left in its answer; 0 if it left none."""
        plan = self._answers.get(req)
        return 0 if plan is None else plan.answer_state

    def take_ready(self, req: Req, up_to: int) -> list[PendingCheckpoint]:
        """Take over the states under way at `up_to` tokens and before, the deepest first."""
        plan = self._plans.get(req)
        if plan is None:
            return []
        was_open = plan.is_open
        ready = plan.take_ready(up_to)
        if plan.answer_states:
            ready = [*plan.take_answer_state(self._slots, up_to), *ready]
        self._note_whether_open(req, plan, was_open)
        return ready

    def drop(self, req: Req) -> None:
        """Give up what is under way for `req`: it will not be published."""
        plan = self._plans.pop(req)
        if plan is None:
            return
        self._micro_branches.pop(req)
        if plan.is_open:
            self._open.pop(req, None)
        self._answers.pop(req, None)
        for checkpoint in (*plan.pending_checkpoints, *plan.answer_states):
            self._slots.give_back(checkpoint.slot)

    def forget_all(self) -> None:
        """The pools were emptied: nothing is under way, and no slot needs to be given back."""
        self._plans.clear()
        self._open.clear()
        self._answers.clear()
        self._micro_branches.clear()

    def _note_whether_open(self, req: Req, plan: CheckpointPlan, was_open: bool) -> None:
        if plan.is_open and not was_open:
            self._open[req] = plan
        elif was_open and not plan.is_open:
            self._open.pop(req, None)

    def _pass(self, req: Req, plan: CheckpointPlan) -> list[PendingCheckpoint]:
        taken, skipped = plan.take_in_prefill(
            self._slots, req.prefix_len, req.extend_end, self._grid, self._min_branch_tokens
        )
        for request, skip in skipped:
            self._skip(req, request, skip)
        return taken

    def _stop(self, req: Req, plan: CheckpointPlan) -> list[PendingCheckpoint]:
        """The state at which this forward begins, if it is wanted."""
        start = req.prefix_len
        here = [at for at in plan.wanted if at == start > plan.hit_len]
        taken, skipped = plan.take(self._slots, here, start)
        for request, skip in skipped:
            self._skip(req, request, skip)
        return taken

    def _skip(self, req: Req, request: plans.CheckpointRequest, skip: Skip) -> None:
        self._skipped[skip.value] += 1
        if self._note is not None:
            self._note(req, request, skip)


def _tracks(tracked: list[tuple[int, PendingCheckpoint]]) -> StateTracks | None:
    if not tracked:
        return None
    slots = [checkpoint.slot for _, checkpoint in tracked]
    return StateTracks(
        rows=[row for row, _ in tracked],
        positions=[checkpoint.position for _, checkpoint in tracked],
        slots=(slots[0] if len(slots) == 1 else torch.cat(slots)).to(torch.int64),
    )


def _copy_live_states(batch: ScheduleBatch, copied: list[tuple[Req, PendingCheckpoint]]) -> None:
    """Copy live states into slots on the forward's stream, before the forward changes them."""
    sources, targets = [_live_states(copied)], [_slots_of(copied)]
    if batch.mamba_cow_src_indices is not None:
        sources.insert(0, batch.mamba_cow_src_indices)
        targets.insert(0, batch.mamba_cow_dst_indices)
    batch.mamba_cow_src_indices = torch.cat(sources)
    batch.mamba_cow_dst_indices = torch.cat(targets)


def _live_states(copied: list[tuple[Req, PendingCheckpoint]]) -> torch.Tensor:
    return torch.cat([req.kv.mamba_pool_idx.unsqueeze(0) for req, _ in copied])


def _slots_of(copied: list[tuple[Req, PendingCheckpoint]]) -> torch.Tensor:
    return torch.cat([checkpoint.slot for _, checkpoint in copied])
