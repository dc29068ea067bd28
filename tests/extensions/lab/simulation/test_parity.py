"""The simulator is the server's cache: every request of real traces hits the same tokens in
`ServerSimulator` and in `HybridRadixCache` on SGLang's pools.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import pytest

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.records.pin import PinRequest, Priority
from sglang_hybrid.core.server_settings import Serving, Split
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.lab.simulation.server_simulator import ServerSimulator
from sglang_hybrid.extensions.lab.simulation.traces.formats import read_trace
from sglang_hybrid.extensions.lab.simulation.traces.lines import Reading
from sglang_hybrid.extensions.lab.systems import Setting, build_system, parse_spec
from sglang_hybrid.storage.codecs.codecs import Codec

pytest.importorskip("sglang")
from sglang_hybrid.checkpoints.message_boundaries import MessageBoundaries
from sglang_hybrid.core.memory.account import MemoryKind
from tests.cache.backends import coding, options
from tests.cache.driver import KV_BYTES, Server, Sizes, build_cache
from tests.traces import REPLY_OPENER, TRACES, leave_out_thoughts

TENANTS = "of three tenants: "
PINS = "with pins: "
THOUGHTS = "without thoughts: "
CHANGED = "chats with a note above their end, and with answers that come back shortened"
MASKED = "agents that are shown the last results of their tools only"
OPENER = (30_001, 30_002)
"""The tokens that open a client's message."""
SERVING = Serving(chunk=2_048, grid=64)
POLICIES = {
    "sglang-lru": options("sglang-lru"),
    "lru": options("lru"),
    "marconi:0.3": options("marconi", hybrid_alpha=0.3),
    "marconi:1": options("marconi", hybrid_alpha=1.0),
    "reuse": options("reuse"),
}

# KV tokens and state slots: under pressure, some pressure, hardly any.
POOLS = {
    "bbh_fewshot": [Split(12_000, 10), Split(30_000, 40), Split(80_000, 120)],
    "sharegpt_55": [Split(14_000, 12), Split(40_000, 48), Split(80_000, 160)],
    "taubench_airline": [Split(40_000, 16), Split(120_000, 64), Split(400_000, 256)],
    "claude_code_64k": [Split(150_000, 24), Split(600_000, 96), Split(2_000_000, 400)],
    "mooncake_conversation_trace": [
        Split(200_000, 24),
        Split(800_000, 128),
        Split(3_000_000, 600),
    ],
}


OURS = [policy for policy in POLICIES if policy != "sglang-lru"]  # there SGLang chooses the victims


def some(quick: Iterable[str], of: Iterable[str] = POLICIES) -> list[Any]:
    """Policies, of which all but the `quick` ones are slow: they take the same way."""
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in of]


TRACES_OF_BOTH = ["sharegpt_55", pytest.param("taubench_airline", marks=pytest.mark.slow)]


@cache
def trace(name: str, limit: int | None = None) -> list[Request]:
    if name.startswith(TENANTS):
        requests = trace(name.removeprefix(TENANTS), limit)
        return [replace(r, tenant=("", "a", "b")[k * 7 % 3]) for k, r in enumerate(requests)]
    if name.startswith(PINS):
        requests = trace(name.removeprefix(PINS), limit)
        return [replace(r, pins=_pins(number, r)) for number, r in enumerate(requests)]
    if name.startswith(THOUGHTS):
        return leave_out_thoughts(trace(name.removeprefix(THOUGHTS), limit))
    if name == CHANGED:
        return _changed_chats()
    if name == MASKED:
        return _masked_chats()
    path = TRACES / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"../shared/traces/{path.name} is not here")
    if name.startswith("mooncake"):
        limit = limit or 2_000
    return read_trace(path, Reading(limit, max_input=32_768))


def _changed_chats() -> list[Request]:
    """Eight chats by turns; the note of every other one is four parts above its end."""
    rng, requests = np.random.default_rng(17), []

    def some(count: int) -> list[int]:
        return rng.integers(1, 30_000, count).tolist()

    chats = [([some(100)], some(30)) for _ in range(8)]
    for turn in range(7):
        for session, (parts, note) in enumerate(chats):
            parts.append(some(20))
            cut = len(parts) - 4 if session % 2 and turn else 0
            prompt = [*chain(*parts[:cut]), *note, *chain(*parts[cut:])]
            answer = some(150 + 10 * session)
            parts.append(answer[: -1 - session * turn])
            tokens = np.array(prompt + answer, np.int32)
            arrival = float(8 * turn + session + 1)
            requests.append(Request(session, turn, arrival, tokens, len(prompt)))
    return requests


def _masked_chats() -> list[Request]:
    """Four agents by turns; all results but the last three are left out, one more each turn."""
    rng, requests = np.random.default_rng(18), []
    sessions = [[rng.integers(1, 30_000, 60 + 40 * at).tolist() for at in range(9)] for _ in "abcd"]
    for turn in range(1, 9):
        for session, results in enumerate(sessions):
            prompt, starts = [1] * 90, []
            for number, result in enumerate(results[:turn]):
                starts.append(len(prompt))
                prompt += [*OPENER, *(result if number >= turn - 3 else [5, 6, 7])]
            tokens = np.array([*prompt, 9, 9, session], np.int32)
            arrival = float(4 * turn + session + 1)
            request = Request(session, turn, arrival, tokens, len(prompt), tuple(starts))
            requests.append(request)
    return requests


def _pins(number: int, request: Request) -> tuple[PinRequest, ...]:
    """One request in three pins two positions, for a few to many requests' time."""
    last = request.input_len - 1
    if number % 3 or last < 4:
        return ()
    priority = list(Priority)[number % 7 % 3]
    return PinRequest(last // 4, 5.0 + number % 50), PinRequest(last, 2.0, priority)


@dataclass(frozen=True)
class Played:
    """Results of a cache on a trace: hits, and KV tokens and states that it holds then."""

    hits: list[int]
    held: tuple[int, int]


STATE_TOKENS = 300
"""Tokens whose KV takes as much as a state in one memory."""


@cache
def served(
    name: str,
    limit: int | None,
    pools: Split,
    policy: str,
    *,
    one_memory: bool = False,
    coded: bool = False,
    spills: bool = False,
) -> tuple[Played, Split, CostModel]:
    """The results of the server's cache, on which pools, or in one memory of as many bytes, and its
    measured costs. coded: entries are coded before they are evicted, and rows are long enough for
    that. spills: the pools lend; each state counts as one that is held, and each token.
    """
    requests = trace(name, limit)
    longest = max(len(request.tokens) for request in requests) + 64
    kv = max(pools.kv_tokens, longest)
    sizes = Sizes(kv, pools.slots, grid=SERVING.grid, rows=4, context=longest)
    if one_memory or spills:
        kind = {"one_memory": one_memory, "spills": spills}
        sizes = replace(sizes, **kind, state_tokens=STATE_TOKENS)
    if coded:
        sizes = replace(sizes, row=16)
    boundaries = MessageBoundaries({"user": [OPENER]}, REPLY_OPENER)
    with coding(Codec.INT8 if coded else Codec.EXACT):
        built = build_cache(sizes, POLICIES[policy], message_boundaries=boundaries)
    server = Server(built, sizes, SERVING.chunk)
    hits = server.play(requests)
    server.check()
    if sizes.one_memory:
        used = server.cache.account.used
        held = (
            used[MemoryKind.KV] // sizes.token_bytes,
            used[MemoryKind.STATES] // sizes.state_bytes,
        )
        return Played(hits, held), Split(kv, pools.slots), server.cache.cost
    free_kv, free_slots = server.free()
    spilled = len(server.cache.spilled) if spills else 0
    held = (kv - free_kv - spilled * STATE_TOKENS, pools.slots - free_slots + spilled)
    room = Split(kv, pools.slots)
    if spills:
        parked = server.cache.parked
        room = replace(room, spilled=STATE_TOKENS, parked=parked.tokens_of_slot)
        held = (held[0] + parked.tokens, held[1] - parked.slots)
    return Played(hits, held), room, server.cache.cost


def simulated(
    requests: Sequence[Request],
    pools: Split | int,
    cost: CostModel,
    policy: str,
) -> Played:
    serving = replace(SERVING, one_memory=isinstance(pools, int))
    setting = Setting(cost, pools, requests, serving=serving)
    simulator = build_system(parse_spec(policy), setting)
    assert isinstance(simulator, ServerSimulator)
    hits = [outcome.hit_len for outcome in simulator.run(requests)]
    assert simulator.memory.kv_in_use == simulator.memory.slots_in_use == 0
    return Played(hits, (simulator.memory.kv_used, simulator.memory.states_used))


def compare(name: str, limit: int | None, pools: Split, policy: str) -> None:
    theirs, pools, cost = served(name, limit, pools, policy)
    ours = simulated(trace(name, limit), pools, cost, policy)
    assert sum(theirs.hits) > 0
    assert ours == theirs


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", TRACES_OF_BOTH)
def test_the_simulator_is_the_server(name: str, policy: str) -> None:
    compare(name, 300, POOLS[name][0], policy)


def compare_in_one_memory(name: str, limit: int | None, pools: Split, policy: str) -> Played:
    theirs, pools, cost = served(name, limit, pools, policy, one_memory=True)
    budget = (pools.kv_tokens + pools.slots * STATE_TOKENS) * KV_BYTES
    ours = simulated(trace(name, limit), budget, cost, policy)
    assert sum(theirs.hits) > 0
    assert ours == theirs
    return theirs


@pytest.mark.parametrize("policy", some(["reuse"], OURS))
@pytest.mark.parametrize("name", TRACES_OF_BOTH)
def test_the_simulator_is_the_server_in_one_memory(name: str, policy: str) -> None:
    """Two pools of as many bytes decide differently."""
    one = compare_in_one_memory(name, 300, POOLS[name][0], policy)
    two, _, _ = served(name, 300, POOLS[name][0], policy)
    assert one != two


@pytest.mark.parametrize("policy", some(["reuse"], OURS))
@pytest.mark.parametrize("name", TRACES_OF_BOTH)
def test_states_spill_as_on_the_server(name: str, policy: str) -> None:
    """Token by token, with few slots and with more. Less KV is seen, and pools that do not lend."""
    for slots in (12, 24):
        theirs, pools, cost = served(
            name, 300, replace(POOLS[name][0], slots=slots), policy, spills=True
        )
        assert sum(theirs.hits) > 0
        assert simulated(trace(name, 300), pools, cost, policy) == theirs
        for other in (
            replace(pools, kv_tokens=pools.kv_tokens - pools.kv_tokens // 10),
            pools.apart,
        ):
            assert simulated(trace(name, 300), other, cost, policy).hits != theirs.hits


@pytest.mark.parametrize("policy", some(["reuse"], OURS))
@pytest.mark.parametrize("name", TRACES_OF_BOTH)
def test_kv_lies_in_slots_as_on_the_server(name: str, policy: str) -> None:
    """Token by token, where there are more slots than states. That it does is seen."""
    pools = replace(POOLS[name][0], slots=80)
    theirs, pools, cost = served(name, 300, pools, policy, spills=True)
    assert sum(theirs.hits) > 0
    assert simulated(trace(name, 300), pools, cost, policy) == theirs
    assert simulated(trace(name, 300), replace(pools, parked=0), cost, policy) != theirs


@pytest.mark.parametrize("one_memory", [False, True])
@pytest.mark.parametrize("policy", some(["reuse"], OURS))
@pytest.mark.parametrize("name", TRACES_OF_BOTH)
def test_coded_entries_are_the_servers(name: str, policy: str, one_memory: bool) -> None:
    """Token by token, and more hits than without them."""
    theirs, pools, cost = served(
        name, 300, POOLS[name][0], policy, one_memory=one_memory, coded=True
    )
    assert cost.coded == (-(-cost.kv_bytes_per_token // 2), -(-cost.state_bytes // 2))
    budget = pools.kv_tokens * cost.kv_bytes_per_token + pools.slots * cost.state_bytes
    memory = budget if one_memory else pools
    ours = simulated(trace(name, 300), memory, cost, policy)
    assert ours == theirs
    exact = simulated(trace(name, 300), memory, replace(cost, coded=()), policy)
    assert sum(ours.hits) > sum(exact.hits)


@pytest.mark.parametrize("policy", some(["reuse"], OURS))
def test_a_small_difference_of_one_memory_is_seen(policy: str) -> None:
    name = "sharegpt_55"
    theirs, pools, cost = served(name, 300, POOLS[name][0], policy, one_memory=True)
    budget = (pools.kv_tokens + pools.slots * STATE_TOKENS) * KV_BYTES
    for less in (budget - STATE_TOKENS * KV_BYTES, budget - budget // 10):
        assert simulated(trace(name, 300), less, cost, policy).hits != theirs.hits


@pytest.mark.parametrize("policy", some(["reuse", "sglang-lru"]))
def test_tenants_share_nothing_in_either(policy: str) -> None:
    """A prompt is hit by its own tenant only."""
    pools = POOLS["sharegpt_55"][0]
    compare(f"{TENANTS}sharegpt_55", 300, pools, policy)
    apart, _, _ = served(f"{TENANTS}sharegpt_55", 300, pools, policy)
    together, _, _ = served("sharegpt_55", 300, pools, policy)
    assert sum(apart.hits) < sum(together.hits)


@pytest.mark.parametrize("policy", some(["reuse", "lru"]))
def test_thoughts_that_are_left_out_leave_prompts_where_replies_begin(policy: str) -> None:
    """The states at the replies' openers are those of the server, and are hit."""
    name, pools = f"{THOUGHTS}sharegpt_55", POOLS["sharegpt_55"][1]
    compare(name, 300, pools, policy)
    theirs, pools, cost = served(name, 300, pools, policy)
    unknown = [replace(request, reply_start=0) for request in trace(name, 300)]
    if policy != "sglang-lru":
        assert sum(simulated(unknown, pools, cost, policy).hits) < 0.9 * sum(theirs.hits)


@pytest.mark.parametrize("slots", [14, 300])
@pytest.mark.parametrize("name", [CHANGED, MASKED])
def test_states_where_the_next_prompt_is_expected_to_leave_are_the_servers(
    name: str, slots: int
) -> None:
    compare(name, None, Split(60_000, slots), "reuse")


@pytest.mark.parametrize("policy", some(["reuse"], ["reuse", "lru"]))
@pytest.mark.parametrize("one_memory", [False, True])
def test_pins_are_the_servers(policy: str, one_memory: bool) -> None:
    """The same nodes are pinned, kept longer and given up; without the pins others are hit."""
    name, pools = f"{PINS}sharegpt_55", POOLS["sharegpt_55"][0]
    theirs, pools, cost = served(name, 200, pools, policy, one_memory=one_memory)
    budget = (pools.kv_tokens + pools.slots * STATE_TOKENS) * KV_BYTES
    memory = budget if one_memory else pools
    assert simulated(trace(name, 200), memory, cost, policy) == theirs
    unpinned = [
        replace(r, pins=tuple(replace(pin, ttl=1e-6) for pin in r.pins)) for r in trace(name, 200)
    ]
    assert simulated(unpinned, memory, cost, policy).hits != theirs.hits


@pytest.mark.parametrize("policy", some(["reuse", "lru"]))
def test_a_small_difference_is_seen(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another policy, one slot less, a tenth less KV, an answer whose last token is computed."""
    name = "sharegpt_55"
    theirs, pools, cost = served(name, 300, POOLS[name][0], policy)
    requests = trace(name, 300)
    for other in POLICIES:
        same = simulated(requests, pools, cost, other) == theirs
        assert same == (other == policy)
    kv, slots = pools.kv_tokens, pools.slots
    for less in (Split(kv, slots - 1), Split(kv - kv // 10, slots)):
        assert simulated(requests, less, cost, policy).hits != theirs.hits
    monkeypatch.setattr(
        "sglang_hybrid.extensions.lab.simulation.server_simulator.computed_tokens",
        lambda one: len(one.tokens),
    )
    assert simulated(requests, pools, cost, policy).hits != theirs.hits


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("policy", OURS)
@pytest.mark.parametrize("name", POOLS)
def test_one_memory_is_the_server_on_whole_traces(name: str, policy: str) -> None:
    compare_in_one_memory(name, None, POOLS[name][1], policy)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", [0, 1, 2], ids=["small", "middle", "large"])
@pytest.mark.parametrize("name", POOLS)
def test_the_simulator_is_the_server_on_whole_traces(name: str, size: int, policy: str) -> None:
    compare(name, None, POOLS[name][size], policy)
