"""When what was computed is there: requests that overlap, queue for the prefill, and decode."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.queue.orders import FirstCome
from sglang_hybrid.core.queue.queue_order import QueueOrder
from sglang_hybrid.core.queue.waiting import Bound
from sglang_hybrid.simulation.scheduling import WaitingQueue
from sglang_hybrid.simulation.simulator import Cache, Outcome, Ticket
from sglang_hybrid.simulation.traces.requests import Request, whole_file, write_line

Floats = npt.NDArray[np.float64]

# The artifact's fit to Jamba-1.5-Mini on four A100 (marconi-notes.md 1.6), in seconds.
PAPER_BASE, PAPER_PER_TOKEN = 0.01781, 5.2964e-5
PAPER_GRID, PAPER_LONGEST = 50, 31_950


@dataclass(frozen=True)
class PrefillTime:
    """Seconds of a prefill of n new tokens after a hit of h: base + per_token * n + per_pair *
    (pairs of new tokens and those they attend to) + per_hit * h, for what must be read of the hit;
    and seconds per decoded token.

    about: where the numbers come from. error: relative error of the fit, 0 if there was none.
    """

    base: float
    per_token: float
    per_pair: float
    decode: float
    about: str
    error: float = 0.0
    per_hit: float = 0.0

    def seconds(self, hit: int, new: int) -> float:
        work = self.per_token * new + self.per_pair * pairs(hit, new)
        return self.base + work + self.per_hit * hit

    @classmethod
    def fit(
        cls, measured: Sequence[tuple[int, int, float]], decode: float, about: str
    ) -> PrefillTime:
        """Fit to (hit, new, seconds); relative errors count, and no coefficient is negative. Raises
        ValueError for fewer than four measurements.
        """
        from scipy.optimize import nnls  # half a second that no replay needs

        if len(measured) < 4:
            raise ValueError(f"a fit needs four measurements or more, not {len(measured)}")
        rows = np.array([[1.0, new, pairs(hit, new), hit] for hit, new, _ in measured])
        seconds = np.array([s for _, _, s in measured])
        scale = np.maximum(rows.max(axis=0), 1.0)
        weights, _ = nnls(rows / scale / seconds[:, None], np.ones(len(seconds)))
        base, per_token, per_pair, per_hit = (weights / scale).tolist()
        wrong = rows @ (weights / scale) / seconds - 1
        error = float(np.sqrt(np.mean(wrong**2)))
        return cls(base, per_token, per_pair, decode, about, error, per_hit)

    @classmethod
    def read(cls, path: Path) -> PrefillTime:
        """What `write` wrote. Raises ValueError, in one sentence."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror})") from error
        except msgspec.DecodeError as error:
            raise ValueError(f"{path} is no prefill time of fit_prefill.py ({error})") from error

    def write(self, path: Path) -> None:
        with whole_file(path) as file:
            write_line(file, asdict(self))


PAPER = PrefillTime(
    PAPER_BASE,
    PAPER_PER_TOKEN,
    0.0,
    decode=0.02,
    about="the paper's fit (Jamba-1.5-Mini, 4 A100); 20 ms per decoded token is assumed",
)


def pairs(hit: int, new: int) -> int:
    """Pairs of `new` tokens and those they attend to: all `hit` before, and each other causally."""
    return new * hit + new * (new + 1) // 2


def paper_ttft(outcomes: Iterable[Outcome]) -> Floats:
    """The paper's TTFT [n] in seconds: linear in the tokens that are computed, rounded up to a grid
    of 50 and cut at 31,950; no queue.
    """
    new = np.array([o.input_len - o.hit_len for o in outcomes])
    grid = np.minimum((new // PAPER_GRID + 1) * PAPER_GRID, PAPER_LONGEST)
    times: Floats = PAPER_BASE + PAPER_PER_TOKEN * grid
    return times


@dataclass(frozen=True, slots=True)
class Served:
    """A request in time. arrival: at the server, later than in the trace if the session's request
    before it was still under way. Seconds.
    """

    outcome: Outcome
    arrival: float
    start: float
    first_token: float
    end: float

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrival


FINISHED, PREFILLED, ARRIVED = range(3)  # at one moment, in this order


class Timeline:
    """One server: prefills one after the other; decoding beside them takes its time per token. A
    session's next request waits for the answer to the one before.

    order: which of the waiting requests is prefilled next; the one that came first by default.
    """

    def __init__(
        self,
        cache: Cache,
        time: PrefillTime,
        done: Callable[[], None] = lambda: None,
        order: QueueOrder[int] | None = None,
    ) -> None:
        self.cache = cache
        self.time = time
        self.done = done
        self.queue = WaitingQueue(cache, time, order or QueueOrder(FirstCome(), Bound()))
        self._events: list[tuple[float, int, int]] = []  # time, what, index of the request
        self._busy = False

    def run(self, requests: Sequence[Request]) -> list[Served]:
        """Serve all; the result is in the requests' order."""
        self._requests = requests
        self._tickets: dict[int, Ticket] = {}
        self._times = np.zeros((len(requests), 4))
        self._outcomes: list[Outcome | None] = [None] * len(requests)
        self._sessions: dict[int, deque[int]] = defaultdict(deque)
        for index, request in enumerate(requests):
            self._sessions[request.session].append(index)
        for waiting in self._sessions.values():
            self._release(waiting, 0.0)
        steps = {ARRIVED: self._arrived, PREFILLED: self._prefilled, FINISHED: self._finished}
        while self._events:
            now, what, index = heapq.heappop(self._events)
            steps[what](index, now)
        return [
            Served(outcome, *times)
            for outcome, times in zip(self._outcomes, self._times.tolist(), strict=True)
            if outcome is not None
        ]

    def _release(self, waiting: deque[int], now: float) -> None:
        if waiting:
            index = waiting.popleft()
            arrival = max(now, self._requests[index].arrival)
            heapq.heappush(self._events, (arrival, ARRIVED, index))

    def _arrived(self, index: int, now: float) -> None:
        self._times[index, 0] = now
        self.queue.add(index, self._requests[index], now)
        if not self._busy:
            self._start(now)

    def _start(self, now: float) -> None:
        index = self.queue.take(now)
        ticket = self._tickets[index] = self.cache.begin(self._requests[index])
        outcome = self._outcomes[index] = ticket.outcome
        self._times[index, 1] = now
        self._busy = True
        took = self.time.seconds(outcome.hit_len, outcome.input_len - outcome.hit_len)
        took += ticket.load_seconds
        heapq.heappush(self._events, (now + took, PREFILLED, index))

    def _prefilled(self, index: int, now: float) -> None:
        self.cache.prefilled(self._tickets[index])
        self._times[index, 2] = now
        request = self._requests[index]
        decoding = self.time.decode * (len(request.tokens) - request.input_len)
        heapq.heappush(self._events, (now + decoding, FINISHED, index))
        self._busy = False
        if len(self.queue):
            self._start(now)

    def _finished(self, index: int, now: float) -> None:
        self.cache.finished(self._tickets.pop(index))
        self.queue.ended(index)
        self._times[index, 3] = now
        self.done()
        self._release(self._sessions[self._requests[index].session], now)
