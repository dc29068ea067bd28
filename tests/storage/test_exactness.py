"""The part of the tree that a request belongs to, where copies below the device are smaller."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang_hybrid.core.returns.hints import PromptHints
from sglang_hybrid.serving.requests.cache_fields import NOTHING, CacheFields
from sglang_hybrid.serving.stored_keys import is_exact_part
from sglang_hybrid.storage.codecs import in_use
from sglang_hybrid.storage.codecs.codecs import Codec
from sglang_hybrid.storage.codecs.coded_rows import CodecPlan
from sglang_hybrid.storage.codecs.exactness import storage_key

EXACT = CacheFields(PromptHints(exact=True))


@pytest.fixture(autouse=True, scope="module")
def smaller() -> Iterator[None]:
    in_use.set_codecs(CodecPlan.uniform(Codec.INT8))
    yield
    in_use.set_codecs(CodecPlan())


def test_only_those_that_ask_for_it_are_apart() -> None:
    assert is_exact_part(storage_key("a", EXACT)) and is_exact_part(storage_key(None, EXACT))
    assert storage_key("a", NOTHING) == "a" and storage_key(None, NOTHING) is None


def test_where_copies_are_exact_nothing_is_apart() -> None:
    in_use.set_codecs(CodecPlan())
    assert storage_key("a", EXACT) == "a" and storage_key(None, EXACT) is None
    in_use.set_codecs(CodecPlan.uniform(Codec.INT8))
