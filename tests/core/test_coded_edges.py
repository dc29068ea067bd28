"""Coded edges: every token has its place, and every slot one owner, however edges are cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.records.coded_edges import CodedEdge, CodedEdges
from tests.examples import examples


def places(edge: CodedEdge[range]) -> list[tuple[int, int]]:
    """Slot and part of each token."""
    at = range(edge.skip, edge.skip + edge.tokens)
    return [(edge.slots[number // edge.parts], number % edge.parts) for number in at]


@given(
    parts=st.integers(1, 4),
    page=st.sampled_from([1, 4]),
    pages=st.integers(1, 12),
    cuts=st.lists(st.integers(0, 100), max_size=6),
    exact=st.integers(0, 6),
)
@examples(50)
def test_cut_and_given_back(parts: int, page: int, pages: int, cuts: list[int], exact: int) -> None:
    """An edge is cut here and there; then the upper ones are decoded, and the rest is evicted from
    below. All slots come back, each once, and no token ever moves.
    """
    edges: CodedEdges[range] = CodedEdges(parts, page)
    tokens = pages * page
    whole = edges.code(0, range(tokens))
    room = -(-tokens // (parts * page)) * page
    assert edges.slots == room == len(whole.slots)
    where, path, length = places(whole), [0], {0: tokens}
    for number, cut in enumerate(cuts, start=1):
        node = path[cut % len(path)]
        if length[node] < 2 * page:
            continue
        head = page * (1 + cut % (length[node] // page - 1)) if length[node] > page else 0
        edges.split(number, node, head)
        path.insert(path.index(node), number)
        length[number], length[node] = head, length[node] - head
        assert [place for each in path for place in places(edges[each])] == where
        assert sum(len(edges[each].owned) for each in path) == edges.slots == room
    assert edges.tokens == tokens
    freed: list[int] = []
    for node, below in zip(path[:exact], [*path[1:], -1], strict=False):
        slots, heir = edges.drop(node, [below])
        assert heir in (None, below)
        freed += slots
    kept = [place for each in path[exact:] for place in places(edges[each])]
    assert kept == where[len(where) - len(kept) :]
    assert set(freed).isdisjoint(slot for slot, _ in kept)
    for node in reversed(path[exact:]):
        freed += edges.drop(node)[0]
    assert sorted(freed) == list(range(room))
    assert edges.tokens == edges.slots == 0
