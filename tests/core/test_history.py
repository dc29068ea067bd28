"""The history tree, against plain lists of everything ever seen."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.records.nodes import Clock
from sglang_hybrid.core.returns.history import History, HistoryMatch, TimeUnit
from sglang_hybrid.core.returns.history_tree import NO_INTERVAL, TOKEN_BYTES, HistoryNode
from tests.examples import examples


def common(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


class PlainHistory:
    """Every sequence, and every prefix at which a checkpoint could have been taken."""

    def __init__(self, min_branch: int) -> None:
        self.min_branch = min_branch
        self.sequences: list[list[int]] = []
        self.possible: set[tuple[int, ...]] = set()

    def match(self, prompt: list[int]) -> tuple[int, int, int]:
        """known_len, branch, and depth of the checkpoint that would be resumed."""
        usable = len(prompt) - 1
        known = min(usable, max((common(s, prompt) for s in self.sequences), default=0))
        depths = [len(p) for p in self.possible if p == tuple(prompt[: len(p)])]
        reused = max((depth for depth in depths if depth <= usable), default=0)
        return known, (known if known - reused >= self.min_branch else reused), reused

    def observe(self, prompt: list[int], answer: list[int], starts: list[int]) -> None:
        _, branch, _ = self.match(prompt)
        sequence = prompt + answer
        ends = {branch, len(sequence), *(s for s in starts if 0 < s < len(sequence))} - {0}
        self.possible |= {tuple(sequence[:end]) for end in ends}
        self.sequences.append(sequence)


def observed(*prompts: list[int]) -> History:
    history, clock = History(), Clock()
    for prompt in prompts:
        clock.advance(None)
        history.observe(prompt, len(prompt), clock)
    return history


@pytest.mark.parametrize(
    ("earlier", "prompt", "expected"),
    [
        pytest.param("sys.note:chat", "sys.turn.note:more", 9, id="a note moves down"),
        pytest.param("sys.note:chat", "sys.turn.note 2", 9, id="its content may change"),
        pytest.param("t1 t2 end.question", "t1 t2 t3 end.another", 9, id="a list grows at its end"),
        pytest.param("sys.note:chat", "sys.then note, note:c.", 15, id="where most of it agrees"),
        pytest.param("sys.note:chat", "sys.turn.note:a note:.", 16, id="the last of several"),
        pytest.param("sys.note:chat", "sys.turn.not", 0, id="three tokens may agree by chance"),
        pytest.param("sys.note:chat", "sys.another one", 0, id="what stood there is gone"),
        pytest.param("sys.one", "sys.one two", 0, id="the prompt only goes on"),
        pytest.param("sys.note:chat", "sys.note:chat", 0, id="the same prompt again"),
        pytest.param("first one", "another note", 0, id="nothing is shared"),
    ],
)
def test_the_next_prompt_is_expected_to_leave_where_a_part_that_moves_begins(
    earlier: str, prompt: str, expected: int
) -> None:
    history = observed([*earlier.encode()])
    assert history.match([*prompt.encode()]).next_branch([]) == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        pytest.param("ask:answ. more", 3, id="the last tokens are lost"),
        pytest.param("ask:answer. more", 0, id="the answer is whole"),
        pytest.param("ask:other answer", 0, id="there is another answer"),
        pytest.param("ask again", 0, id="the prompt is another one"),
    ],
)
def test_how_much_of_an_answer_is_lost(prompt: str, expected: int) -> None:
    history, clock = History(), Clock()
    clock.advance(None)
    history.observe([*b"ask:answer."], len("ask:"), clock)
    assert history.match([*prompt.encode()]).answer_lost == expected


def test_of_several_sequences_the_newest_tells_what_moves() -> None:
    history = observed(*([*text.encode()] for text in ("sys.older part", "sys.newer part")))
    assert history.match([*b"sys.turn.newer part"]).next_branch([]) == len("sys.turn.")
    assert history.match([*b"sys.turn.older part"]).next_branch([]) == 0


LONG, CUT = 40, 4


def masked(turn: int, shown: int = 2) -> tuple[list[int], list[int]]:
    """The prompt of a client that shows only the last results of its tools whole, and the starts of
    its messages: `turn` results, each behind a message of three tokens.
    """
    prompt, starts = [*range(1, 11)], [0]
    for number in range(turn):
        starts.append(len(prompt))
        prompt += [20_000 + number, 1, 2]
        starts.append(len(prompt))
        kept = LONG if number >= turn - shown else CUT
        prompt += [7, *(1_000 * (number + 1) + place * (kept == LONG) for place in range(kept))]
    return prompt, starts


def test_old_messages_that_change_one_after_the_other_are_expected_to_go_on() -> None:
    """A client leaves out a result of a tool with each turn, as far from the end as the one before:
    from the second time on it is known where the next prompt leaves.
    """
    history, clock = History(), Clock()
    for turn in range(1, 9):
        prompt, starts = masked(turn)
        following, _ = masked(turn + 1)
        differ = (at for at in range(len(prompt)) if prompt[at] != following[at])
        leaves = next(differ, len(prompt))
        match = history.match(prompt)
        message = max(start for start in starts if start <= leaves)
        assert match.next_branch(starts) == (message if turn >= 4 else 0), turn
        clock.advance(None)
        path = history.observe([*prompt, 5], len(prompt), clock, message_starts=starts)
        assert turn < 4 or path.at(message) is not None
    other, starts = masked(9, shown=5)  # as far from the end no more
    assert history.match(other).next_branch(starts) == 0
    assert history.match(masked(9)[0]).next_branch([]) == 0, "its messages are not known"


def all_nodes(history: History, tenant: str | None = None) -> list[HistoryNode]:
    found, stack = [], list(history.tree(tenant).root.children.values())
    while stack:
        node = stack.pop()
        found.append(node)
        stack.extend(node.children.values())
    return found


@examples(20)
@given(seed=st.integers(0, 10**9))
def test_a_look_up_that_goes_on_is_one_from_the_start(seed: int) -> None:
    """Prompts wait while others end; one history is told what their last look-ups found."""
    rng, clock = random.Random(seed), Clock()
    histories = [History(min_branch_tokens=3, max_bytes=12_000) for _ in "ab"]
    waiting: list[tuple[array[int], HistoryMatch | None]] = []
    for _ in range(40):
        clock.advance(None)
        prompt = array("q", [rng.randrange(2) for _ in range(rng.randrange(1, 30))])
        waiting.append((prompt, None))
        for index in rng.sample(range(len(waiting)), min(3, len(waiting))):
            prompt, last = waiting[index]
            match = histories[0].match(prompt, None, last)
            anew = histories[1].match(prompt)
            assert comparable(match) == comparable(anew)
            waiting[index] = prompt, match
        prompt, last = waiting.pop(rng.randrange(len(waiting)))
        cut = prompt[: rng.choice([len(prompt), rng.randrange(len(prompt) + 1)])]
        sequence = cut + array("q", [1] * rng.randrange(4) * (len(cut) == len(prompt)))
        if len(sequence):
            histories[0].observe(sequence, len(prompt), clock, (), last)
            histories[1].observe(sequence, len(prompt), clock)


def comparable(match: HistoryMatch) -> Any:
    reused = None if match.reused is None else (match.reused.depth, match.reused.interval_id)
    path = [(node.depth, node.turn, node.reuse_class) for node in match.path.nodes]
    return match.known_len, match.branch, reused, path, match.version, match.fingerprints


@examples(50)
@given(seed=st.integers(0, 10**9), min_branch=st.sampled_from([1, 3]))
def test_history_remembers_what_plain_lists_remember(seed: int, min_branch: int) -> None:
    rng = random.Random(seed)
    history, plain, clock = History(min_branch_tokens=min_branch), PlainHistory(min_branch), Clock()
    for _ in range(25):
        base = rng.choice(plain.sequences)[: rng.randrange(1, 20)] if plain.sequences else []
        prompt = base + [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
        answer = [rng.randrange(3) for _ in range(rng.randrange(4))]
        starts = [rng.randrange(0, len(prompt) + 3)] if rng.random() < 0.3 else []
        known, branch, _ = plain.match(prompt)
        history_match = history.match(array("q", prompt))
        assert (history_match.known_len, history_match.branch) == (known, branch)
        clock.advance()
        history_path = history.observe(array("q", prompt + answer), len(prompt), clock, starts)
        plain.observe(prompt, answer, starts)
        assert history_path.nodes[-1].depth == len(prompt + answer)
        assert {p.depth for p in history_path.nodes if p.interval_id != NO_INTERVAL} == {
            len(p) for p in plain.possible if p == tuple((prompt + answer)[: len(p)])
        }
    assert sum(p.interval_id != NO_INTERVAL for p in all_nodes(history)) == len(plain.possible)
    for node in all_nodes(history):
        assert node.branches >= len(node.children)
        assert node.parent is not None
        assert node.depth == node.parent.depth + len(node.edge) // TOKEN_BYTES


@examples(40)
@given(seed=st.integers(0, 10**9))
def test_a_meeting_saves_the_way_and_changes_nothing(seed: int) -> None:
    """Requests overlap, so some end after the history has moved on; some were cut short."""
    rng = random.Random(seed)
    histories = [History(max_bytes=8_000, min_branch_tokens=2) for _ in range(2)]
    clock = Clock()
    running: list[tuple[list[int], int, HistoryMatch]] = []
    seen: list[list[int]] = []
    for _ in range(40):
        base = rng.choice(seen)[: rng.randrange(1, 20)] if seen else []
        prompt = base + [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
        tokens = prompt + [rng.randrange(3) for _ in range(rng.randrange(-1, 4))]
        if len(tokens) == len(prompt) and rng.random() < 0.2:
            tokens = tokens[: rng.randrange(1, len(tokens) + 1)]
        running.append((tokens, len(prompt), histories[0].match(array("q", prompt))))
        if rng.random() < 0.3:
            continue
        clock.advance()
        tokens, input_len, history_match = running.pop(rng.randrange(len(running)))
        seen.append(tokens)
        history_paths = [
            histories[0].observe(array("q", tokens), input_len, clock, [3], history_match),
            histories[1].observe(array("q", tokens), input_len, clock, [3]),
        ]
        shapes = [
            [(p.depth, p.interval_id, p.reuse_class) for p in history_path.nodes]
            for history_path in history_paths
        ]
        assert shapes[0] == shapes[1]
    one, other = (history.index for history in histories)
    for name in ("_number", "_since"):
        assert np.array_equal(getattr(one, name), getattr(other, name))
    for name in ("_counts", "_number"):
        assert np.array_equal(getattr(one._long, name), getattr(other._long, name))


def watched(history: History) -> Counter[str]:
    """Counts what the index is told of intervals from now on."""
    happened: Counter[str] = Counter()

    def counted(name: str, tell: Callable[..., Any]) -> Callable[..., Any]:
        def told(*arguments: Any) -> Any:
            happened[name] += 1
            return tell(*arguments)

        return told

    for name in ("on_return", "close"):
        setattr(history.index, name, counted(name, getattr(history.index, name)))
    return happened


def test_a_session_and_a_template() -> None:
    history, clock = History(TimeUnit.REQUESTS), Clock()
    happened = watched(history)
    rng = np.random.default_rng(0)
    template = rng.integers(0, 1000, 100)

    def ask(*parts: object) -> tuple[np.ndarray, int]:
        prompt = np.concatenate([np.asarray(p) for p in parts])
        clock.advance()
        tokens = np.concatenate([prompt, rng.integers(0, 1000, 20)])
        history.observe(tokens, len(prompt), clock)
        return tokens, len(prompt)

    def question() -> np.ndarray:
        return rng.integers(1000, 2000, 30)

    first, _ = ask(template, question())
    assert history.match(np.concatenate([template, question()])).branch == 100
    ask(template, question())  # finds the branch
    ask(template, question())  # resumes from it
    assert happened["on_return"] == 1
    turn2, _ = ask(first, question())
    assert happened["on_return"] == 2
    history_path = history.observe(turn2, len(turn2) - 20, clock)
    fork = history_path.at(100)
    assert fork is not None
    assert (fork.depth, fork.branches, fork.turn) == (100, 3, 0)
    tail = history_path.at(len(first))
    assert tail is not None
    assert (tail.depth, tail.turn, tail.is_end) == (150, 1, True)
    assert (
        history_path.at(120) is tail
    )  # a checkpoint between two places is passed by who resumes below
    assert history_path.at(10_000) is None


def test_a_place_has_the_pace_of_its_session() -> None:
    history, clock = History(), Clock()
    said = np.arange(100)
    interval_buckets = []
    for now in (0.0, 1.0, 31.0, 61.0):
        clock.advance(now)
        history_path = history.observe(said, len(said) - 50, clock)
        interval_buckets.append([node.last_interval_bucket for node in history_path.nodes])
        said = np.arange(len(said) + 100)
    short, long = (history.index.interval_bucket(gap) for gap in (1.0, 30.0))
    assert 0 < short < long
    assert interval_buckets == [[0], [short, short], [short, long, long], [short, long, long, long]]


@pytest.mark.parametrize(("answer_bytes", "each", "left"), [(64 << 20, 500, 16), (0, 0, 28)])
def test_the_oldest_are_forgotten_and_counted_as_cut_short(
    answer_bytes: int, each: int, left: int
) -> None:
    """Answers take memory, too."""
    history, clock = History(max_bytes=20_000, answer_bytes=answer_bytes), Clock()
    happened = watched(history)
    for i in range(200):
        clock.advance(float(i))
        history.observe(np.arange(50) + 50 * i, 40, clock)
        assert history.held_bytes <= 20_000
    kept = all_nodes(history)
    assert history.held_bytes == sum(600 + len(p.edge) + each for p in kept)
    assert len(kept) == left
    assert happened["close"] == 200 - left
    assert history.match(np.arange(50)).known_len == 0
    assert history.match(np.arange(50) + 50 * 199).known_len == 49


def test_a_used_sequence_outlives_newer_ones() -> None:
    history, clock = History(max_bytes=20_000), Clock()
    for i in range(200):
        for tokens in (np.arange(50) + 50 * i, np.arange(50)):
            clock.advance(float(i))
            history.observe(tokens, 40, clock)
    assert history.match(np.arange(50)).known_len == 49


def test_a_sequence_larger_than_the_bound_is_held_alone() -> None:
    history, clock = History(max_bytes=1000), Clock()
    for i in range(3):
        clock.advance()
        history.observe(np.arange(5000) + 5000 * i, 5000, clock)
    assert len(all_nodes(history)) == 1


def test_tenants_know_nothing_of_one_another() -> None:
    """A tenant finds and leaves what it would alone; the index counts both."""
    rng = random.Random(5)
    alone, shared, clock = History(), History(), Clock()
    of_one, of_both = watched(alone), watched(shared)
    for number in range(120):
        clock.advance(float(number))
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 60))]
        for tenant in ("a", "b"):
            if tenant == "b":
                found, known = (history.match(prompt, "b") for history in (alone, shared))
                assert (found.known_len, found.branch) == (known.known_len, known.branch)
                assert [node.depth for node in found.path.nodes] == [
                    node.depth for node in known.path.nodes
                ]
                alone.observe([*prompt, 1], len(prompt), clock, tenant="b")
            shared.observe([*prompt, 1], len(prompt), clock, tenant=tenant)
    mine, its = all_nodes(alone, "b"), all_nodes(shared, "b")
    assert sorted((p.depth, p.branches, p.turn) for p in mine) == sorted(
        (p.depth, p.branches, p.turn) for p in its
    )
    assert of_both["on_return"] == 2 * of_one["on_return"] > 0
    assert shared.held_bytes == sum(shared.tree(tenant).held_bytes for tenant in "ab")


def test_a_flood_of_one_tenant_leaves_the_others_what_they_have() -> None:
    history, clock = History(max_bytes=20_000), Clock()
    for i in range(5):
        history.observe(np.arange(50) + 50 * i, 40, clock, tenant="small")
    for i in range(500):
        clock.advance(float(i))
        history.observe(np.arange(50) + 50 * i, 40, clock, tenant="flood")
        assert history.held_bytes <= 20_000
    assert len(all_nodes(history, "small")) == 5
    assert history.match(np.arange(50) + 50 * 499, "flood").known_len == 49


def test_many_tenants_stay_within_the_bound() -> None:
    history, clock = History(max_bytes=20_000), Clock()
    for i in range(200):
        clock.advance(float(i))
        history.observe(np.arange(50), 40, clock, tenant=i)
        assert history.held_bytes <= 20_000
    assert len(history._trees) == len(history._shares) == 16
    assert history.match(np.arange(50), 199).known_len == 49
    assert history.match(np.arange(50), 0).known_len == 0


def test_a_match_of_a_tree_that_was_forgotten_since_is_not_taken_up() -> None:
    history, clock = History(max_bytes=1_500), Clock()
    first = np.arange(50)
    history.observe(first, 40, clock, tenant="a")
    history_match = history.match(first, "a")
    assert history_match.known_len == 49
    history.observe(np.arange(400), 40, clock, tenant="b")
    assert not all_nodes(history, "a")
    history_path = history.observe(first, 50, clock, history_match=history_match, tenant="a")
    assert history_path.nodes == all_nodes(history, "a")


@pytest.mark.parametrize(
    "then, expected",
    [
        (100, False),  # goes on behind the answer
        (60, True),  # leaves before it
        (10, None),  # has too little of it
        (40, None),  # leaves where another one did
    ],
)
def test_where_a_prompt_leaves_what_is_known(
    monkeypatch: pytest.MonkeyPatch, then: int, expected: bool | None
) -> None:
    """After a sequence of 100 tokens, another one that has 40 of them where `then` is 40."""
    seen: list[bool] = []
    history, clock = History(TimeUnit.REQUESTS), Clock()

    def on_departure(*, before: bool) -> None:
        seen.append(before)

    known = np.arange(100)
    history.observe(known, 90, clock)
    if then == 40:
        history.observe(np.concatenate([known[:40], 500 + np.arange(60)]), 90, clock)
    monkeypatch.setattr(history.index, "on_departure", on_departure)
    history.observe(np.concatenate([known[:then], 1_000 + np.arange(60)]), then + 50, clock)
    assert seen == ([] if expected is None else [expected])


def test_a_page_is_within_reach() -> None:
    """A checkpoint rounded down to its page still stands for the place below it."""
    assert History().max_offset == 16
    assert History(page_size=64).max_offset == 64


def test_what_led_only_to_the_oldest_leaf_is_forgotten_next() -> None:
    """Before a sequence that was here later."""
    history, clock = History(), Clock()
    for start in (0, 100):
        clock.advance()
        history.observe(np.arange(start, start + 20), 15, clock, [10])
    tree = history.tree()
    (old, late) = tree.root.children.values()
    for left in ([old, late], [late]):
        tree.forget_oldest()
        assert list(tree.root.children.values()) == left
    assert late.children
