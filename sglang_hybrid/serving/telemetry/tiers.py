"""Counts of what went between the device and the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sglang_hybrid.core.tiers.rates import Link


@dataclass
class TierStats:
    """Totals since the cache was built.

    token_bytes, state_bytes: of one KV token and of one state on the host. written_*: copies made
    there. not_written: nodes that were not worth their writing. offloaded: nodes that were copied
    before the device gave them up. loads: transfers from the host, their bytes, how long they took
    and how long they were expected to take, in seconds. loaded_requests: requests that resumed from
    the host. demoted: nodes that the device gave up and the host kept. failed_loads: requests that
    could not, and computed. hit_tokens: of requests, by the tier that they came from.
    """

    token_bytes: int = 0
    state_bytes: int = 0
    written_tokens: int = 0
    written_states: int = 0
    not_written: int = 0
    offloaded: int = 0
    loads: int = 0
    loaded_requests: int = 0
    demoted: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    expected_seconds: float = 0.0
    failed_loads: int = 0
    hit_tokens: dict[str, int] = field(default_factory=lambda: {"device": 0, "host": 0})

    @property
    def written_bytes(self) -> int:
        """Bytes of all copies made on the host."""
        return self.bytes_of(self.written_tokens, self.written_states)

    def bytes_of(self, tokens: int, states: int) -> int:
        """Bytes that so many KV tokens and states take on the host."""
        return tokens * self.token_bytes + states * self.state_bytes

    def on_write(self, tokens: int, states: int) -> None:
        """Count copies of so many KV tokens and states that were made on the host."""
        self.written_tokens += tokens
        self.written_states += states

    def on_load(self, ack: Any, link: Link) -> None:
        """SGLang acknowledges a load (`HiCacheAck`); `link` says what was expected of it."""
        self.loads += 1
        self.loaded_bytes += ack.num_bytes
        if ack.timing_enabled:
            self.load_seconds += ack.start_event.elapsed_time(ack.finish_event) / 1e3
            self.expected_seconds += link.seconds(ack.num_bytes)

    def as_dict(self) -> dict[str, Any]:
        """The values for /server_info."""
        return {**vars(self), "written_bytes": self.written_bytes}
