"""Sends the same traffic to a server with our cache and to one with SGLang's own; compares them.

Agents, chats, questions about documents, and long prompts with several samples at once. Each
request is sent to one server and, once that has answered, to the other; another one begins each
time. Two servers that work at the same time would share two cores, and the time to first token of
one would depend on what the other computes. Called by demo.sh in the environment that it made.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import requests
from rich.console import Console
from rich.live import Live

from scripts.bench.commands import positive
from scripts.bench.servers import LAUNCHERS, at_once, events, flush
from scripts.bench.traffic import Outcome
from scripts.demo.picture import BROWSERS, browser, picture
from scripts.demo.results import SYSTEMS, Row, Served, rows, summary, table
from scripts.demo.traffic import Message, Step, plan
from scripts.train.facts import Fact, collect
from sglang_hybrid.core.options import LAST_PORT, integer
from sglang_hybrid.extensions.cpu.models import ensure_tiny_model
from sglang_hybrid.serving.flag_values import TRAINED
from sglang_hybrid.serving.preflight import check_port
from sglang_hybrid.serving.server_process import ServerFailed, ServerProcess
from sglang_hybrid.serving.startup import StartupError

PAGE = ("--hybrid-ui", "text")
"""Flags of the server whose cache is shown on a page, with the text of prompts."""
COMMON = (
    *("--enable-cache-report", "--max-running-requests", "4"),
    *("--max-total-tokens", "8192", "--max-mamba-cache-size", "32"),
)
"""Flags of both servers: a memory that the traffic does not fit into. Ours has the same bytes, but
divides them between KV and states by itself."""
ANSWER_TOKENS = 40
"""More than any answer of the embedded model has."""
LINE_SECONDS = 10.0
"""Between two lines about the progress where the output is not a terminal."""

Answer = tuple[Outcome, str]


class DemoFailed(RuntimeError):
    """The comparison could not be made, or is not in our favour; the message says why."""


def ask(server: ServerProcess, messages: list[Message], samples: int) -> Answer:
    """One streamed chat completion, and its text. Raises `DemoFailed` where it fails."""
    body: dict[str, Any] = {
        **{"model": "default", "messages": messages, "max_tokens": ANSWER_TOKENS},
        **{"temperature": 0.7 if samples > 1 else 0, "stream": True},
        "stream_options": {"include_usage": True},
    }
    start, first, text = time.perf_counter(), 0.0, ""
    usage: dict[str, Any] = {}
    try:
        url = server.url + "/v1/chat/completions"
        with requests.post(url, json=body, stream=True, timeout=120) as response:
            response.raise_for_status()
            for event in events(response.iter_lines()):
                first = first or time.perf_counter()
                usage = event.get("usage") or usage
                text += "".join(c["delta"].get("content") or "" for c in event.get("choices", ()))
    except requests.RequestException as error:
        raise DemoFailed(f"a request failed (log: {server.log}): {error}") from None
    if not usage:
        raise DemoFailed(f"a request was not answered to its end (log: {server.log})")
    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    spent = time.perf_counter() - start
    return Outcome(usage["prompt_tokens"], cached, first - start, spent), text


def sample(server: ServerProcess, messages: list[Message], samples: int) -> list[Answer]:
    """`ask` so many times at once."""
    return at_once(partial(ask, server, messages), [samples] * samples)


def drive(
    servers: Sequence[ServerProcess],
    steps: Sequence[Step],
    seconds: float,
    show: Callable[[float, list[Served]], None],
) -> list[Served]:
    """Send every step to each server, nothing else at the same time. Another one begins each time.

    A step that is late is sent at once; after so many seconds no more are sent. An answer of the
    first server continues the session on both.
    """
    served: list[Served] = []
    sessions: defaultdict[str, list[Message]] = defaultdict(list)
    begin = time.monotonic()
    for number, step in enumerate(steps):
        now = time.monotonic() - begin
        if now >= seconds:
            break
        time.sleep(max(0.0, step.at - now))
        messages = sessions[step.session]
        messages += step.messages
        found = {}
        for turn in range(len(servers)):
            at = (number + turn) % len(servers)
            found[at] = sample(servers[at], messages, step.samples)
        answers = [found[at][0][1] for at in range(len(servers))]
        messages.append({"role": "assistant", "content": answers[0]})
        outcomes = tuple([one for one, _ in found[at]] for at in range(len(servers)))
        differs = step.samples == 1 and len(set(answers)) > 1
        served.append(Served(step.kind, outcomes, differs))
        show(time.monotonic() - begin, served)
    return served


def warm_up(servers: Sequence[ServerProcess], facts: Sequence[Fact]) -> None:
    """Every kind of step twice, the second time with hits; then empty caches."""
    drive(servers, 2 * plan(facts, seed=-1, seconds=1), math.inf, lambda seconds, served: None)
    for server in servers:
        flush(server.url)


@contextmanager
def progress(console: Console) -> Iterator[Callable[[float, list[Served]], None]]:
    """A display of the results so far: the table in a terminal, else a line now and then."""
    if console.is_terminal:
        with Live(console=console, transient=True) as live:
            yield lambda seconds, served: live.update(table(rows(served), seconds))
        return
    said = 0.0

    def line(seconds: float, served: list[Served]) -> None:
        nonlocal said
        if seconds >= said + LINE_SECONDS:
            said = seconds
            print(f"{seconds:.0f} s, {len(served)} steps. {summary(rows(served)[-1])}", flush=True)

    yield line


def compare(servers: Sequence[ServerProcess], options: argparse.Namespace) -> Row:
    """Send the traffic, print the table and write it to the file; the row of all requests."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    facts = collect()
    print("Warming both up ...", flush=True)
    warm_up(servers, facts)
    with progress(console) as show:
        steps = plan(facts, options.seed, options.seconds)
        served = drive(servers, steps, options.seconds, show)
    found = rows(served)
    console.print(table(found, options.seconds))
    print(summary(found[-1]))
    differing = sum(step.differs for step in served)
    if differing:
        print(f"{differing} of {len(served)} answers differ.")
    if options.output:
        record = {"seconds": options.seconds, "seed": options.seed, "systems": SYSTEMS}
        text = json.dumps(record | {"rows": [asdict(one) for one in found]}, indent=2)
        options.output.write_text(text + "\n")
    return found[-1]


def run(options: argparse.Namespace) -> int:
    """Start both servers, compare them, and serve on where somebody watches; the exit status."""
    check_port("127.0.0.1", options.port)
    model = str(ensure_tiny_model(TRAINED))
    ours = ServerProcess([*COMMON, *PAGE], module=LAUNCHERS["ours"], port=options.port)
    theirs = ServerProcess([*COMMON, "--model-path", model], module=LAUNCHERS["SGLang"])
    with ExitStack() as stack:
        for whose, server in (("our", ours), ("SGLang's own", theirs)):
            where = f"{server.url} (log: {server.log})"
            print(f"Starting a server with {whose} cache on {where} ...", flush=True)
            stack.callback(server.stop)
            server.start()
        for server in (ours, theirs):
            server.wait_until_healthy()
        print(f"What is in our cache: {ours.url}/hybrid_cache/", flush=True)
        with picture(f"{ours.url}/hybrid_cache/", options.picture):
            total = compare((ours, theirs), options)
        if not options.check and sys.stdin.isatty():
            theirs.stop()
            print(f"Serving {ours.url}/hybrid_cache/ until Ctrl-C.", flush=True)
            assert ours.process is not None
            return ours.process.wait()
    if total.hit[0] <= total.hit[1]:
        raise DemoFailed("our cache hit {:,} tokens, SGLang's own {:,}".format(*total.hit))
    print("demo: ok")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="demo.sh", description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="stop the servers after the table")
    parser.add_argument("--seconds", type=positive, default=120, help="of traffic")
    parser.add_argument("--seed", type=integer(0), default=0, help="of the traffic")
    port = integer(1, LAST_PORT)
    parser.add_argument("--port", type=port, default=30000, help="of the server with our cache")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="the table, as JSON")
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE.png",
        help="of the page, at the end; beside it an empty, a dark and a phone's",
    )
    options = parser.parse_args()
    for name in ("output", "picture"):
        file = getattr(options, name)
        if file and not file.resolve().parent.is_dir():
            parser.error(f"--{name} {file}: there is no such folder")
    if options.picture and browser() is None:
        parser.error(f"--picture takes a browser: {', '.join(BROWSERS)}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        return run(options)
    except KeyboardInterrupt:
        return 130
    except (DemoFailed, ServerFailed, StartupError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
