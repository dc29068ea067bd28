"""The state of the shared memory, and its last transitions (AVMP, arXiv 2605.22416)."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

KEPT_TRANSITIONS = 64


class MemoryState(Enum):
    """The states of the paper's monitor."""

    BALANCED = "balanced"
    KV_SHORT = "kv_short"
    STATES_SHORT = "states_short"
    REBALANCING = "rebalancing"


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of state: at how many seconds since the start, and which bytes it was about (short:
    bytes that are missing; rebalancing: bytes that move; balanced: 0).
    """

    seconds: float
    before: str
    after: str
    bytes: int


class Monitor:
    """The state in force and a ring of the last transitions."""

    def __init__(self) -> None:
        self.state = MemoryState.BALANCED
        self.entered = dict.fromkeys(MemoryState, 0)  # how often each state was entered
        self.transitions: deque[Transition] = deque(maxlen=KEPT_TRANSITIONS)
        self._start = time.monotonic()

    def enter(self, state: MemoryState, about: int = 0) -> None:
        """`state` is in force from now on; nothing is noted if it was already."""
        if state is self.state:
            return
        seconds = round(time.monotonic() - self._start, 6)
        self.transitions.append(Transition(seconds, self.state.value, state.value, about))
        self.entered[state] += 1
        self.state = state

    def as_dict(self) -> dict[str, Any]:
        """For /server_info."""
        return {
            "state": self.state.value,
            "entered": {state.value: times for state, times in self.entered.items()},
            "transitions": [asdict(transition) for transition in self.transitions],
        }
