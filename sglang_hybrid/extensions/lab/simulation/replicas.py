"""Several servers, each with a cache of its own, and routers that choose one for a request."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sglang_hybrid.core.costs.cost import DISPLACED, SIMILAR, STATES_OF_A_PREFILL
from sglang_hybrid.core.queue.prefix_overlap import TOKEN_BYTES, SortedKeys, as_key
from sglang_hybrid.core.queue.prefix_ranks import PrefixRanks
from sglang_hybrid.core.records.nodes import Node
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.lab.simulation.prefill_time import PrefillTime
from sglang_hybrid.extensions.lab.simulation.simulated_queue import SimulatedQueue
from sglang_hybrid.extensions.lab.simulation.simulator import Cache, Simulator
from sglang_hybrid.extensions.lab.simulation.token_tree import TokenTree, prefix_hashes


class Told:
    """The knowledge of a router about the states in a server's `tree`: each change is an event that
    arrives `late` seconds after it, by the clock `now`.
    """

    settle: Callable[[], None]

    def __init__(self, tree: TokenTree, late: float, now: Callable[[], float]) -> None:
        self._late = late
        self._now = now
        self._of_node: dict[Node, int] = {}
        self._on_way: deque[tuple[float, int, bool]] = deque()  # when, what prefix, whether it came
        self._known: set[int] = set()
        tree.listen(self)

    def mark_dirty(self, node: Node) -> None:
        if node.has_state != (node in self._of_node):
            self._publish(node, node.has_state)

    def forget(self, node: Node) -> None:
        if node in self._of_node:
            self._publish(node, False)

    def deepest(self, positions: Mapping[int, int]) -> int:
        """The last position of a prompt at which the server is believed to have a state; 0 if there
        is none. positions: by the hashes of the prompt's prefixes.
        """
        while self._on_way and self._on_way[0][0] <= self._now():
            _, prefix, there = self._on_way.popleft()
            (self._known.add if there else self._known.discard)(prefix)
        return max((positions[it] for it in self._known if it in positions), default=0)

    def _publish(self, node: Node, there: bool) -> None:
        if there:
            prefix = self._of_node[node] = _hash_of(node)
        else:
            prefix = self._of_node.pop(node)
        self._on_way.append((self._now() + self._late, prefix, there))


def _hash_of(node: Node) -> int:
    """The hash of all tokens up to `node`, of its tenant."""
    edges, tenant, above = [node.payload], "", node
    while above.parent is not None and above.parent.parent is not None:
        above = above.parent
        edges.append(above.payload)
    if isinstance(above.key, tuple):
        tenant = above.key[0]
    tokens = np.frombuffer(b"".join(reversed(edges)), dtype=np.int32)
    return int(prefix_hashes(tokens, tenant)[-1])


@dataclass(eq=False)
class Replica:
    """One server. free_at: when the prefill under way ends, in seconds. unfinished: requests that
    it was sent and that have no answer yet. waiting: seconds of the prefills in its queue, by the
    request's index, as they were expected when it was sent. told: what a router knows of its
    states, None if it knows them as they are; heard: what the request at hand hits by that.
    """

    cache: Cache
    queue: SimulatedQueue
    time: PrefillTime
    busy: bool = False
    free_at: float = 0.0
    unfinished: int = 0
    waiting: dict[int, float] = field(default_factory=dict)
    told: Told | None = None
    heard: int = 0

    def backlog(self, now: float) -> float:
        """Seconds until a request that is sent now begins."""
        return max(0.0, self.free_at - now) + sum(self.waiting.values())

    def seconds(self, request: Request, hit: int) -> float:
        """The seconds of the prefill of `request`, if it hits `hit` tokens."""
        return self.time.seconds(hit, request.input_len - hit)

    def stored(self, request: Request) -> int:
        """Prompt tokens of `request` whose KV is here, whether there is a state to resume from or
        not.
        """
        if not isinstance(self.cache, Simulator):
            return self.cache.peek(request)
        prompt = request.tokens[: request.input_len - 1]
        return self.cache.tree.find(prompt, tenant=request.tenant)[1]

    def must_evict_for(self, tokens: int) -> bool:
        """True if a prefill of so many tokens takes the place of what is cached here."""
        if not isinstance(self.cache, Simulator):
            return True
        return self.cache.memory.short_of(tokens, STATES_OF_A_PREFILL) is not None

    def resumable(self, request: Request) -> int:
        """Prompt tokens of `request` that would be hit here, as far as a router knows."""
        return self.cache.peek(request) if self.told is None else self.heard


def hear(replicas: Sequence[Replica], request: Request) -> None:
    """The hits of `request` that `replicas` are believed to have, where a router is told late."""
    prompt = request.tokens[: request.input_len - 1]
    hashes = prefix_hashes(prompt, request.tenant).tolist()
    positions = dict(zip(hashes, range(1, len(hashes) + 1), strict=True))
    for replica in replicas:
        if replica.told is not None:
            replica.heard = replica.told.deepest(positions)


class Router(ABC):
    """Chooses a replica for each request, in the order in which they arrive."""

    @abstractmethod
    def choose(self, request: Request, replicas: Sequence[Replica], now: float) -> int:
        """The number of the replica that `request` is sent to at `now` seconds."""


class Random(Router):
    """Any replica."""

    def __init__(self) -> None:
        self._draw = random.Random(0)

    def choose(self, request: Request, replicas: Sequence[Replica], now: float) -> int:
        return self._draw.randrange(len(replicas))


class RoundRobin(Router):
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Request, replicas: Sequence[Replica], now: float) -> int:
        self._next += 1
        return (self._next - 1) % len(replicas)


class Sticky(Router):
    """A session stays where its first request went: to the replica with the fewest requests."""

    def __init__(self) -> None:
        self._replica_of: dict[int, int] = {}

    def choose(self, request: Request, replicas: Sequence[Replica], now: float) -> int:
        if request.session not in self._replica_of:
            self._replica_of[request.session] = _least_loaded(replicas)
        return self._replica_of[request.session]


class CacheAware(Router):
    """sglang-router's `cache_aware` at its defaults: where the longest prefix of the prompt was
    sent before, if that is more than 0.3 of it, or else where least was sent; to the replica with
    the fewest requests while the loads are far apart (the most above the fewest by more than 64,
    and more than 1.5 times as many). It knows neither states nor evictions. Its tree of at most
    2^26 characters forgets the oldest; here nothing is forgotten.
    """

    threshold, absolute, relative = 0.3, 64, 1.5

    def __init__(self) -> None:
        self._sent: defaultdict[tuple[int, str], SortedKeys] = defaultdict(SortedKeys)
        self._tokens: defaultdict[int, int] = defaultdict(int)

    def choose(self, request: Request, replicas: Sequence[Replica], now: float) -> int:
        key = as_key(request.tokens[: request.input_len])
        loads = [replica.unfinished for replica in replicas]
        most, fewest = max(loads), min(loads)
        known = [self._sent[at, request.tenant].longest(key) for at in range(len(replicas))]
        if most - fewest > self.absolute and most > self.relative * fewest:
            chosen = _least_loaded(replicas)
        elif max(known) > self.threshold * request.input_len:
            chosen = known.index(max(known))
        else:
            chosen = min(range(len(replicas)), key=lambda at: self._tokens[at])
        self._sent[chosen, request.tenant].add(request.session, key)
        self._tokens[chosen] += len(key) // TOKEN_BYTES - known[chosen]
        return chosen


class Soonest(Router):
    """The replica whose first token is expected first: after its backlog, and the prefill of what
    `hit` says that it would not hit. Of similar ones that which was sent the fewest requests.

    displaced: what a token that is computed costs beside its own prefill, in prefills of a token,
    where something must be evicted for it.
    """

    def __init__(self, hit: Callable[[Replica, Request], int], displaced: float = 0.0) -> None:
        self._hit = hit
        self._displaced = displaced
        self._sent: Counter[int] = Counter()

    def choose(self, request: Request, replicas: Sequence[Replica], now: float) -> int:
        prices = []
        for replica in replicas:
            hit = self._hit(replica, request)
            price = replica.backlog(now) + replica.seconds(request, hit)
            new = request.input_len - hit
            if self._displaced and replica.must_evict_for(new):
                price += self._displaced * replica.time.per_token * new
            prices.append(price)
        alike = [at for at, price in enumerate(prices) if price <= SIMILAR * min(prices)]
        chosen = min(alike, key=lambda at: (self._sent[at], at))
        self._sent[chosen] += 1
        return chosen


class DpRanks(Router):
    """The choice of `--dp-size`: `core.queue.prefix_ranks`, told of every load at once."""

    def __init__(self) -> None:
        self._ranks: PrefixRanks | None = None

    def choose(self, request: Request, replicas: Sequence[Replica], now: float) -> int:
        ranks = self._ranks = self._ranks or PrefixRanks(len(replicas))
        for load, replica in zip(ranks.loads, replicas, strict=True):
            tokens = round(replica.backlog(now) / replica.time.per_token)
            load.on_load_report(now, replica.unfinished, tokens)
        prompt = request.tokens[: request.input_len].tolist()
        return ranks.send(request.tenant, prompt, now, range(len(replicas)))


ROUTERS: dict[str, Callable[[], Router]] = {
    "random": Random,
    "round_robin": RoundRobin,
    "sticky": Sticky,
    "cache_aware": CacheAware,
    "dp_ranks": DpRanks,
    "by_blocks": lambda: Soonest(Replica.stored),
    "by_states": lambda: Soonest(Replica.resumable, DISPLACED),
}
"""Routers by name. by_blocks: by the stored KV, which SGLang's and vLLM's events report. by_states:
by the states, with a price on what is computed, as our router (router/choosing.py).
"""


def _least_loaded(replicas: Sequence[Replica]) -> int:
    return min(range(len(replicas)), key=lambda at: (replicas[at].unfinished, at))
