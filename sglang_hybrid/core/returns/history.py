"""The history of returns: recent prompts and answers, whatever the cache holds.

A cache sees reuse only of what it kept. The history remembers every position where a checkpoint
could have been taken, so that the reuse index learns from intervals that no eviction cut short, and
admission knows a shared prefix whose KV is long gone.

Each tenant has a tree of its own: no look-up of one can find what another one sent. The index,
which holds statistics of classes of positions, is common to all.

Memory: two bytes per token (a fingerprint, not the token), about 600 bytes per history node and 500
per answer, over all tenants. When `max_bytes` (the server's SGLANG_HYBRID_HISTORY_MB) is reached,
the payer that holds most (`core/records/shares.py`) forgets its oldest leaves.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.costs.cost import MIN_BRANCH_TOKENS
from sglang_hybrid.core.records.nodes import Clock, Node
from sglang_hybrid.core.records.shares import Shares, payer_of
from sglang_hybrid.core.returns.answer_models import AnswerModels
from sglang_hybrid.core.returns.answers import Answer, AnswerModel, LearntAnswers
from sglang_hybrid.core.returns.hints import Hint
from sglang_hybrid.core.returns.history_tree import (
    NO_INTERVAL,
    TOKEN_BYTES,
    HistoryNode,
    HistoryPath,
    HistoryTree,
    fingerprint_tokens,
    longest_start,
    part,
)
from sglang_hybrid.core.returns.reuse import LearntClasses, ReuseIndex

MOST_CHILDREN = 2
"""Children up to which returns to a history node say something about the answer that ended there.
"""


MOST_MOVED_TOKENS = 64
"""Tokens of what an earlier prompt had behind the known part that are looked for in a prompt."""

LEAST_MOVED_TOKENS = 4
"""Tokens that must be found in a row, so that words that two texts share by chance do not count."""

MOST_NODES_BEHIND = 128
"""History nodes that are looked at behind the place where a prompt leaves an earlier one."""


class TimeUnit(Enum):
    """The unit of ages. Seconds tell sessions apart by their think times; requests suit traffic
    without stamps.
    """

    SECONDS = "seconds"
    REQUESTS = "requests"

    def now(self, clock: Clock) -> float:
        return clock.stamp if self is TimeUnit.SECONDS else float(clock.tick)

    def last_used(self, node: Node) -> float:
        return node.stamp if self is TimeUnit.SECONDS else float(node.last_used)


@dataclass(frozen=True)
class HistoryMatch:
    """The common part of a prompt and its tenant's history.

    known_len: prompt tokens that were seen before. branch: position (tokens from the start) where a
    checkpoint would serve the next prompt of this kind; 0 if there is none. It is the end of the
    known part, or a history node just above it. path: the history nodes on the prompt's path.
    reused: the deepest of them that could have been a checkpoint and that the prompt continues.
    earlier: the end, in the history, of the newest sequence that has the known part and goes on
    otherwise; None if there is none, or its end is more than MOST_NODES_BEHIND nodes further.
    moved_part: position in this prompt where the tokens begin that such a sequence has right behind
    the known part, if they come again here; 0 if they do not.
    answer_lost: how many tokens before the end of the last answer the prompt leaves it, as where a
    client shortens answers; 0 if it has all of the answer, or nothing.

    version, fingerprints: the version of the tree that was searched, and the prompt's fingerprints.
    With them `match` and `observe` need not search again.
    """

    known_len: int
    branch: int
    path: HistoryPath
    reused: HistoryNode | None
    earlier: HistoryNode | None
    moved_part: int
    answer_lost: int
    version: int
    fingerprints: bytes

    @property
    def only_continues(self) -> bool:
        """True if the prompt continues a sequence that no other prompt has continued, as the next
        turn of a session does. Then nothing says yet that `branch` serves other prompts.
        """
        end = self.reused
        return end is not None and end.depth == self.branch and not end.children

    def next_branch(self, message_starts: Sequence[int]) -> int:
        """The position where the next prompt is expected to leave this one; 0 if that is not known.

        Some clients change one old message with each turn, as those do that show only the last
        results of tools. If this prompt left the earlier one n messages before its end, and that
        one left the one before it n messages before its end, the next prompt is expected to leave
        this one at the start of the n-th message from the end. Other clients insert text in front
        of a part that stays (a note some messages above the end, what follows a list of tools); the
        next prompt is expected to leave where that part begins (`moved_part`).

        message_starts: positions in this prompt at which messages begin, ascending.
        """
        behind = self.messages_behind(message_starts)
        before = 0 if self.earlier is None else self.earlier.messages_behind
        repeats = 0 < behind == before and behind <= len(message_starts)
        return message_starts[-behind] if repeats else self.moved_part

    def messages_behind(self, message_starts: Sequence[int]) -> int:
        """The messages of the earlier prompt that this one does not repeat: the one inside which
        they part, and those behind it. 0 if there is no earlier prompt, or the number of its
        messages is not known. message_starts: as for `next_branch`.
        """
        if self.earlier is None or not self.earlier.messages:
            return 0
        shared = bisect_right(message_starts, self.known_len)
        return max(0, self.earlier.messages - max(0, shared - 1))

    def is_of(self, tokens: int) -> bool:
        """True if this is the match of a prompt of `tokens` tokens."""
        return len(self.fingerprints) == tokens * TOKEN_BYTES


@dataclass(frozen=True)
class LearntHistory:
    """The parameters of a history, as plain arrays: for a file that outlives the server. Positions,
    prompts and answers are not in it.

    classes: common to all tenants. answers: by a name of the tenant, the one that was here last
    at the end.
    """

    classes: LearntClasses
    answers: dict[str, LearntAnswers] = field(default_factory=dict)


@dataclass(frozen=True)
class SavedHistory:
    """The parameters that an earlier server has saved, as all ranks get them. content: of the file,
    as extensions/disk/learnt_file.py packs it. key: of tenants' names in it.
    """

    content: bytes
    key: bytes


class History:
    """All recent sequences. The reuse index learns from them.

    time_unit: what ages are counted in. max_offset: a checkpoint less than this many tokens above a
    history node serves the returns to that node. page_size: positions of checkpoints are rounded
    down to multiples of it. answer_bytes: memory for what is learnt from answers and hints, of all
    tenants; with 0 nothing is. answers_count: False: what was learnt from them is not used for new
    answers.
    """

    def __init__(
        self,
        time_unit: TimeUnit = TimeUnit.SECONDS,
        max_bytes: int = 64 << 20,
        min_branch_tokens: int = MIN_BRANCH_TOKENS,
        page_size: int = 1,
        answer_bytes: int = 64 << 20,
    ) -> None:
        self.time_unit = time_unit
        self.index = ReuseIndex(unit=0.125 if time_unit is TimeUnit.SECONDS else 1.0)
        self.max_bytes = max_bytes
        self.min_branch_tokens = min_branch_tokens
        self.max_offset = max(min_branch_tokens, page_size)
        self._versions = 0
        self._trees: dict[Hashable, HistoryTree] = {}
        self._tenants: dict[Hashable, OrderedDict[Hashable, None]] = {}  # by payer, oldest first
        self._shares = Shares()
        self._answers = AnswerModels(answer_bytes)
        self.answers_count = True
        self._empty = HistoryTree(self.index)  # of a tenant that sent nothing yet

    @property
    def held_bytes(self) -> int:
        """Bytes of all tenants' trees."""
        return self._shares.total

    @property
    def answers(self) -> AnswerModels:
        """The models of each tenant's answers, to be read only."""
        return self._answers

    def tree(self, tenant: Hashable = None) -> HistoryTree:
        """The sequences of `tenant`, to be read only."""
        return self._trees.get(tenant, self._empty)

    def match(
        self,
        prompt: Sequence[int] | npt.NDArray[np.integer[Any]],
        tenant: Hashable = None,
        last: HistoryMatch | None = None,
    ) -> HistoryMatch:
        """Look `prompt` [n] of `tenant` up in the history, before its prefill. Changes nothing.

        last: what an earlier look-up of the same prompt found; it holds still if the tenant's
        history did not change since.
        """
        tree = self.tree(tenant)
        if last is not None and last.is_of(len(prompt)):
            if last.version == tree.version:
                return last
            fingerprints = last.fingerprints
        else:
            fingerprints = fingerprint_tokens(prompt)
        path, matched = tree.walk(fingerprints, [])
        return self._as_match(tree, path, matched, fingerprints, len(fingerprints) // TOKEN_BYTES)

    def observe(
        self,
        tokens: npt.ArrayLike,
        input_len: int,
        clock: Clock,
        boundaries: Iterable[int] = (),
        history_match: HistoryMatch | None = None,
        tenant: Hashable = None,
        hint: Hint | None = None,
        message_starts: Sequence[int] = (),
    ) -> HistoryPath:
        """Take in a request of `tenant` when it ends: `tokens` [n] is its prompt of `input_len`
        tokens and its answer, or less if it was cut short.

        Call it once per request, for aborted ones too, in the same order on every rank. The time is
        that of `clock`. boundaries: positions at which another prompt may leave it, beside its end:
        where the reply begins, and a state in the answer; 0 is none. message_starts: of the prompt,
        ascending; another one may leave it at the last of them, and at its `next_branch`.
        history_match: the result of `match` for this prompt; its tokens are not read again, nor
        searched if the tenant's history did not change since. hint: what the client says of the
        session. Cost: a few vector passes over n tokens, and Python work per history node on the
        path.
        """
        now = self.time_unit.now(clock)
        ids = np.asarray(tokens)
        tree = self._trees.get(tenant)
        if tree is None:
            tree = self._trees[tenant] = HistoryTree(self.index)
        found, fingerprints, path, matched = self._find(tree, ids, input_len, history_match)
        answer = self._learn_from_answer(tenant, found.reused, ids[input_len:], now, hint)
        interval_bucket = self._on_return(found.reused, answer, now)
        more = (*message_starts[-1:], found.next_branch(message_starts))
        ends = {start for start in (*boundaries, *more) if 0 < start < len(ids)}
        ends |= {found.branch, len(ids)} - {0}
        self._on_departure(tree, fingerprints, path, found.known_len)
        held = tree.held_bytes
        nodes = tree.insert(fingerprints, path, matched, ends)
        for node in nodes:
            if node.depth in ends:
                _set_answer(node, answer)
                self._open(node, now, interval_bucket, is_end=node.depth == len(ids))
        if nodes and nodes[-1].depth == len(ids):
            end = nodes[-1]
            end.answer_start = min(input_len, len(ids))
            end.messages = len(message_starts)
            end.messages_behind = found.messages_behind(message_starts)
        if nodes and answer is not None and not nodes[-1].answer_bytes:
            tree.hold_answer(nodes[-1])
        self._changed(tenant, tree, held)
        if tree.leaves:
            tenants = self._tenants.setdefault(payer_of(tenant), OrderedDict())
            tenants[tenant] = None
            tenants.move_to_end(tenant)
        else:
            del self._trees[tenant]
        self._forget_oldest(tenant)
        self.index.on_request(now)
        return HistoryPath(nodes)

    def _find(
        self,
        tree: HistoryTree,
        ids: npt.NDArray[Any],
        input_len: int,
        match: HistoryMatch | None,
    ) -> tuple[HistoryMatch, bytes, list[HistoryNode], int]:
        """The match of a prompt, and of it and its answer, `ids` [n]: the fingerprints, the history
        nodes on their path, and how many tokens are in `tree`. match: as `observe` was given it.
        """
        known: list[HistoryNode] = []
        if match is None or len(ids) < input_len or not match.is_of(input_len):
            match, fingerprints = None, fingerprint_tokens(ids)
        else:
            fingerprints = match.fingerprints + fingerprint_tokens(ids[input_len:])
            if match.version == tree.version:
                known = match.path.nodes
            else:
                match = None
        path, matched = tree.walk(fingerprints, known)
        found = match or self._as_match(tree, path, matched, fingerprints, input_len)
        return found, fingerprints, path, matched

    def _on_departure(
        self, tree: HistoryTree, fingerprints: bytes, path: list[HistoryNode], known_len: int
    ) -> None:
        """A prompt leaves `tree` behind `known_len` tokens: at the last node of `path` that it
        passes, or on the way to the next one. It counts if nothing has continued that node.
        """
        passed = [node for node in path if node.depth <= known_len]
        last = passed[-1] if passed else tree.root
        before = known_len - last.depth >= self.min_branch_tokens
        if before:
            last = last.children[part(fingerprints, last.depth, last.depth + 1)]
        if not last.branches and last is not tree.root:
            self.index.on_departure(before=before)

    def _learn_from_answer(
        self,
        tenant: Hashable,
        reused: HistoryNode | None,
        answer_ids: npt.NDArray[Any],
        now: float,
        hint: Hint | None,
    ) -> Answer | None:
        """A request of `tenant` that continued `reused` ended with the answer `answer_ids` [n]: the
        answer before it had a return, and this one waits for one. None if nothing is learnt.
        """
        model = self._answers.of(tenant)
        if model is None:
            return None
        answer = self._update_model(model, reused, answer_ids, now, hint)
        self._answers.on_change(tenant)
        return answer

    def _update_model(
        self,
        model: AnswerModel,
        reused: HistoryNode | None,
        answer_ids: npt.NDArray[Any],
        now: float,
        hint: Hint | None,
    ) -> Answer | None:
        """`_learn_from_answer` with the tenant's model."""
        if reused is not None and reused.last is not None:
            model.on_return(reused.last, now)
        model.give_up(now)
        if not len(answer_ids) and hint is None:
            return None
        answer = model.on_answer_end(answer_ids, now, self._in_time_unit(hint))
        if not self.answers_count:
            answer.expect_nothing()
        return answer

    def _on_return(self, reused: HistoryNode | None, answer: Answer | None, now: float) -> int:
        """A request that ended with `answer` continued `reused`: the index learns how long that
        took. Returns the bucket of that interval; 0 if nothing was continued.
        """
        if reused is None:
            return 0
        interval = self.index.on_return(reused.interval_id, now)
        reused.last_interval_bucket = self.index.interval_bucket(interval)
        if answer is not None and self.time_unit is TimeUnit.SECONDS:
            answer.pace = interval
        _set_answer(reused, answer)
        self.index.reclass(reused.interval_id, reused.reuse_class)
        return reused.last_interval_bucket

    def hint(self, tokens: npt.ArrayLike, hint: Hint, tenant: Hashable = None) -> None:
        """Use a hint that came after its request: what the client says of the session whose latest
        observed sequence is `tokens` [n]. Nothing happens if that sequence was forgotten, or if a
        later request resumed from it.
        """
        path, _ = self.tree(tenant).walk(fingerprint_tokens(tokens), [])
        answer = path[-1].last if path else None
        if answer is None or answer.returned is not None or not self.answers_count:
            return
        model = self._answers.of(tenant)
        if model is None:
            return
        said = answer.hint = self._in_time_unit(hint)
        answer.expected, answer.wait = model.expect(answer.features, said), model.wait(said)
        for node in path:
            if node.last is answer and node.interval_id != NO_INTERVAL:
                self.index.reclass(node.interval_id, node.reuse_class)

    def export(self, name_of: Callable[[Any], str]) -> LearntHistory:
        """The parameters that a restarted server can begin with. name_of: the name of a tenant
        there. Changes nothing.
        """
        return LearntHistory(self.index.export(), dict(self._answers.export(name_of)))

    def restore(self, learnt: LearntHistory, name_of: Callable[[Any], str]) -> bool:
        """Begin with what an earlier server has learnt; False if requests were seen before."""
        if self.index.has_observed:
            return False
        self.index.restore(learnt.classes)
        self._answers.restore(learnt.answers, name_of)
        return True

    def _in_time_unit(self, hint: Hint | None) -> Hint | None:
        """`hint`, whose seconds say nothing where time is counted in requests."""
        if hint is None or self.time_unit is TimeUnit.SECONDS:
            return hint
        return hint.without_time()

    def _as_match(
        self,
        tree: HistoryTree,
        path: list[HistoryNode],
        matched: int,
        fingerprints: bytes,
        input_len: int,
    ) -> HistoryMatch:
        """The match of a prompt whose nodes in `tree` are `path`, `matched` tokens in all."""
        usable = input_len - 1  # the last prompt token is always computed
        known_len = min(matched, usable)
        reused = None
        for node in path:
            if node.interval_id != NO_INTERVAL and node.depth <= usable:
                reused = node
        depth = 0 if reused is None else reused.depth
        gains = known_len - depth >= self.min_branch_tokens
        branch = known_len if gains else depth
        moved_part = answer_lost = 0
        earlier = None
        if matched < usable:
            moved, first, earlier = _newest_continuation(tree, fingerprints, path, matched)
            if first is not None and first.answer_start < matched:
                answer_lost = first.depth - matched
            prompt = fingerprints[: TOKEN_BYTES * usable]
            at, length = longest_start(prompt, matched + 1, moved)
            moved_part = at if length >= LEAST_MOVED_TOKENS else 0
        return HistoryMatch(
            known_len,
            branch,
            HistoryPath(path),
            reused,
            earlier,
            moved_part,
            answer_lost,
            tree.version,
            fingerprints,
        )

    def _open(self, node: HistoryNode, now: float, interval_bucket: int, *, is_end: bool) -> None:
        """Begin an interval of `node` if it has none: a checkpoint can exist there from now on."""
        if is_end and not node.is_end:
            node.is_end = True
            node.turn += 1
        if node.interval_id == NO_INTERVAL:
            node.last_interval_bucket = interval_bucket
            node.interval_id = self.index.open(node.reuse_class, now)
        else:
            self.index.reclass(node.interval_id, node.reuse_class)

    def _changed(self, tenant: Hashable, tree: HistoryTree, held: int) -> None:
        """Account for a change of `tree` of `tenant`, which held `held` bytes before it."""
        self._versions += 1
        tree.version = self._versions
        self._shares.change(payer_of(tenant), tree.held_bytes - held)

    def _forget_oldest(self, newest: Hashable) -> None:
        """Drop leaves until everything fits: of the payer that holds most, the oldest one of the
        tenant that came longest ago, again and again; but not all that the tenant `newest`, which
        just came, has.
        """
        while self.held_bytes > self.max_bytes:
            payer = self._shares.largest()
            tenant = next(iter(self._tenants[payer]))
            if tenant == newest and len(self._trees[tenant].leaves) == 1:
                if len(self._trees) == 1:
                    return
                payer = self._shares.largest(besides=payer)
                tenant = next(iter(self._tenants[payer]))
            tree = self._trees[tenant]
            held = tree.held_bytes
            tree.forget_oldest()
            self._changed(tenant, tree, held)
            if not tree.leaves:
                del self._trees[tenant], self._tenants[payer][tenant]
                if not self._tenants[payer]:
                    del self._tenants[payer]


def _newest_continuation(
    tree: HistoryTree, fingerprints: bytes, path: list[HistoryNode], matched: int
) -> tuple[bytes, HistoryNode | None, HistoryNode | None]:
    """The continuation of the newest sequence that has the first `matched` tokens of a prompt: the
    fingerprints of a few tokens, the first end of a sequence there, and its own end, if that is not
    many nodes further.
    """
    moved, first_end, end = b"", None, None
    wanted = TOKEN_BYTES * MOST_MOVED_TOKENS
    for number, node in enumerate(tree.behind(fingerprints, path, matched)):
        if len(moved) < wanted:
            first = max(0, len(node.edge) - TOKEN_BYTES * (node.depth - matched))
            moved += node.edge[first : first + wanted - len(moved)]
        if node.is_end:
            first_end, end = first_end or node, node
        if number == MOST_NODES_BEHIND:
            return moved, first_end, None
    return moved, first_end, end


def _set_answer(node: HistoryNode, answer: Answer | None) -> None:
    """Remember at `node` the answer of the request that opened it or resumed from it last."""
    node.last = answer if node.branches <= MOST_CHILDREN else None
