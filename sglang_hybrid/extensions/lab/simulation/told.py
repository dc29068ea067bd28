"""Caches whose policies are told more than the cache's own records say: the future, or what agents
do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from sglang_hybrid.core.records.nodes import Node
from sglang_hybrid.core.returns.history import HistoryMatch
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.lab.simulation.server_simulator import (
    Running,
    ServerSimulator,
    way_to,
)
from sglang_hybrid.extensions.lab.simulation.simulator import Simulator, Ticket
from sglang_hybrid.extensions.lab.simulation.tiers.tier_simulator import TieredSimulator


class Knowledge(Protocol):
    """The knowledge that all policies of one cache share."""

    def on_request(self, request: Request) -> None:
        """States of `request`, which are in no tree yet, are compared with victims from now on."""

    def on_path(self, request: Request, path: Sequence[Node]) -> Iterable[Node]:
        """`request` found or left the nodes on `path`. Returns the nodes to be described anew."""
        ...

    def forget(self, node: Node) -> None:
        """Called when `node` has left the cache."""


class Told(Simulator):
    """Tells `knowledge` of every request and of the nodes on its path."""

    knowledge: Knowledge

    def _match_history(self, request: Request) -> HistoryMatch | None:
        self.knowledge.on_request(request)
        return super()._match_history(request)

    def _on_path(self, request: Request, path: list[Node]) -> None:
        for node in self.knowledge.on_path(request, path):
            self.tree.mark_dirty(node)


class ToldServer(Told, ServerSimulator):
    """`Told` as it is served."""

    def end_prefill(self, ticket: Ticket) -> None:
        self.knowledge.on_request(ticket.request)
        super().end_prefill(ticket)

    def _on_publish(self, running: Running) -> None:
        self._on_path(running.request, list(way_to(running.locked_node)))


class ToldTiers(Told, TieredSimulator):
    """`Told` with tiers below the device."""
