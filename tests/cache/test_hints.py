"""Hints about sessions, on SGLang's tree: the history learns it, misses tell it."""

from __future__ import annotations

import pytest

from sglang_hybrid.cache import endings
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
    it.cache.on_session_close([req])
    assert at_the_end(it, [*run(40), *run(3, 1)], whose).return_expected == pytest.approx(0.1)
    it.cache.on_session_close([it.arrive(run(9, 5))])  # of which nothing is known


def test_an_open_session_of_sglangs_flag_returns_and_a_closed_one_has_ended() -> None:
    """`--enable-session-radix-cache`: requests name their session, and the client closes it."""
    it = server()
    it.cache.enable_session_radix_cache = True
    for session, salt in (("one", "a"), ("two", "b")):
        req = it.begin(run(40), cache_salt=salt)
        req.session_id = session
        it.complete(req, run(3, 1))

    def expected(salt: str) -> float | None:
        return at_the_end(it, [*run(40), *run(3, 1)], (None, salt)).return_expected

    assert expected("a") == expected("b") == pytest.approx(0.9)
    for session in ("one", "one", "of which nothing is known"):
        it.cache.release_radix_session(session)
    assert expected("a") == pytest.approx(0.1) and expected("b") == pytest.approx(0.9)


def test_a_request_that_ends_behind_its_sessions_close_does_not_return() -> None:
    """The session returns once the client opens one of that name again."""
    it = server()
    refs = it.cache.session_refs
    it.cache.enable_session_radix_cache = refs.enable_session_radix_cache = True
    for number, expected in enumerate((0.1, 0.9)):
        req = it.begin(run(40, number))
        req.session_id = "one"
        if number == 0:
            it.cache.release_radix_session("one")
        else:
            refs.open_radix_session("one")
        it.complete(req, run(3, 1))
        end = at_the_end(it, [*run(40, number), *run(3, 1)])
        assert end.return_expected == pytest.approx(expected)


def test_what_a_client_says_itself_counts_more() -> None:
    it = server()
    it.cache.enable_session_radix_cache = True
    req = it.begin(run(40), session=Hint.ENDS)
    req.session_id = "one"
    it.complete(req, run(3, 1))
    assert at_the_end(it, [*run(40), *run(3, 1)]).return_expected == pytest.approx(0.1)


def test_of_too_many_sessions_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "MOST_SESSION_TOKENS", 100)
    it = server()
    it.cache.enable_session_radix_cache = True
    for number in range(4):
        req = it.begin(run(40, number))
        req.session_id = str(number)
        it.complete(req, run(3, 1))
    for number in range(4):
        it.cache.release_radix_session(str(number))
    ends = [at_the_end(it, [*run(40, number), *run(3, 1)]).return_expected for number in range(4)]
    assert ends == pytest.approx([0.9, 0.9, 0.1, 0.1])


@pytest.mark.parametrize("policy", ["lru", "sglang-lru"])
def test_policies_without_a_history_hear_nothing(policy: str) -> None:
    it = server(policy)
    it.serve(run(40), run(3, 1), session=Hint.ENDS)
    it.cache.on_session_close([it.arrive(run(40))])
    assert it.cache.report.answers is None


def test_memory_for_answers_can_be_turned_off() -> None:
    it = server(hybrid_answers_mb=0)
    it.serve(run(40), run(3, 1), session=Hint.ENDS)
    assert at_the_end(it, [*run(40), *run(3, 1)]).return_expected is None
