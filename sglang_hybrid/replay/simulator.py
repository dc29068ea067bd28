"""A trace-driven cache: the server's tree, candidates and policies, with a byte budget and without
a model.

One shared budget; a request's prompt is matched and its checkpoints and tail are inserted at once,
so requests do not overlap. Admission is the paper's: the branch point of the prompt, if it gains
enough tokens, and the last token. A policy that keeps a history also knows branch points whose KV
was evicted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sglang_hybrid.core.admission import Prefill, Room, decide
from sglang_hybrid.core.cost import CostModel
from sglang_hybrid.core.eviction import Policy
from sglang_hybrid.core.nodes import Kind, Node, NodeTree
from sglang_hybrid.core.pool import Pool, Scarce
from sglang_hybrid.replay.traces import Request, TokenArray


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one request found: tokens skipped, and how far KV alone reached. hit_len <= kv_len <
    input_len.
    """

    input_len: int
    hit_len: int
    kv_len: int


def hit_rate(outcomes: Iterable[Outcome]) -> float:
    """Skipped tokens over prompt tokens."""
    outcomes = list(outcomes)
    return sum(o.hit_len for o in outcomes) / sum(o.input_len for o in outcomes)


class Simulator:
    """A cache of at most `budget` bytes (None: unbounded) that evicts by `policy`. `used` is what
    it holds now.
    """

    def __init__(
        self, cost: CostModel, budget: int | None, policy: Policy, min_branch_tokens: int = 16
    ) -> None:
        self.cost = cost
        self.budget = budget
        self.min_branch_tokens = min_branch_tokens
        self.tree = NodeTree()
        self.policy = policy
        self.pool = Pool(Scarce.SHARED, cost, policy, self.tree.clock)
        self.tree.listen(self.pool)
        self.used = 0

    def run(self, requests: Iterable[Request]) -> list[Outcome]:
        """Serve every request, in order."""
        return [self.serve(request) for request in requests]

    def serve(self, request: Request) -> Outcome:
        """Match the prompt, then insert the whole sequence with the checkpoints it deserves."""
        self.tree.clock.advance(request.arrival)
        usable = request.input_len - 1  # the last prompt token is always computed
        path, matched = self._walk(request.tokens)
        hit = self.tree.root
        for node in path:
            if node.has_state and node.depth <= usable:
                hit = node
        if hit is not self.tree.root:
            self.tree.hit(hit)
        prefill = Prefill(
            request.input_len, hit.depth, min(matched, usable), self._known_branch(request)
        )
        branch = (prefill.branch_point(), Kind.BRANCH)
        decided = decide([branch], prefill, Room(free_slots=1), self.min_branch_tokens)
        ends = {c.position: c.kind for c in decided if c.admitted}
        ends[len(request.tokens)] = Kind.TAIL
        path = self._insert(request.tokens, path, matched, ends)
        self._remember(request, path)
        return Outcome(prefill.prompt_len, prefill.hit_len, prefill.kv_len)

    def _known_branch(self, request: Request) -> int:
        history = self.policy.history
        return 0 if history is None else history.meet(request.tokens[: request.input_len]).branch

    def _remember(self, request: Request, path: list[Node]) -> None:
        history = self.policy.history
        if history is not None:
            trail = history.observe(request.tokens, request.input_len, self.tree.clock)
            for node in path:
                self.tree.trace(node, trail.at(node.depth))

    def _insert(
        self, tokens: TokenArray, path: list[Node], matched: int, ends: dict[int, Kind]
    ) -> list[Node]:
        """Store `tokens` with states at `ends`; return the nodes on their path. What cannot fit is
        not stored at all.
        """
        stored = {node.depth for node in path if node.has_state}
        needed = (len(tokens) - matched) * self.cost.kv_bytes_per_token
        needed += len(ends.keys() - stored) * self.cost.state_bytes
        touched = self._path_to(path, matched, tokens)
        if not self._make_room(needed, touched):
            return path
        self.used += needed
        at = {node.depth: node for node in path}
        for cut in sorted({matched, *ends} - at.keys() - {0}):
            if cut <= matched:
                at[cut] = self._split(next(node for node in touched if node.depth > cut), cut)
        start = matched
        for end in sorted(end for end in ends if end > matched):
            parent = at[start] if start else self.tree.root
            at[end] = self.tree.add(parent, int(tokens[start]), end - start)
            at[end].owner = tokens[start:end]
            start = end
        for end, kind in ends.items():
            self.tree.give_state(at[end], kind)
        return list(at.values())

    def _make_room(self, needed: int, path: list[Node]) -> bool:
        """Evict until `needed` bytes fit; False if they cannot. What is on `path` stays."""
        if self.budget is None or self.used + needed <= self.budget:
            return True
        kept = path[-1].depth * self.cost.kv_bytes_per_token if path else 0
        kept += sum(node.has_state for node in path) * self.cost.state_bytes
        if kept + needed > self.budget:
            return False
        for node in path:
            self.tree.hold(node, kv=True, state=True)
        while self.used + needed > self.budget:
            victim = self.pool.victim()
            if victim is None:
                break
            self._evict(victim)
        for node in path:
            self.tree.hold(node, kv=False, state=False)
        return self.used + needed <= self.budget

    def _evict(self, node: Node) -> None:
        if node.has_state:
            self.used -= self.cost.state_bytes
        if node.children:
            self.tree.drop_state(node)
        else:
            self.used -= node.tokens * self.cost.kv_bytes_per_token
            self.tree.remove(node)

    def _walk(self, tokens: TokenArray) -> tuple[list[Node], int]:
        """Nodes that `tokens` cover to their end, and how many tokens are stored, the part of an
        edge included.
        """
        path: list[Node] = []
        node, matched, total = self.tree.root, 0, len(tokens)
        while matched < total:
            child = node.children.get(int(tokens[matched]))
            if child is None:
                break
            edge: TokenArray = child.owner
            same = min(len(edge), total - matched)
            differ = edge[:same] != tokens[matched : matched + same]
            first = int(differ.argmax())
            if differ[first]:
                return path, matched + first
            matched += same
            if same < len(edge):
                break
            path.append(child)
            node = child
        return path, matched

    def _path_to(self, path: list[Node], matched: int, tokens: TokenArray) -> list[Node]:
        """`path`, and the node whose edge `matched` ends on."""
        deepest = path[-1] if path else self.tree.root
        if matched == deepest.depth:
            return path
        return [*path, deepest.children[int(tokens[deepest.depth])]]

    def _split(self, node: Node, depth: int) -> Node:
        """Cut `node`'s edge at `depth` and return the new node that ends there."""
        edge: TokenArray = node.owner
        head_tokens = node.tokens - (node.depth - depth)
        head = self.tree.split(node, head_tokens, int(edge[0]), int(edge[head_tokens]))
        head.owner, node.owner = edge[:head_tokens], edge[head_tokens:]
        return head
