"""Entries that are kept coded on the device instead of being evicted (`--hybrid-device-codec`).

An entry is coded before it would be evicted: its KV and its state stay where they are, as smaller
numbers, in a half or a quarter of their bytes, and give back the rest. A coded entry is evicted
when nothing is left to code, or when it is worth less than what coding another entry loses
(`INEXACT`). A hit decodes what it reads. Entries that running requests hold are never coded.

The KV of a node is coded after that of its children, so that a path is exact down to some node and
coded below it. KV that serves nothing but what is below, of nodes without a state of their own that
is not coded, is coded with the last of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.records.nodes import Node

INEXACT: Final = 0.05
"""Share of what an entry saves that is taken to be lost when it is coded, since its hits are not
exact any more. Replayed, hits are as many as with 0 (-0.4 points with the sizes of the paper's 7B,
+0.3 with those of Nemotron-H-8B), and a quarter more of them are exact; with 0.2 they are 0.1 to
1.1 points fewer."""


@dataclass(frozen=True, slots=True)
class Codable:
    """The entries that are coded where a node would be evicted: the KV of these nodes, the deepest
    first, and whether its state. freed: bytes that this gives back.
    """

    kv: tuple[Node, ...]
    state: bool
    freed: int


def codable(node: Node, cost: CostModel, *, kv: bool, state: bool) -> Codable | None:
    """The part of `node` that can be coded, of KV and of states as far as they are wanted; None if
    there is none.

    node: not the root, of a tree whose entries may be coded.
    """
    if not cost.coded or node.stays_exact:
        return None
    saved_kv = cost.kv_bytes_per_token - cost.coded[0]
    saved_state = cost.state_bytes - cost.coded[1]
    nodes = tuple(_chain(node)) if kv and saved_kv > 0 else ()
    takes_state = (
        state
        and saved_state > 0
        and node.has_state
        and not node.coded_state
        and not node.state_locked
    )
    freed = sum(each.tokens for each in nodes) * saved_kv + takes_state * saved_state
    return Codable(nodes, takes_state, freed) if freed else None


def _chain(node: Node) -> Iterator[Node]:
    """Nodes whose KV can be coded when that of `node` is, itself first."""
    if not _is_lowest(node) or node.state_locked:
        return
    yield node
    above = node.parent
    while (
        above is not None
        and above.parent is not None
        and above.exact_children == 1
        and not above.coded_kv
        and not above.kv_locked
        and (not above.has_state or above.coded_state)
    ):
        yield above
        above = above.parent


def _is_lowest(node: Node) -> bool:
    """True if the KV of `node` is exact, held by nobody, and none is exact below it."""
    return not (node.coded_kv or node.exact_children or node.kv_locked)
