"""What came back, and when: recent prompts and answers, whatever the cache holds.

A cache sees reuse only of what it kept. The history remembers every position where a checkpoint
could have been taken, so that the reuse index learns from intervals that no eviction cut short, and
admission knows a shared prefix whose KV is long gone.

Each tenant has a tree of its own: no look-up of one can find what another one sent. The index,
which holds statistics of classes of positions, is common to all.

Memory: two bytes per token (a fingerprint, not the token) and about 600 bytes per place, over all
tenants. When `max_bytes` is reached, the tenant that holds most forgets its oldest leaves.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.answers import Answer, AnswerModels
from sglang_hybrid.core.history_tree import (
    NO_SLOT,
    TOKEN_BYTES,
    HistoryTree,
    Place,
    Trail,
    fingerprints,
)
from sglang_hybrid.core.nodes import Clock, Node
from sglang_hybrid.core.reuse import ReuseIndex
from sglang_hybrid.core.shares import Shares

MOST_CHILDREN = 2
"""Of a place whose returns say something of the answer before them."""


class TimeUnit(Enum):
    """What ages are counted in. Seconds tell sessions apart by their think times; requests suit
    traffic without stamps.
    """

    SECONDS = "seconds"
    REQUESTS = "requests"

    def now(self, clock: Clock) -> float:
        return clock.stamp if self is TimeUnit.SECONDS else float(clock.tick)

    def last_used(self, node: Node) -> float:
        return node.stamp if self is TimeUnit.SECONDS else float(node.last_used)


@dataclass(frozen=True)
class Meeting:
    """How a prompt meets its tenant's history. known_len: tokens that were seen before. branch:
    where a checkpoint would serve the next prompt of its kind, 0 if nowhere: where it leaves the
    history, or just above at a place that is known already. trail: the places on its path. reused:
    the deepest possible checkpoint among them that it extends.

    version, marks: which tree that was, and the prompt's fingerprints, so that `observe` need not
    look again.
    """

    known_len: int
    branch: int
    trail: Trail
    reused: Place | None
    version: int
    marks: bytes


class History:
    """All recent sequences. The index learns from them; `time_unit` says in which time.

    answer_bytes: memory for what answers teach, 2 MiB for each tenant; 0: they teach nothing.
    reach: tokens that a checkpoint may lie above the place that it stands for; page_size: positions
    of checkpoints are rounded down to its multiples.
    """

    def __init__(
        self,
        time_unit: TimeUnit = TimeUnit.SECONDS,
        max_bytes: int = 64 << 20,
        min_branch_tokens: int = 16,
        page_size: int = 1,
        answer_bytes: int = 64 << 20,
    ) -> None:
        self.time_unit = time_unit
        self.index = ReuseIndex(unit=0.125 if time_unit is TimeUnit.SECONDS else 1.0)
        self.max_bytes = max_bytes
        self.min_branch_tokens = min_branch_tokens
        self.reach = max(min_branch_tokens, page_size)
        self._versions = 0
        self._trees: dict[Hashable, HistoryTree] = {}
        self._shares = Shares()
        self._answers = AnswerModels(answer_bytes)
        self._empty = HistoryTree(self.index)  # what a tenant that never came finds

    @property
    def held_bytes(self) -> int:
        """What all tenants' trees take."""
        return self._shares.total

    def tree(self, tenant: Hashable = None) -> HistoryTree:
        """The sequences of `tenant`, to be read only."""
        return self._trees.get(tenant, self._empty)

    def meet(self, prompt: npt.ArrayLike, tenant: Hashable = None) -> Meeting:
        """Look `prompt` [n] of `tenant` up before its prefill. Changes nothing."""
        marks = fingerprints(prompt)
        tree = self.tree(tenant)
        path, matched = tree.walk(marks, [])
        return self._meeting(tree, path, matched, marks, len(marks) // TOKEN_BYTES)

    def observe(
        self,
        tokens: npt.ArrayLike,
        input_len: int,
        clock: Clock,
        message_starts: Iterable[int] = (),
        meeting: Meeting | None = None,
        tenant: Hashable = None,
    ) -> Trail:
        """Take in a request of `tenant` when it ends: `tokens` [n] is its prompt of `input_len`
        tokens and its answer, or less if it was cut short.

        Once per request, aborted ones too, in the same order on every rank; nothing else may be fed
        to it. Its time is the clock's. meeting: what `meet` said of this very prompt; if the tenant
        sent nothing since, the way to its end is not walked again. Cost: a few vector passes over n
        tokens, and Python work per place on the path.
        """
        now = self.time_unit.now(clock)
        ids = np.asarray(tokens)
        tree = self._trees.get(tenant)
        if tree is None:
            tree = self._trees[tenant] = HistoryTree(self.index)
        known: list[Place] = []
        if meeting is None or meeting.version != tree.version or len(ids) < input_len:
            meeting, marks = None, fingerprints(ids)
        else:
            known = meeting.trail.places
            marks = meeting.marks + fingerprints(ids[input_len:])
        path, matched = tree.walk(marks, known)
        if meeting is None:
            meeting = self._meeting(tree, path, matched, marks, input_len)
        model = self._answers.of(tenant)
        answer, says = None, 0
        if model is not None:
            if meeting.reused is not None and meeting.reused.last is not None:
                model.returned(meeting.reused.last, now)
            model.give_up(now)
            if len(ids) > input_len:
                answer = model.ended(ids[input_len:], now)
                says = model.bucket(answer.features)
        pace = 0
        if meeting.reused is not None:
            pace = self.index.pace(self.index.returned(meeting.reused.slot, now))
            meeting.reused.pace = pace
            _says(meeting.reused, answer, says)
            self.index.reclass(meeting.reused.slot, meeting.reused.klass)
        ends = {start for start in message_starts if 0 < start < min(input_len, len(ids))}
        ends |= {meeting.branch, len(ids)} - {0}
        held = tree.held_bytes
        trail = tree.insert(marks, path, matched, ends)
        self._changed(tenant, tree, held)
        for place in trail:
            if place.depth in ends:
                _says(place, answer, says)
                self._open(place, now, pace, is_end=place.depth == len(ids))
        self._forget_oldest(tenant)
        self.index.observed(now)
        return Trail(trail)

    def _meeting(
        self, tree: HistoryTree, path: list[Place], matched: int, marks: bytes, input_len: int
    ) -> Meeting:
        """How a prompt that was walked along `path` of `tree` meets it."""
        usable = input_len - 1  # the last prompt token is always computed
        known_len = min(matched, usable)
        reused = None
        for place in path:
            if place.slot != NO_SLOT and place.depth <= usable:
                reused = place
        depth = 0 if reused is None else reused.depth
        gains = known_len - depth >= self.min_branch_tokens
        branch = known_len if gains else depth
        return Meeting(known_len, branch, Trail(path), reused, tree.version, marks)

    def _open(self, place: Place, now: float, pace: int, *, is_end: bool) -> None:
        """A checkpoint could have been taken at `place` by now."""
        if is_end and not place.is_end:
            place.is_end = True
            place.turn += 1
        if place.slot == NO_SLOT:
            place.pace = pace
            place.slot = self.index.open(place.klass, now)
        else:
            self.index.reclass(place.slot, place.klass)

    def _changed(self, tenant: Hashable, tree: HistoryTree, held: int) -> None:
        """`tree` of `tenant`, which held `held` bytes before, is another one now."""
        self._versions += 1
        tree.version = self._versions
        self._shares.change(tenant, tree.held_bytes - held)

    def _forget_oldest(self, newest: Hashable) -> None:
        """Drop leaves until everything fits: the oldest one of the tenant that holds most, again
        and again; but not all that the tenant `newest`, which just came, has.
        """
        while self.held_bytes > self.max_bytes:
            tenant = self._shares.largest()
            if tenant == newest and len(self._trees[tenant].leaves) == 1:
                if len(self._trees) == 1:
                    return
                tenant = self._shares.largest(besides=newest)
            tree = self._trees[tenant]
            held = tree.held_bytes
            tree.forget_oldest()
            self._changed(tenant, tree, held)
            if not tree.leaves:
                del self._trees[tenant]


def _says(place: Place, answer: Answer | None, says: int) -> None:
    """A request that ended with `answer` opened `place` or resumed from it."""
    few = place.branches <= MOST_CHILDREN
    place.last, place.answer = (answer, says) if few else (None, 0)
