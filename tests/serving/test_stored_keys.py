"""No two requests of different clients or kinds are stored under one key, and each key tells who is
charged.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.serving import stored_keys
from sglang_hybrid.serving.stored_keys import OF_KEY, check_key, payer
from tests.examples import examples

ADAPTERS = ["0123456789abcdef" * 2, "f" * 32]


@dataclass(frozen=True)
class Stored:
    """A request: the extra key that its client sent, where an empty one is none, and what the
    server makes of it. api: the hash of its API key, "" without. place: digest of a composed
    prompt, start of a segment; None of another prompt.
    """

    sent: str | None
    api: str
    place: str | int | None
    adapter: str | None
    exact: bool

    @property
    def key(self) -> str | None:
        key = f"{OF_KEY}{self.api}/{self.sent or ''}" if self.api else self.sent
        if isinstance(self.place, str):
            key = stored_keys.composed_key(key, self.place)
        elif self.place is not None:
            key = stored_keys.segment_key(key, self.place)
        key = stored_keys.stored_under(key, self.adapter)
        return stored_keys.exact_key(key) if self.exact else key

    @property
    def payer(self) -> str | None:
        return f"{OF_KEY}{self.api}/" if self.api else self.sent


def is_allowed(key: str) -> bool:
    try:
        check_key(key)
    except ValueError:
        return False
    return not key.startswith(OF_KEY)


pieces = st.sampled_from(
    [*"a/+-.1", "\0", "..", "exact", "modular/", "module/", "api-key/", *ADAPTERS]
)
sent = st.lists(pieces, min_size=1, max_size=5).map("".join).filter(is_allowed)
requests = st.builds(
    Stored,
    sent=st.none() | sent,
    api=st.sampled_from(["", "0a", "1b"]),
    place=st.none() | st.sampled_from(["d1", "d2"]) | st.integers(0, 12),
    adapter=st.none() | st.sampled_from(ADAPTERS),
    exact=st.booleans(),
)


@examples(300)
@given(requests, requests)
def test_no_two_kinds_of_requests_share_a_key(one: Stored, two: Stored) -> None:
    assert (one.key == two.key) is (one == two)


@examples(300)
@given(requests)
def test_a_key_tells_who_is_charged(request: Stored) -> None:
    assert payer(request.key) == request.payer
    assert stored_keys.is_exact_part(request.key) is request.exact


@pytest.mark.parametrize("key", ["modular/d/+a", "module/7/+a", "\0exact\0-", "\0"])
def test_no_client_names_a_key_of_the_servers(key: str) -> None:
    with pytest.raises(ValueError, match="the server's own"):
        check_key(key)


@pytest.mark.parametrize("key", [None, "", "a", "/D/+victim", "D/D/+victim", 3])
def test_other_keys_are_taken(key: object) -> None:
    check_key(key)
