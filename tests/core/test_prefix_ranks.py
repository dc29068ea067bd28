"""The rank that a prompt is sent to: where its prefix is, unless too much waits there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.queue.prefix_ranks import AGAIN, BLOCK, HORIZON, REQUEST_TOKENS, PrefixRanks

RANKS = (0, 1, 2, 3)


def tokens(count: int, kind: int = 0) -> list[int]:
    return [1_000 * kind + at % 97 for at in range(count)]


class Controller:
    """Sends prompts one after another, each to idle ranks."""

    def __init__(self, ranks: int = len(RANKS), most_blocks: int = 1 << 16) -> None:
        self.ranks = PrefixRanks(ranks, most_blocks)
        self.now = 0.0

    def send(self, prompt: list[int], tenant: str = "a", allowed: tuple[int, ...] = RANKS) -> int:
        self.now += 2 * HORIZON
        return self.ranks.send(tenant, prompt, self.now, allowed)


def test_a_prompt_goes_where_its_longest_prefix_is() -> None:
    it = Controller()
    homes = {kind: it.send(tokens(10 * BLOCK, kind)) for kind in range(20)}
    assert set(homes.values()) == set(RANKS)
    for kind, home in homes.items():
        prompt = tokens(10 * BLOCK, kind)
        assert it.send(prompt) == home
        assert it.send([*prompt, *tokens(5 * BLOCK, 50 + kind)]) == home
        assert it.send([*prompt[: 3 * BLOCK], *tokens(5 * BLOCK, 80 + kind)]) == home


def test_a_longer_prefix_counts_more() -> None:
    it = Controller(2)
    stem = tokens(4 * BLOCK)
    it.send(stem, allowed=(0,))
    it.send([*stem, *tokens(4 * BLOCK, 1)], allowed=(1,))
    assert it.send([*stem, *tokens(4 * BLOCK, 1), 5], allowed=(0, 1)) == 1


def test_another_tenants_prefix_steers_nobody() -> None:
    """The rank of `b`'s prompts is the same whatever `a` has sent."""
    alone, beside = Controller(), Controller()
    for kind in range(40):
        prompt = tokens(10 * BLOCK, kind)
        for number in range(kind % 4):
            beside.send([*prompt, *tokens(BLOCK, number)], "a")
        assert alone.send(prompt, "b") == beside.send(prompt, "b")


def test_a_prefix_gets_a_second_rank_when_that_is_worth_it() -> None:
    """Sent at once, to ranks that have not told of their load."""
    ranks = PrefixRanks(2)
    prompt = tokens(10 * BLOCK)
    home = ranks.send("a", prompt, 0.0, (0, 1))
    sent = [ranks.send("a", prompt, 2 * HORIZON, (0, 1)) for _ in range(40)]
    most = AGAIN * 10 * BLOCK // REQUEST_TOKENS
    assert sent[:most] == [home] * most
    assert 10 <= sent.count(1 - home) <= 20
    assert sent[-2:] in ([0, 1], [1, 0])


def test_siblings_wait_for_their_prefix_where_it_is_computed() -> None:
    """All sent within a moment, the first one too."""
    ranks = PrefixRanks(2)
    stem = tokens(20 * BLOCK)
    sent = {ranks.send("a", [*stem, kind], 1.0, (0, 1)) for kind in range(12)}
    assert len(sent) == 1
    assert ranks.send("a", tokens(20 * BLOCK, 3), 1.0, (0, 1)) not in sent


def test_a_rank_that_says_how_much_waits_there_gets_less() -> None:
    ranks = PrefixRanks(2)
    prompt = tokens(10 * BLOCK)
    home = ranks.send("a", prompt, 0.0, (0, 1))
    ranks.loads[home].on_load_report(1.0, 1, 5_000)
    assert ranks.send("a", prompt, 1.1, (0, 1)) == 1 - home
    ranks.loads[home].on_load_report(2.0, 0, 0)
    ranks.loads[home].on_load_report(1.5, 9, 9_000)  # older
    ranks.loads[1 - home].on_load_report(2.0, 1, 0)
    assert ranks.send("a", prompt, 2.1, (0, 1)) == home


def test_a_rank_that_is_gone_gets_nothing() -> None:
    it = Controller()
    prompt = tokens(10 * BLOCK)
    home = it.send(prompt)
    others = tuple(rank for rank in RANKS if rank != home)
    assert it.send(prompt, allowed=others) in others


def test_short_prompts_are_spread_by_their_tokens() -> None:
    it = Controller()
    sent = {kind: it.send(tokens(BLOCK - 1, kind)) for kind in range(40)}
    assert set(sent.values()) == set(RANKS)
    assert all(it.send(tokens(BLOCK - 1, kind)) == rank for kind, rank in sent.items())


def test_a_flood_forgets_its_own_prefixes_first() -> None:
    it = Controller(most_blocks=100)
    prompt = tokens(10 * BLOCK, 9)
    home = it.send(prompt, "b")
    for kind in range(100, 200):
        it.send(tokens(10 * BLOCK, kind), "a")
    assert len(it.ranks._holders) == 100
    assert it.send([*prompt, *tokens(3 * BLOCK, 1)], "b") == home


def test_a_session_stays_on_its_rank() -> None:
    it = PrefixRanks(4)
    ranks = [it.of_session(f"s{number}") for number in range(40)]
    assert set(ranks) == set(RANKS)
    assert ranks == [PrefixRanks(4).of_session(f"s{number}") for number in range(40)]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 300), st.integers(0, 3)), max_size=30))
def test_what_is_known_is_what_was_sent(requests: list[tuple[int, int, int]]) -> None:
    """The plain twin keeps every prompt that each rank got."""
    it = Controller()
    got: list[list[tuple[list[int], str]]] = [[] for _ in RANKS]
    for kind, length, tenant in requests:
        prompt = tokens(length, kind)
        key = str(tenant)
        blocks = length // BLOCK

        def known(rank: int, prompt: list[int] = prompt, key: str = key) -> int:
            same = [
                sum(
                    1
                    for _ in range(BLOCK, min(len(prompt), len(old)) + 1, BLOCK)
                    if prompt[:_] == old[:_]
                )
                for old, of in got[rank]
                if of == key
            ]
            return max(same, default=0)

        most = [known(rank) for rank in RANKS]
        rank = it.send(prompt, key)
        assert most[rank] == max(most) <= blocks
        got[rank].append((prompt, key))  # type: ignore[arg-type]
