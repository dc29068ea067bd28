"""SGLang's hashes of pages are compiled at the start; where they cannot be, ours are the same."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("sglang")

from sglang.srt.mem_cache.cpp_utils import native_hash
from sglang.srt.mem_cache.utils import get_hash_str

from sglang_hybrid.cache import page_hashes
from sglang_hybrid.cache.page_hashes import FLAGS, compile_hashes, plain_hash


@pytest.mark.parametrize("flag", [None, *FLAGS])
def test_only_who_names_pages_compiles(flag: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    monkeypatch.setattr(page_hashes, "get_hash_str", asked.append)
    given: dict[str, Any] = {**dict.fromkeys(FLAGS), **({flag: "something"} if flag else {})}
    compile_hashes(SimpleNamespace(**given))  # type: ignore[arg-type]
    assert bool(asked) is bool(flag)


def test_without_a_compiler_python_stands_for_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> Any:
        raise RuntimeError("Failed to load") from FileNotFoundError("no c++")

    monkeypatch.setattr(native_hash, "_load_native_hash_module", fails)
    compile_hashes(SimpleNamespace(kv_events_config="{}"))  # type: ignore[arg-type]
    assert "cannot be compiled (no c++); Python stands for them" in caplog.text
    assert get_hash_str([1, 2, 3], None, 2) == plain_hash(
        array("q", [1, 2, 3]), 3, 1, False, None, 2
    )


@given(
    st.lists(st.one_of(st.integers(0, 300), st.integers(0, 2**40)), max_size=40),
    st.sampled_from(["q", "I"]),
    st.sampled_from([None, 1, 4, 64]),
    st.sampled_from([1, 2, "pairs"]),
    st.one_of(st.none(), st.binary(min_size=32, max_size=32)),
)
def test_python_says_what_sglang_says(
    ids: list[int], kind: str, page: int | None, width: int | str, prior: bytes | None
) -> None:
    """It is compiled here, too."""
    numbers = array(kind, [each % 2**32 for each in ids] if kind == "I" else ids)
    is_bigram = width == "pairs"
    length = max(0, len(ids) - 1) if is_bigram else len(ids) // int(width)
    given = numbers, length, 2 if is_bigram else int(width), is_bigram, prior, page
    assert plain_hash(*given) == native_hash._load_native_hash_module().get_hash(*given)
