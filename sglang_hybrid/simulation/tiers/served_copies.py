"""What a replayed server copies to its host, writes to its disk and reads from there, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sglang_hybrid.core.records.nodes import Kind, Node
from sglang_hybrid.core.server_settings import ServedTiers
from sglang_hybrid.core.tiers.places import Unit, copies_of
from sglang_hybrid.core.tiers.rates import Tier
from sglang_hybrid.core.tiers.writes import CopyJudge, refuse, was_refused
from sglang_hybrid.simulation.server_simulator import way_to
from sglang_hybrid.simulation.tiers.tier_simulator import TieredSimulator


class ServedCopies(TieredSimulator):
    """Copies between the tiers of `below`; `judge` says which are worth it."""

    below: ServedTiers
    judge: CopyJudge
    uses: Counter[Node]  # requests that left a node or passed it

    def _copy_to_host(self, node: Node) -> list[Node]:
        """Copy `node` and the KV that it needs above it, if that is worth it; if not, it is judged
        again only after its next use. Returns the nodes that were copied.
        """
        copies = copies_of(node)
        missing = not copies.has_kv(Tier.HOST) or lacks_copy(node)
        if not missing or not copies.has_kv(Tier.DEVICE) or was_refused(node):
            return []
        if not copies.has_kv(Tier.HOST) and self.uses[node] < self.below.least_uses:
            return []
        if self._worth(node):
            return self._copy_down(node)
        refuse(node)
        return []

    def _worth(self, node: Node) -> bool:
        copies = copies_of(node)
        if copies.kv_children[Tier.HOST] and not copies.has_kv(Tier.HOST):
            return True  # what the host has below it would be lost
        return copies.has_state(Tier.DEVICE) and self.judge.worth_resuming(node)

    def _copy_down(self, node: Node) -> list[Node]:
        """From the first KV that the host has not, as far as room can be made. What that continues
        stays on the host meanwhile. Returns the nodes that were copied.
        """
        path = path_to(node)
        first = next((i for i, n in enumerate(path) if not copies_of(n).has_kv(Tier.HOST)), -1)
        missing = path[first:]
        held = self._hold_on(Tier.HOST, path[first - 1 : first] if first > 0 else [])
        copied = 0
        for each in missing:
            kv = not copies_of(each).has_kv(Tier.HOST)
            state = lacks_copy(each) and self.judge.worth_resuming(each)
            if not self._make_room_in(Tier.HOST, kv * each.tokens, int(state), [each]):
                break
            self._add(Tier.HOST, each, kv=kv, state=state)
            self._write_to_disk(each)
            held += self._hold_on(Tier.HOST, [each])
            copied += 1
        self._let_go(held)
        return missing[:copied]

    def _hold_on(self, tier: Tier, path: Sequence[Node]) -> list[tuple[Node, Tier]]:
        """Pin the copies of `path` in one tier; returns those that were not."""
        free = [(node, tier) for node in path if not copies_of(node).is_pinned(tier)]
        for node, _ in free:
            self.placement.pin(node, tier, True)
        return free

    def _write_to_disk(self, node: Node) -> None:
        copies = copies_of(node)
        kv = copies.has_kv(Tier.HOST) and not copies.has_kv(Tier.DISK)
        state = copies.has_state(Tier.HOST) and not copies.has_state(Tier.DISK)
        if (
            self.below.disk
            and (kv or state)
            and self._take(Tier.DISK, node, kv=kv, state=state, needed=True)
        ):
            self._add(Tier.DISK, node, kv=kv, state=state)

    def _read_ahead(self, path: Sequence[Node]) -> None:
        """Bring to the host what the disk has of the way to the deepest state on `path`, if that
        saves enough tokens and the host has room. KV behind the deepest state above the disk is
        read anew, as SGLang does it.
        """
        deepest = next((node for node in reversed(path) if copies_of(node).state), None)
        if deepest is None:
            return
        passed = [node for node in path if node.depth <= deepest.depth]
        at_hand = 0
        for node in passed:
            if not held_above_disk(node, copies_of(node).kv):
                break
            if held_above_disk(node, copies_of(node).state):
                at_hand = node.depth
        tokens = deepest.depth - at_hand
        if tokens < self.below.least_read:
            return
        if self._make_room_in(Tier.HOST, tokens, 1, passed):
            for node in passed:
                if not held_above_disk(node, copies_of(node).kv):
                    self.placement.add_kv(node, Tier.HOST)
            self.tree.give_state(deepest, Kind.UNKNOWN)
            self.placement.add_state(deepest, Tier.HOST)

    def _demote(self, node: Node, unit: Unit) -> None:
        """Of what leaves the device, the host may take a copy first."""
        ready = copies_of(node).has_kv(Tier.HOST) or self.below.write_back
        if ready and (unit.kv or unit.state):
            held = self._hold([node])
            self._copy_to_host(node)
            self._let_go(held)


def lacks_copy(node: Node) -> bool:
    """Whether the device has a state of `node`, and the host has not."""
    copies = copies_of(node)
    return copies.has_state(Tier.DEVICE) and not copies.has_state(Tier.HOST)


def held_above_disk(node: Node, tiers: int) -> bool:
    """Whether the device or the host is among `tiers`, a mask."""
    return bool(tiers & (1 << Tier.DEVICE | 1 << Tier.HOST))


def path_to(node: Node) -> list[Node]:
    """`node` and all above it but the root, parents first."""
    return list(way_to(node))[::-1]
