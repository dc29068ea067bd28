"""A rolling update of two servers behind our router: each ends as Kubernetes ends it, and starts
again, while clients go on to send streams.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count

import pytest
import requests

from sglang_hybrid.serving.server_process import ServerProcess, event_flags, free_port
from tests.server.client import Serve, random_prompt, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3_000)]

STREAMS = 200
TOKENS = 24
PATIENT = {"SGLANG_HYBRID_DRAIN_SECONDS": "120"}  # for a machine that does much else
ROUTE = [sys.executable, "-m", "sglang_hybrid.replicas", "route"]


class Clients:
    """Clients of a router, each of which sends one stream after another until `enough` is set and
    there were STREAMS. outcomes: "whole" for each that had all of its tokens, else what came.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._numbers = count()
        self.enough = threading.Event()
        self.outcomes: Counter[str] = Counter()

    def run(self) -> None:
        while not (self.enough.is_set() and self.outcomes.total() >= STREAMS):
            outcome = self._ask(next(self._numbers))
            self.outcomes[outcome] += 1

    def _ask(self, number: int) -> str:
        """Ask by SGLang's route and OpenAI's in turns; prompts share the first half with others."""
        if number % 2:
            path = "/v1/completions"
            body = {"model": "default", "max_tokens": TOKENS, "ignore_eos": True}
            body |= {"prompt": f"The number is {number}. " * 8, "temperature": 0}
        else:
            path = "/generate"
            prompt = random_prompt(60, number % 5) + random_prompt(60, number)
            sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
            body = {"input_ids": prompt, "sampling_params": sampling}
        try:
            answer = requests.post(self._url + path, json=body | {"stream": True}, timeout=400)
        except requests.RequestException as error:
            return f"{path}: {error}"
        last = answer.text.rpartition("\n\ndata: [DONE]")[0].rpartition("data: ")[2]
        if answer.ok and last:
            said = json.loads(last)
            reason = said["choices"][0] if "choices" in said else said.get("meta_info", {})
            reason = reason.get("finish_reason")
            if reason == "length" or (isinstance(reason, dict) and reason["type"] == "length"):
                return "whole"
        return f"{path}: {answer.status_code} {answer.text[-300:]}"


def end_and_start_again(server: ServerProcess, again: ServerProcess) -> None:
    assert server.process is not None
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(200) == 0
    again.start()
    again.wait_until_healthy()


@pytest.mark.parametrize(("clients", "running"), [(3, 8), (6, 1)], ids=["nobody waits", "waiting"])
def test_a_rolling_update_cuts_no_stream(serve: Serve, clients: int, running: int) -> None:
    with ExitStack() as stack:

        def server(port: int, events: list[str]) -> ServerProcess:
            flags = ["--max-running-requests", str(running), *events]
            made = serve(*flags, port=port, environment=PATIENT, timeout=1_000)
            stack.callback(made.stop)
            return made

        places = [(free_port(), event_flags()) for _ in range(2)]
        servers = [server(*place) for place in places]
        for each in servers:
            each.start()
        for each in servers:
            each.wait_until_healthy()
        program = [*ROUTE, *(each.url for each in servers)]
        router = ServerProcess(program=program, health="/health", environment=PATIENT)
        stack.enter_context(router)
        load = Clients(router.url)
        with ThreadPoolExecutor(clients) as pool:
            asking = [pool.submit(load.run) for _ in range(clients)]
            try:
                for each, place in zip(servers, places, strict=True):
                    sent = load.outcomes.total()
                    until(lambda sent=sent: load.outcomes.total() > sent + 10, 200)
                    end_and_start_again(each, server(*place))
            finally:
                load.enough.set()
            for ended in asking:
                ended.result()
        print(load.outcomes)
        assert load.outcomes.keys() == {"whole"}
        assert load.outcomes.total() >= STREAMS
