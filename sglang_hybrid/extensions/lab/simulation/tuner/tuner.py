"""The tuner: when it compares policies, what it concludes, and the switch that it offers.

It is called from the scheduler's thread only. A search waits for its workers in a thread of its
own.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang_hybrid.core.costs.cost import MIN_BRANCH_TOKENS, CostModel, IntArray
from sglang_hybrid.core.server_settings import ServedTiers, Serving
from sglang_hybrid.core.specs import PolicySwitch, Spec
from sglang_hybrid.core.traffic.recorder import (
    MOST_RECORD_BYTES,
    MOST_REQUESTS,
    FinishedRequest,
    Recorder,
    RequestWindow,
    make_window,
)
from sglang_hybrid.extensions.lab.simulation.tuner.candidates import (
    CANDIDATES,
    TokensFound,
    describe_failure,
    search,
)
from sglang_hybrid.extensions.lab.simulation.tuner.regret import Advantages, Regrets
from sglang_hybrid.extensions.lab.simulation.workers import Limits

logger = logging.getLogger(__name__)

MOST_DOUBLINGS = 10
"""Doublings of the time between two searches that fail, at most."""

Search = Callable[[RequestWindow, Sequence[Spec], Limits], TokensFound]


@dataclass(frozen=True)
class Rules:
    """The rules of the tuner's searches.

    window: requests before the first search, 0 for `bootstrap` times those that ended before the
    first eviction (the paper's section 4.2), within `least` and `most`. Every search that changes
    nothing doubles the time to the next one. Replayed are the requests since the last search and
    as many before them, at most `most`; the latter half counts, as policies that learn would seem
    worse than they are in the server if they were compared while they know nothing.

    margin: share of the hit tokens that a switch must gain. sure: standard errors that the gain
    must exceed. Both grow with every switch that was taken back. probation: share of the window
    after which a switch is looked at again, and then after twice as many requests each time: what
    was left behind comes back unless it did worse on the requests since. drift: points of hit rate
    between what was expected and what is seen that are reason to forget earlier searches, and to
    search again.
    """

    window: int = 0
    bootstrap: int = 2
    least: int = 64
    most: int = MOST_REQUESTS
    margin: float = 0.01
    sure: float = 2.5
    probation: float = 0.5
    drift: float = 0.1
    record_bytes: int = MOST_RECORD_BYTES
    limits: Limits = field(default_factory=Limits)


@dataclass
class TunerCounts:
    """Totals. taken_back: switches that a later comparison undid. regret_tokens: hit tokens by
    which the best candidate of each search exceeded the policy in force, in the requests that
    counted.
    """

    runs: int = 0
    failures: int = 0
    seconds: float = 0.0
    switches: int = 0
    taken_back: int = 0
    regret_tokens: int = 0


class Tuner:
    """Records, searches and decides for one cache.

    Args:
        cost: FLOPs and bytes of the served model, as the cache has them.
        rules: when and how.
        start: the policy in force.
        candidates: what it chooses from.
        serving: how the server runs, where it plans its checkpoints.
        has_states: False for a model without recurrent state.
        tiers: what the server has below the device now; None for a server without tiers.
        search: tries candidates on a window.
    """

    def __init__(
        self,
        cost: CostModel,
        rules: Rules | None = None,
        start: Spec = CANDIDATES[0],
        *,
        candidates: Sequence[Spec] = CANDIDATES,
        min_branch_tokens: int = MIN_BRANCH_TOKENS,
        serving: Serving | None = None,
        has_states: bool = True,
        tiers: Callable[[], ServedTiers | None] = lambda: None,
        search: Search = search,
    ) -> None:
        self.rules = rules or Rules()
        self.counts = TunerCounts()
        self.current = start
        self.expected: float | None = None  # hit rate
        self.last_switch = ""
        self.last_failure = ""
        self._cost = cost
        self._candidates = candidates
        self._min_branch_tokens = min_branch_tokens
        self._serving = serving
        self._has_states = has_states
        self._tiers = tiers
        self._search = search
        self._recorder = Recorder(self.rules.record_bytes)
        self._regrets: Regrets[Spec] = Regrets()
        self._advantages = Advantages()
        self._left: Spec | None = None  # what the last switch left behind, while that is watched
        self._switched_at = 0
        self._next_check = 0  # requests after the switch
        self._compared: Sequence[Spec] = candidates
        self._seen_hit_lens: IntArray = np.zeros(0, dtype=np.int64)  # of the requests that count
        self._window = 0  # requests; 0 until something was evicted
        self._ended = 0
        self._searched_at = 0
        self._gap = 0  # requests from one search to the next
        self._seen: deque[tuple[int, int]] = deque()  # hit and prompt tokens of the latest
        self._seen_hits = self._seen_tokens = 0
        self._failed = 0  # searches in a row
        self._rests_until = 0  # requests
        self._thread: threading.Thread | None = None
        self._found: TokensFound | None = None
        self._seen_then = 0.0
        self._offer: PolicySwitch | None = None

    def on_request_end(self, record: FinishedRequest, *, evicted: bool) -> None:
        """A request ended. evicted: whether the cache ever had to evict."""
        self._recorder.add(record)
        self._ended += 1
        self._see(record)
        if not self._window and evicted:
            self._window = self._gap = self._first_window()
            logger.info(
                "sglang_hybrid: the first eviction came after %d requests; policies are compared "
                "after %d.",
                *(self._ended, self._window),
            )
        reason = self._reason()
        if reason:
            self._begin(reason)

    def poll(self) -> PolicySwitch | None:
        """The switch that every rank should get; the same at every call until `on_adoption`. None
        if there is none.
        """
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
            self._conclude()
        return self._offer

    def wait(self) -> None:
        """Block until the running search ends, if there is one."""
        if self._thread is not None:
            self._thread.join()

    def on_adoption(self, switch: PolicySwitch) -> None:
        """Called when `switch` is in force."""
        back = switch.spec == self._left
        self.counts.taken_back += back
        self._left = None if back else self.current
        self._switched_at = self._ended
        self._next_check = max(1, round(self.rules.probation * self._window))
        self.current, self.last_switch = switch.spec, switch.reason
        self.counts.switches += 1
        self._offer = None

    @property
    def searching(self) -> bool:
        return self._thread is not None

    @property
    def hit_rate(self) -> float:
        """Hit tokens over prompt tokens of the latest half window."""
        return self._seen_hits / self._seen_tokens if self._seen_tokens else 0.0

    def info(self) -> dict[str, Any]:
        """The values for /server_info."""
        return {
            "window": self._window,
            "recorded": len(self._recorder),
            "recorded_bytes": self._recorder.held_bytes,
            "searching": self.searching,
            **vars(self.counts),
            "last_switch": self.last_switch,
            "last_failure": self.last_failure,
            "failed_in_a_row": self._failed,
            "rests_for_requests": max(0, self._rests_until - self._ended),
            "expected_hit_rate": self.expected,
            "seen_hit_rate": self.hit_rate,
            "regret": {str(spec): lost for spec, lost in self._regrets.shares.items()},
        }

    def _first_window(self) -> int:
        if self.rules.window:
            return self.rules.window
        return min(max(self.rules.bootstrap * self._ended, self.rules.least), self.rules.most)

    def _see(self, record: FinishedRequest) -> None:
        self._seen.append((record.hit_len, record.input_len))
        self._seen_hits += record.hit_len
        self._seen_tokens += record.input_len
        while len(self._seen) > max(1, self._window // 2 or self.rules.most):
            hits, tokens = self._seen.popleft()
            self._seen_hits -= hits
            self._seen_tokens -= tokens

    def _reason(self) -> str:
        """The reason why a search is due now; empty if none is."""
        if not self._window or self.searching or self._offer is not None:
            return ""
        if self._ended < self._rests_until:
            return ""
        if self._left is not None and self._ended - self._switched_at >= self._next_check:
            return f"{self._left} was left {self._ended - self._switched_at} requests ago"
        new = self._ended - self._searched_at
        if new < self._window:
            return ""
        if self.expected is not None and abs(self.hit_rate - self.expected) > self.rules.drift:
            self._regrets.forget()
            self._gap = self._window
            return f"the hit rate is {self.hit_rate:.1%} instead of {self.expected:.1%}"
        return f"{new} requests after the last one" if new >= self._gap else ""

    def _begin(self, reason: str) -> None:
        """Compare all candidates on what came since the last search; or, after a switch, what was
        left behind with what is in force on what came since, after as many requests of before as
        are recorded.
        """
        since = self._ended - self._switched_at
        if self._left is None or since < self._next_check:
            new, self._searched_at = self._ended - self._searched_at, self._ended
            records = self._recorder.latest(min(2 * new, self.rules.most))
            counted = (len(records) + 1) // 2
            self._compared = self._candidates
        else:
            records = self._recorder.latest(self.rules.most)
            counted = min(since, (len(records) + 1) // 2)
            self._compared = (self.current, self._left)
            self._next_check *= 2
        self._seen_then = self.hit_rate
        known = min(counted, since)  # before, another policy was in force
        self._seen_hit_lens = np.array([record.hit_len for record in records[-known:]])
        logger.info(
            "sglang_hybrid: %d policies are compared on the last %d requests: %s.",
            *(len(self._compared), len(records), reason),
        )
        self._thread = threading.Thread(
            target=self._run,
            args=(records, counted, self._tiers()),
            name="hybrid-tuner",
            daemon=True,
        )
        self._thread.start()

    def _run(self, records: list[FinishedRequest], counted: int, tiers: ServedTiers | None) -> None:
        """Search, in a thread of its own. Whatever goes wrong there, the server goes on."""
        try:
            window = make_window(
                records,
                counted,
                self._cost,
                self._min_branch_tokens,
                self._serving,
                has_states=self._has_states,
                tiers=tiers,
            )
            self._found = self._search(window, self._compared, self.rules.limits)
        except Exception as error:
            logger.debug("the search failed", exc_info=True)
            self._found = TokensFound(0, failures=[describe_failure(error)])

    def _conclude(self) -> None:
        found, self._found = (
            self._found or TokensFound(0, failures=["it ended without a word"]),
            None,
        )
        self.counts.runs += 1
        self.counts.seconds += found.seconds
        self.counts.failures += len(found.failures)
        self._rest_after(found.failures)
        if self.current not in found.hits or not found.counted_tokens:
            return
        replayed = found.hits[self.current]
        known = len(self._seen_hit_lens)
        if 0 < known <= len(replayed):
            self._advantages.learn(self.current, self._seen_hit_lens, replayed[-known:])
        tokens = self._advantages.added(found.hits)
        hits = {spec: int(of_spec.sum()) for spec, of_spec in tokens.items()}
        self.expected = self._seen_then
        if self._compared is not self._candidates:
            self._watch(hits)
            return
        self.counts.regret_tokens += max(hits.values()) - hits[self.current]
        self._regrets.learn(tokens)
        strictness = 1 + self.counts.taken_back
        margin, sure = self.rules.margin * strictness, self.rules.sure * strictness
        choice = self._regrets.choose(self.current, margin, sure)
        if choice == self.current:
            self._gap = min(2 * self._gap, max(self._window, self.rules.most // 2))
            logger.info(
                "sglang_hybrid: %s stays, as nothing gains %.0f %% more for sure; %.1f s.",
                *(self.current, 100 * margin, found.seconds),
            )
            return
        self.expected = max(self._seen_then, hits[choice] / found.counted_tokens)
        reason = (
            f"{choice} instead of {self.current}: {hits[choice]:,} instead of "
            f"{hits[self.current]:,} of {found.counted_tokens:,} prompt tokens hit in a replay"
        )
        self._offer = PolicySwitch(self.counts.switches + 1, choice, reason)

    def _rest_after(self, failures: Sequence[str]) -> None:
        """Every further failed search in a row doubles the requests until the next one; only the
        first of them is a line in the log.
        """
        if not failures:
            if self._failed:
                logger.info(
                    "sglang_hybrid: comparing policies works again; it failed %d times.",
                    self._failed,
                )
            self._failed = 0
            return
        self.last_failure = failures[-1]
        self._failed += 1
        rest = self._window << min(self._failed - 1, MOST_DOUBLINGS)
        self._rests_until = self._ended + rest
        if self._failed == 1:
            logger.warning(
                "sglang_hybrid: comparing policies: %s. The next attempt comes after %d requests, "
                "and ever later while it fails; /server_info counts the failures.",
                *(self.last_failure, rest),
            )

    def _watch(self, hits: Mapping[Spec, int]) -> None:
        """Offer the policy that the last switch replaced, if it would have hit as many tokens as
        the one in force.
        """
        left = self._left
        if left is None or left not in hits:
            return
        if hits[left] < hits[self.current]:
            if self._next_check > self.rules.most:
                self._left = None  # it has proved itself
            return
        self._regrets.forget()
        reason = (
            f"{left} again instead of {self.current}: since the switch {hits[left]:,} instead of "
            f"{hits[self.current]:,} prompt tokens would have been hit"
        )
        self._offer = PolicySwitch(self.counts.switches + 1, left, reason)
