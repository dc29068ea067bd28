"""The latest values of each tenant: one tenant's flood replaces its own values."""

from __future__ import annotations

from sglang_hybrid.core.records.latest import Latest


def test_a_tenant_finds_its_own_values_only() -> None:
    kept: Latest[str] = Latest(100)
    kept.put("a", "one", "secret", 6)
    assert kept.get("b", "one") is None and kept.get(None, "one") is None
    assert kept.get("a", "one") == "secret" and kept.get("a", "two") is None
    assert (kept.of("a"), kept.of("b")) == (["secret"], [])


def test_the_tenant_that_holds_most_loses_its_oldest_value() -> None:
    kept: Latest[int] = Latest(500)
    kept.put("b", "b", 0, 100)
    for number in range(20):
        kept.put("a", str(number), number, 100)
    assert kept.of("b") == [0] and kept.of("a") == [16, 17, 18, 19]
    assert list(kept.newest("a")) == [19, 18, 17, 16] and list(kept.newest("c")) == []
    kept.put("c", "huge", 0, 600)
    assert kept.get("c", "huge") is None and len(kept) == 5


def test_a_value_that_is_dropped_leaves_room() -> None:
    kept: Latest[int] = Latest(200)
    kept.put("a", "one", 1, 100)
    kept.put("a", "two", 2, 100)
    kept.drop("a", "one")
    kept.drop("b", "two")
    assert kept.of("a") == [2] and kept.nbytes == 100
    kept.put("b", "three", 3, 100)
    assert kept.of("a") == [2] and kept.of("b") == [3]


def test_a_value_replaces_the_earlier_one_of_its_name() -> None:
    kept: Latest[int] = Latest(500, 3)
    for number, name in enumerate("abcadd"):
        kept.put(None, name, number, 200 if name == "d" else 100)
    assert kept.of(None) == [2, 3, 5]
    kept.put(None, "a", 6, 600)
    assert kept.of(None) == [2, 5]
