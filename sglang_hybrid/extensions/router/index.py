"""Finds the replicas that can resume a prompt: one index of the prefixes that all of them hold."""

from __future__ import annotations

import operator
import threading
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from sglang_hybrid.core.tiers.published import KV, STATE
from sglang_hybrid.core.tiers.rates import Tier
from sglang_hybrid.extensions.router import tree
from sglang_hybrid.extensions.router.resumable import Resumable, answers, note_deepest
from sglang_hybrid.extensions.router.tokens import TOKEN_BYTES, Tokens, as_bytes
from sglang_hybrid.extensions.router.tree import ReplicaNode, Root

MOST_TOKENS: Final = 1 << 28
MOST_NODES: Final = 1 << 22
"""The most that a replica may hold here, so that none takes all of the router's memory: with 4
bytes of each token and about 400 of each node, 3 GB at most.
"""


class LostMessages(Exception):
    """A replica speaks of a block that it never said it had."""


class Holdings(NamedTuple):
    """The content of a replica in numbers. positions: where it has a state, by the tier of the
    state.
    """

    nodes: int
    tokens: int
    positions: tuple[int, int, int]


class _Replica:
    """The records of one replica.

    number: its place among the bits of a node. ends: for the last hash of each event, the node that
    ends with this block. nodes: all nodes of which it holds something, each with its hash in
    `ends`, or None where an edge was cut for another replica. size: bytes of their edges.
    """

    __slots__ = ("block_size", "ends", "nodes", "number", "size")

    def __init__(self, number: int) -> None:
        self.number = number
        self.block_size = 0
        self.ends: dict[int, ReplicaNode] = {}
        self.nodes: dict[ReplicaNode, int | None] = {}
        self.size = 0


class ReplicaIndex:
    """The prefixes of all replicas in radix trees: one for each tenant and size of block.

    `store`, `remove` and `clear` follow the events of a replica, from one thread. `resume` answers
    for a prompt, from any thread; it waits for one node or one chain of blocks, not for all that a
    replica gives up. A tree has an object for each stretch of tokens between two cuts, not for each
    token.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replicas: dict[str, _Replica] = {}
        self._numbered: list[str | None] = []  # names by number; None where one was forgotten
        self._everyone = 0  # all bits of those that have a number
        self._roots: dict[str, dict[int, Root]] = {}  # by tenant and bytes of a block

    def store(
        self,
        replica: str,
        *,
        parent: int | None,
        hashes: Sequence[int],
        tokens: Tokens,
        block_size: int,
        tier: Tier = Tier.DEVICE,
        components: Collection[str] = (KV, STATE),
        tenant: str = "",
    ) -> None:
        """A replica holds `components` of these blocks in `tier`.

        parent: hash of the block before the first one, None at the beginning of a prompt. hashes:
        one for each block; only the last one is remembered. "full" is the KV, and replaces what was
        said of these blocks before; "mamba" is a state at the end of each block. "mamba" alone adds
        states and leaves the tier of the KV as it is.

        Raises LostMessages if `parent` is unknown for this replica, and ValueError if the sizes do
        not fit together, another block size was given before, or the replica holds more than
        MOST_TOKENS tokens or MOST_NODES nodes.
        """
        content = as_bytes(tokens)
        width = operator.index(block_size) * TOKEN_BYTES
        if width <= 0 or len(content) != len(hashes) * width:
            raise ValueError(
                f"{len(hashes)} blocks of {block_size} tokens do not have "
                f"{len(content) // TOKEN_BYTES} tokens"
            )
        if not hashes or not (KV in components or STATE in components):
            return
        end = operator.index(hashes[-1])
        with self._lock:
            one = self._add(replica)
            if one.block_size not in (0, block_size):
                raise ValueError(
                    f"{replica} has blocks of {one.block_size} tokens; it cannot have blocks of "
                    f"{block_size} as well"
                )
            if one.size + len(content) > MOST_TOKENS * TOKEN_BYTES or len(one.nodes) >= MOST_NODES:
                raise ValueError(
                    f"{replica} holds more than {MOST_TOKENS:,} tokens or {MOST_NODES:,} nodes"
                )
            if parent is None:
                top: ReplicaNode = self._roots.setdefault(tenant, {}).setdefault(
                    width, Root(tenant, width)
                )
            elif parent in one.ends:
                top = one.ends[parent]
            else:
                raise LostMessages(f"{replica} stores blocks after the unknown block {parent}")
            one.block_size = block_size
            path, cuts = tree.extend(top, content, width)
            for upper in cuts:
                self._share(upper)
            for node in path:
                _hold(one, node, tier, components)
            _end_with(one, path[-1], end)

    def remove(self, replica: str, hashes: Sequence[int]) -> None:
        """A replica holds nothing of these blocks any more, in no tier.

        hashes: chains of blocks, each from its top to its end, one chain after the other; the end
        of each was the last hash of a `store`. Unknown hashes are ignored.
        """
        one = self._replicas.get(replica)
        left = len(hashes)
        while one is not None and left:
            node = one.ends.get(hashes[left - 1])
            if node is None:
                left -= 1
                continue
            with self._lock:
                left = self._remove_chain(one, node, hashes, left)

    def clear(self, replica: str) -> None:
        """A replica holds nothing any more. It stays known."""
        with self._lock:
            one = self._add(replica)
        while one.nodes:  # also those that a cut for another replica made meanwhile
            for node in list(one.nodes):
                with self._lock:
                    if node in one.nodes:
                        self._release(one, node)
        one.block_size = 0

    def forget(self, replica: str) -> None:
        """A replica is gone: `resume` does not answer for it any more."""
        self.clear(replica)
        with self._lock:
            one = self._replicas.pop(replica)
            self._numbered[one.number] = None

    def resume(self, tokens: Tokens, tenant: str = "") -> list[Resumable]:
        """The position at which each known replica can resume a prompt: the deepest one before the
        last token with a state and with all KV up to there.
        """
        prompt = as_bytes(tokens)
        limit = len(prompt) - TOKEN_BYTES  # the last token's logits are needed
        with self._lock:
            deepest = [0] * (tree.TIER_COUNT * len(self._numbered))
            for width, root in self._roots.get(tenant, {}).items():
                ends, holders = tree.stops(root, prompt, limit, self._everyone, width)
                note_deepest(deepest, ends, holders)
            return answers(self._numbered, deepest)

    def holdings(self, replica: str) -> Holdings:
        """The content of a replica in numbers; zeros if it is unknown."""
        with self._lock:
            one = self._replicas.get(replica)
            tokens, positions = 0, [0, 0, 0]
            for node in [] if one is None else one.nodes:
                assert one is not None
                size = len(node.edge) // TOKEN_BYTES
                tokens += size if tree.tier_of(node.kv, one.number) is not None else 0
                tier = tree.tier_of(node.state, one.number)
                if tier is not None:
                    inner = node.inner & tree.bits_of(one.number)
                    positions[tier] += size // one.block_size if inner else 1
            nodes = 0 if one is None else len(one.nodes)
            return Holdings(nodes, tokens, (positions[0], positions[1], positions[2]))

    def check_integrity(self) -> None:
        """Raise AssertionError if what is kept for the replicas and the trees contradict each
        other, or a node is held by nobody and has no children.
        """
        seen: set[ReplicaNode] = set()
        for width, root in [each for of in self._roots.values() for each in of.items()]:
            assert root.children
            for node in tree.walk(root):
                seen.add(node)
                above = node.parent
                assert above is not None and above.children[node.edge[:width]] is node
                assert node.edge and len(node.edge) % width == 0
                assert node.children or node.kv or node.state
                for one in self._replicas.values():
                    assert node.is_held_by(one.number) == (node in one.nodes)
        for one in self._replicas.values():
            assert seen.issuperset(one.nodes)
            named = {end: node for node, end in one.nodes.items() if end is not None}
            assert named == one.ends
            assert one.size == sum(len(node.edge) for node in one.nodes)

    def _add(self, replica: str) -> _Replica:
        one = self._replicas.get(replica)
        if one is None:
            if None not in self._numbered:
                self._numbered.append(None)
                self._everyone = (1 << tree.TIER_COUNT * len(self._numbered)) - 1
            one = self._replicas[replica] = _Replica(self._numbered.index(None))
            self._numbered[one.number] = replica
        return one

    def _share(self, upper: ReplicaNode) -> None:
        """Note a node that a cut made for all who hold it."""
        for one in self._replicas.values():
            if upper.is_held_by(one.number):
                one.nodes[upper] = None

    def _remove_chain(
        self, one: _Replica, node: ReplicaNode, hashes: Sequence[int], left: int
    ) -> int:
        """Remove the chain that ends with `node`, whose hash is the last of the first `left`.
        Returns how many hashes are left before this chain.
        """
        width = one.block_size * TOKEN_BYTES
        while True:
            is_held, blocks = node in one.nodes, len(node.edge) // width
            if blocks > left:
                if not is_held:
                    return 0
                self._share(tree.cut(node, (blocks - left) * width, width))
                blocks = left
            above = node.parent
            if is_held:
                self._release(one, node)
            left -= blocks
            if not left or above is None or above.parent is None:
                return left
            if one.nodes.get(above) not in (None, hashes[left - 1]):  # another chain ends here
                return left
            node = above

    def _release(self, one: _Replica, node: ReplicaNode) -> None:
        """A replica holds nothing of `node` any more."""
        end = one.nodes.pop(node)
        one.size -= len(node.edge)
        if end is not None:
            del one.ends[end]
        node.remove(one.number)
        top = tree.prune(node, one.block_size * TOKEN_BYTES)
        if isinstance(top, Root) and not top.children:
            del self._roots[top.tenant][top.width]
            if not self._roots[top.tenant]:
                del self._roots[top.tenant]


def _hold(one: _Replica, node: ReplicaNode, tier: Tier, components: Collection[str]) -> None:
    """A replica holds `components` of `node` in `tier`."""
    if node not in one.nodes:
        one.nodes[node] = None
        one.size += len(node.edge)
    if KV in components:
        node.put_kv(one.number, tier)
        node.remove_states(one.number)
    if STATE in components:
        node.put_states(one.number, tier)


def _end_with(one: _Replica, node: ReplicaNode, end: int) -> None:
    """The last block of `node` has the hash `end`."""
    before, other = one.nodes[node], one.ends.get(end)
    if before is not None and before != end:
        del one.ends[before]
    if other is not None and other is not node:
        one.nodes[other] = None
    one.nodes[node] = end
    one.ends[end] = node
