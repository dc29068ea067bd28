"""Finished requests: the latest in memory, bounded in bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_hybrid.core.returns.hints import Hint
from sglang_hybrid.core.server_settings import Split
from sglang_hybrid.simulation.traces.requests import TokenArray

RECORD_BYTES = 400
"""Of a record beside its tokens."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that ended. tokens: int32, its prompt of `input_len` tokens and its answer.

    arrival: seconds on any clock. room: what running requests left to the cache when it ended, KV
    tokens and state slots of two pools, or bytes of one memory. tenant: a name for who sent it, ""
    for a request without cache salt, extra key and adapter. hint: what its client said of the
    session.
    """

    tokens: TokenArray
    input_len: int
    arrival: float
    hit_len: int
    room: Split | int
    message_starts: tuple[int, ...] = ()
    tenant: str = ""
    hint: Hint | None = None

    @property
    def held_bytes(self) -> int:
        return RECORD_BYTES + self.tokens.nbytes + 8 * len(self.message_starts)


def compact(prompt: Sequence[int], answer: Sequence[int]) -> TokenArray:
    """Token ids as int32."""
    tokens = np.empty(len(prompt) + len(answer), dtype=np.int32)
    tokens[: len(prompt)] = prompt
    tokens[len(prompt) :] = answer
    return tokens


class Recorder:
    """The latest finished requests in at most `max_bytes`; the oldest are dropped."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._records: deque[Finished] = deque()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: Finished) -> None:
        self._records.append(record)
        self.held_bytes += record.held_bytes
        while self.held_bytes > self.max_bytes:
            self.held_bytes -= self._records.popleft().held_bytes

    def latest(self, count: int) -> list[Finished]:
        """The last `count` records, or as many as there are, in order of arrival."""
        skipped = max(0, len(self._records) - count)
        records = list(self._records)[skipped:]
        return sorted(records, key=lambda record: record.arrival)
