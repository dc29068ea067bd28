"""Changes by hooks in SGLang's requests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cache.backends import options
from tests.cache.driver import Server, Sizes


@pytest.mark.parametrize(("wanted", "hit"), [(False, 50), ("last", 50), (True, 0)])
def test_a_hit_hides_no_hidden_state_that_is_wanted(wanted: Any, hit: int) -> None:
    server = Server.on(Sizes(kv=600, states=12), options("reuse"))
    server.serve([1] * 50, [2])
    req = server.arrive([1] * 50 + [3] * 9)
    req.return_hidden_states = wanted
    assert server.look_up(req) == hit
