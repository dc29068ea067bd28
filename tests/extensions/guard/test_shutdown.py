"""The steps that end a server, on a manager that only notes what it is told.

tests/server/test_shutdown.py ends real ones, on a CPU.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sglang_hybrid.extensions.guard import shutdown
from sglang_hybrid.extensions.guard.shutdown import MESSAGE, GracefulEnd, _drain, _End, _release

SCHEDULERS = "sglang.srt.utils.cudacore_pyspy_dump_utils.collect_scheduler_processes"
LONG = 60.0
"""Seconds that no test takes."""


class Manager:
    """The part of SGLang's TokenizerManager that is used."""

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


@pytest.fixture
def end(monkeypatch: pytest.MonkeyPatch) -> _End:
    """The state of a server's end, which it has not reached."""
    monkeypatch.setattr(shutdown, "_end", _End())
    return shutdown._end


class Served:
    """An application behind `GracefulEnd`. goes_on: what its streams wait for after one part.
    fails: what a request waits for that then has status 503.
    """

    def __init__(self) -> None:
        self.goes_on, self.fails = asyncio.Event(), asyncio.Event()
        methods = ["GET", "POST"]
        served = {"/stream": self._stream, "/fail": self._fail, "/metrics": self._answer}
        served |= {"/health": self._answer, "/v1/responses/{it}": self._answer}
        routes = [Route(path, answer, methods=methods) for path, answer in served.items()]
        app = GracefulEnd(Starlette(routes=routes))
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://server", timeout=LONG
        )

    async def _answer(self, request: Request) -> Response:
        return JSONResponse(len(await request.body()))

    async def _fail(self, request: Request) -> Response:
        await self.fails.wait()
        return JSONResponse({}, 503)

    async def _stream(self, request: Request) -> Response:
        async def parts() -> AsyncIterator[str]:
            yield "a"
            await self.goes_on.wait()
            yield "b"

        return StreamingResponse(parts())


def is_refused(answer: httpx.Response) -> bool:
    assert (answer.status_code == 503) == ("retry-after" in answer.headers)
    if answer.status_code == 503:
        assert answer.json() == {"error": {"message": MESSAGE, "code": 503}}
        assert answer.headers["connection"] == "close"
    return answer.status_code == 503


def test_what_comes_after_the_signal_is_refused_and_probes_fail(end: _End) -> None:
    async def ask() -> None:
        served = Served()
        paths = ("/health", "/stream", "/nowhere", "/metrics", "/v1/responses/5")
        served.goes_on.set()
        before = [is_refused(await served.client.get(path)) for path in paths]
        end.reached = True
        after = [is_refused(await served.client.get(path)) for path in paths]
        assert before == [False] * 5
        assert after == [True, True, True, False, False]
        assert is_refused(await served.client.post("/stream", content=b"x" * 100_000))

    run(ask)


def test_a_stream_that_began_before_ends_and_is_waited_for(
    end: _End, schedulers: list[str]
) -> None:
    """SGLang may know nothing of it any more."""

    async def ask() -> None:
        served = Served()
        stream = asyncio.create_task(served.client.post("/stream", content=b"{}"))
        while not end.open:
            await asyncio.sleep(0)
        end.reached = True
        drain = asyncio.create_task(_drain(Manager(), LONG))
        await asyncio.sleep(3 * shutdown.STEP)
        assert not drain.done()
        served.goes_on.set()
        answer = await stream
        assert (answer.status_code, answer.text) == (200, "ab")
        await drain
        assert end.open == 0

    run(ask)


def test_an_idle_server_ends_at_once(end: _End, schedulers: list[str]) -> None:
    run(_drain, Manager(), LONG)


def test_what_is_cut_before_its_first_byte_may_come_again(end: _End) -> None:
    async def ask() -> None:
        served = Served()
        served.fails.set()
        answer = await served.client.post("/fail")
        assert "retry-after" not in answer.headers, "the server does not end"
        served.fails.clear()
        cut = asyncio.create_task(served.client.post("/fail"))
        while not end.open:
            await asyncio.sleep(0)
        end.reached = True
        served.fails.set()
        assert (await cut).headers["retry-after"] == "1"

    run(ask)


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
