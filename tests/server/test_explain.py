"""The command sglang_hybrid.explain and a running server: what it says is what the server does."""

import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
import requests

from tests.server.client import Serve, ask, cached, hybrid_cache, random_prompt

COMMAND = ("-m", "sglang_hybrid.explain")


def run(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *COMMAND, "--url", url, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )


def account(url: str, *arguments: str) -> dict:
    done = run(url, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def ids(prompt: list[int]) -> str:
    return ",".join(map(str, prompt))


def test_a_hit_a_partial_hit_and_a_request(url: str) -> None:
    document = random_prompt(301, seed=31)
    first, second, third = (document + random_prompt(20, seed=seed) for seed in (32, 33, 34))
    assert account(url, "--input-ids", ids(first))["hit"] == 0
    first_id = ask(url, first)["meta_info"]["id"]

    before = hybrid_cache(url)
    repeated = account(url, "--input-ids", ids(first))
    branching = account(url, "--input-ids", ids(second))
    assert hybrid_cache(url) == before  # asking is no request
    assert (repeated["hit"], repeated["deeper"]) == (320, [])
    assert (branching["kv"], branching["usable"]) == (301, 320)
    assert branching["hit"] < 301  # at most the last boundary that the kernel passed
    assert (branching["deeper"][0]["position"], branching["deeper"][0]["reason"]) == (
        301,
        "not_wanted",
    )
    assert [301, "branch"] in branching["leaves"]
    text = run(url, "--input-ids", ids(second)).stdout
    assert "token 301" in text and "no earlier prompt left the stored ones here" in text

    answer = ask(url, second)["meta_info"]
    assert answer["cached_tokens"] == branching["hit"]
    left = [one["position"] for one in answer["hybrid_cache"]["checkpoints"]]
    assert 301 in left
    exact = account(url, "--input-ids", ids(third))
    assert exact["hit"] == 301
    assert (exact["checkpoint"]["kind"], exact["checkpoint"]["hits"]) == ("branch", 0)
    assert ask(url, third)["meta_info"]["cached_tokens"] == 301

    known = account(url, "--request-id", answer["id"])
    assert (known["hit"], known["kv"]) == (branching["hit"], 301)
    assert known["deeper"][0]["reason"] == "not_wanted"  # as of then
    assert known["request"]["now"] == 320
    assert sorted(left) == [position for position, _ in known["request"]["left"]]
    assert account(url, "--request-id", first_id)["hit"] == 0


def test_a_long_prompt_is_explained(url: str) -> None:
    """An idle server waits for requests that follow a long prompt; a question is none."""
    prompt = random_prompt(700, seed=35)
    assert account(url, "--input-ids", ids(prompt))["hit"] == 0
    ask(url, prompt)
    assert account(url, "--input-ids", ids(prompt))["hit"] == 699


def test_text_and_messages_are_tokenized_as_for_a_request(url: str, tmp_path: Path) -> None:
    text = "The keeper of the archive shall record every entry in the register. " * 9
    body = {"text": text, "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    tokens = requests.post(url + "/generate", json=body, timeout=120).json()["meta_info"]
    said = account(url, "--prompt", text)
    assert (said["prompt"], said["hit"]) == (tokens["prompt_tokens"], tokens["prompt_tokens"] - 1)
    (tmp_path / "prompt.txt").write_text(text)
    assert account(url, "--prompt-file", str(tmp_path / "prompt.txt"))["hit"] == said["hit"]

    messages = [{"role": "system", "content": text}, {"role": "user", "content": "Who keeps it?"}]
    chat = {"model": "default", "messages": messages, "max_tokens": 4, "temperature": 0}
    answer = requests.post(url + "/v1/chat/completions", json=chat, timeout=120).json()
    for name, content in (("list.json", messages), ("body.json", chat)):
        (tmp_path / name).write_text(json.dumps(content))
        said = account(url, "--messages", str(tmp_path / name))
        assert said["prompt"] == answer["usage"]["prompt_tokens"]
        assert said["hit"] == said["usable"]
    asked = account(url, "--request-id", answer["id"])
    assert "message" in [kind for _, kind in asked["request"]["left"]]


def test_a_line_that_changes_is_named(url: str) -> None:
    rules = " ".join(f"Rule {n} is kept in register {n * 11 % 37}." for n in range(60))

    def chat(stamp: str, **more: str) -> dict:
        system = {"role": "system", "content": f"Answer briefly.\nNow: {stamp}\n{rules}"}
        messages = [system, {"role": "user", "content": f"Which rule at {stamp}?"}]
        body = {"model": "default", "messages": messages, "max_tokens": 2, **more}
        return requests.post(url + "/v1/chat/completions", json=body, timeout=120).json()

    for stamp in ("10:41:07", "11:58:32"):
        answer = chat(stamp)
    found = account(url, "--request-id", answer["id"])
    unstored = found["unstored"]
    assert (found["request"]["missed"], unstored["why"]) == ("changing_text", "changing_text")
    assert unstored["changing_text"]["message"] == 1
    assert unstored["changing_text"]["same_tokens"] > 300
    text = run(url, "--request-id", answer["id"]).stdout
    assert f"(line {unstored['line']}, message 1)" in text
    assert "belongs behind text that stays the same" in text
    stranger = chat("12:03:51", cache_salt="another")
    report = account(url, "--request-id", stranger["id"], "--cache-salt", "another")
    assert report["unstored"]["changing_text"] is None


def test_mistakes_end_in_one_sentence(url: str, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "empty.json").write_text("{}")
    for arguments, why in (
        (["--request-id", "nobody"], "no request 'nobody' with this extra key, salt and adapter"),
        (["--input-ids", "1,two"], "numbers with commas"),
        (["--input-ids", f"1,{1 << 70}"], "below 2**31"),
        (["--input-ids", "@nowhere"], "nowhere cannot be read (No such file"),
        (["--messages", str(tmp_path / "broken.json")], "is no JSON"),
        (["--messages", str(tmp_path / "empty.json")], "neither a list of messages nor"),
    ):
        _refused(run(url, *arguments), why)
    for wrong in ([-1], [1 << 70], ["a"]):
        answer = requests.post(url + "/hybrid_cache/explain", json={"input_ids": wrong}, timeout=30)
        assert answer.status_code == 400
    both = requests.post(url + "/hybrid_cache/explain", json={}, timeout=30)
    assert (both.status_code, both.json()["error"]) == (
        400,
        'give either input_ids or request_id: {"input_ids": [1, 2, 3]} or {"request_id": "..."}.',
    )


class _Stranger(BaseHTTPRequestHandler):
    """A server that knows no such route."""

    def do_POST(self) -> None:
        self.send_response(404)
        self.end_headers()
        self.wfile.write(b'{"detail":"Not Found"}')

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def stranger() -> str:
    server = HTTPServer(("127.0.0.1", 0), _Stranger)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_server_without_the_route_and_no_server(stranger: str) -> None:
    _refused(run(stranger, "--input-ids", "1,2"), "was it started with sglang_hybrid.launch_server")
    _refused(run("http://127.0.0.1:9", "--input-ids", "1,2"), "no server answers at http://127")


def _refused(done: subprocess.CompletedProcess[str], why: str) -> None:
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert why in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hit_that_ends_at_the_grid_says_so(serve: Serve) -> None:
    """States are taken where SGLang tracks them."""
    buffers = ("--mamba-radix-cache-strategy", "extra_buffer")
    with serve("--hybrid-admission", "all", *buffers) as server:
        prompt = random_prompt(700, seed=1)
        reports = [ask(server.url, prompt, 4)["meta_info"]["hybrid_cache"] for _ in range(2)]
        assert [report["hit_tokens"] for report in reports] == [0, 640]
        assert [report["missed"] for report in reports] == ["not_stored", "grid"]
        told = account(server.url, "--input-ids", ids(prompt))
        assert (told["hit"], told["unstored"]["why"]) == (640, "grid")
        assert cached(ask(server.url, random_prompt(700, seed=2), 4)) == 0
