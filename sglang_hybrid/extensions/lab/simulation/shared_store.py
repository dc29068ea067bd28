"""One store below the caches of several servers, as Mooncake's is below those of a fleet."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.tiers.rates import Link
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.core.victims.eviction import Reuse
from sglang_hybrid.extensions.lab.simulation.prefill_time import PrefillTime
from sglang_hybrid.extensions.lab.simulation.simulator import Outcome, Simulator, Ticket
from sglang_hybrid.extensions.lab.simulation.sizes import parse_bytes, parse_rate

STORE_LATENCY = 1e-3
"""Seconds until the first byte of a load: a question to the store's master, and a connection."""


@dataclass(frozen=True)
class StoreBudget:
    """Bytes of a store, and the link from it to each server."""

    size: int
    link: Link

    @classmethod
    def parse(cls, text: str) -> StoreBudget:
        """Read `2TB@3GB/s`. Raises ValueError, in one sentence."""
        size, at, rate = text.partition("@")
        if not at:
            raise ValueError(f"{text!r} is no store; write 2TB@3GB/s")
        return cls(parse_bytes(size), Link(parse_rate(rate), STORE_LATENCY))


class SimulatedStore(Simulator):
    """The objects that servers which share a `store` have written to it, evicted by the returns
    that all their requests taught.

    A server writes the KV and the states that its own cache keeps of a request, behind its prefill
    and at its end, and no state twice. It loads what it lacks before a prefill, where that takes
    less `time` than computing it. Writes take no time of a request, and servers do not slow one
    another's loads.
    """

    def __init__(self, cost: CostModel, store: StoreBudget, time: PrefillTime) -> None:
        super().__init__(cost, store.size, Reuse())
        self._link = store.link
        self._time = time

    def load(self, request: Request, cache: Simulator) -> float:
        """Bring to the server's `cache` what `request` can resume from here and not there, if that
        pays and there is room; the seconds that it takes, 0 if nothing is loaded.
        """
        self.tree.clock.advance(request.arrival)
        own = cache.peek(request)
        node, position = self.resumes_from(request)
        if node is None or position <= own:
            return 0.0
        loaded = self.cost.kv_bytes_per_token * (position - own) + self.cost.state_bytes
        seconds = self._link.seconds(loaded)
        if seconds >= self._seconds(request, own) - self._seconds(request, position):
            return 0.0
        self.tree.hit(node)
        cache.adopt(request, {position: node.kind})
        return seconds if cache.peek(request) >= position else 0.0

    def save(self, request: Request, cache: Simulator, *, ended: bool) -> None:
        """Write what the server's `cache` keeps of `request`. ended: its answer is there, too."""
        path, _ = cache.tree.find(request.tokens, tenant=request.tenant)
        ends = {node.depth: node.kind for node in path if node.has_state}
        stored = self.adopt(request, ends) if ends else []
        if ended:
            outcome = Outcome(request.input_len, 0, 0)
            self._remember(Ticket(request, outcome, {}), stored)

    def _seconds(self, request: Request, hit: int) -> float:
        return self._time.seconds(hit, request.input_len - hit)
