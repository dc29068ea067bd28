"""Measuring a server: a made-up one, whose times are known, must be found again."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from sglang_hybrid.extensions.lab.measure import Server, TimedAnswer, decode_seconds, fit, measure
from sglang_hybrid.extensions.lab.simulation.prefill_time import PrefillTime

TRUE = PrefillTime(0.03, 4e-5, 3e-9, 0.005, "made up")


class MadeUp:
    """Hits whole answered sequences; now and then a request takes ten times as long."""

    def __init__(self) -> None:
        self.known: set[tuple[int, ...]] = set()
        self.asked = 0

    def ask(self, prompt: list[int], new_tokens: int) -> TimedAnswer:
        lengths = {len(sequence) for sequence in self.known}
        hits = [n for n in lengths if n < len(prompt) and tuple(prompt[:n]) in self.known]
        hit = max(hits, default=0)
        answer = [7] * new_tokens
        self.known |= {tuple(prompt[:-1]), tuple(prompt + answer)}
        seconds = TRUE.seconds(hit, len(prompt) - hit) + new_tokens * TRUE.decode
        self.asked += 1
        return TimedAnswer(hit, answer, seconds * (10 if self.asked % 7 == 0 else 1))


def test_a_servers_times_are_found_again() -> None:
    server = MadeUp()
    measured = measure(server.ask, [64, 512, 2_048], [0, 1_000, 4_000], repeats=3)
    assert [(hit, new) for hit, new, _ in measured][:4] == [
        *[(0, 64), (0, 512), (0, 2_048)],
        (1_001, 64),
    ]
    fitted = fit(server.ask, measured, "test")
    assert fitted.decode == pytest.approx(TRUE.decode, rel=0.01)
    for hit, new in ((0, 100), (0, 4_000), (8_000, 1_000)):
        assert fitted.seconds(hit, new) == pytest.approx(TRUE.seconds(hit, new), rel=0.02)


def test_decoding_is_told_from_prefill() -> None:
    assert decode_seconds(MadeUp().ask, [1, 2, 3, 4]) == pytest.approx(TRUE.decode, rel=0.01)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._send(200, {"model_path": "/models/tiny"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if len(body["input_ids"]) > 10:
            self._send(400, {"error": {"message": "too\nlong"}})
            return
        count = body["sampling_params"]["max_new_tokens"]
        self._send(200, {"meta_info": {"cached_tokens": 2}, "output_ids": [5] * count})

    def _send(self, status: int, content: object) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_server_is_asked_as_sglang_wants_it(url: str) -> None:
    server = Server(url + "/")
    assert server.model == "/models/tiny"
    answer = server.ask([1, 2, 3], 4)
    assert (answer.cached, answer.tokens) == (2, [5] * 4)
    assert answer.seconds > 0


def test_what_goes_wrong_is_one_sentence(url: str) -> None:
    with pytest.raises(ValueError, match=r"answered 400: .*too\\nlong"):
        Server(url).ask(list(range(20)), 1)
    with pytest.raises(ValueError, match=r"no server answers at http://127\.0\.0\.1:9"):
        Server("http://127.0.0.1:9")
