"""Which part of the tree a request belongs to, where copies below the device are smaller."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.returns.hints import PromptHints
from sglang_hybrid.serving.requests.cache_fields import NOTHING, CacheFields
from sglang_hybrid.storage.codecs import coded_rows
from sglang_hybrid.storage.codecs.codecs import Codec
from sglang_hybrid.storage.codecs.coded_rows import CodecPlan
from sglang_hybrid.storage.codecs.exactness import apart_if_exact, is_exact_part

EXACT = CacheFields(PromptHints(exact=True))
keys = st.none() | st.text(alphabet="\0aexct", max_size=9) | st.just("\0exact\0")


@pytest.fixture(autouse=True, scope="module")
def smaller() -> Iterator[None]:
    coded_rows.use(CodecPlan.uniform(Codec.INT8))
    yield
    coded_rows.use(CodecPlan())


@given(keys, keys, st.booleans(), st.booleans())
def test_no_two_tenants_share_a_part(
    one: str | None, two: str | None, one_exact: bool, two_exact: bool
) -> None:
    first = apart_if_exact(one, EXACT if one_exact else NOTHING)
    second = apart_if_exact(two, EXACT if two_exact else NOTHING)
    assert is_exact_part(first) is one_exact and is_exact_part(second) is two_exact
    assert (first == second) is ((one, one_exact) == (two, two_exact))


def test_where_copies_are_exact_nothing_is_apart() -> None:
    coded_rows.use(CodecPlan())
    assert apart_if_exact("\0a", EXACT) == "\0a" and apart_if_exact(None, EXACT) is None
    coded_rows.use(CodecPlan.uniform(Codec.INT8))
