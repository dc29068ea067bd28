"""The live page in a browser, on a server that works."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from playwright.sync_api import Browser, Page

from tests.browser import violations
from tests.server.client import random_prompt, send
from tests.server.page import LARGE, large_tree

SHOWN = 20  # seconds


class Opened:
    """A page, and what went wrong in it."""

    def __init__(self, browser: Browser, url: str, **context: Any) -> None:
        self.page: Page = browser.new_page(
            **{"viewport": {"width": 1400, "height": 1000}, **context}
        )
        self.wrong: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))
        self.page.goto(f"{url}/hybrid_cache/")

    def _on_console(self, message: Any) -> None:
        if message.type == "error":
            self.wrong.append(message.text)

    def value(self, expression: str) -> Any:
        return self.page.evaluate(expression)

    def until(self, expression: str, seconds: float = SHOWN) -> None:
        """Wait for it. The page forbids what Playwright's own waiting does."""
        end = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < end, expression
            time.sleep(0.05)


@pytest.fixture
def opened(browser: Browser, url: str) -> Iterator[Opened]:
    it = Opened(browser, url)
    yield it
    it.page.close()
    assert it.wrong == []
    assert it.hosts == {url.split("/")[2]}


NODES = "hybrid.ranks[0]?.tree.nodes.size"
LIT = "Number(document.getElementById('tree').dataset.lit)"


def test_requests_appear_and_a_hit_lights_up_its_path(opened: Opened, url: str) -> None:
    opened.until(f"{NODES} === 1")  # the root of an empty tree
    prompt = random_prompt(200, 1)
    send(url, prompt)
    opened.until(f"{NODES} > 2")
    assert (
        opened.value("[...hybrid.ranks[0].tree.nodes.values()].map(n => n.kind)").count("tail") == 1
    )
    opened.until(f"!({LIT} > 0)")
    send(url, [*prompt, *random_prompt(20, 2)])
    opened.until(f"{LIT} > 0")
    opened.until("document.querySelector('#requests tr')?.textContent.includes('220')")
    assert opened.page.inner_text("#requests tr:first-child td[data-name=route]") == "/generate"
    assert "%" in opened.page.inner_text("#numbers")


def test_explain_marks_where_the_server_says_that_a_hit_ends(opened: Opened, url: str) -> None:
    prompt = random_prompt(120, 3)
    for more in (4, 5):
        send(url, [*prompt, *random_prompt(30, more)], rid=f"explained-{more}")
    opened.until(f"{NODES} > 3 && document.body.textContent.includes('explained-5')")
    asked = [*prompt, *random_prompt(9, 6)]
    opened.page.fill("#prompt", json.dumps(asked))
    opened.page.click("#ask button[type=submit]")
    opened.until("document.getElementById('answer').dataset.hit !== undefined")
    answer = requests.post(f"{url}/hybrid_cache/explain", json={"input_ids": asked}).json()
    assert answer["hit"] == 120
    assert opened.value("document.getElementById('answer').dataset.hit") == "120"
    opened.until("document.getElementById('tree').dataset.mark === '120'")
    assert "branch point" in opened.page.inner_text("#answer")
    opened.page.click("#requests button:text-is('explained-5')")
    opened.until("document.getElementById('answer').textContent.startsWith('request ')")
    opened.page.click("#compare")
    opened.until("document.getElementById('answer').textContent.includes('up to token 120 of')")


def test_what_was_sent_is_shown_and_not_run(opened: Opened, url: str) -> None:
    script = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
    key = "<b>key</b>"
    body = {"text": script * 3, "extra_key": key, "sampling_params": {"max_new_tokens": 2}}
    requests.post(f"{url}/flush_cache").raise_for_status()  # the key takes the largest node
    opened.until(f"{NODES} === 1")
    requests.post(f"{url}/generate", json=body)
    opened.until(f"hybrid.ranks[0].requests.at(-1)?.tenant && {NODES} > 1")
    opened.page.focus("#tree")
    opened.page.keyboard.press("ArrowRight")
    opened.until("document.querySelector('#about pre')?.textContent.includes('<script>')")
    assert opened.value("document.title") != "run"
    assert (
        opened.value("document.querySelectorAll('#about img, #about script, main b b').length") == 0
    )
    assert key not in opened.page.content()  # tenants have names of their own


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_a_checker_of_accessibility_finds_nothing(browser: Browser, url: str, scheme: str) -> None:
    it = Opened(browser, url, color_scheme=scheme, viewport={"width": 390, "height": 800})
    for more in range(3):
        send(url, [*random_prompt(60, 7), *random_prompt(20, more)])
    it.until("document.querySelectorAll('#requests tr').length >= 3")
    assert violations(it.page) == []
    assert it.value("document.documentElement.scrollWidth") <= 390  # no sideways scrolling
    it.page.close()


def test_other_hosts_get_nothing(url: str) -> None:
    for headers in ({"Origin": "http://other.example"}, {"Sec-Fetch-Site": "cross-site"}):
        for path in ("", "changes", "nodes/0/1", "static/page.js"):
            answer = requests.get(f"{url}/hybrid_cache/{path}", headers=headers)
            assert (answer.status_code, list(answer.json())) == (403, ["error"])
    assert requests.get(f"{url}/hybrid_cache/", headers={"Origin": url}).status_code == 200
    for name in ("%2e%2e/route.py", "vendor", "%00", "a" * 5_000):
        assert requests.get(f"{url}/hybrid_cache/static/{name}").status_code == 404
    for name in ("page.js", "vendor/uPlot.iife.min.js", "style.css"):
        assert requests.get(f"{url}/hybrid_cache/static/{name}").status_code == 200
    assert "gone" in requests.get(f"{url}/hybrid_cache/nodes/0/1000000000").json()


@pytest.mark.slow
def test_a_replay_answers_for_other_sizes(opened: Opened, url: str) -> None:
    for number in range(16):
        send(url, [*random_prompt(40, number % 4), *random_prompt(10, 50 + number)], 1)
    opened.page.click("#what")
    opened.until("document.querySelectorAll('#what-rows tbody tr').length === 5", 90)
    opened.until(
        "/% *with SGLang's own policy/.test(document.getElementById('numbers').textContent)"
    )


@pytest.mark.slow
def test_a_hundred_thousand_nodes(browser: Browser, url: str) -> None:
    """Given to the page by the test: the time of the browser, not of a server."""
    it = Opened(browser, url)
    it.until("window.hybrid !== undefined")
    took = it.value(f"({LARGE})({json.dumps(large_tree(100_000))})")
    print(took)
    assert took["nodes"] == 100_001
    assert took["paint"] < 3_000
    assert took["zoom"] < 100 and took["hover"] < 100 and took["step"] < 100
    it.page.close()


def test_a_question_is_one_of_its_tenant(url: str) -> None:
    """Said as in any request; what it asks about is checked as by /hybrid_cache/explain."""

    def ask(headers: dict[str, str] | None = None, **question: Any) -> requests.Response:
        return requests.post(f"{url}/hybrid_cache/ask", json=question, headers=headers)

    prompt = random_prompt(120, 11)
    send(url, prompt, extra_key="a")
    header = {"X-Hybrid-Tenant": "a"}
    assert ask(header, input_ids=prompt).json()["report"]["hit"] == 119
    assert ask(input_ids=prompt, extra_key="a").json()["report"]["hit"] == 119
    assert ask(input_ids=prompt).json()["report"]["kv"] == 0
    assert ask(header, input_ids=prompt, extra_key="b").status_code == 400
    assert "a token id of this model" in ask(input_ids=[-1]).json()["error"]


def test_two_prompts_differ_where_their_tokens_do(url: str) -> None:
    def differ(*prompts: list[int]) -> requests.Response:
        pair = dict(zip(("first", "second"), prompts, strict=True))
        return requests.post(f"{url}/hybrid_cache/differ", json=pair, timeout=60)

    assert differ([5, 6, 7], [5, 7]).json()["at"] == 1
    refused = differ([5], [5, -1])
    assert refused.status_code == 400 and "second[1] is -1;" in refused.json()["error"]
