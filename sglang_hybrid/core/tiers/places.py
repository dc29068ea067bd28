"""Copies of the KV and the states of nodes, the cheapest way to a position, and what a copy is
worth.

The value of a copy is what it saves over the next best way to the same point (design.md 7):

    value per byte and second = G * (seconds of the next best way - seconds of this way) / bytes

G, the rate at which requests return, is the policy's (core/victims/eviction.py). Here are the
seconds and the bytes. The tree holds every node that has KV in some tier; a node has a state
(`has_state`) if that has a copy in some tier that counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.records.node_tree import NodeTree
from sglang_hybrid.core.records.nodes import Node
from sglang_hybrid.core.tiers.rates import TIERS, Speeds, Tier

ALL_TIERS = (1 << len(TIERS)) - 1
"""The mask of all tiers."""

FASTEST = (None, *(Tier((mask & -mask).bit_length() - 1) for mask in range(1, 1 << len(TIERS))))
"""The fastest tier of each mask of tiers; None for no tier."""


class Copies:
    """Copies of one node, as masks with bit `1 << tier` for each tier.

    kv, state: tiers that hold the KV of its edge, and its state. pinned: tiers whose copies a
    transfer reads or writes now, so that they are no victims; on the device the node's own locks
    say so besides. kv_children: number of children with KV, by tier. refused: the node's last use
    (tick) when a tier below the device evicted the state, or was not given it, while a faster tier
    kept it. inexact: what the device has was loaded from a smaller copy that is not exact. uses:
    requests that have computed or passed the node, where a replay counts them.
    """

    __slots__ = ("inexact", "kv", "kv_children", "pinned", "refused", "state", "uses")

    def __init__(self, kv: int = 0, state: int = 0) -> None:
        self.kv = kv
        self.state = state
        self.pinned = 0
        self.refused = -1
        self.uses = 0
        self.inexact = False
        self.kv_children = [0] * len(TIERS)

    def __repr__(self) -> str:
        names = [
            [tier.name for tier in TIERS if mask >> tier & 1] for mask in (self.kv, self.state)
        ]
        return f"Copies(kv {names[0]}, state {names[1]})"

    def has_kv(self, tier: Tier) -> bool:
        return bool(self.kv >> tier & 1)

    def has_state(self, tier: Tier) -> bool:
        return bool(self.state >> tier & 1)

    def is_pinned(self, tier: Tier) -> bool:
        return bool(self.pinned >> tier & 1)

    def of_head(self) -> Copies:
        """The copies of the new node above, when the edge of this node is cut: the same KV, no
        state.
        """
        head = Copies(self.kv)
        head.pinned, head.inexact, head.uses = self.pinned, self.inexact, self.uses
        head.kv_children = [self.kv >> tier & 1 for tier in TIERS]
        return head

    @property
    def kv_tier(self) -> Tier | None:
        """The fastest tier that holds its KV."""
        return FASTEST[self.kv]

    @property
    def state_tier(self) -> Tier | None:
        """The fastest tier that holds its state."""
        return FASTEST[self.state]


def slower_tiers(mask: int, tier: Tier) -> int:
    """`mask` without `tier` and all that are faster."""
    return mask >> (tier + 1) << (tier + 1)


def copies_of(node: Node) -> Copies:
    """The copies of a node of a tree that a `Placement` follows."""
    copies: Copies = node.copies
    return copies


def was_refused(node: Node) -> bool:
    """True if a copy of `node` below the device was refused or evicted, and no request has resumed
    from `node` since. Entries that were worth more than that copy then are worth more now.
    """
    return copies_of(node).refused == node.last_used


def tiers_of(node: Node) -> tuple[Tier | None, Tier | None]:
    """The fastest tiers of a node's KV and of its state, None of none. A tree that no `Placement`
    follows is on the device.
    """
    if node.copies is None:
        return Tier.DEVICE, Tier.DEVICE if node.has_state else None
    return node.copies.kv_tier, node.copies.state_tier


def is_exact(path: Iterable[Node]) -> bool:
    """True if no node of `path`, which begins at the root, is marked inexact. What is computed
    behind a marked node is inexact without a mark.
    """
    return not any(copies_of(node).inexact for node in path)


class Placement:
    """Keeps the copies of all nodes of a tree, and how much each tier holds.

    The caller repeats each change of its memory here, after that of the tree: `add_kv` after a node
    was added, `add_state` after `NodeTree.give_state`. Nodes whose value this may change are marked
    dirty: the node, and its parent.

    counted: a mask of tiers. Where victims are chosen, a node whose state has copies in other tiers
    only has no state (`has_state`).
    """

    def __init__(self, tree: NodeTree, counted: int = ALL_TIERS) -> None:
        self.tree = tree
        self.counted = counted
        self.kv_tokens = [0] * len(TIERS)
        self.states = [0] * len(TIERS)
        tree.root.copies = Copies()

    def used(self, tier: Tier, cost: CostModel) -> int:
        """Bytes of KV and states in `tier`."""
        return cost.bytes_in(tier, self.kv_tokens[tier], self.states[tier])

    def add_kv(self, node: Node, tier: Tier) -> None:
        """Note that `tier` has the KV of the edge to `node`."""
        if node.copies is None:
            node.copies = Copies()
        copies = copies_of(node)
        if not copies.has_kv(tier):
            copies.kv |= 1 << tier
            self.kv_tokens[tier] += node.tokens
            self._count(node, tier, 1)

    def drop_kv(self, node: Node, tier: Tier) -> None:
        """Note that `tier` has the KV of `node` no more. Before its last copy is dropped, `node`
        must be a leaf; the caller then removes it from the tree.
        """
        copies = copies_of(node)
        if copies.has_kv(tier):
            if node.children and copies.kv == 1 << tier:
                raise ValueError(f"the last KV of {node!r} cannot go: its children need it")
            copies.kv &= ~(1 << tier)
            self.kv_tokens[tier] -= node.tokens
            self._count(node, tier, -1)

    def add_state(self, node: Node, tier: Tier) -> None:
        """Note that `tier` has the state of `node`."""
        copies = copies_of(node)
        if not copies.has_state(tier):
            copies.state |= 1 << tier
            self.states[tier] += 1
            self.tree.mark_dirty(node)

    def drop_state(self, node: Node, tier: Tier) -> None:
        """Note that `tier` lost the state; with the last copy that counts the node loses it."""
        copies = copies_of(node)
        if copies.has_state(tier):
            copies.state &= ~(1 << tier)
            self.states[tier] -= 1
            self.tree.mark_dirty(node)
            if node.parent is not None:  # it may have inherited demand (core/victims/eviction.py)
                self.tree.mark_dirty(node.parent)
            if not copies.state & self.counted:
                self.tree.drop_state(node)
            elif copies.state & (1 << tier) - 1:
                copies.refused = node.last_used

    def pin(self, node: Node, tier: Tier, pinned: bool) -> None:
        """Say whether a transfer uses the copies of `node` in `tier`."""
        copies = copies_of(node)
        if copies.is_pinned(tier) != pinned:
            copies.pinned ^= 1 << tier
            self.tree.mark_dirty(node)

    def _count(self, node: Node, tier: Tier, change: int) -> None:
        assert node.parent is not None
        copies_of(node.parent).kv_children[tier] += change
        self.tree.mark_dirty(node)
        self.tree.mark_dirty(node.parent)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to the end of a prompt: resume at `depth`, compute the rest.

    load_bytes: what is loaded, by tier; of the device nothing. state_tier: where the state comes
    from, None where nothing is resumed. load_seconds, compute_seconds: as if loading and computing
    did not overlap; where layers are loaded while others are computed, the sum is an upper bound.
    """

    depth: int
    state_tier: Tier | None
    load_bytes: tuple[int, ...]
    load_seconds: float
    compute_seconds: float

    @property
    def seconds(self) -> float:
        return self.load_seconds + self.compute_seconds


def ways(path: Sequence[Node], prompt_len: int, cost: CostModel, speeds: Speeds) -> Iterator[Way]:
    """All ways to compute a prompt of `prompt_len` tokens, the shallowest first.

    path: the nodes that the prompt passes, parents first; those that end behind the last token but
    one do not count, since the last token is always computed. Every way with a depth above 0 ends
    at a node with a state and has copies of all KV above it.
    """
    whole = cost.flops(prompt_len)
    yield Way(0, None, (0,) * len(TIERS), 0.0, speeds.compute(whole))
    kv_bytes = [0] * len(TIERS)
    for node in path:
        copies = copies_of(node)
        if node.depth >= prompt_len or copies.kv_tier is None:
            return
        kv_bytes[copies.kv_tier] += node.tokens * cost.kv_bytes_in(copies.kv_tier)
        resumes = copies.state_tier if cost.state_bytes else copies.kv_tier
        if resumes is None:
            continue
        loaded = list(kv_bytes)
        loaded[resumes] += cost.state_bytes_in(resumes)
        loaded[Tier.DEVICE] = 0
        seconds = load_seconds(loaded, speeds)
        rest = speeds.compute(whole - cost.flops(node.depth))
        yield Way(node.depth, resumes, tuple(loaded), seconds, rest)


def cheapest(known: Iterable[Way]) -> Way:
    """The way that takes the fewest seconds; the deepest of equals."""
    return min(known, key=lambda way: (way.seconds, -way.depth))


def way_without_loads(
    path: Sequence[Node], prompt_len: int, cost: CostModel, speeds: Speeds
) -> Way:
    """The cheapest of `ways` that loads nothing, which a request falls back to."""
    known = ways(path, prompt_len, cost, speeds)
    return cheapest(way for way in known if not any(way.load_bytes))


def load_seconds(load_bytes: Sequence[int], speeds: Speeds) -> float:
    """Seconds to load so many bytes from each tier, one tier after the other."""
    links = zip(speeds.loads, load_bytes, strict=True)
    return sum(link.seconds(size) for link, size in links)


@dataclass(frozen=True, slots=True)
class Unit:
    """The part of a node that one eviction takes from a tier: the KV of a node's edge, its state,
    or both.

    freed: bytes. saves: seconds that each return gains from it, over the next best way.
    """

    kv: bool
    state: bool
    freed: int
    saves: float


def unit_of(
    node: Node,
    tier: Tier,
    cost: CostModel,
    speeds: Speeds,
    demotes_to: Tier | None = None,
    counted: int = ALL_TIERS,
) -> Unit | None:
    """The unit that evicting `node` from `tier` takes, and its worth; None if nothing can go.

    A node gives up its KV and its state in `tier` together if none of its children has KV there,
    and if its KV has another copy, or no children need it. Any other node gives up its state only.
    On the device, nothing that a running request holds is evicted.

    demotes_to: the tier that victims are written to. A victim that has no slower copy yet is then
    worth what it saves over one there. counted: a mask of tiers; copies in others are left out of
    what it is worth.
    """
    copies = copies_of(node)
    if node.parent is None or copies.is_pinned(tier):
        return None
    on_device = tier is Tier.DEVICE
    kv = copies.has_kv(tier) and not copies.kv_children[tier]
    kv = kv and (demotes_to is not None or copies.kv != 1 << tier or not node.children)
    kv = kv and not (on_device and (node.kv_locked or node.state_locked))
    state = copies.has_state(tier) and not (on_device and node.state_locked)
    freed = cost.bytes_in(tier, kv * node.tokens, int(state))
    if not freed:
        return None
    saves = seconds_saved(
        node, tier, cost, speeds, kv=kv, state=state, demotes_to=demotes_to, counted=counted
    )
    return Unit(kv, state, freed, saves)


def seconds_saved(
    node: Node,
    tier: Tier,
    cost: CostModel,
    speeds: Speeds,
    *,
    kv: bool,
    state: bool,
    demotes_to: Tier | None = None,
    counted: int = ALL_TIERS,
) -> float:
    """Seconds that the copies of `node` in `tier`, of its KV or state or both, save a request that
    returns to `node`: those of the best way without them minus those of the best way with them.

    Copies of the same in faster tiers do not count: they are expected to be evicted first. So that
    the value depends on nothing but the node and its anchor, the anchor's state is taken to be on
    the device, and the KV between the anchor and `node` to be where that of `node`'s own edge is.
    Where the KV is needed by nodes below only, it saves a slower load of its own edge, or computing
    that. demotes_to: victims are written to this tier. counted: as in `unit_of`.
    """
    copies = copies_of(node)
    written = 0 if demotes_to is None else 1 << demotes_to
    kv_now = _from(copies.kv & counted, tier)
    kv_left = slower_tiers(kv_now, tier) | written if kv else kv_now
    edge, place = (node.tokens, 0), FASTEST[kv_now]
    if not copies.state & counted:
        if not counted_children(node, counted):
            return 0.0  # nothing is resumed at it or below it
        computed = speeds.compute(cost.savings(node.depth, node.depth - node.tokens))
        left, now = [(FASTEST[kv_left], edge)], [(place, edge)]
        return _best(computed, left, cost, speeds) - _best(computed, now, cost, speeds)
    state_now = _from(copies.state & counted, tier)
    state_left = slower_tiers(state_now, tier) | written if state else state_now
    computed = speeds.compute(cost.savings(node.depth, node.anchor_depth))
    gap, one_state = (node.depth - node.anchor_depth - node.tokens, 0), (0, 1)
    after = [(place, gap), (FASTEST[kv_left], edge), (FASTEST[state_left], one_state)]
    now = [(place, gap), (place, edge), (FASTEST[state_now], one_state)]
    return _best(computed, after, cost, speeds) - _best(computed, now, cost, speeds)


def counted_children(node: Node, counted: int) -> int:
    """The number of children of `node` that have KV in the tiers of a mask."""
    if counted == ALL_TIERS:
        return len(node.children)
    return sum(copies_of(child).kv & counted > 0 for child in node.children.values())


def _from(mask: int, tier: Tier) -> int:
    """`mask` without the tiers that are faster than `tier`, if any is left then."""
    return mask >> tier << tier or mask


def _best(
    computed: float,
    pieces: Sequence[tuple[Tier | None, tuple[int, int]]],
    cost: CostModel,
    speeds: Speeds,
) -> float:
    """Seconds to load all pieces (tier, KV tokens and states), or to compute what they save if that
    is faster or a piece is nowhere.
    """
    sizes = [0] * len(TIERS)
    for tier, (tokens, states) in pieces:
        if tier is None:
            return computed
        sizes[tier] += cost.bytes_in(tier, tokens, states)
    return min(computed, load_seconds(sizes, speeds))
