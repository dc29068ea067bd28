"""Hits, states and reports of a tenant do not depend on what others sent, on the real tree."""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.explain.explanation import Explanation
from sglang_hybrid.explain.messages import ExplainReq
from sglang_hybrid.extensions.lab.simulation.traces.line_formats import RecordedLine
from sglang_hybrid.serving.tenants import TenantNames, tenant, tenant_of
from tests.cache.backends import POLICIES, options
from tests.cache.driver import Server, Sizes
from tests.cache.test_rules import run
from tests.examples import examples

ADAPTER = "0123456789abcdef" * 2
WAYS = {  # what makes a tenant another one
    "salt": ({"cache_salt": "a"}, {"cache_salt": "b"}),
    "key": ({"extra_key": "a"}, {"extra_key": "b"}),
    "salt against none": ({"cache_salt": "a"}, {}),
    "none against salt": ({}, {"cache_salt": "b"}),
    "key against salt": ({"extra_key": "a"}, {"cache_salt": "a"}),
    "adapter": ({"extra_key": ADAPTER}, {}),
}


def server(policy: str = "reuse", **sizes: int) -> Server:
    return Server.on(Sizes(**{"kv": 40_000, "states": 400, **sizes}), options(policy))


def serve(it: Server, prompt: list[int], answer: list[int], at: float, **whose: Any) -> Any:
    """A request from arrival to end; it takes the id that its sender chose."""
    req = it.begin(prompt, at, **whose)
    it.complete(req, answer)
    return req


def told(it: Server, prompt: list[int], **whose: str) -> Any:
    """All that /hybrid_cache/explain says of a prompt."""
    asked = ExplainReq(input_ids=prompt, **whose)
    return it.cache.explainer.answer(asked).report


@pytest.mark.parametrize("way", WAYS)
def test_a_guess_is_not_answered(way: str) -> None:
    """b sends the first 321 of the 500 tokens that a sent, and goes on otherwise."""
    a, b = WAYS[way]
    it, alone = server(), server()
    secret, guess = run(500), [*run(321), *run(100, 1)]
    serve(it, secret, [7], 1.0, **a)
    assert told(it, guess, **b) == told(alone, guess, **b)
    reports = [
        serve(one, guess, [7], 2.0, **b).customized_info["hybrid_cache"][0] for one in (it, alone)
    ]
    assert told(it, guess, **b) == told(alone, guess, **b)
    assert reports[0] == reports[1]
    positions = [one["position"] for one in reports[0]["checkpoints"]]
    assert 321 not in positions and positions


tenants_traffic = st.lists(
    st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 40), st.integers(1, 40)),
    min_size=1,
    max_size=30,
)


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(policy, marks=[] if policy in ("reuse", "sglang-lru") else pytest.mark.slow)
        for policy in POLICIES
    ],
)
@examples(15)
@given(tenants_traffic)
def test_with_room_for_all_nothing_of_others_is_seen(
    policy: str, traffic: list[tuple[bool, int, int, int]]
) -> None:
    """a and b send prompts of the same few kinds, with the same ids; b is served with a and
    without.
    """
    both, alone = server(policy), server(policy)
    for number, (mine, kind, cut, own) in enumerate(traffic):
        prompt = [*run(60, kind)[: 20 + cut], *run(own, 10 + kind)]
        rid, at = str(number), 1.0 + number
        if not mine:
            serve(both, prompt, [7, 8], at, rid=rid, cache_salt="a")
            serve(both, prompt, [7, 8], at, rid=str(number + 1), cache_salt="a")
            continue
        found = [
            serve(it, prompt, [7, 8], at, rid=rid, cache_salt="b").customized_info
            for it in (both, alone)
        ]
        assert found[0] == found[1]
        for question in ({"input_ids": prompt}, {"request_id": rid}):
            asked = ExplainReq(**question, cache_salt="b")
            answers = [it.cache.explainer.answer(asked) for it in (both, alone)]
            assert msgspec.to_builtins(answers[0].report) == msgspec.to_builtins(answers[1].report)
            assert answers[0].error == answers[1].error


def test_requests_are_not_found_under_another_tenant() -> None:
    it = server()
    serve(it, run(50), [7], 1.0, rid="mine", cache_salt="a")
    for whose in ({}, {"cache_salt": "b"}, {"extra_key": "a"}):
        answer = it.cache.explainer.answer(ExplainReq(request_id="mine", **whose))
        assert answer.report is None
        assert "'mine' with this extra key, salt and adapter" in answer.error
    assert it.cache.explainer.answer(ExplainReq(request_id="mine", cache_salt="a")).report


def test_when_room_is_short_only_that_is_seen() -> None:
    """a's requests push b's states out: b learns that they went, not for whom or for what."""
    it = server(states=4)
    serve(it, run(80, 9), [7], 0.0, rid="b's", cache_salt="b")
    for number in range(12):
        serve(it, run(100 + number, number), [7], 1.0 + number, rid=f"a's {number}", cache_salt="a")
    serve(it, run(30, 8), [7], 20.0, cache_salt="b")
    account = Explanation(it.cache, it.cache.decision_log, tenant(None, "b")).of_prompt(
        array("q", run(80, 9))
    )
    assert account.deeper
    text = msgspec.json.encode(account).decode()
    assert "a's" not in text
    for gap in account.deeper:
        assert (gap.recipient, gap.score, gap.victim_score) == (None, None, None)


def test_siblings_of_different_tenants_do_not_lay_checkpoints_for_one_another() -> None:
    """Waiting prompts of another tenant are not looked at, whatever their ids."""
    it = server()
    document = run(200)
    waiting = [
        it.arrive([*document, *run(30, k)], rid=str(k % 2), cache_salt=salt)
        for k, salt in enumerate("ab")
    ]
    wait = it.cache.plans.prefix_wait
    wait.update_waiting(waiting)
    assert [wait.shared(req) for req in waiting] == [[], []]
    twin = it.arrive([*document, *run(30, 7)], rid="0", cache_salt="a")
    wait.update_waiting([*waiting, twin])
    assert [wait.shared(req) for req in (*waiting, twin)] == [
        [200],
        [],
        [200],
    ]


@pytest.mark.parametrize("way", WAYS)
def test_a_recording_names_no_tenant(way: str, tmp_path: Path) -> None:
    """It tells tenants apart, and has neither their salts nor their keys."""
    a, b = ({name: f"secret-{value}" for name, value in who.items()} for who in WAYS[way])
    path = tmp_path / "trace.jsonl"
    it = Server.on(Sizes(), options("reuse", hybrid_record=str(path)), rank=0)
    for at, whose in enumerate((a, b, a)):
        serve(it, run(20), [7], float(at), **whose)
    it.cache.tuning.file.close()
    assert "secret" not in path.read_text()
    lines = path.read_text().splitlines()
    first, other, again = (msgspec.json.decode(line, type=RecordedLine).tenant for line in lines)
    assert first == again != other


# Names.


def test_names_tell_tenants_apart_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(3)
    parts = [None, "", "a", "b", "ab", "+a", "-", *(str(source.random()) for _ in range(20))]
    every = {tenant(key, salt) for key in parts for salt in parts}
    monkeypatch.setenv("SGLANG_HYBRID_RECORD_KEY", "one")
    names = TenantNames()
    named = {names.name(whose) for whose in every}
    assert len(named) == len(every)
    assert names.name(None) == ""
    assert {TenantNames().name(whose) for whose in every} == named
    monkeypatch.setenv("SGLANG_HYBRID_RECORD_KEY", "another")
    assert {TenantNames().name(whose) for whose in every} & named == {""}
    monkeypatch.delenv("SGLANG_HYBRID_RECORD_KEY")
    assert TenantNames().name(("a", None)) != TenantNames().name(("a", None))


hexes = st.text("0123456789abcdef", min_size=32, max_size=32)
likenesses = st.builds(
    "{}{}{}".format, st.text(max_size=2), hexes, st.sampled_from(["", ".", ".."])
)
keys = st.one_of(st.text(max_size=3), likenesses)


def test_an_adapter_and_a_key_that_looks_like_one_are_two_tenants() -> None:
    it = server()
    plain = it.arrive([1], extra_key=ADAPTER)
    adapted = it.arrive([1], lora_id=ADAPTER)
    assert tenant_of(plain) != tenant_of(adapted)
    assert it.arrive([1], extra_key="a").extra_key == "a"
