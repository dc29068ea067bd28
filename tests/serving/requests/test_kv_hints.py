"""Our actions in SGLang's envelope: what they may hold, and what is said of others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sglang.srt.managers.kv_hints import decode_kv_hints_envelope

from sglang_hybrid.core.records.pin import PinRequest, Priority
from sglang_hybrid.core.returns.hints import IMPORT, PREWARM, Hint, PromptHints
from sglang_hybrid.serving.requests import kv_hints
from sglang_hybrid.serving.requests.payloads import read_rate


def envelope(*actions: dict[str, Any]) -> Any:
    whole = [{"action_id": "a", "action_version": "1", **action} for action in actions]
    return decode_kv_hints_envelope({"protocol_version": "1", "message_id": "m", "actions": whole})


def checkpoint(positions: Any, **more: Any) -> dict[str, Any]:
    return {"action_type": "hybrid.checkpoint", "payload": {"positions": positions}, **more}


def pin(positions: Any, ttl: Any = 60, **more: Any) -> dict[str, Any]:
    payload = {"positions": positions, "ttl": ttl, **more}
    return {"action_type": "hybrid.pin", "payload": payload}


def session(what: Any, **more: Any) -> dict[str, Any]:
    return {"action_type": "hybrid.session", "payload": {"next": what}, **more}


def after(seconds: Any, what: str = "return") -> dict[str, Any]:
    return session(what, payload={"next": what, "seconds": seconds})


def test_positions_of_all_actions_are_declared_in_order() -> None:
    asked = envelope(checkpoint([30, 10]), {"action_type": "other.pin"}, checkpoint([10, 20]))
    assert kv_hints.read(asked, 31) == PromptHints((10, 20, 30))
    assert kv_hints.read(None, 31) == PromptHints()


def test_pins_declare_their_positions_and_the_last_word_about_each_counts() -> None:
    asked = envelope(pin([20, 10], 60), checkpoint([15]), pin([20], 0.5, priority="high"))
    said = kv_hints.read(asked, 31)
    assert said.positions == (10, 15, 20)
    assert said.pins == (PinRequest(10, 60), PinRequest(20, 0.5, Priority.HIGH))


def test_the_last_word_about_a_session_counts() -> None:
    said = kv_hints.read(envelope(session("end"), checkpoint([3]), session("return")), 8)
    assert said == PromptHints((3,), session=Hint.RETURNS)


SAID = [
    PromptHints(),
    PromptHints(exact=True),
    PromptHints((3, 7)),
    PromptHints((2,), (PinRequest(3, 300), PinRequest(5, 60), PinRequest(7, 300, Priority.LOW))),
    *(PromptHints(session=hint) for hint in (Hint.ENDS, Hint.RETURNS, Hint.after(0.5))),
]


@pytest.mark.parametrize("said", SAID, ids=str)
def test_what_we_write_is_what_we_read(said: PromptHints) -> None:
    assert kv_hints.read(decode_kv_hints_envelope(kv_hints.write(said)), 9) == said


@pytest.mark.parametrize(
    "before", [None, {}, kv_hints.write(PromptHints((7,))), envelope(session("return"))]
)
def test_what_is_said_joins_an_envelope(before: Any) -> None:
    said = PromptHints(session=Hint.ENDS)
    for written in (kv_hints.write(said, before), *kv_hints.write(said, [before, None])):
        assert kv_hints.read(decode_kv_hints_envelope(written), 8).session == Hint.ENDS
    joined = kv_hints.read(decode_kv_hints_envelope(kv_hints.write(said, SEVEN)), 8)
    assert joined == PromptHints((7,), session=Hint.ENDS)


SEVEN = kv_hints.write(PromptHints((7,)))


@pytest.mark.parametrize("broken", [{"actions": 3}, "text", 7])
def test_what_is_no_envelope_is_left_for_sglang_to_refuse(broken: Any) -> None:
    with pytest.raises(ValueError, match="Malformed kv_hints"):
        decode_kv_hints_envelope(kv_hints.write(PromptHints(session=Hint.ENDS), broken))


@pytest.mark.parametrize(
    ("action", "sentence"),
    [
        (checkpoint([5, 31]), "positions[1] of hybrid.checkpoint is 31; in a prompt of 31 tokens"),
        (checkpoint([0]), "positions[0] of hybrid.checkpoint is 0"),
        (checkpoint([True]), "positions[0] of hybrid.checkpoint is True"),
        (checkpoint(["5"]), "positions[0] of hybrid.checkpoint is '5'"),
        (checkpoint([]), "positions of hybrid.checkpoint is []; it must be a list"),
        (checkpoint(7), "positions of hybrid.checkpoint is 7; it must be a list"),
        ({"action_type": "hybrid.checkpoint"}, "positions of hybrid.checkpoint is None"),
        (checkpoint([5], action_version="2"), "version '2' of hybrid.checkpoint"),
        (checkpoint([5], action_type="hybrid.fly"), "the action 'hybrid.fly'"),
        (checkpoint([5], action_type="hybrid.segments"), "which is for requests of one prompt"),
        (pin([2**63]), "positions[0] of hybrid.pin is 9223372036854775808"),
        (session("maybe"), "says 'maybe' of the session; say 'end' or 'return'."),
        (session(None), "the payload of hybrid.session says None"),
        (session("end", payload={"next": "end", "soon": 1}), "hybrid.session has the field 'soon'"),
        (after("soon"), "seconds in the payload of hybrid.session is 'soon'; it is a number"),
        (after(True), "seconds in the payload of hybrid.session is True"),
        (after(10**4_208), "returns after a number of 13,979 bits seconds; say more than 0"),
        (after(-3), "returns after -3 seconds; say more than 0 and at most 604,800"),
        (after(float("nan")), "returns after nan seconds"),
        (after(5, "end"), "seconds in the payload of hybrid.session is 5"),
        (checkpoint([5], payload={"positions": [5], "at": 1}), "has the field 'at'"),
        ({"action_type": "hybrid.exact", "payload": {"bits": 8}}, "'bits'; it has none"),
        (pin([31]), "positions[0] of hybrid.pin is 31; in a prompt of 31 tokens"),
        (pin([]), "positions of hybrid.pin is []; it must be a list"),
        (pin([5], 0), "ttl of hybrid.pin is 0; it is a number of seconds, above 0 and at most"),
        (pin([5], 86_401), "ttl of hybrid.pin is 86401; it is a number of seconds"),
        (pin([5], "5m"), "ttl of hybrid.pin is '5m'; it is a number of seconds"),
        (pin([5], True), "ttl of hybrid.pin is True; it is a number of seconds"),
        (pin([5], float("nan")), "ttl of hybrid.pin is nan; it is a number of seconds"),
        (pin([5], priority=9), "priority of hybrid.pin is 9; it may be 'low', 'normal', 'high'."),
        (pin([5], priority=[]), "priority of hybrid.pin is []; it may be 'low'"),
        (pin([5], tier="disk"), "hybrid.pin has the field 'tier'; it has only positions, ttl"),
        (pin(list(range(1, 18))), "declares 17 positions; a request may declare 16"),
        (checkpoint(list(range(1, 18))), "declares 17 positions; a request may declare 16"),
    ],
)
def test_what_is_malformed_is_named(action: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        kv_hints.read(envelope(action), 31)
    assert sentence in str(error.value)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


def test_an_action_that_the_server_does_itself_is_taken_out() -> None:
    pins = {"action_id": "b", "action_version": "1", **pin([5])}
    warm = {"action_id": "a", "action_type": "hybrid.prewarm", "action_version": "1", "payload": {}}
    both = {"protocol_version": "1", "message_id": "m", "actions": [warm, pins]}
    assert kv_hints.take(both, PREWARM) == ({}, {**both, "actions": [pins]})
    assert kv_hints.take({**both, "actions": [warm]}, PREWARM) == ({}, None)
    for other in (None, {}, 7, {"actions": 3}, {"actions": [4]}, {**both, "actions": [pins]}):
        assert kv_hints.take(other, PREWARM) == (None, other)
    assert kv_hints.take([None, both], IMPORT) == (None, [None, both])
    refused = {
        "2 times; it may stand there once": {**both, "actions": [warm, warm]},
        "version '9' of hybrid.prewarm": {**both, "actions": [{**warm, "action_version": "9"}]},
        "the payload of hybrid.prewarm is 3": {**both, "actions": [{**warm, "payload": 3}]},
        "for a request of one prompt": [None, both],
    }
    for sentence, hints in refused.items():
        with pytest.raises(ValueError, match=sentence):
            kv_hints.take(hints, PREWARM)
    with pytest.raises(ValueError, match=r"hybrid\.prewarm, which is for requests of one prompt"):
        kv_hints.read(envelope(warm), 8)


def test_the_rate_of_a_prewarming() -> None:
    assert read_rate({}) is None
    assert read_rate({"tokens_per_second": 0.5}) == 0.5
    for wrong in (0, -1, True, "fast", float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"tokens_per_second of hybrid\.prewarm is"):
            read_rate({"tokens_per_second": wrong})
    with pytest.raises(ValueError, match="has the field 'budget'; it has only tokens_per_second"):
        read_rate({"budget": 3})


@pytest.mark.parametrize(
    ("name", "header", "sentence"),
    [
        ("Session", "perhaps", "it is neither 'end' nor 'return' nor 'return; seconds=N'."),
        ("Session", "return; seconds=0", "a session returns after 0.0 seconds; say more than 0"),
        ("Session", "return; seconds=1000000", "a session returns after 1000000.0 seconds"),
        ("Session", "end; seconds=3", "it is neither"),
        ("Session", "return; seconds=1e3", "it is neither"),
        ("Exact", "yes", "it may be 'true'."),
    ],
)
def test_a_header_that_says_something_else(name: str, header: str, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        kv_hints.with_headers(None, {f"X-Hybrid-{name}": header})
    assert str(error.value).startswith(f"the header X-Hybrid-{name} is '{header}'; {sentence}")


@pytest.mark.parametrize(
    ("header", "hint"),
    [
        ("return; seconds=20", Hint.after(20)),
        (" return ;seconds=0.5 ", Hint.after(0.5)),
        ("end", Hint.ENDS),
    ],
)
def test_headers_join_what_a_request_says(header: str, hint: Hint) -> None:
    headers = {"X-Hybrid-Session": header, "X-Hybrid-Exact": "true"}
    written = decode_kv_hints_envelope(kv_hints.with_headers(SEVEN, headers))
    assert kv_hints.read(written, 8) == PromptHints((7,), session=hint, exact=True)
    assert kv_hints.with_headers(SEVEN, {}) is SEVEN


def test_a_header_has_actions_where_a_body_cannot() -> None:
    """SGLang's router forwards it by its other name."""
    (action,) = kv_hints.write(PromptHints((3,)))["actions"]
    text = json.dumps([action])
    for name in ("X-Hybrid-Kv-Hints", "X-Request-Id-Hybrid-Kv-Hints"):
        alone = decode_kv_hints_envelope(kv_hints.with_headers(None, {name: text}))
        assert kv_hints.read(alone, 8) == PromptHints((3,))
        both = decode_kv_hints_envelope(kv_hints.with_headers(SEVEN, {name: text}))
        assert kv_hints.read(both, 8) == PromptHints((3, 7))


@pytest.mark.parametrize("text", ["", "{}", "[1]", "[{", '[{"a":' * 5_000], ids=len)
def test_a_header_without_actions_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="the header X-Hybrid-Kv-Hints is no JSON list of actions"):
        kv_hints.with_headers(None, {"X-Hybrid-Kv-Hints": text})


def test_two_headers_that_differ_are_refused() -> None:
    headers = {"X-Hybrid-Session": "end", "X-Request-Id-Hybrid-Session": "return"}
    with pytest.raises(ValueError, match="two values of X-Hybrid-Session; give one"):
        kv_hints.with_headers(None, headers)
