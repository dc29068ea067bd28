"""The tuner in a replay: it decides, and its choices take effect, as in the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sglang_hybrid.core.costs.cost import UNBOUNDED
from sglang_hybrid.core.returns.history import History, HistoryMatch
from sglang_hybrid.core.server_settings import Split
from sglang_hybrid.core.specs import Spec, make_policies
from sglang_hybrid.core.traffic.recorder import FinishedRequest, RequestWindow
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.lab.simulation.device_memory import device_pools
from sglang_hybrid.extensions.lab.simulation.server_simulator import ServerSimulator
from sglang_hybrid.extensions.lab.simulation.simulator import Outcome, Simulator, Ticket
from sglang_hybrid.extensions.lab.simulation.system_names import Setting, System
from sglang_hybrid.extensions.lab.simulation.tuner.candidates import (
    CANDIDATES,
    MARCONI_ALONE,
    TokensFound,
    counted_hits,
)
from sglang_hybrid.extensions.lab.simulation.tuner.tuner import Rules, Tuner
from sglang_hybrid.extensions.lab.simulation.workers import Limits

DELAY = 32
"""Requests that end while a search runs."""


CHOICES = {
    "tuned": CANDIDATES,
    "marconi-tuned": MARCONI_ALONE,
}
"""The candidates of a system, by its name in a replay; it starts with the first one."""


class Switching(Simulator):
    """A cache in which another policy can take over. The history is fed even while the policy in
    force does not learn from it.
    """

    def __init__(self, *arguments: Any, history: History) -> None:
        super().__init__(*arguments)
        self.history = self.policy.history = history

    def switch(self, spec: Spec) -> None:
        """`spec` chooses the victims from now on. Records, holds and the history stay, as in
        `cache.records.shadow_tree.ShadowTree.use`.
        """
        policy, state_policy = make_policies(spec, self.history)
        policy.history = self.history
        self.policy = policy
        pools = device_pools(self.budget, self.cost, self.tree.clock, policy, state_policy)
        self.memory.use(pools)

    @property
    def room(self) -> Split | int:
        """The room that running requests leave to the cache, as in `Finished.room`."""
        return self.budget if isinstance(self.budget, Split) else Split(UNBOUNDED, UNBOUNDED)

    def _match_history(self, request: Request) -> HistoryMatch | None:
        return super()._match_history(request) if self.policy.knows_returns else None


class SwitchingServed(Switching, ServerSimulator):
    """The same as it is served."""

    @property
    def room(self) -> Split | int:
        kv, slots = self.memory.kv_in_use, self.memory.slots_in_use
        if isinstance(self.budget, Split):
            kv, slots = self.budget.kv_tokens - kv, self.budget.slots - slots
            return replace(self.budget, kv_tokens=kv, slots=slots)
        assert self.budget is not None
        return self.budget - self.memory.bytes_of(kv, slots)


def switching(setting: Setting, start: Spec) -> Switching:
    """A cache that begins with `start`."""
    history = History()
    policy, state_policy = make_policies(start, history)
    cost, least = setting.cost, setting.min_branch_tokens
    if setting.as_served:
        how = setting.serving
        return SwitchingServed(
            cost, setting.memory, policy, state_policy, least, how, history=history
        )
    return Switching(cost, setting.budget, policy, least, state_policy, history=history)


class SimulatedTunedCache:
    """A cache with a tuner.

    Searches run here, and their results arrive `delay` requests later.

    Args:
        candidates: what it chooses from.
        start: what is in force until its first choice.

    Attributes:
        decided: requests that had ended when a search's result arrived, and what was in force then.
    """

    def __init__(
        self,
        setting: Setting,
        candidates: Sequence[Spec] = CANDIDATES,
        start: Spec = CANDIDATES[0],
        rules: Rules | None = None,
        delay: int = DELAY,
    ) -> None:
        self.decided: list[tuple[int, Spec]] = []
        self._setting = setting
        self._delay = delay
        self._ended = 0
        self._due = 0
        self.cache = switching(setting, start)
        self.tuner = Tuner(
            setting.cost,
            rules,
            start,
            candidates=candidates,
            min_branch_tokens=setting.min_branch_tokens,
            serving=setting.serving,
            search=self._search,
        )

    def serve(self, request: Request) -> Outcome:
        outcome = self.cache.serve(request)
        self._record(request, outcome)
        return outcome

    def peek(self, request: Request) -> int:
        return self.cache.peek(request)

    def begin(self, request: Request) -> Ticket:
        return self.cache.begin(request)

    def end_prefill(self, ticket: Ticket) -> None:
        self.cache.end_prefill(ticket)

    def finish(self, ticket: Ticket) -> None:
        self.cache.finish(ticket)
        self._record(ticket.request, ticket.outcome)

    def _record(self, request: Request, outcome: Outcome) -> None:
        self._ended += 1
        searching = self.tuner.searching
        record = FinishedRequest(
            request.tokens,
            request.input_len,
            request.arrival,
            outcome.hit_len,
            self.cache.room,
            request.message_starts,
            request.reply_start,
        )
        self.tuner.on_request_end(record, evicted=self.cache.memory.has_evicted)
        if not searching:
            self._due = self._ended + self._delay
        if self.tuner.searching and self._ended >= self._due:
            self._decide()

    def _decide(self) -> None:
        self.tuner.wait()
        switch = self.tuner.poll()
        if switch is not None:
            self.cache.switch(switch.spec)
            self.tuner.on_adoption(switch)
        self.decided.append((self._ended, self.tuner.current))

    def _search(self, window: RequestWindow, candidates: Sequence[Spec], _: Limits) -> TokensFound:
        if not self._setting.as_served:
            window = replace(window, budget=self._setting.budget)
        hits = {spec: counted_hits(window, spec) for spec in candidates}
        return TokensFound(window.counted_tokens, hits)


def build_tuned(
    name: str, setting: Setting, delay: float = DELAY, window: float = 0
) -> SimulatedTunedCache:
    """`name`: one of CHOICES. window: requests, 0 for what the rules find."""
    candidates = CHOICES[name]
    rules = Rules(window=int(window))
    return SimulatedTunedCache(setting, candidates, candidates[0], rules, int(delay))


SYSTEMS = {name: System(partial(build_tuned, name), ("delay", "window")) for name in CHOICES}
"""The systems that a replay builds by name (`extensions/lab/systems.py`)."""
