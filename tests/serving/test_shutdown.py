"""The steps that end a server, on a manager that only notes what it is told.

tests/server/test_shutdown.py ends real ones, on a CPU.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.serving import shutdown
from sglang_hybrid.serving.shutdown import MESSAGE, _drain, _release

SCHEDULERS = "sglang.srt.utils.cudacore_pyspy_dump_utils.collect_scheduler_processes"
LONG = 60.0
"""Seconds that no test takes."""


class Manager:
    """What is used of SGLang's TokenizerManager."""

    def __init__(self, *requests: str) -> None:
        self.rid_to_state = dict.fromkeys(requests)
        self.gracefully_exit = False
        self.server_status: Any = None
        self.told: list[str] = []
        self._subprocess_watchdog = SimpleNamespace(stop=lambda: self.told.append("watchdog off"))

    def _dispatch_to_scheduler(self, message: Any) -> None:
        self.told.append(type(message).__name__)

    def _handle_abort_req(self, message: Any) -> None:
        del self.rid_to_state[message.rid]
        reason = message.finished_reason
        assert (reason["type"], reason["message"], reason["status_code"]) == ("abort", MESSAGE, 503)
        self.told.append(f"cut {message.rid}")


def run(step: Callable[..., Any], *arguments: Any) -> None:
    asyncio.run(asyncio.wait_for(step(*arguments), LONG / 2))


def serve_on(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(device_type=device)
    monkeypatch.setattr("sglang.srt.platforms.current_platform", platform)


@pytest.fixture
def schedulers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    alive = ["scheduler"]
    monkeypatch.setattr(SCHEDULERS, lambda: list(alive))
    return alive


def test_schedulers_release_what_they_hold(
    schedulers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not end holds nothing up; a request that comes meanwhile is cut as well."""
    monkeypatch.setattr(
        "sglang.srt.platforms.current_platform", SimpleNamespace(device_type="cuda")
    )
    monkeypatch.setattr(shutdown, "RELEASE_SECONDS", 0.3)
    manager = Manager("a", "b")

    async def release_while_one_comes() -> None:
        asyncio.get_running_loop().call_later(0.15, manager.rid_to_state.update, {"late": None})
        await _release(manager)

    run(release_while_one_comes)
    assert manager.told == ["ShutdownReq", "cut a", "cut b", "cut late"]


def test_on_a_cpu_there_is_nothing_to_release(
    schedulers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_on("cpu", monkeypatch)
    manager = Manager("a")
    run(_release, manager)
    assert manager.told == ["cut a"]


def test_requests_may_end_until_the_time_is_over(schedulers: list[str]) -> None:
    manager = Manager("a")

    async def end_soon() -> None:
        asyncio.get_running_loop().call_later(0.2, manager.rid_to_state.clear)
        await _drain(manager, LONG)

    run(end_soon)
    assert manager.told == []
    manager = Manager("a")
    run(_drain, manager, 0.2)
    assert list(manager.rid_to_state) == ["a"]


def test_nobody_waits_for_schedulers_that_have_ended(schedulers: list[str]) -> None:
    schedulers.clear()
    run(_drain, Manager("a"), LONG)


def test_nobody_waits_for_a_server_that_is_ill(schedulers: list[str]) -> None:
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    manager = Manager("a")
    manager.server_status = ServerStatus.UnHealthy
    run(_drain, manager, LONG)


def test_late_output_of_requests_that_were_cut_off_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The words are SGLang's."""
    from sglang.srt.managers import tokenizer_manager

    source = inspect.getsource(tokenizer_manager.TokenizerManager)
    assert source.count(shutdown.LATE_OUTPUT) == 1
    log = tokenizer_manager.logger
    before = list(log.filters)
    try:
        shutdown.ignore_late_output()
        log.warning(f"Received output for rid='a' but {shutdown.LATE_OUTPUT}.")
        log.warning("Something else.")
    finally:
        log.filters = before
    assert [record.message for record in caplog.records] == ["Something else."]
