"""The future, for policies that may know it: the next request that could resume at a position."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_hybrid.core.records.nodes import NEVER, Node
from sglang_hybrid.core.traffic.requests import Request, TokenArray
from sglang_hybrid.extensions.lab.simulation.token_tree import TokenTree


@dataclass(frozen=True, slots=True)
class Steps:
    """The next use of every position on one sequence: `ticks[i]` for depths up to `depths[i]`, both
    rising; NEVER below the last.
    """

    depths: list[int]
    ticks: list[float]

    def at(self, depth: int) -> float:
        index = bisect_left(self.depths, depth)
        return self.ticks[index] if index < len(self.ticks) else NEVER


class Oracle:
    """The next use of each position on the path of each request of a trace. The trace is read from
    its end, so that the last request seen at a position is the next one to come.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        tree = TokenTree()
        steps: list[Steps] = []
        for index in range(len(requests) - 1, -1, -1):
            request = requests[index]
            steps.append(self._look(tree, request.tokens, request.tenant))
            self._pass(tree, request.tokens[: request.input_len - 1], index + 1, request.tenant)
        self._steps = steps[::-1]
        self._requests = list(requests)  # their identities are the keys
        self._ticks = {id(request): tick for tick, request in enumerate(requests, start=1)}

    def tick(self, request: Request) -> int:
        """The tick at which `request`, one of the trace's own objects, comes: 1 for the first."""
        return self._ticks[id(request)]

    def next_use(self, request: Request, depth: int, now: int) -> float:
        """The first tick after `now` at which a prompt passes position `depth` of `request` and
        could resume there; NEVER if none does.
        """
        tick = float(self.tick(request))
        while tick <= now:
            tick = self._steps[int(tick) - 1].at(depth)
        return tick

    @staticmethod
    def _look(tree: TokenTree, tokens: TokenArray, tenant: str) -> Steps:
        path, matched = tree.find(tokens, tenant=tenant)
        depths: list[int] = []
        ticks: list[float] = []
        for node in tree.beyond(path, matched, tokens, tenant):
            if ticks and ticks[-1] == node.history_node:
                depths.pop(), ticks.pop()
            depths.append(min(node.depth, matched))
            ticks.append(node.history_node)
        return Steps(depths, ticks)

    @staticmethod
    def _pass(tree: TokenTree, prompt: TokenArray, tick: int, tenant: str) -> None:
        """A request of `tenant` passes every position of `prompt` at `tick`."""
        path, matched = tree.find(prompt, tenant=tenant)
        deepest = path[-1] if path else tree.root
        if matched > deepest.depth:
            below = tree.beyond(path, matched, prompt, tenant)[-1]
            deepest = tree.cut(below, matched)
            path = [*path, deepest]
        if matched < len(prompt):
            path = [*path, tree.grow(deepest, prompt[matched:], tenant)]
        for node in path:
            node.history_node = float(tick)


class NextUses:
    """The next use of each node of a cache, for policies that are told of the future
    (`told.Knowledge`).
    """

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._now = 0
        self._request: Request | None = None
        self._ticks: dict[int, float] = {}  # by node id

    def on_request(self, request: Request) -> None:
        self._request = request

    def on_path(self, request: Request, path: Sequence[Node]) -> Sequence[Node]:
        self._request = request
        self._now = max(self._now, self._oracle.tick(request))
        for node in path:
            self._ticks[node.id] = self._oracle.next_use(request, node.depth, self._now)
        return path

    def forget(self, node: Node) -> None:
        self._ticks.pop(node.id, None)

    def of(self, node: Node) -> float:
        """The tick at which a prompt passes `node` next; NEVER if none does. A node of no tree is a
        state that the latest request could leave.
        """
        if node.parent is None and self._request is not None:
            now = max(self._now, self._oracle.tick(self._request))
            return self._oracle.next_use(self._request, node.depth, now)
        return self._ticks.get(node.id, NEVER)
