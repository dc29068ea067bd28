"""How many prompts a process has received and not sent yet."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from sglang_hybrid.hooks.serving import send_arrival, send_prompts
from sglang_hybrid.serving.requests import on_the_way


def body(prompts: int, samples: int = 1) -> Any:
    rid = "r" if prompts == 1 else [str(number) for number in range(prompts)]
    return SimpleNamespace(is_single=prompts == 1, rid=rid, parallel_sample_num=samples)


class Manager:
    """A tokenizer manager that sends, and notes what each message says is still on the way."""

    def __init__(self) -> None:
        self.rid_to_state: dict[str, Any] = {}
        self.said: list[int] = []

    async def send(self, manager: Manager, prompts: Any) -> None:
        state: dict[str, Any] = {}
        send_arrival(state, SimpleNamespace(created_time=1.0))
        self.said.append(state["on_the_way"])

    async def handle(self, asked: Any, fails: bool = False) -> None:
        on_the_way.on_received(asked)
        await asyncio.sleep(0)
        if fails:
            raise ValueError
        for _ in range(1 if asked.is_single else len(asked.rid)):
            await send_prompts(self.send, self, "a prompt")


def said(*bodies: tuple[Any, bool]) -> list[int]:
    manager = Manager()

    async def handle_all() -> None:
        tasks = [manager.handle(asked, fails) for asked, fails in bodies]
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(handle_all())
    return manager.said


def test_each_prompt_says_how_many_come_after_it() -> None:
    assert said((body(1), False), (body(1), False), (body(1), False)) == [2, 1, 0]


def test_the_prompts_of_one_body_count_one_by_one() -> None:
    assert said((body(3), False)) == [2, 1, 0]


def test_a_body_that_is_refused_is_not_waited_for() -> None:
    assert said((body(5), True), (body(1), False)) == [0]


def test_samples_of_one_prompt_are_not_on_the_way() -> None:
    assert said((body(1), False), (body(1, samples=4), False)) == [0, 0]


def test_a_batch_is_one_message() -> None:
    manager = Manager()

    async def handle() -> None:
        on_the_way.on_received(body(3))
        await send_prompts(manager.send, manager, ["a", "b", "c"])

    asyncio.run(handle())
    assert manager.said == [0]


def test_an_idle_process_reads_what_has_reached_it_before_it_sends() -> None:
    """Of two bodies that came at once, the first is counted on before the other was looked at."""
    manager = Manager()
    manager.rid_to_state = {"first": None}

    async def handle(asked: Any) -> None:
        on_the_way.on_received(asked)
        await send_prompts(manager.send, manager, "a prompt")

    async def later() -> None:
        await asyncio.sleep(0)
        await handle(body(1))

    async def handle_both() -> None:
        await asyncio.gather(handle(body(1)), later())

    asyncio.run(handle_both())
    assert sorted(manager.said) == [0, 1]
    manager.said.clear()
    manager.rid_to_state["running"] = None
    asyncio.run(handle_both())
    assert manager.said == [0, 0]
