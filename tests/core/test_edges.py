"""Edges as bytes, against counting one by one."""

from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.records.edges import common_bytes

FEW = st.binary(max_size=12).map(lambda content: bytes(byte % 3 for byte in content))


@given(FEW, FEW, st.integers(0, 12))
def test_as_many_as_are_alike(edge: bytes, sequence: bytes, start: int) -> None:
    start = min(start, len(sequence))
    alike = (mine == other for mine, other in zip(edge, sequence[start:], strict=False))
    assert common_bytes(edge, sequence, start) == sum(takewhile(bool, alike))
