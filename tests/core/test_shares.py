"""The tenant that holds most, compared with a plain dictionary."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.records.shares import Shares

tenants = st.sampled_from([None, "a", ("b", None), ("b", "c"), 7])


@given(st.lists(st.tuples(tenants, st.integers(-5, 5))))
def test_the_largest_is_the_first_of_those_with_most(changes: list[tuple[object, int]]) -> None:
    shares, plain = Shares(), dict[object, int]()
    for tenant, by in changes:
        by = max(by, -plain.get(tenant, 0))
        shares.change(tenant, by)
        plain[tenant] = plain.get(tenant, 0) + by
        if plain[tenant] == 0:
            del plain[tenant]
        assert shares.total == sum(plain.values())
        assert len(shares) == len(plain)
        assert all(shares.of(name) == held for name, held in plain.items())
        if not plain:
            with pytest.raises(KeyError):
                shares.largest()
            continue
        most = max(plain, key=lambda name: plain[name])  # the first inserted, among equals
        assert shares.largest() == most
        rest = {name: held for name, held in plain.items() if name != most}
        if rest:
            assert shares.largest(besides=most) == max(rest, key=lambda name: rest[name])


def test_outdated_entries_do_not_pile_up() -> None:
    shares = Shares()
    shares.change("other", 1)
    for _ in range(10_000):
        shares.change("a", 1)
    assert len(shares._largest_first._heap) < 100
    assert shares.largest() == "a"
