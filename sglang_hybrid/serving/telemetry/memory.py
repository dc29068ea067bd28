"""Prometheus metrics of one memory: who has the bytes, and which were moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_hybrid.core.memory.account import Account

PREFIX = "sglang_hybrid:memory_"


class MemoryMetrics:
    """Gauges and counters that follow an `Account`; `update` copies what has changed since."""

    def __init__(self, account: Account) -> None:
        # Imported here as in metrics.py: prometheus_client chooses its mode at import.
        from prometheus_client import Counter, Gauge

        self._account = account
        self._seen: dict[str, float] = {}
        self._bytes = Gauge(
            PREFIX + "bytes",
            "Bytes that a kind uses, wastes (rows of granules that are partly used, padding), or "
            "keeps for its next use.",
            ["kind", "part"],
            multiprocess_mode="mostrecent",
        )
        self._free = Gauge(
            PREFIX + "free_bytes",
            "Bytes that nobody uses or wastes.",
            multiprocess_mode="mostrecent",
        )
        self._state = Gauge(
            PREFIX + "state",
            "1 for the state of the memory in force.",
            ["state"],
            multiprocess_mode="mostrecent",
        )
        self._moved = Counter(
            PREFIX + "moved_bytes", "Bytes that a kind got from the other one.", ["kind"]
        )
        self._totals = {
            "moves": Counter(PREFIX + "moves", "Times that one kind gave bytes to the other."),
            "failed_moves": Counter(
                PREFIX + "failed_moves", "Moves that the system refused; nothing was changed."
            ),
            "move_seconds": Counter(PREFIX + "move_seconds", "Seconds that moves took."),
        }
        self.update()

    def update(self) -> None:
        """Bring all of them up to the account."""
        account = self._account
        for part in ("used", "waste", "kept"):
            for kind, size in getattr(account, part).items():
                self._bytes.labels(kind.value, part).set(size)
        self._free.set(account.free)
        for state in account.monitor.entered:
            self._state.labels(state.value).set(float(state is account.monitor.state))
        for kind, size in account.moved.items():
            self._moved.labels(kind.value).inc(self._since(kind.value, size))
        for name, counter in self._totals.items():
            counter.inc(self._since(name, getattr(account, name)))

    def _since(self, name: str, total: float) -> float:
        added = total - self._seen.get(name, 0.0)
        self._seen[name] = total
        return added
