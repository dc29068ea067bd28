"""SGLang's hashes of pages are compiled at the start, or the start says why not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang_hybrid.cache import page_hashes
from sglang_hybrid.cache.page_hashes import compile_hashes
from sglang_hybrid.serving.startup import StartupError

FLAGS: dict[str, Any] = {"hicache_storage_backend": None, "kv_events_config": None}


@pytest.mark.parametrize("flag", [None, *FLAGS])
def test_only_who_names_pages_compiles(flag: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    monkeypatch.setattr(page_hashes, "get_hash_str", asked.append)
    given = {**FLAGS, **({flag: "something"} if flag else {})}
    compile_hashes(SimpleNamespace(**given))  # type: ignore[arg-type]
    assert bool(asked) is bool(flag)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(tokens: list[int]) -> str:
        raise RuntimeError("Failed to load") from FileNotFoundError("no c++")

    monkeypatch.setattr(page_hashes, "get_hash_str", fails)
    words = r"^--kv-events-config needs .* \(no c\+\+\); install a C\+\+ compiler"
    with pytest.raises(StartupError, match=words):
        compile_hashes(SimpleNamespace(**FLAGS | {"kv_events_config": "{}"}))  # type: ignore[arg-type]
