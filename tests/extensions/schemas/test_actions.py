"""Actions that are done before a scheduler sees a request: an import, and waiting for a turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sglang_hybrid.core.returns.hints import PromptHints
from sglang_hybrid.extensions.schemas.declared.modular import Segment
from sglang_hybrid.extensions.schemas.declared.resolve import read_prompt
from sglang_hybrid.extensions.schemas.endpoints import prewarm
from sglang_hybrid.extensions.schemas.endpoints.actions import (
    imported_prompt,
    prepare_prewarm,
    take_turn,
)
from sglang_hybrid.extensions.schemas.endpoints.prewarm import Prepared, PrewarmTurns, prefill
from sglang_hybrid.serving.requests.kv_hints import write


def hints(kind: str, payload: Any = None) -> dict[str, Any]:
    action = {"action_id": "a", "action_type": kind, "action_version": "1"}
    actions = [{**action, "payload": {} if payload is None else payload}]
    return {"protocol_version": "1", "message_id": "m", "actions": actions}


def request(kv_hints: Any, **more: Any) -> Any:
    fields = {"text": " And?", "input_ids": None, "sampling_params": None, "kv_hints": kv_hints}
    return SimpleNamespace(**{**fields, **more})


PLAN = {"name": "travel-plan", "parameters": {"duration": "a week"}, "imports": ["domestic"]}


def test_an_import_is_the_prompt_that_markup_says() -> None:
    asked = request(hints("hybrid.import", {"name": "travel", "imports": [PLAN]}))
    markup = (
        '<prompt schema="travel"><travel-plan duration="a week"><domestic/></travel-plan></prompt>'
    )
    found, same = imported_prompt(asked), read_prompt(markup)
    assert found is not None and (found.schema, found.modular) == (same.schema, False)
    (plan,), (other,) = found.imports, same.imports
    assert (plan.name, plan.values) == (other.name, other.values)
    assert [one.name for one in plan.imports] == [one.name for one in other.imports]
    assert asked.kv_hints is None
    assert imported_prompt(request(None)) is None


def test_other_actions_stay_beside_an_import() -> None:
    both = write(PromptHints((7,)), hints("hybrid.import", {"name": "travel"}))
    asked = request(both)
    assert imported_prompt(asked) is not None
    assert [one["action_type"] for one in asked.kv_hints["actions"]] == ["hybrid.checkpoint"]


@pytest.mark.parametrize(
    ("kv_hints", "more", "sentence"),
    [
        (hints("hybrid.import", {"imports": []}), {}, "name of hybrid.import"),
        (
            hints("hybrid.import", {"name": "s", "mode": "fast"}),
            {},
            "mode of hybrid.import is 'fast'",
        ),
        (hints("hybrid.import", {"name": "s", "at": 1}), {}, "at of hybrid.import is 1"),
        (hints("hybrid.import", {"name": "s"}), {"text": ["a", "b"]}, "of one prompt"),
        (hints("hybrid.import", {"name": "s"}), {"input_ids": [[1], [2]]}, "of one prompt"),
    ],
)
def test_what_is_malformed_is_named(kv_hints: Any, more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        imported_prompt(request(kv_hints, **more))
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_a_prewarming_generates_nothing() -> None:
    asked = request(hints("hybrid.prewarm"), sampling_params={"temperature": 0})
    prepare_prewarm(asked)
    assert asked.sampling_params == {"temperature": 0, "max_new_tokens": 0}
    assert asked.kv_hints is None and asked.prewarm.rate is None
    other = request(None)
    prepare_prewarm(other)
    assert not hasattr(other, "prewarm")
    with pytest.raises(ValueError, match="sampling_params is a list"):
        prepare_prewarm(request(hints("hybrid.prewarm"), sampling_params=[{}]))


class Steps:
    """A server that is busy for some looks; the clock goes on by a second at each of them."""

    def __init__(self, busy: int) -> None:
        self.left = busy
        self.now = 0.0
        self.turns = PrewarmTurns(self.busy, lambda: self.now)

    def busy(self) -> bool:
        self.left -= 1
        self.now += 1.0
        return self.left >= 0


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_hybrid.extensions.schemas.endpoints.prewarm.IDLE_CHECK", 0)


def test_a_turn_comes_when_nothing_else_runs() -> None:
    it = Steps(busy=7)
    asyncio.run(it.turns.take(100, None))
    assert it.now == 8.0


def test_a_rate_gives_turns_on_a_busy_server() -> None:
    """100 tokens at 10 a second: the next prompt waits for 10 seconds."""
    it = Steps(busy=1_000)
    starts = []
    for _ in range(3):
        asyncio.run(it.turns.take(100, 10.0))
        starts.append(it.now)
    assert starts == [1.0, 11.0, 21.0]


def test_a_slow_rate_holds_up_no_others_prompts() -> None:
    it = Steps(busy=1_000)
    asyncio.run(it.turns.take(100, 1e-6, payer="a"))
    asyncio.run(it.turns.take(100, 100.0, payer="b"))
    asyncio.run(it.turns.take(100, 100.0, payer="b"))
    assert it.now < 10


def test_a_rate_is_remembered_for_a_day_at_most() -> None:
    """A client may name any payer, and any rate above 0: none stays for ever."""
    it = Steps(busy=1_000)
    for payer in "abc":
        asyncio.run(it.turns.take(100, 5e-324, payer=payer))
    it.now += 86_400
    began = it.now
    for payer in "abc":
        asyncio.run(it.turns.take(100, 1.0, payer=payer))
    assert it.now - began < 10


def test_rates_of_few_payers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prewarm, "MOST_PAYERS", 3)
    it = Steps(busy=1_000)
    for payer in "abcaefg":
        asyncio.run(it.turns.take(1, 1.0, payer=payer))
    assert list(it.turns._due) == ["e", "f", "g"]


def test_many_that_wait_leave_time_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await asyncio.Event().wait()

    async def wait(count: int) -> None:
        turns = PrewarmTurns(lambda: True)
        tasks = [asyncio.create_task(turns.take(1, None)) for _ in range(count)]
        await asyncio.wait(tasks, timeout=0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert turns._waiting == 0

    monkeypatch.setattr(prewarm, "IDLE_CHECK", 1.0)
    monkeypatch.setattr(prewarm, "asyncio", SimpleNamespace(sleep=sleep))
    asyncio.run(wait(2_000))
    assert slept[:20] == [1.0] * 20 and slept[-1] == 100.0


def test_a_text_that_cannot_fit_is_not_tokenized_for_its_rate() -> None:
    asked = request(hints("hybrid.prewarm", {"tokens_per_second": 5}), text="a" * 2_000)
    prepare_prewarm(asked)
    manager: Any = SimpleNamespace(
        tokenizer=pytest.fail, context_len=1, allow_auto_truncate=False, rid_to_state={}
    )
    with pytest.raises(ValueError, match="2,000 bytes"):
        asyncio.run(take_turn(manager, asked, None))


def test_a_client_that_goes_away_waits_no_more() -> None:
    async def gone() -> bool:
        return True

    it = Steps(busy=1_000)
    with pytest.raises(ValueError, match="the client went away"):
        asyncio.run(it.turns.take(100, None, gone))


class Manager:
    """A tokenizer manager that notes what it is given. busy: another request runs all the time."""

    def __init__(self, *, busy: bool) -> None:
        self.rid_to_state = {"other": 1} if busy else {}
        self.given: list[tuple[list[int], Any]] = []

    async def generate_request(self, asked: Any, http: Any) -> AsyncIterator[None]:
        self.given.append((asked.input_ids, http))
        yield


class Client:
    """An HTTP request whose client goes away after so many looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    async def is_disconnected(self) -> bool:
        self.looks -= 1
        return self.looks < 0


PROMPTS = [Prepared([number] * 4, [4]) for number in range(5)]


@pytest.mark.parametrize(("busy", "computed"), [(False, 3), (True, 0)])
def test_a_prewarming_ends_when_its_client_goes(*, busy: bool, computed: int) -> None:
    """Between two prompts, and while it waits for its turn on a server that is never idle."""
    pytest.importorskip("sglang")
    manager, client = Manager(busy=busy), Client(looks=3)

    async def run() -> None:
        await asyncio.wait_for(
            prefill(cast(Any, manager), None, PROMPTS, http=cast(Any, client)), 20
        )

    with pytest.raises(ValueError, match="the client went away"):
        asyncio.run(run())
    assert manager.given == [(one.ids, client) for one in PROMPTS[:computed]]


def test_modules_are_computed_while_somebody_waits_for_them() -> None:
    pytest.importorskip("sglang")
    from sglang_hybrid.extensions.schemas.endpoints.apart import compute_apart

    segments = [Segment((1, 2), start) for start in range(5)]
    manager, client = Manager(busy=False), Client(looks=2)
    with pytest.raises(ValueError, match="the client went away"):
        asyncio.run(compute_apart(cast(Any, manager), None, None, segments, cast(Any, client)))
    assert len(manager.given) == 2
    asyncio.run(compute_apart(cast(Any, manager), None, None, segments))
    assert len(manager.given) == 2 + len(segments)


def test_other_requests_do_not_wait() -> None:
    busy: Any = SimpleNamespace(rid_to_state={"other": 1})
    asyncio.run(take_turn(busy, request(None), None))
