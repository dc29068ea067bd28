"""Coded states share slots: n of them take n / parts, and each is where it was put."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.cache.coded.groups import Groups
from tests.examples import examples


@given(parts=st.integers(2, 4), steps=st.lists(st.integers(-20, 20), max_size=60))
@examples(50)
def test_no_slot_is_lost(parts: int, steps: list[int]) -> None:
    """Against a dictionary of what is in which part of which slot."""
    groups: Groups[int, str] = Groups(parts)
    content: dict[tuple[int, int], str] = {}
    taken: set[int] = set()
    names: list[str] = []
    for number, step in enumerate(steps):
        if step >= 0:
            name, slot = f"state {number}", number
            group, part, leaves = groups.join(name, slot)
            assert (group.slot, part) not in content
            content[group.slot, part] = name
            assert leaves == (group.slot != slot)
            if not leaves:
                taken.add(slot)
            names.append(name)
        elif names:
            name = names.pop(step % len(names))
            group, part = groups.of(name)
            del content[group.slot, part]
            moved, empty = groups.leave(name)
            if moved is not None:
                content[moved.target.slot, moved.to] = content.pop((moved.source.slot, moved.part))
                assert content[moved.target.slot, moved.to] == moved.name
            if empty is not None:
                taken.remove(empty.slot)
        assert len(groups) == len(names) == len(content)
        assert len(taken) == -(-len(names) // parts)
        for name in names:
            group, part = groups.of(name)
            assert content[group.slot, part] == name
            assert name in groups
