"""Replays recent requests under another policy or with another size of memory: a replay in a worker
process of lowest priority.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.server_settings import Budget, Split
from sglang_hybrid.core.specs import Spec
from sglang_hybrid.core.traffic.recorder import FEWEST_REQUESTS, RequestWindow
from sglang_hybrid.extensions.lab.simulation.tuner.candidates import (
    SGLANG,
    describe_failure,
    hits_within,
)
from sglang_hybrid.extensions.lab.simulation.workers import Limits, run_jobs
from sglang_hybrid.extensions.page.messages import WhatIfReqOutput

logger = logging.getLogger(__name__)

SIZES = (0.5, 1.0, 2.0, 4.0, math.inf)
"""Times the memory that the server has; without a bound at last."""


class WhatIf:
    """One replay at a time.

    window: the requests that ended last and the cache that they had; None where there are none.
    in_force: the policy that the server runs. It is called in the scheduler's thread, the window in
    a thread of its own.
    """

    def __init__(
        self,
        window: Callable[[], Callable[[], RequestWindow] | None],
        in_force: Callable[[], Spec],
    ) -> None:
        self._window = window
        self._in_force = in_force
        self._answer = WhatIfReqOutput(told="nothing was replayed yet.")
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start, unless it runs."""
        if self._thread is not None and self._thread.is_alive():
            return
        window = self._window()
        if window is None:
            told = f"fewer than {FEWEST_REQUESTS} requests have ended since the start."
            self._answer = WhatIfReqOutput(told=told)
            return
        self._answer = WhatIfReqOutput(state="running", told="requests are replayed.")
        policies = tuple(dict.fromkeys((self._in_force(), SGLANG, Spec("lru"))))
        self._thread = threading.Thread(
            target=self._run, args=(window, policies), name="hybrid-what-if", daemon=True
        )
        self._thread.start()

    def answer(self) -> WhatIfReqOutput:
        """The progress of the replay, and its results."""
        return self._answer

    def _run(self, make: Callable[[], RequestWindow], policies: Sequence[Spec]) -> None:
        """Compare the policies. Whatever goes wrong here, the server goes on."""
        try:
            self._answer = _compare(make(), policies)
        except Exception as error:
            logger.debug("what-if failed", exc_info=True)
            self._answer = WhatIfReqOutput(state="failed", told=describe_failure(error))


def _compare(window: RequestWindow, policies: Sequence[Spec]) -> WhatIfReqOutput:
    tried = [(spec, times) for spec in policies for times in SIZES]
    jobs = [(spec, scaled(window.budget, times)) for spec, times in tried]
    done = run_jobs(hits_within, window, jobs, Limits())
    if done.failures:
        return WhatIfReqOutput(state="failed", told=describe_failure(done.failures[0]))
    tokens = max(1, window.counted_tokens)
    rows = [
        (str(spec), *_size(window, times), int(done.results[number].sum()) / tokens)
        for number, (spec, times) in enumerate(tried)
    ]
    return WhatIfReqOutput(
        state="done",
        rows=rows,
        told=f"the last {len(window.requests):,} requests were replayed; of the last "
        f"{window.counted:,} the hits are counted."
        + (" SGLang's own cache is replayed without copies on the host." if window.tiers else ""),
    )


def scaled(budget: Budget, times: float) -> Budget:
    """`budget`, `times` as large; None without a bound."""
    if budget is None or math.isinf(times):
        return None
    if isinstance(budget, Split):
        kv_tokens, slots = int(budget.kv_tokens * times), int(budget.slots * times)
        return replace(budget, kv_tokens=kv_tokens, slots=slots)
    return int(budget * times)


def size_of(budget: Budget, cost: CostModel) -> int:
    """Bytes of a budget, 0 without a bound."""
    if isinstance(budget, Split):
        return budget.bytes(cost)
    return budget or 0


def _size(window: RequestWindow, times: float) -> tuple[float, float]:
    """Times and bytes, both 0 without a bound: JSON knows no infinity."""
    bytes_ = size_of(scaled(window.budget, times), window.cost)
    return (0.0 if math.isinf(times) else times), float(bytes_)
