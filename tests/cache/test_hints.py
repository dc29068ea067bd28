"""What clients say of their sessions, on SGLang's tree: the history learns it, misses tell it."""

from __future__ import annotations

import pytest

from sglang_hybrid.core.returns.hints import Hint
from sglang_hybrid.core.returns.history_tree import HistoryNode
from sglang_hybrid.explain.render import render
from tests.cache.driver import Server
from tests.cache.test_rules import run
from tests.explain.test_explain import explain, server


def at_the_end(it: Server, tokens: list[int], tenant: object = None) -> HistoryNode:
    """The history's node at the end of a sequence that was served."""
    return it.cache.shadow_tree.history.match([*tokens, 0], tenant).path.nodes[-1]


@pytest.mark.parametrize(("said", "p"), [(Hint.ENDS, 0.1), (Hint.RETURNS, 0.9), (None, None)])
def test_a_request_says_what_becomes_of_its_session(said: Hint | None, p: float | None) -> None:
    it = server()
    it.serve(run(40), run(3, 1), session=said)
    found = at_the_end(it, [*run(40), *run(3, 1)]).return_expected
    assert found == (None if p is None else pytest.approx(p))
    text = "\n".join(render(explain(it, [*run(40), *run(3, 1)[:2], 9])))
    assert ("nobody comes back (p = 0.10)" in text) == (said is Hint.ENDS)
    assert ("somebody comes back (p = 0.90)" in text) == (said is Hint.RETURNS)


def test_a_closed_session_is_one_that_ended() -> None:
    it = server()
    req = it.begin(run(40), cache_salt="a")
    it.complete(req, run(3, 1))
    whose = (None, "a")
    assert at_the_end(it, [*run(40), *run(3, 1)], whose).return_expected is None
    it.cache.session_closed([req])
    assert at_the_end(it, [*run(40), *run(3, 1)], whose).return_expected == pytest.approx(0.1)
    it.cache.session_closed([it.arrive(run(9, 5))])  # of which nothing is known


@pytest.mark.parametrize("policy", ["lru", "sglang-lru"])
def test_policies_without_a_history_hear_nothing(policy: str) -> None:
    it = server(policy)
    it.serve(run(40), run(3, 1), session=Hint.ENDS)
    it.cache.session_closed([it.arrive(run(40))])
    assert it.cache.report.calibration is None


def test_memory_for_answers_can_be_turned_off() -> None:
    it = server(hybrid_answers_mb=0)
    it.serve(run(40), run(3, 1), session=Hint.ENDS)
    assert at_the_end(it, [*run(40), *run(3, 1)]).return_expected is None
