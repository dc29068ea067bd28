"""How long a replica takes to the first token of a prompt, and how often it was predicted right."""

from __future__ import annotations

from collections import deque
from typing import Final

ASSUMED_RATE: Final = 10_000.0  # tokens per second of a server that has not measured its prefills
RECENT: Final = 32  # predictions that are remembered
TOO_MANY_WRONG: Final = 8  # of them: what is known of the replica is not true
WEIGHT: Final = 0.1  # of the latest prompt in the typical prefill


class ReplicaLoad:
    """waiting: requests that wait there for their prefill. prefill_tokens_per_second: None while
    it is unknown. right, wrong: predictions that were and that were not as served.
    """

    def __init__(self) -> None:
        self.waiting = 0
        self.prefill_tokens_per_second: float | None = None
        self.right = self.wrong = 0
        self._recent: deque[bool] = deque(
            maxlen=RECENT
        )  # for each prediction, whether it was wrong
        self._typical: float | None = None  # tokens of a prefill that was sent there

    def on_status(self, waiting: int, prefill_tokens_per_second: float | None) -> None:
        """The server says how busy it is."""
        self.waiting = waiting
        self.prefill_tokens_per_second = prefill_tokens_per_second

    def on_choice(self, left: int) -> None:
        """A prompt of which `left` tokens are not cached is sent there. It counts as waiting until
        the next status.
        """
        before = left if self._typical is None else self._typical
        self._typical = before + WEIGHT * (left - before)
        self.waiting += 1

    def seconds(self, left: int, total: int) -> float:
        """Expected seconds to the first token of a prompt of `total` tokens of which `left` are not
        cached: a typical prefill for each request that waits, and this one. Until a prompt was sent
        there, a typical prefill has `total` tokens.
        """
        typical = total if self._typical is None else self._typical
        rate = self.prefill_tokens_per_second or ASSUMED_RATE
        return (self.waiting * typical + left) / rate

    def is_doubtful_after(self, predicted: int, served: int) -> bool:
        """Count a prompt that was resumed at `served` tokens where `predicted` were expected.
        Returns whether more than TOO_MANY_WRONG of the last RECENT were wrong; then these are
        forgotten.
        """
        is_wrong = predicted != served
        self.wrong += is_wrong
        self.right += not is_wrong
        self._recent.append(is_wrong)
        if sum(self._recent) <= TOO_MANY_WRONG:
            return False
        self._recent.clear()
        return True
