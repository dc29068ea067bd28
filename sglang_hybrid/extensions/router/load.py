"""The time of a replica to the first token of a prompt, and the quality of predictions."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from sglang_hybrid.core.records.edges import common_bytes
from sglang_hybrid.core.tiers.rates import Tier
from sglang_hybrid.extensions.router.resumable import Resumable
from sglang_hybrid.extensions.router.tokens import TOKEN_BYTES

ASSUMED_RATE: Final = 10_000.0  # tokens per second of a server that has not measured its prefills
RECENT: Final = 32  # predictions that are remembered
TOO_MANY_WRONG: Final = 8  # of them: what is known of the replica is not true
WEIGHT: Final = 0.1  # of the latest prompt in the typical prefill
MOST_BYTES: Final = 64 << 20  # of the prompts that are kept; beyond, only their numbers are
FORGOTTEN: Final = 60.0  # seconds after which nobody will say any more that an answer began


class _Sent(NamedTuple):
    """A prompt that was sent and is not answered: its tenant and tokens (int32), how many of them
    are to be prefilled, and when it was sent.
    """

    tenant: str
    prompt: bytes
    left: float
    at: float


class ReplicaLoad:
    """The prefills of one replica before a prompt that is sent now.

    waiting: requests that the server says wait there, whoever sent them. prefill_tokens_per_second:
    None while it is unknown. room: tokens that can be computed and kept there without an eviction,
    None if that is unknown. loads: for a tier, seconds of a state and of each token of KV. sent:
    prompts that were sent there, so far. typical: tokens of a prefill that was sent there. right,
    wrong: predictions that were and that were not as served.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.waiting = 0
        self.prefill_tokens_per_second: float | None = None
        self.room: int | None = None
        self.loads: Mapping[Tier, tuple[float, float]] = {}
        self.sent = 0
        self.typical = 0.0
        self.right = self.wrong = 0
        self._clock = clock
        self._recent: deque[bool] = deque(maxlen=RECENT)  # of each prediction, whether it was wrong
        self._unanswered: dict[int, _Sent] = {}

    def on_status(
        self,
        waiting: int,
        prefill_tokens_per_second: float | None,
        room: int | None = None,
        loads: Mapping[Tier, tuple[float, float]] | None = None,
    ) -> None:
        """The server says how busy it is."""
        self.waiting = waiting
        self.prefill_tokens_per_second = prefill_tokens_per_second
        self.room = room
        self.loads = loads or {}

    def on_choice(self, number: int, tenant: str, prompt: bytes, left: float) -> None:
        """Request `number` is sent there; `left` of its tokens are expected to be prefilled."""
        now = self._clock()
        for old in [old for old, sent in self._unanswered.items() if now - sent.at > FORGOTTEN]:
            del self._unanswered[old]
        self.sent += 1
        self.typical += (left - self.typical) * (WEIGHT if self.typical else 1.0)
        kept = sum(len(each.prompt) for each in self._unanswered.values())
        known = prompt if kept + len(prompt) <= MOST_BYTES else b""
        self._unanswered[number] = _Sent(tenant, known, left, now)

    def on_answer(self, number: int) -> None:
        """Note that request `number` has its first token, or has ended without one."""
        self._unanswered.pop(number, None)

    def on_its_way(self, tenant: str, prompt: bytes) -> int:
        """The number of tokens that `prompt` has in common with one of its tenant that is being
        prefilled there: a state will be there when it has waited for that.
        """
        sent = [each.prompt for each in self._unanswered.values() if each.tenant == tenant]
        return max((common_bytes(each, prompt, 0) for each in sent), default=0) // TOKEN_BYTES

    def way(self, found: Resumable) -> tuple[int, float]:
        """The position at which the server would resume, and the seconds of loads before that: it
        loads nothing that is computed sooner.
        """
        more = found.position - found.device_position
        state, token = self.loads.get(found.tier, (0.0, 0.0))
        seconds = state + more * token if more else 0.0
        if seconds > self.prefill_seconds(more):
            return found.device_position, 0.0
        return found.position, seconds

    def seconds(self, left: float) -> float:
        """Expected seconds to the first token of a prompt with `left` tokens to be prefilled: after
        all that was sent there, and a typical prefill for each request of somebody else's.
        """
        own = self._left()
        others = max(0, self.waiting - len(self._unanswered)) * (self.typical or left)
        return self.prefill_seconds(own + others + left)

    def displaces(self, left: float) -> bool:
        """True if a prefill of `left` tokens takes the place of what is cached there, as far as is
        known.
        """
        return self.room is None or self._left() + left > self.room

    def _left(self) -> float:
        """Tokens that were sent there and are not prefilled, as far as is known."""
        return sum(sent.left for sent in self._unanswered.values())

    @property
    def rate(self) -> float:
        """Tokens per second of a prefill, assumed where they are unknown."""
        return self.prefill_tokens_per_second or ASSUMED_RATE

    def prefill_seconds(self, tokens: float) -> float:
        """The seconds of a prefill of so many tokens, alone."""
        return tokens / self.rate

    def is_doubtful_after(self, predicted: int, served: int) -> bool:
        """Count a prompt that was resumed at `served` tokens where `predicted` were expected; more
        are no error, since another request may have computed them meanwhile. Returns whether more
        than TOO_MANY_WRONG of the last RECENT were wrong; then these are forgotten.
        """
        is_wrong = served < predicted
        self.wrong += is_wrong
        self.right += not is_wrong
        self._recent.append(is_wrong)
        if sum(self._recent) <= TOO_MANY_WRONG:
            return False
        self._recent.clear()
        return True
