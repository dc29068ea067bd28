"""TokenPlaces in rows: who has which, whatever is taken, given back and moved."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.memory.token_places import TokenPlaces
from tests.examples import examples

WIDTH = 5
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["take", "take", "give back", "hand over", "leave"]), st.integers(0)),
    max_size=40,
)


@examples(60)
@given(OPERATIONS)
def test_nobody_loses_a_place(operations: list[tuple[str, int]]) -> None:
    """Against the places of each owner, and rows that are added when there is no free place."""
    places, of = TokenPlaces(WIDTH), dict[int, list[int]]()
    for number, (name, some) in enumerate(operations):
        owner = sorted(of)[some % len(of)] if of else None
        if name == "take":
            count = 1 + some % (2 * WIDTH)
            while places.free < count:
                places.add_row()
            of[number] = places.take(number, count).tolist()
        elif owner is not None and name == "give back":
            first = len(of[owner]) // 2
            places.give_back(np.array(of[owner][first:], np.int64))
            of[owner] = of[owner][:first]
            places.drop_empty_rows()
        elif owner is not None and name == "hand over":
            places.hand_over(np.array(of[owner], np.int64), number)
            of[number] = of.pop(owner)
        elif places.rows and places.taken <= (places.rows - 1) * WIDTH:
            row, old, new, owners = places.vacate_row()
            assert set(old // WIDTH) <= {row}
            assert row not in new // WIDTH
            for before, now, whose in zip(old, new, owners, strict=True):
                mine = of[int(whose)]
                mine[mine.index(int(before))] = int(now)
        taken = [place for mine in of.values() for place in mine]
        assert len(taken) == len(set(taken)) == places.taken
        assert places.free == places.rows * WIDTH - len(taken) >= 0
        assert len({place // WIDTH for place in taken}) <= places.rows


def test_a_row_that_is_empty_is_dropped_and_its_number_used_again() -> None:
    places = TokenPlaces(WIDTH)
    assert [places.add_row() for _ in range(3)] == [0, 1, 2]
    first, second = places.take(7, WIDTH), places.take(8, 2)
    places.give_back(first)
    assert places.drop_empty_rows() == [0, 2]
    assert (places.rows, places.taken, places.free) == (1, 2, 3)
    assert [places.add_row() for _ in range(3)] == [0, 2, 3]
    assert second.tolist() == [WIDTH, WIDTH + 1]
