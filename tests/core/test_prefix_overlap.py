"""Prefixes that waiting prompts share: each answer against a comparison of all pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.queue.prefix_overlap import PrefixOverlap, as_key, common_prefix

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=8)


def shared_plainly(prompts: list[list[int]], own: int, at_least: int) -> list[int]:
    lengths = set()
    for index, other in enumerate(prompts):
        if index == own:
            continue
        same = 0
        while same < min(len(prompts[own]), len(other)) and prompts[own][same] == other[same]:
            same += 1
        lengths.add(min(same, len(prompts[own]) - 1, len(other) - 1))
    return sorted(length for length in lengths if length >= at_least)


@given(st.lists(prompts, min_size=1, max_size=12), st.integers(1, 4))
def test_shared_prefixes_are_those_of_all_pairs(waiting: list[list[int]], at_least: int) -> None:
    siblings = PrefixOverlap()
    for name, prompt in enumerate(waiting):
        siblings.add(name, prompt)
    for name in range(len(waiting)):
        seen = siblings.shared(name, at_least)
        plain = shared_plainly(waiting, name, at_least)
        assert seen[-1:] == plain[-1:]
        assert set(seen) <= set(plain)
    for name in range(len(waiting)):
        siblings.remove(name)
    assert len(siblings) == 0


def test_tenants_share_nothing() -> None:
    siblings = PrefixOverlap()
    siblings.add("a", [1, 2, 3, 4], tenant="adapter")
    siblings.add("b", [1, 2, 3, 5])
    siblings.add("c", [1, 2, 3, 6])
    assert siblings.shared("a", 1) == []
    assert siblings.shared("b", 1) == [3]
    siblings.remove("c")
    assert siblings.shared("b", 1) == []


def test_a_name_waits_once() -> None:
    siblings = PrefixOverlap()
    siblings.add("a", [1])
    with pytest.raises(ValueError, match="waits already"):
        siblings.add("a", [2])


def test_common_prefix_counts_whole_tokens() -> None:
    one, other = as_key([1, 2, 70_000]), as_key([1, 2, 70_001, 4])
    assert common_prefix(one, other) == 2
    assert common_prefix(one, one) == 3
    assert common_prefix(as_key([]), one) == 0
    assert np.frombuffer(one, np.uint32).tolist() == [1, 2, 70_000]
