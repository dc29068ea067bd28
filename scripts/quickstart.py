"""Starts the server, sends it real requests in four ways and prints what each one cost.

Called by quickstart.sh in the environment that it made.
"""

import argparse
import json
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

import openai
import requests
import sglang as sgl
from rich.console import Console
from rich.table import Table

from sglang_hybrid.core.options import LAST_PORT, integer
from sglang_hybrid.core.sentences import escape
from sglang_hybrid.serving.server_process import ServerFailed, ServerProcess

TOKENS = 40
"""More than any answer of the embedded model has."""
DOCUMENT = "\n".join(
    f"Article {number}. The keeper of the archive shall record every entry in the register, "
    f"compare it with entry {number * 7 % 97} and answer questions about it in order."
    for number in range(1, 60)
)
QUESTIONS = ("What does json.dumps do?", "What does math.sqrt do?", "What is os.path.join?")
"""About something else: the embedded model knows Python's standard library, and reads nothing."""


@dataclass
class Row:
    """One request: what it was, its tokens, seconds to the first token, and the answer."""

    name: str
    prompt_tokens: int
    cached_tokens: int
    seconds: float
    answer: str


def below(question: str) -> str:
    """A question after a text, without a chat template."""
    return f"\n\nQuestion: {question}\nAnswer:"


def generate(url: str, name: str, text: str) -> Row:
    """SGLang's own /generate, streamed to time the first token."""
    body = {
        "text": text,
        "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS},
        "stream": True,
    }
    start = time.perf_counter()
    first = 0.0
    said: dict[str, Any] = {}
    with requests.post(url + "/generate", json=body, stream=True, timeout=300) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith(b"data: {"):
                continue
            first = first or time.perf_counter()
            said = json.loads(line[len(b"data: ") :])
    meta = said["meta_info"]
    waited = first - start
    return Row(name, meta["prompt_tokens"], meta["cached_tokens"], waited, said["text"])


def chat(url: str, name: str, question: str, *, stream: bool) -> Row:
    """An OpenAI chat completion through the `openai` client."""
    client = openai.OpenAI(base_url=url + "/v1", api_key="none")
    messages = [
        {"role": "system", "content": DOCUMENT},
        {"role": "user", "content": question},
    ]
    start = time.perf_counter()
    first = 0.0
    if stream:
        usage, answer = None, ""
        for chunk in client.chat.completions.create(
            model="default",
            messages=messages,
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ):
            first = first or time.perf_counter()
            usage = chunk.usage or usage
            answer += "".join(choice.delta.content or "" for choice in chunk.choices)
    else:
        complete = client.chat.completions.create(
            model="default", messages=messages, max_tokens=TOKENS, temperature=0
        )
        first = time.perf_counter()
        usage, answer = complete.usage, complete.choices[0].message.content
    details = usage.prompt_tokens_details
    cached = details.cached_tokens if details else 0
    return Row(name, usage.prompt_tokens, cached, first - start, answer)


@sgl.function
def two_answers(s, document: str) -> None:
    """A frontend program: one answer, then two questions asked side by side about it."""
    s += document + below(QUESTIONS[0])
    start = time.perf_counter()
    s += sgl.gen("answer", max_tokens=TOKENS, temperature=0)
    rows = [frontend_row("gen", s, first_token(s) - start)]
    branches = s.fork(2)
    start = time.perf_counter()
    for branch, question in zip(branches, QUESTIONS[1:], strict=True):
        branch += below(question)
        branch += sgl.gen("answer", max_tokens=TOKENS, temperature=0)
    seconds = [first_token(branch) - start for branch in branches]
    rows += [
        frontend_row(f"fork {number}", branch, waited)
        for number, branch, waited in zip((1, 2), branches, seconds, strict=True)
    ]
    s["rows"] = rows


def first_token(state: sgl.lang.interpreter.ProgramState) -> float:
    """The time of the first token of a state's `answer`; needs a program run with `stream=True`."""
    next(iter(state.text_iter("answer")))
    return time.perf_counter()


def frontend_row(name: str, state: sgl.lang.interpreter.ProgramState, seconds: float) -> Row:
    """The cost of a state's `answer`, once it is complete."""
    meta = state.get_meta_info("answer")
    tokens = meta["prompt_tokens"], meta["cached_tokens"]
    return Row(f"frontend program, {name}", *tokens, seconds, state["answer"])


def program(url: str) -> list[Row]:
    """Run the frontend program."""
    backend = sgl.RuntimeEndpoint(url)
    state = two_answers.run(document=DOCUMENT, backend=backend, stream=True)
    for _ in state.text_iter():  # until the program has ended
        pass
    if state.error() is not None:
        raise RuntimeError("the frontend program failed") from state.error()
    rows: list[Row] = state["rows"]
    return rows


def send_requests(url: str) -> list[Row]:
    """All requests, in an order in which the later ones can use what the earlier ones left."""
    return [
        generate(url, "/generate", DOCUMENT + below(QUESTIONS[0])),
        generate(url, "/generate, the same again", DOCUMENT + below(QUESTIONS[0])),
        generate(url, "/generate, another question", DOCUMENT + below(QUESTIONS[1])),
        chat(url, "chat completion", QUESTIONS[0], stream=False),
        chat(url, "chat completion, the same, streamed", QUESTIONS[0], stream=True),
        chat(url, "chat completion, another question, streamed", QUESTIONS[1], stream=True),
        *program(url),
    ]


def print_table(rows: list[Row]) -> None:
    table = Table(title="What each request cost")
    table.add_column("request")
    for title in ("prompt tokens", "cached", "prefilled", "first token, ms"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.prompt_tokens:,}",
            f"{row.cached_tokens:,}",
            f"{row.prompt_tokens - row.cached_tokens:,}",
            f"{row.seconds * 1000:.0f}",
        )
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    for row in rows:
        answer = escape(row.answer.strip())
        console.print(f"{row.name}: {answer}", markup=False, highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="stop after the requests")
    parser.add_argument("--port", type=integer(1, LAST_PORT), default=30000)
    options, server_arguments = parser.parse_known_args()
    for number in (signal.SIGTERM, signal.SIGHUP):  # the server goes, too
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    server = ServerProcess(["--enable-cache-report", *server_arguments], port=options.port)
    print(f"Starting the server on {server.url} (log: {server.log}) ...", flush=True)
    try:
        with server:
            print_table(send_requests(server.url))
            if not options.check:
                print(f"Serving on {server.url} until Ctrl-C.", flush=True)
                assert server.process is not None
                return server.process.wait()
    except KeyboardInterrupt:
        return 130
    except (ServerFailed, requests.RequestException, openai.OpenAIError) as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 1
    print("quickstart: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
