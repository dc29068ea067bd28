"""Routers that follow servers: against publishers that are made here, with real sockets."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import zmq
from rich.console import Console

from sglang_hybrid.core.tiers.rates import Tier
from sglang_hybrid.extensions.router import Choice, Follower, ReplicaIndex, Replicas, tenant_name
from sglang_hybrid.extensions.router.choosing import addresses, endpoint_of
from sglang_hybrid.extensions.router.load import TOO_MANY_WRONG
from sglang_hybrid.extensions.router.program import table
from sglang_hybrid.extensions.router.resumable import Resumable
from sglang_hybrid.extensions.router.wire import KvEvents, Malformed
from sglang_hybrid.serving.tenants import TenantNames
from tests.extensions.router.server import (
    KEY,
    PATIENCE,
    PAUSE,
    Server,
    all_of,
    removed,
    stored,
    wait_until,
)


@contextmanager
def following(server: Server, **given: Any) -> Iterator[tuple[Follower, ReplicaIndex]]:
    """A follower of the server that is in step and has subscribed."""
    index = ReplicaIndex()
    times = {"pause": PAUSE, "patience": PATIENCE} | given
    follower = Follower(server.url, server.endpoint, index, "a", KEY, **times)
    try:
        server.wait_for_subscriber()
        wait_until(lambda: follower.is_in_step)
        yield follower, index
    finally:
        follower.close()
        assert index.resume([1]) == []


def position(index: ReplicaIndex, *tokens: int) -> int:
    """The position at which the replica can resume these tokens and one more."""
    return index.resume([*tokens, 0])[0].position


def test_batches_are_applied(server: Server) -> None:
    with following(server) as (follower, index):
        server.publish(stored([1, 2]), {"type": "OfANewerServer"})
        server.publish(stored([3, 4], parent=2, tenant=""))
        wait_until(lambda: follower.applied == 2)
        assert position(index, 1, 2, 3, 4) == 4
        server.publish(removed(4))
        wait_until(lambda: position(index, 1, 2, 3, 4) == 2)
        server.publish({"type": "AllBlocksCleared"})
        wait_until(lambda: position(index, 1, 2, 3, 4) == 0)
        assert (follower.snapshots, follower.malformed, server.asked) == (1, 0, [0])


def test_one_who_joins_late_reads_the_snapshot(server: Server) -> None:
    server.published = 7
    server.snapshot = [[stored([1, 2])], [stored([3, 4], parent=2)]]
    with following(server) as (follower, index):
        assert position(index, 1, 2, 3, 4) == 4
        server.publish(stored([5, 6], parent=4))
        wait_until(lambda: follower.applied == 1)
        assert position(index, 1, 2, 3, 4, 5, 6) == 6
        assert server.asked == [0, 1]


def test_a_lost_batch_has_the_snapshot_read_anew(server: Server) -> None:
    with following(server) as (follower, index):
        server.snapshot = [[stored([1, 2]), stored([3, 4])]]
        server.published = 1  # batch 0 was lost
        server.publish(stored([3, 4]))
        wait_until(lambda: follower.is_in_step and follower.snapshots == 2)
        assert "batch 1 came where batch 0 was due" in follower.error
        assert position(index, 1, 2) == position(index, 3, 4) == 2


def test_a_lost_batch_after_which_nothing_comes_is_noticed(server: Server) -> None:
    with following(server) as (follower, index):
        server.snapshot = [[stored([1, 2])]]
        server.published = 1
        wait_until(lambda: follower.is_in_step and follower.snapshots == 2)
        assert "batches before number 1 did not come" in follower.error
        assert position(index, 1, 2) == 2


def test_an_unknown_block_has_the_snapshot_read_anew(server: Server) -> None:
    with following(server) as (follower, index):
        server.snapshot = [[stored([1, 2]), stored([3, 4], parent=2)]]
        server.publish(stored([3, 4], parent=2))
        wait_until(lambda: follower.is_in_step and follower.snapshots == 2)
        assert "unknown block 2" in follower.error
        assert position(index, 1, 2, 3, 4) == 4


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1",
        msgspec.msgpack.encode("text"),
        msgspec.msgpack.encode([0.0, ["text"]]),
        msgspec.msgpack.encode([0.0, [{"type": "BlockStored"}]]),
        msgspec.msgpack.encode([0.0, [stored([1, 2], token_ids=[(1, 2), (2, 3)])]]),
        msgspec.msgpack.encode([0.0, [stored([1, 2], block_size=3)]]),
    ],
)
def test_a_malformed_batch_is_counted(server: Server, payload: bytes) -> None:
    with following(server) as (follower, index):
        server.send(0, payload)
        server.published = 1
        server.wait_for_another_subscriber()
        wait_until(lambda: follower.is_in_step and follower.snapshots == 2)
        server.publish(stored([1, 2]))
        wait_until(lambda: position(index, 1, 2) == 2)
        assert follower.malformed == 1


def test_what_is_published_is_not_kept_while_nothing_is_read(server: Server) -> None:
    """A server that publishes for hours and has no snapshot would take all memory here."""
    with following(server) as (follower, index):
        server.send(0, b"\x00")
        server.published = 1
        server.wait_for_another_subscriber()
        server.error, server.epoch = "none", "another"
        server.wait_for_another_subscriber()
        server.error, server.snapshot = "", [[stored([1, 2])]]
        wait_until(lambda: follower.is_in_step)
        assert position(index, 1, 2) == 2


def test_a_message_of_other_frames_is_malformed(server: Server) -> None:
    with following(server) as (follower, _):
        server.socket.send_multipart([b"", b"one"])
        wait_until(lambda: follower.is_in_step and follower.snapshots == 2)
        assert follower.malformed == 1
        assert "frames of [0, 3] bytes" in follower.error


def test_batches_between_the_pages_are_applied_between_them(server: Server) -> None:
    """Block 2 is on the first page, gone before the second one, and stored again after it."""

    def publish_before(page: int) -> None:
        if page == 1:
            server.wait_for_subscriber()
            server.publish(removed(2))
        if page == 2:
            server.publish(stored([7, 8], parent=6))

    server.snapshot = [[stored([1, 2])], [stored([5, 6]), stored([1, 2])], [stored([9, 10])]]
    server.published = 3
    server.on_page = publish_before
    index = ReplicaIndex()
    follower = Follower(
        server.url, server.endpoint, index, "a", KEY, pause=PAUSE, patience=20 * PATIENCE
    )
    wait_until(lambda: follower.is_in_step)
    assert (follower.applied, follower.snapshots) == (2, 1)
    assert position(index, 1, 2) == 2
    assert position(index, 5, 6, 7, 8) == 4
    assert position(index, 9, 10) == 2
    follower.close()


def test_a_page_waits_for_batches_that_were_published_before_it(server: Server) -> None:
    first = msgspec.msgpack.encode([0.0, [stored([3, 4])]])

    def count_before(page: int) -> None:
        server.published = page  # batch 0 is published before page 1, and comes later

    server.on_page = count_before
    server.snapshot = [[stored([1, 2])], [stored([5, 6])]]
    index = ReplicaIndex()
    follower = Follower(server.url, server.endpoint, index, "a", KEY, pause=PAUSE, patience=20)
    server.wait_for_subscriber()
    wait_until(lambda: server.asked == [0, 1])
    assert not follower.is_in_step
    assert position(index, 5, 6) == 0
    server.send(0, first)
    wait_until(lambda: follower.is_in_step)
    assert position(index, 3, 4) == position(index, 5, 6) == 2
    follower.close()


def test_batches_that_do_not_come_before_a_page_have_it_begin_again(server: Server) -> None:
    def count_before(page: int) -> None:
        server.published = 1 if page else server.published

    server.on_page = count_before
    server.snapshot = [[stored([1, 2])], [stored([5, 6])]]
    with following(server) as (follower, index):
        assert server.asked == [0, 1, 0, 1]
        assert "batches before number 1 did not come" in follower.error
        assert position(index, 5, 6) == 2


def test_a_server_that_starts_anew_is_followed_again(server: Server) -> None:
    with following(server, patience=20) as (follower, index):
        server.publish(stored([1, 2]))
        server.publish(stored([5, 6]))
        wait_until(lambda: follower.applied == 2)
        server.start_anew()
        server.wait_for_subscriber()
        server.publish(stored([3, 4]))
        server.snapshot = [[stored([3, 4])]]
        wait_until(lambda: follower.is_in_step and position(index, 3, 4) == 2)
        assert position(index, 1, 2) == 0
        server.publish(stored([7, 8]))
        wait_until(lambda: position(index, 7, 8) == 2)
        assert position(index, 3, 4) == 2


def test_numbers_that_start_anew_are_noticed_by_the_batch_alone(server: Server) -> None:
    with following(server, pause=600) as (follower, _):
        server.publish(stored([1, 2]))
        wait_until(lambda: follower.applied == 1)
        server.published = 0
        server.publish(stored([3, 4]))
        wait_until(lambda: not follower.is_in_step)
        assert "numbers started anew" in follower.error


def test_a_server_that_goes_away_holds_nothing_until_it_is_back(server: Server) -> None:
    with following(server) as (follower, index):
        server.publish(stored([1, 2]))
        wait_until(lambda: follower.applied == 1)
        server.stop_http()
        wait_until(lambda: not follower.is_in_step and not follower.is_reachable)
        assert position(index, 1, 2) == 0
        server.snapshot = [[stored([1, 2])]]
        server.start_http()
        wait_until(lambda: follower.is_in_step)
        assert position(index, 1, 2) == 2


def test_a_server_that_answers_late_is_busy_and_one_that_does_not_has_vanished(
    server: Server,
) -> None:
    with following(server, patience=0.3) as (follower, index):
        server.publish(stored([1, 2]))
        wait_until(lambda: follower.applied == 1)
        server.goes_on.clear()
        threading.Event().wait(0.3)  # it has not been answered once or twice
        assert follower.is_in_step and follower.is_reachable
        wait_until(lambda: not follower.is_in_step and not follower.is_reachable)
        wait_until(lambda: position(index, 1, 2) == 0)
        server.snapshot = [[stored([1, 2])]]
        server.goes_on.set()
        wait_until(lambda: follower.is_in_step)
        assert position(index, 1, 2) == 2


def test_a_busy_server_whose_snapshot_is_wanted_has_not_vanished(server: Server) -> None:
    with following(server, patience=2) as (follower, _):
        server.goes_on.clear()
        follower.resync()
        wait_until(lambda: "ReadTimeout" in follower.error)
        assert follower.is_reachable and not follower.is_in_step
        server.goes_on.set()
        wait_until(lambda: follower.is_in_step)


def test_a_server_whose_thread_hangs_is_not_in_step(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last message is not true for ever."""
    with following(server) as (follower, _):
        now = time.monotonic()
        monkeypatch.setattr("time.monotonic", lambda: now + 60)
        assert not follower.is_in_step and not follower.is_reachable
        monkeypatch.undo()


def test_a_snapshot_that_does_not_end_puts_its_server_aside(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_hybrid.extensions.router.follower.MOST_PAGES", 3)
    server.snapshot = [[stored([token])] for token in range(4)]
    follower = Follower(server.url, server.endpoint, ReplicaIndex(), "a", KEY, pause=600)
    wait_until(lambda: "more than 3 pages" in follower.error)
    assert not follower.is_reachable and follower.malformed == 1
    follower.close()


def test_nothing_is_left_of_a_server_whose_endpoint_is_none() -> None:
    index = ReplicaIndex()
    with pytest.raises(zmq.ZMQError):
        Follower("http://127.0.0.1:9", "no endpoint", index, "a")
    assert index.resume([1]) == []


def test_a_server_that_lies_to_others_is_put_aside(server: Server) -> None:
    with all_of(server) as replicas:
        follower = replicas.followers[server.url]
        replicas.put_aside("http://another", Malformed("a lie"))
        assert follower.is_reachable
        replicas.put_aside(server.url, Malformed("a lie"))
        assert not follower.is_reachable
        wait_until(lambda: follower.is_in_step)
        assert (follower.error, follower.malformed, follower.snapshots) == ("a lie", 1, 2)


def test_a_server_that_is_not_there_yet_is_waited_for(server: Server) -> None:
    server.stop_http()
    index = ReplicaIndex()
    follower = Follower(server.url, server.endpoint, index, "a", KEY, pause=PAUSE)
    wait_until(lambda: follower.error)
    assert [each.replica for each in index.resume([1])] == ["a"]
    server.start_http()
    wait_until(lambda: follower.is_in_step)
    follower.close()


def test_what_a_server_refuses_is_said(server: Server) -> None:
    server.error = "busy with a flush"
    follower = Follower(server.url, server.endpoint, ReplicaIndex(), "a", KEY, pause=PAUSE)
    wait_until(lambda: "busy with a flush" in follower.error)
    server.error = ""
    wait_until(lambda: follower.is_in_step)
    follower.close()
    other = Follower(server.url, server.endpoint, ReplicaIndex(), "a", "wrong", pause=PAUSE)
    wait_until(lambda: "401" in other.error)
    other.close()


def test_the_replica_with_the_earliest_first_token_is_chosen(server: Server, other: Server) -> None:
    server.snapshot = [[stored([1, 2])]]
    server.rate = other.rate = 100.0
    with all_of(server, other) as replicas:

        def choose(reusable: int | None = None) -> Choice:
            """Nothing is left of the choice: it is answered at once."""
            choice = replicas.choose([1, 2, 3], reusable=reusable)
            replicas.on_answer(choice)
            return choice

        assert choose()[:3] == (server.url, 2, 0.01)
        assert [choose(most).position for most in (0, 1, 2, 9)] == [0, 0, 2, 2]
        server.waiting = 9
        wait_until(lambda: replicas.followers[server.url].load.waiting == 9)
        assert choose()[:3] == (other.url, 0, 0.03)
        other.rate = 10.0
        wait_until(lambda: replicas.followers[other.url].load.prefill_tokens_per_second == 10)
        assert choose().replica == server.url
        server.stop_http()
        wait_until(lambda: not replicas.followers[server.url].is_reachable)
        assert choose().replica == other.url
        server.start_http()


def test_replicas_that_are_as_good_get_prompts_by_turns(server: Server, other: Server) -> None:
    """Speeds are measured, so that two of the same kind are never quite equal."""
    server.rate, other.rate = 1_000.0, 1_050.0
    with all_of(server, other) as replicas:
        loads = [follower.load for follower in replicas.followers.values()]
        wait_until(lambda: all(load.prefill_tokens_per_second for load in loads))
        for at in range(6):
            replicas.on_answer(replicas.choose([at] * 50))
        assert [load.sent for load in loads] == [3, 3]
        other.rate = 2_000.0
        wait_until(lambda: any(load.prefill_tokens_per_second == 2_000 for load in loads))
        choice = replicas.choose([7] * 50)
        assert (choice.replica, choice.others) == (other.url, (server.url,))


def test_one_that_does_not_say_how_fast_it_is_is_no_faster(server: Server, other: Server) -> None:
    server.rate = 100.0
    with all_of(server, other) as replicas:
        loads = [replicas.followers[each.url].load for each in (server, other)]
        wait_until(lambda: loads[0].prefill_tokens_per_second == 100)
        for at in range(6):
            replicas.on_answer(replicas.choose([at] * 50))
        assert [load.sent for load in loads] == [3, 3]


def test_one_that_cannot_be_read_gets_what_the_others_have_no_time_for(
    server: Server, other: Server
) -> None:
    """It says that it is ten times as fast."""
    server.rate, other.rate = 100.0, 1_000.0
    server.room = other.room = 1_000_000
    is_read = threading.Event()
    with all_of(server, other, patience=20) as replicas:
        choice = replicas.choose([1] * 50)
        assert choice.replica == other.url
        replicas.on_answer(choice)
        follower = replicas.followers[other.url]
        other.on_page = lambda page: is_read.wait() if page else None
        other.snapshot = [[stored([1, 2])], []]
        follower.resync()
        wait_until(lambda: follower.is_reachable and not follower.is_in_step)
        wait_until(lambda: other.asked[-1] == 1)
        choices = [replicas.choose([2, at] * 50) for at in range(3)]
        is_read.set()
        assert [choice.replica for choice in choices] == [server.url, server.url, other.url]
        wait_until(lambda: follower.is_in_step)


def test_a_server_may_go_while_it_is_chosen(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with all_of(server) as replicas:
        load, everyone = replicas.followers[server.url].load, replicas.followers

        def way(found: Resumable) -> tuple[int, float]:
            replicas.followers = {}
            return 0, 0.0

        monkeypatch.setattr(load, "way", way)
        choice = replicas.choose([1, 2, 3])
        assert choice.replica == server.url
        replicas.on_answer(choice, 2)
        replicas.followers = everyone


def test_loads_from_the_host_take_their_time(server: Server, other: Server) -> None:
    """One has two of three tokens on its host, the other one has one on its device."""
    host = [stored([1, 2], medium="CPU_PINNED", block_size=1, block_hashes=[1, 2])]
    server.snapshot, other.snapshot = [host], [[stored([1])]]
    server.rate = other.rate = 100.0
    with all_of(server, other) as replicas:

        def chosen(state: float) -> Choice:
            loads = {Tier.HOST: (state, 0.001)}
            server.loads = {"CPU_PINNED": loads[Tier.HOST]}
            wait_until(lambda: replicas.followers[server.url].load.loads == loads)
            choice = replicas.choose([1, 2, 3])
            replicas.on_answer(choice)
            return choice

        loaded, computed = chosen(0.001), chosen(0.015)
        assert (loaded.replica, computed.replica) == (server.url, other.url)
        assert loaded[1:3] == pytest.approx((2, 0.013))
        assert computed[1:3] == pytest.approx((1, 0.02))


def test_a_token_costs_more_where_it_takes_anothers_place(server: Server, other: Server) -> None:
    """Two of five tokens are known to one; the other has nothing, and room or not."""
    server.snapshot = [[stored([1, 2])]]
    server.rate = other.rate = 100.0
    with all_of(server, other) as replicas:

        def chosen(*rooms: int | None) -> str:
            server.room, other.room = rooms
            loads = [replicas.followers[each.url].load for each in (server, other)]
            wait_until(lambda: [load.room for load in loads] == [*rooms])
            choice = replicas.choose([1, 2, 3, 4, 5])
            replicas.on_answer(choice)
            return choice.replica

        assert chosen(None, None) == server.url
        assert chosen(None, 100) == chosen(2, 100) == other.url
        assert chosen(100, 100) == chosen(0, 4) == server.url


def test_equal_prompts_at_once_are_sent_to_one_replica(server: Server, other: Server) -> None:
    """The second waits for the prefill of the first there; others are sent elsewhere meanwhile."""
    prompt, different = list(range(100)), list(range(100, 200))
    with all_of(server, other) as replicas:
        first = replicas.choose(prompt)
        assert replicas.choose(prompt).replica == first.replica
        assert replicas.choose(prompt, "another tenant").replica != first.replica
        assert replicas.choose(different[:50]).replica != first.replica


def test_servers_of_a_name_come_and_go(server: Server, other: Server) -> None:
    now: set[str] | OSError = {server.url}

    def resolve(name: str) -> set[str]:
        assert name == "dns://servers:30000"
        if isinstance(now, OSError):
            raise now
        return now

    names = ["dns://servers:30000/"]
    with closing(Replicas(names, KEY, pause=PAUSE, patience=PATIENCE, resolve=resolve)) as replicas:
        wait_until(lambda: {*replicas.followers} == {server.url})
        wait_until(lambda: replicas.followers[server.url].is_in_step)
        choice = replicas.choose([1, 2, 3])
        now = {other.url, "http://127.0.0.1:9"}
        wait_until(lambda: {*replicas.followers} == {other.url})
        assert [each.replica for each in replicas.resume([1])] == [other.url]
        replicas.on_answer(choice, 2)  # of one that has gone
        now = OSError("no nameserver")
        wait_until(lambda: replicas.errors.get("dns://servers:30000") == "no nameserver")
        assert {*replicas.followers} == {other.url}
        now = set()
        wait_until(lambda: not replicas.followers and not replicas.errors)


def test_a_server_of_two_names_is_followed_once_and_as_long_as_one_has_it(server: Server) -> None:
    now = {"dns://blue:1": {server.url}, "dns://green:1": {server.url}}
    with closing(
        Replicas(
            [*now, server.url], KEY, pause=PAUSE, patience=PATIENCE, resolve=lambda of: now[of]
        )
    ) as replicas:
        wait_until(lambda: {*replicas.followers} == {server.url})
        follower = replicas.followers[server.url]
        now["dns://blue:1"] = set()
        wait_until(lambda: not replicas._resolved["dns://blue:1"])
        now["dns://green:1"] = {server.url + "0"}
        wait_until(lambda: server.url + "0" in replicas.errors)
        assert replicas.followers == {server.url: follower}


def test_a_name_has_a_server_at_each_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert addresses("dns://127.0.0.1:30000") == {"http://127.0.0.1:30000"}
    assert addresses("dns://[::1]:30000") == {"http://[::1]:30000"}
    for number, is_known in ((socket.EAI_NONAME, True), (socket.EAI_AGAIN, False)):
        error = socket.gaierror(number, "no")
        monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=error))
        with nullcontext() if is_known else pytest.raises(OSError, match="no"):
            assert addresses("dns://servers:30000") == set()


def test_none_is_chosen_where_none_is_reachable() -> None:
    with (
        all_of(urls=("http://127.0.0.1:9",)) as replicas,
        pytest.raises(LookupError, match=r"no server can be reached: http://127\.0\.0\.1:9"),
    ):
        replicas.choose([1, 2, 3])


def test_a_replica_that_is_often_wrong_is_read_anew(server: Server) -> None:
    """One that served more than it had said is not wrong."""
    with all_of(server) as replicas:
        follower = replicas.followers[server.url]
        for number in range(TOO_MANY_WRONG + 1):
            assert follower.snapshots == 1
            replicas.on_answer(Choice(server.url, 10, 0.0, number), 10)
            replicas.on_answer(Choice(server.url, 10, 0.0, number), 12)
            replicas.on_answer(Choice(server.url, 10, 0.0, number), 0)
        wait_until(lambda: follower.is_in_step and follower.snapshots == 2)
        load = follower.load
        assert (load.right, load.wrong) == (2 * (TOO_MANY_WRONG + 1), TOO_MANY_WRONG + 1)


def test_the_table_has_a_line_for_each_server(server: Server) -> None:
    server.snapshot = [[stored([1, 2]), stored([3, 4], parent=2, medium="DISK")]]
    with all_of(server, urls=(server.url, "http://127.0.0.1:9")) as replicas:
        wait_until(lambda: "refused" in str(replicas.errors))
        replicas.errors = replicas.errors | {"http://a": "no [/markup] of ours"}
        console = Console(width=400, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(table(replicas))
        lines = console.export_text().splitlines()
        (line,) = (line for line in lines if server.url in line)
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        assert cells == [server.url, "yes", "2", "4", "1", "0", "1", "0", "0 of 0"]
        assert any("127.0.0.1:9" in line and "refused" in line for line in lines)
        assert any("no [/markup] of ours" in line for line in lines)


def test_a_publisher_is_found_at_the_host_of_its_server() -> None:
    url = "http://[::1]:30000"
    assert endpoint_of(url, KvEvents("*", 5557), 0) == "tcp://[::1]:5557"
    assert endpoint_of("http://a:1", KvEvents("0.0.0.0", 5557), 2) == "tcp://a:5559"
    assert endpoint_of("http://a:1", KvEvents("10.0.0.1", 5557), 0) == "tcp://10.0.0.1:5557"


def test_a_tenant_has_the_name_that_servers_give_it() -> None:
    names = TenantNames(b"a key")
    assert tenant_name("", None, "a key") == names.name(None) == ""
    assert tenant_name("k", "", "a key") == names.name(("k", None))
    assert tenant_name(None, "s", b"a key") == names.name((None, "s"))
    assert len({tenant_name(*each, "x") for each in [("k", "s"), ("ks", None), (None, "ks")]}) == 3


def test_a_router_needs_neither_torch_nor_sglang() -> None:
    code = "import sys, sglang_hybrid.replicas; print({'torch', 'sglang'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
