"""Hints about sessions, on a real server: by a header, by a hint, by closing it."""

from __future__ import annotations

import pytest
import requests

from sglang_hybrid.core.returns.hints import Hint, PromptHints
from sglang_hybrid.serving.requests import kv_hints
from tests.server.client import ask, random_prompt, send


def expected(url: str, prompt: list[int], answer: list[int], tenant: str | None) -> float | None:
    """The probability of a return that the server gives for the checkpoint at the answer's end."""
    asked = {"input_ids": [*prompt, *answer, 5], "extra_key": tenant}
    report = requests.post(url + "/hybrid_cache/explain", json=asked, timeout=60).json()
    found: float | None = report["checkpoint"]["return_expected"]
    return found


@pytest.mark.parametrize(
    ("seed", "headers", "hint", "p"),
    [
        (1, {"X-Hybrid-Session": "end"}, None, 0.1),
        (2, {"X-Hybrid-Session": "return"}, None, 0.9),
        (3, None, Hint.ENDS, 0.1),
        (5, {"X-Hybrid-Session": "return; seconds=20"}, None, 0.9),
        (6, None, Hint.after(2), 0.9),
        (4, None, None, None),
    ],
)
def test_a_request_says_it(
    url: str, seed: int, headers: dict[str, str] | None, hint: Hint | None, p: float | None
) -> None:
    prompt = random_prompt(200, seed)
    tenant = f"sessions {seed}"  # what hints are worth is learnt: from none that came before
    said = {} if hint is None else {"kv_hints": kv_hints.write(PromptHints(session=hint))}
    answer = ask(url, prompt, 4, headers, extra_key=tenant, **said)["output_ids"]
    found = expected(url, prompt, answer, tenant)
    assert found == (None if p is None else pytest.approx(p, abs=0.05))


def test_another_word_is_refused(url: str) -> None:
    answer = send(url, random_prompt(20, seed=9), 4, {"X-Hybrid-Session": "perhaps"})
    assert answer.status_code == 400
    assert "X-Hybrid-Session is 'perhaps'; it is neither" in answer.json()["error"]["message"]


def test_closing_a_session_ends_it(url: str) -> None:
    tenant = "sessions 10"
    body = {"capacity_of_str_len": 10_000, "extra_key": tenant}
    session = requests.post(url + "/open_session", json=body, timeout=60).json()
    prompt = random_prompt(200, seed=10)
    more = {"session_params": {"id": session, "rid": None}, "extra_key": tenant}
    answer = ask(url, prompt, 4, **more)["output_ids"]
    assert expected(url, prompt, answer, tenant) is None
    body = {"session_id": session, "extra_key": tenant}
    closed = requests.post(url + "/close_session", json=body, timeout=60)
    assert closed.status_code == 200
    assert expected(url, prompt, answer, tenant) == pytest.approx(0.1, abs=0.05)
