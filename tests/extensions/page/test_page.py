"""Messages to the page: the tree in slices, decisions as they are made; nothing for nobody."""

from __future__ import annotations

import asyncio
import base64
import random
import runpy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.server_settings import Serving, Split
from sglang_hybrid.core.specs import Spec
from sglang_hybrid.core.traffic.recorder import FEWEST_REQUESTS, RequestWindow
from sglang_hybrid.extensions.lab import systems as systems  # registers SGLang's own
from sglang_hybrid.extensions.lab.simulation.system_names import Setting, build_system
from sglang_hybrid.extensions.lab.simulation.traces import generators
from sglang_hybrid.extensions.lab.simulation.tuner.candidates import SGLANG, hits_within
from sglang_hybrid.extensions.page import route as routes
from sglang_hybrid.extensions.page import watch
from sglang_hybrid.extensions.page.follower import AGAIN, NODES
from sglang_hybrid.extensions.page.messages import (
    AskReq,
    NodeReq,
    NodeReqOutput,
    WatchReq,
    WatchReqOutput,
    WhatIfReq,
)
from sglang_hybrid.extensions.page.route import FILES, is_of_page
from sglang_hybrid.extensions.page.view import READERS, PageView
from sglang_hybrid.extensions.page.watch import MOST_WATCHERS, TooManyWatchers, Watch
from sglang_hybrid.extensions.page.what_if import SIZES, scaled
from sglang_hybrid.serving.flag_values import Ui
from sglang_hybrid.serving.routes import KeyHeader
from tests.cache.backends import options
from tests.cache.driver import Server, Sizes, build_cache
from tests.cache.test_rules import run
from tests.examples import examples
from tests.extensions.lab.simulation.tuner.traffic import bursts, conversations, window


def server(kv: int = 2_000, states: int = 24, **more: Any) -> Server:
    where = Sizes(kv=kv, states=states)
    return Server(build_cache(where, options("reuse", hybrid_ui=Ui.TEXT), **more), where)


def page(it: Server) -> PageView:
    assert it.cache.page is not None
    return it.cache.page


class Copy:
    """The knowledge of a reader."""

    def __init__(self, it: Server, name: str = "a") -> None:
        self.it, self.name = it, name
        self.nodes: dict[int, list[Any]] = {}
        self.events: list[dict[str, Any]] = []

    def read(self) -> WatchReqOutput:
        told = page(self.it).watch(WatchReq(reader=self.name))
        if told.start:
            self.nodes.clear()
        self.nodes |= {row[0]: row for row in told.nodes}
        for node in told.gone:
            self.nodes.pop(node, None)
        self.events += told.events
        return told

    def read_all(self) -> None:
        while self.read().more:
            pass

    def check(self) -> None:
        """It knows what the tree holds."""
        tree = self.it.cache.shadow_tree.tree
        assert {
            node.payload.id: (
                -1 if node.parent is None else node.parent.payload.id,
                node.tokens,
                node.kind.value if node.has_state else "",
                node.hits,
            )
            for node in [tree.root, *tree.walk()]
        } == {key: (row[1], row[2], row[3], row[5]) for key, row in self.nodes.items()}


traffic = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 60), st.integers(1, 40)), max_size=25
)


@given(traffic, st.integers(0, 10))
@examples(25)
def test_a_reader_knows_the_tree_however_it_is_sliced(
    requests: list[tuple[int, int, int]], seed: int
) -> None:
    """Evictions, cut edges and a flush come between its questions."""
    it, asks = server(kv=400, states=8), random.Random(seed)
    copy = Copy(it)
    for number, (start, length, more) in enumerate(requests):
        it.serve([*run(length, start), *run(more, 100 + number)], [7])
        if asks.random() < 0.5:
            copy.read()
        if asks.random() < 0.05:
            it.flush()
    copy.read_all()
    copy.check()


def test_a_large_tree_is_told_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_hybrid.extensions.page.view.IDLE_SECONDS", 0.0)
    it = server(kv=4_000, states=400)
    for start in range(300):
        it.serve(run(4, start), [7])
    copy = Copy(it)
    first = copy.read()
    assert first.start and first.more and len(first.nodes) == NODES
    it.serve(run(3, 7), [9])  # one edge is cut before the reader came to it
    copy.read_all()
    copy.check()
    later = copy.read()
    assert not later.more and 0 < len(later.nodes) <= AGAIN  # values change with time


def test_nothing_is_recorded_for_nobody() -> None:
    it = server()
    it.serve(run(50), [7])
    listeners = len(it.cache.shadow_tree.tree._listeners)
    copy = Copy(it)
    copy.read()
    assert len(it.cache.shadow_tree.tree._listeners) == listeners + 1
    assert it.cache.decision_log.decisions.heard is not None
    page(it).watch(WatchReq(reader=copy.name, leave=True))
    assert len(it.cache.shadow_tree.tree._listeners) == listeners
    assert it.cache.decision_log.decisions.heard is None


def test_a_reader_that_asks_no_more_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    it = server()
    for number in range(READERS + 3):
        Copy(it, str(number)).read()
    assert list(page(it)._readers) == [str(n) for n in range(3, READERS + 3)]
    monkeypatch.setattr("sglang_hybrid.extensions.page.view.MOST_WAITING", 3)
    for start in range(5):
        it.serve(run(9, start), [7])
    page(it).drop_idle()
    assert not page(it)._readers
    assert it.cache.decision_log.decisions.heard is None
    copy = Copy(it, "5")
    assert copy.read().start
    copy.check()


@given(traffic)
@examples(15)
def test_who_looks_changes_nothing(requests: list[tuple[int, int, int]]) -> None:
    found = []
    for looks in (False, True):
        it = server(kv=300, states=6)
        hits = []
        for number, (start, length, more) in enumerate(requests):
            hits.append(it.serve([*run(length, start), *run(more, 100 + number)], [7]))
            if looks:
                Copy(it).read()
                for node in list(it.cache.shadow_tree._records)[:5]:
                    page(it).node(NodeReq(node=node))
                page(it).ask(AskReq(input_ids=run(length, start)))
        found.append((hits, it.cache.stats.as_dict()))
    assert found[0] == found[1]


def test_it_tells_what_went_and_why() -> None:
    it = server(states=6)
    copy = Copy(it)
    copy.read()
    for start in range(8):
        it.serve(run(40, start), [7])
    copy.read()
    gone = [event for event in copy.events if event["event"] == "evicted"]
    begun = [event for event in copy.events if event["event"] == "request"]
    assert len(gone) == sum(it.cache.stats.evicted.values()) > 0
    assert {event["policy"] for event in gone if event["what"] != "kv"} == {"reuse"}
    assert [event["prompt"] for event in begun] == [40] * 8
    other = Copy(it, "b")  # who comes later is told of what is remembered
    other.read()
    assert len(other.events) == len(copy.events)
    assert not copy.read().events


def test_it_tells_the_route_of_a_request() -> None:
    it = server()
    copy = Copy(it)
    copy.read()
    for start, route in enumerate(("/v1/messages", "")):
        it.complete(it.begin(run(40, start), route=route), [7])
    copy.read()
    begun = [event for event in copy.events if event["event"] == "request"]
    assert [event["route"] for event in begun] == ["/v1/messages", ""]


def forked() -> tuple[Server, Copy]:
    """Prompts of 100 and 80 tokens, of which 60 are the same, and a reader that knows them."""
    it = server()
    it.serve(run(100), [7])
    it.serve([*run(60), *run(20, 3)], [7])
    copy = Copy(it)
    copy.read_all()
    return it, copy


def test_a_node_is_told_with_what_its_loss_costs() -> None:
    it, copy = forked()
    branch = next(row for row in copy.nodes.values() if row[3] == "branch")
    told = page(it).node(NodeReq(node=branch[0], text=True))
    assert told.node is not None and told.tokens == run(60)
    cost = it.cache.cost
    about = told.node
    assert (about["begins"], about["ends"], about["anchor"]) == (0, 60, 0)
    assert about["saves_flops"] == cost.savings(60, 0)
    assert about["value"] == pytest.approx(
        about["saves_flops"] * about["returns"] / (about["kv_bytes"] + about["state_bytes"])
    )
    assert about["value"] == branch[7]
    assert page(it).node(NodeReq(node=branch[0])).tokens == []
    assert page(it).node(NodeReq(node=10**9)).node is None


def test_an_answer_has_the_path_that_the_report_is_about() -> None:
    it, copy = forked()
    told = page(it).ask(AskReq(input_ids=[*run(60), *run(9, 5)], text=True))
    assert told.report is not None and told.report["hit"] == 60
    assert sum(copy.nodes[node][2] for node in told.path) == 60
    assert told.tokens == [*run(60), *run(9, 5)]
    begun = [event for event in copy.events if event["event"] == "request"][-1]
    again = page(it).ask(AskReq(request_id=begun["request"], tenant=begun["tenant"]))
    assert again.report is not None and again.report["prompt"] == 80 and again.tokens == []
    foreign = page(it).ask(AskReq(request_id=begun["request"], tenant="0123456789abcdef"))
    assert foreign.error is not None and foreign.report is None
    assert page(it).ask(AskReq()).error == "the prompt has no tokens."


def test_a_replay_says_what_more_memory_would_hit() -> None:
    it = server(kv=600, states=12, rank=0)
    view = page(it)
    assert view.try_others(WhatIfReq(begin=True)).told.startswith(f"fewer than {FEWEST_REQUESTS}")
    for number in range(2 * FEWEST_REQUESTS):
        it.serve([*run(60, number % 8), *run(10, 100 + number)], [7])
    assert view.try_others(WhatIfReq(begin=True)).state == "running"
    view._what_if._thread.join()
    told = view.try_others(WhatIfReq())
    assert told.state == "done", told.told
    assert [row[1] for row in told.rows] == [0.5, 1, 2, 4, 0] * 3
    assert list(dict.fromkeys(row[0] for row in told.rows)) == ["reuse", "sglang", "lru"]
    shares = {(row[0], row[1]): row[3] for row in told.rows}
    assert shares["lru", 0.5] < shares["lru", 4] <= shares["lru", 0]
    assert told.rows[2][2] == 2 * told.rows[1][2]


def test_sizes() -> None:
    assert [scaled(Split(10, 4), times) for times in SIZES[:2]] == [Split(5, 2), Split(10, 4)]
    assert scaled(100, 0.5) == 50 and scaled(100, SIZES[-1]) is None and scaled(None, 2) is None


LAST_STATE = 0.06
"""Share of hits that more of one memory may lose: the rest of it holds one state more or less."""


def generated(kind: str, sessions: int) -> RequestWindow:
    """A twentieth of its tokens fits in memory."""
    how = generators.traffic(kind, sessions=sessions, max_input=4_000)
    made = generators.generate(kind, how, 0)
    cost = CostModel.paper_7b()
    room = sum(len(request.tokens) for request in made) * cost.kv_bytes_per_token // 20
    return RequestWindow(made, cost, room, len(made) // 2, 16, Serving(one_memory=True))


WINDOWS: dict[str, Callable[[], RequestWindow]] = {
    "fan-out": partial(generated, "fan-out", 6),
    "transcript": partial(generated, "transcript", 12),
    "chat": partial(generated, "chat", 10),
    "conversations": lambda: window(conversations(60)),
    "bursts": lambda: window(bursts(60)),
}


@pytest.mark.parametrize("policy", ["reuse", "lru"])
@pytest.mark.parametrize("kind", WINDOWS)
def test_more_memory_never_hits_less(kind: str, policy: str) -> None:
    """Memory without a bound counts, too; the same simulator replays it."""
    made = WINDOWS[kind]()
    shares = [
        sum(hits_within(made, (Spec(policy), scaled(made.budget, times)), lambda: None))
        / made.counted_tokens
        for times in SIZES
    ]
    best = 0.0
    for share in shares:
        assert share >= best - LAST_STATE * (kind == "bursts"), shares
        best = max(best, share)
    assert shares[0] <= shares[-1] and 0 < shares[-1] < 1


def test_sglangs_own_cache_hits_what_it_hits_in_a_replay() -> None:
    made = replace(WINDOWS["chat"](), serving=Serving(chunk=200, grid=16))
    setting = Setting(made.cost, made.budget, (), made.min_branch_tokens, made.serving)
    cache = build_system(SGLANG, setting)
    expected = [cache.serve(request).hit_len for request in made.requests][made.counted_from :]
    found = hits_within(made, (SGLANG, made.budget), lambda: None)
    assert found.tolist() == expected and sum(expected) > 0


# In the HTTP process.


def test_watchers_share_one_reader_and_there_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def ask(manager: Any, question: WatchReq, kind: Any) -> list[WatchReqOutput]:
        asked.append(question)
        rows = [[1, -1, 0, "", "", 0, 0.0, 0.0, 0, -1, None]] if len(asked) == 1 else []
        return [WatchReqOutput(start=len(asked) == 1, nodes=rows, counts={"requests": len(asked)})]

    monkeypatch.setattr(watch, "ask_ranks", ask)
    monkeypatch.setattr(watch, "EVERY", 0.001)

    async def look() -> None:
        told = Watch(SimpleNamespace())  # type: ignore[arg-type]
        first = await told.stream()
        assert b'"nodes":[[1,' in await anext(first)
        second = await told.stream()  # it is told what is there already
        assert b'"start":true,"nodes":[[1,' in await anext(second)
        streams = [await told.stream() for _ in range(MOST_WATCHERS - len(told))]
        with pytest.raises(TooManyWatchers):
            await told.stream()
        assert len({question.reader for question in asked}) == 1
        for each in streams:
            await anext(each)
        for each in (first, second, *streams):
            await each.aclose()
        while told._task is not None:
            await asyncio.sleep(0.01)
        assert asked[-1].leave
        count = len(asked)
        await asyncio.sleep(0.02)
        assert len(asked) == count  # nobody looks, nobody asks
        last = await told.stream()
        await anext(last)
        told._manager.gracefully_exit = True
        async with asyncio.timeout(5):
            assert len([message async for message in last]) <= 1  # streams end with the server

    asyncio.run(look())


def test_a_page_that_is_opened_again_is_told_of_each_request_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scheduler tells a new reader of the requests that it remembers, also of those of which it
    has told this process before.
    """
    it = server()
    it.serve(run(50), [7])

    async def ask(manager: Any, question: WatchReq, kind: Any) -> list[WatchReqOutput]:
        return [page(it).watch(question)]

    monkeypatch.setattr(watch, "ask_ranks", ask)
    monkeypatch.setattr(watch, "EVERY", 0.001)
    told = Watch(SimpleNamespace())  # type: ignore[arg-type]

    async def requests_of_a_page() -> int:
        stream, events = await told.stream(), list[Any]()
        for _ in range(5):
            message = msgspec.json.decode((await anext(stream)).removeprefix(b"data: "))
            events += message.get("events", ())
        await stream.aclose()
        while told._task is not None:
            await asyncio.sleep(0.01)
        return sum(event["event"] == "request" for event in events)

    async def look() -> list[int]:
        found = [await requests_of_a_page()]
        it.serve(run(60, 3), [7])
        return [*found, await requests_of_a_page(), await requests_of_a_page()]

    assert asyncio.run(look()) == [1, 2, 2]


def test_who_joins_while_the_last_one_leaves_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is opened just after another was closed."""
    leaves, joined = asyncio.Event(), asyncio.Event()

    async def ask(manager: Any, question: WatchReq, kind: Any) -> list[WatchReqOutput]:
        if question.leave and not joined.is_set():
            leaves.set()
            await joined.wait()
        return [WatchReqOutput(counts={"requests": 7 if joined.is_set() else 1})]

    monkeypatch.setattr(watch, "ask_ranks", ask)
    monkeypatch.setattr(watch, "EVERY", 0.001)

    async def look() -> None:
        told = Watch(SimpleNamespace())  # type: ignore[arg-type]
        first = await told.stream()
        await anext(first)
        await first.aclose()
        async with asyncio.timeout(5):
            await leaves.wait()
            second = await told.stream()
            joined.set()
            async for message in second:
                if b'"requests":7' in message:
                    break
        await second.aclose()
        while told._task is not None:
            await asyncio.sleep(0.01)

    asyncio.run(look())


@pytest.mark.parametrize(
    ("path", "sent", "comes"),
    [
        ("/hybrid_cache/", "Basic " + base64.b64encode(b"me:a:key").decode(), "Bearer a:key"),
        ("/hybrid_cache/", "Bearer key", "Bearer key"),
        ("/hybrid_cache/", "Basic no base64", "Basic no base64"),
        ("/hybrid_cache/nodes/0/7", "Basic " + base64.b64encode(b":key").decode(), "Bearer key"),
        ("/hybrid_cache/resumable", "Basic " + base64.b64encode(b"me:key").decode(), None),
        ("/flush_cache", "Basic " + base64.b64encode(b"me:key").decode(), None),
    ],
)
def test_a_browser_gives_the_key_as_a_password(path: str, sent: str, comes: str | None) -> None:
    seen: list[str | None] = []
    answers: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(dict(scope["headers"]).get(b"authorization", b"").decode())
        await send({"type": "http.response.start", "status": 401, "headers": []})

    async def send(message: Any) -> None:
        answers.append(message)

    scope = {"type": "http", "method": "GET", "path": path}
    scope["headers"] = [(b"authorization", sent.encode())]
    asyncio.run(KeyHeader(app, is_of_page)(scope, None, send))  # type: ignore[arg-type]
    assert seen == [sent if comes is None else comes]
    asks = [name for name, _ in answers[0]["headers"]]
    assert asks == ([] if comes is None else [b"www-authenticate"])


@pytest.mark.parametrize("shown", ["off", "lengths"])
def test_without_a_page_its_address_says_how_to_have_one(
    shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_HYBRID_UI", shown)
    app = FastAPI()
    app.router.routes.extend(runpy.run_module("sglang_hybrid.explain.route")["router"].routes)
    paths = {getattr(route, "path", "") for route in app.router.routes}
    assert ("/hybrid_cache/changes" in paths) == (shown != "off")
    if shown == "off":
        answer = TestClient(app).get("/hybrid_cache/")
        assert answer.status_code == 404 and "--hybrid-ui" in answer.json()["error"]


def test_an_id_that_no_node_can_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(manager: Any, question: NodeReq, kind: Any) -> list[NodeReqOutput]:
        msgspec.msgpack.encode(question)
        return [NodeReqOutput()]

    monkeypatch.setenv("SGLANG_HYBRID_UI", "lengths")
    monkeypatch.setattr(routes, "_manager", lambda: None)
    monkeypatch.setattr(routes, "has_our_cache", lambda _: True)
    monkeypatch.setattr(routes, "ask_ranks", ask)
    app = FastAPI()
    app.include_router(routes.router)
    client = TestClient(app)
    asked = {node: client.get(f"/hybrid_cache/nodes/0/{node}") for node in (7, 2**64, -(2**64))}
    assert [answer.status_code for answer in asked.values()] == [200, 422, 422]
    assert "gone" in asked[7].json()


def test_a_browser_that_connects_again_shows_nothing_twice(browser: Any) -> None:
    root = [0, -1, 0, "", "", 0, 0.0, 0.0, 0, -1, None]
    request = {"event": "request", "request": "a", "tenant": "", "at": 1.0, "route": "", "hit": 0}
    request |= {"prompt": 9, "kv_only": 0, "missed": "nothing", "path": []}
    past = {"rank": 0, "samples": [{"time": 1.0, "clock": 1.0}], "events": [request]}
    whole = [{"rank": 0, "start": True, "nodes": [root]}, past]
    stream = b"retry: 50\n\n" + b"".join(map(watch._event, whole))
    connected = 0

    def answer(route: Any) -> None:
        nonlocal connected
        path = route.request.url.partition("/hybrid_cache/")[2]
        if path == "changes":
            connected += 1
            route.fulfill(body=stream, content_type="text/event-stream")
        elif path == "static/style.css":
            route.fulfill(body="")
        else:
            route.fulfill(path=FILES / (path.removeprefix("static/") or "index.html"))

    opened = browser.new_page()
    opened.route("**/*", answer)
    opened.goto("http://a-server/hybrid_cache/")
    while connected < 3:
        opened.wait_for_timeout(20)
    opened.wait_for_function("hybrid.ranks[0]?.requests.length > 0")
    counts = "[hybrid.ranks[0].requests.length, hybrid.ranks[0].samples.length]"
    assert opened.evaluate(counts) == [1, 1]
    opened.close()
