"""A master that is there, one that comes late, and one that does not come."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from torch.distributed.distributed_c10d import default_pg_timeout

from sglang_hybrid.extensions.guard import rendezvous
from sglang_hybrid.extensions.guard.rendezvous import meet_members, wait_for_master
from sglang_hybrid.serving.requests.errors import Refused
from sglang_hybrid.serving.server_process import free_port


def told_to_wait(monkeypatch: pytest.MonkeyPatch, seconds: float | None) -> None:
    """Set the seconds of --dist-timeout."""
    given = SimpleNamespace(dist_timeout=seconds)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: given)


@pytest.fixture(autouse=True)
def no_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    told_to_wait(monkeypatch, None)


async def serve(port: int) -> asyncio.Server:
    return await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", port)


def test_a_master_that_comes_late() -> None:
    port = free_port()

    async def run() -> None:
        waiting = asyncio.create_task(wait_for_master("127.0.0.1", f"{port},{port}", rank=1))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        server = await serve(port)
        await waiting
        server.close()

    asyncio.run(run())


def test_a_master_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    for of_ours, of_the_operator in ((0.2, None), (1_000.0, 0.2)):
        monkeypatch.setattr(rendezvous, "SECONDS", of_ours)
        told_to_wait(monkeypatch, of_the_operator)
        with pytest.raises(Refused, match=r"no master listens on 127\.0\.0\.1:.*--dist-timeout"):
            asyncio.run(wait_for_master("127.0.0.1", free_port(), rank=1))


@pytest.mark.parametrize(
    ("address", "port"),
    [("nowhere.invalid", 80), ("127.0.0.1", "a"), ("127.0.0.1", 10**6), ("", ""), ("a" * 99, 1)],
)
def test_what_is_no_address(address: str, port: str | int) -> None:
    with pytest.raises(Refused, match="is no address of a master"):
        asyncio.run(wait_for_master(address, port, rank=1))


def test_the_master_waits_for_nobody_here() -> None:
    asyncio.run(wait_for_master("nowhere.invalid", "", rank=0))


def test_a_group_whose_members_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "SECONDS", 1)
    with pytest.raises(RuntimeError, match="1"):  # torch's own sentence names the seconds
        meet_members(f"tcp://127.0.0.1:{free_port()}", 2, 0, "g")


def test_a_group_whose_members_come_late_where_the_operator_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "SECONDS", 0.1)
    told_to_wait(monkeypatch, 30)
    address = f"tcp://127.0.0.1:{free_port()}"
    with ThreadPoolExecutor() as threads:
        first = threads.submit(meet_members, address, 2, 0, "g")
        time.sleep(0.5)
        second = threads.submit(meet_members, address, 2, 1, "g")
        assert (first.result()["rank"], second.result()["rank"]) == (0, 1)


def test_a_group_whose_members_meet() -> None:
    group = meet_members(f"tcp://127.0.0.1:{free_port()}", 1, 0, "g")
    assert (group["rank"], group["world_size"]) == (0, 1)
    assert group["store"].timeout == default_pg_timeout
