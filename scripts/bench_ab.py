#!/usr/bin/env python3
"""SGLang's own prefix cache and ours on a real server: the same trace, the same pools, in turn.

    python scripts/bench_ab.py TRACE [--paired] [--json FILE] [--sglang FLAGS] [--ours FLAGS]

Serves SGLang's own cache at its defaults, then with every set of flags of `CANDIDATES` (or with
those of `--sglang`), then ours at its defaults and with every `--ours`; one server at a time. Each
is warmed up, flushed and sent the same slice of the trace in the trace's order; a session's next
turn is sent when the one before has been answered. The model's answers are forced to be those of
the trace, token by token, because the next turn's prompt repeats them. Prints Markdown.

With `--paired` all servers are up at once and get each request one after another, so that what else
the machine does slows all of them alike: for times to first token where it is not quiet.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import re
import shlex
import signal
import sys
import time
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aiohttp
import numpy as np
import requests
import torch
from prometheus_client.parser import text_string_to_metric_families
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from scripts.bench_server import machine
from sglang_hybrid.models import build_tiny_model, default_model_directory
from sglang_hybrid.models.tokenizer import FIRST_TEXT_ID
from sglang_hybrid.replay.slices import Slice, read_trace, reusable_tokens, to_vocabulary
from sglang_hybrid.replay.traces import Request
from sglang_hybrid.server_process import ServerFailed, ServerProcess

CANDIDATES = (
    "--mamba-max-states-per-path 2",
    "--mamba-max-states-per-path 2 --mamba-radix-cache-strategy extra_buffer_lazy",
    "--mamba-track-interval 128 --mamba-radix-cache-strategy extra_buffer_lazy",
    "--mamba-radix-cache-strategy no_buffer --disable-overlap-schedule",
)
"""Flags with which SGLang's own cache may do better than at its defaults."""

WATCH_SECONDS = 2.0
"""Between looks at a server's metrics while it works."""


@dataclass(frozen=True)
class Preset:
    """A slice of a trace, and pools in which it does not fit."""

    slice: Slice
    kv_tokens: int
    state_slots: int
    flags: str = ""


PRESETS = {
    "taubench": Preset(Slice(requests=150, max_answer_tokens=48), kv_tokens=16_384, state_slots=48),
    "sharegpt": Preset(Slice(requests=150, max_answer_tokens=64), kv_tokens=16_384, state_slots=48),
    "bbh": Preset(Slice(requests=324, max_answer_tokens=8), kv_tokens=16_384, state_slots=48),
    "claude_code": Preset(
        Slice(requests=80, scale=4, max_prompt_tokens=16_384, max_answer_tokens=32),
        kv_tokens=49_152,
        state_slots=48,
        flags="--chunked-prefill-size 2048",
    ),
    "mooncake": Preset(
        Slice(requests=450, scale=8, max_prompt_tokens=2_048, max_answer_tokens=8),
        kv_tokens=98_304,
        state_slots=128,
        flags="--chunked-prefill-size 1024",
    ),
}
"""By the start of a trace's file name. Where lengths are scaled down, so is the prefill chunk, from
the 8,192 tokens that SGLang takes on a large GPU."""


class ForcedAnswer(CustomLogitProcessor):  # type: ignore[misc]
    """Makes `custom_params["answer"]` the greedy answer.

    Which of its tokens is due follows from the tokens that the request has committed, this step's
    included: with the overlap scheduler its list of output tokens is a step behind, and a chunk of
    a prompt that is not its last samples a token that nobody reads.
    """

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or ()):
            req, answer = params["__req__"], params["answer"]
            due = req.kv.kv_committed_len - len(req.origin_input_ids)
            if 0 <= due < len(answer):
                logits[row] = -1e9
                logits[row, answer[due]] = 0.0
        return logits


@dataclass(frozen=True)
class Outcome:
    """What became of one request; ttft: seconds from sending to the first token, seconds: to the
    last.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft: float = 0.0
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Configuration:
    """A server to measure: SGLang's own launcher, or ours."""

    name: str
    flags: tuple[str, ...]
    ours: bool

    def server(self, common: Sequence[str]) -> ServerProcess:
        """With the flags that all have in common, and its own."""
        module = "sglang_hybrid.launch_server" if self.ours else "sglang.launch_server"
        return ServerProcess([*common, *self.flags], module=module)


@dataclass
class Result:
    """What one configuration did; an error of the server itself leaves no outcomes."""

    configuration: Configuration
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    pools: tuple[str, ...] = ()
    kv_evicted: int = 0
    slots_free: int = 0
    error: str = ""

    @property
    def served(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.error]

    @property
    def hit_rate(self) -> float:
        """Cached tokens over prompt tokens of what was served."""
        prompts = sum(outcome.prompt_tokens for outcome in self.served)
        return sum(outcome.cached_tokens for outcome in self.served) / max(1, prompts)

    @property
    def prefilled(self) -> int:
        return sum(outcome.prompt_tokens - outcome.cached_tokens for outcome in self.served)

    @property
    def ttft(self) -> tuple[float, float, float]:
        """P5, P50 and P95 of the time to first token, ms."""
        if not self.served:
            return (0.0, 0.0, 0.0)
        times = [outcome.ttft * 1000 for outcome in self.served]
        low, middle, high = np.percentile(times, (5, 50, 95)).tolist()
        return (low, middle, high)

    def record(self) -> dict[str, Any]:
        """Everything, for JSON."""
        summary = {"hit_rate": self.hit_rate, "prefilled": self.prefilled, "ttft_ms": self.ttft}
        return summary | asdict(self)


def next_ready(waiting: Sequence[int], busy: set[int], trace: Sequence[Request]) -> int | None:
    """The first waiting request whose session has none under way."""
    return next((number for number in waiting if trace[number].session not in busy), None)


async def send(client: aiohttp.ClientSession, request: Request, processor: str) -> Outcome:
    """One streamed /generate whose answer must be the trace's."""
    prompt = request.tokens[: request.input_len].tolist()
    # A request generates a token at least. Of a session's answers it is lost anyway: a cache has
    # the KV of all tokens but the last.
    answer = request.tokens[request.input_len :].tolist() or [FIRST_TEXT_ID]
    body = {
        "input_ids": prompt,
        "custom_logit_processor": processor,
        "sampling_params": {
            "temperature": 0,
            "ignore_eos": True,
            "max_new_tokens": len(answer),
            "custom_params": {"answer": answer},
        },
        "stream": True,
    }
    start, first, last = time.perf_counter(), 0.0, b"{}"
    try:
        async with client.post("/generate", json=body) as response:
            if not response.ok:
                return Outcome(error=f"{response.status}: {(await response.text())[:200]}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    first = first or time.perf_counter()
                    last = line.removeprefix(b"data: ")
    except (aiohttp.ClientError, TimeoutError) as error:
        return Outcome(error=f"{type(error).__name__}: {error}")
    spent = time.perf_counter() - start
    return read_outcome(json.loads(last), len(prompt), answer, first - start, spent)


def read_outcome(
    record: dict[str, Any], prompt: int, answer: list[int], ttft: float, seconds: float
) -> Outcome:
    """The last record of a stream, checked against what was asked for."""
    if "meta_info" not in record:
        return Outcome(error=f"no answer: {json.dumps(record)[:200]}")
    meta = record["meta_info"]
    if meta["prompt_tokens"] != prompt or record["output_ids"] != answer:
        return Outcome(error=f"another answer than the trace's ({meta['finish_reason']})")
    return Outcome(prompt, meta["cached_tokens"], ttft, seconds)


async def drive(
    url: str, trace: Sequence[Request], concurrency: int, time_scale: float | None
) -> list[Outcome]:
    """Send every request of `trace`; outcomes in the trace's order.

    At most `concurrency` are under way. With `time_scale` none is sent before its arrival, counted
    in that many seconds per second of the trace.
    """
    processor = ForcedAnswer.to_str()
    outcomes = [Outcome(error="not sent")] * len(trace)
    waiting, busy = list(range(len(trace))), set[int]()
    changed = asyncio.Condition()
    origin = trace[0].arrival if trace else 0.0
    start = time.perf_counter()

    async def work(client: aiohttp.ClientSession) -> None:
        while True:
            async with changed:
                while (number := next_ready(waiting, busy, trace)) is None:
                    if not waiting:
                        return
                    await changed.wait()
                waiting.remove(number)
                busy.add(trace[number].session)
            if time_scale is not None:
                due = start + (trace[number].arrival - origin) * time_scale
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
            outcomes[number] = await send(client, trace[number], processor)
            async with changed:
                busy.discard(trace[number].session)
                changed.notify_all()

    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(url, timeout=timeout, connector=connector) as client,
        asyncio.TaskGroup() as workers,
    ):
        for _ in range(concurrency):
            workers.create_task(work(client))
    return outcomes


async def drive_in_pairs(urls: Sequence[str], trace: Sequence[Request]) -> list[list[Outcome]]:
    """Send every request to each server, nothing at the same time; outcomes by server.

    Another server begins each time.
    """
    processor = ForcedAnswer.to_str()
    outcomes: list[list[Outcome]] = [[] for _ in urls]
    timeout = aiohttp.ClientTimeout(total=600)
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(aiohttp.ClientSession(url, timeout=timeout))
            for url in urls
        ]
        for number, request in enumerate(trace):
            for turn in range(len(urls)):
                at = (number + turn) % len(urls)
                outcomes[at].append(await send(clients[at], request, processor))
    return outcomes


async def watched(
    url: str, driving: Awaitable[list[Outcome]], limit: float
) -> tuple[list[Outcome], int]:
    """What `driving` returns, and the fewest free state slots that the server's metrics said.

    Raises `TimeoutError` after `limit` seconds.
    """
    least = math.inf

    async def watch() -> None:
        nonlocal least
        with contextlib.suppress(requests.RequestException):
            while True:
                now = await asyncio.to_thread(metrics, url)
                least = min(least, now.get("sglang:mamba_available_tokens", math.inf))
                await asyncio.sleep(WATCH_SECONDS)

    watching = asyncio.create_task(watch())
    try:
        outcomes = await asyncio.wait_for(driving, limit)
    finally:
        watching.cancel()
    return outcomes, int(least) if math.isfinite(least) else -1


def warm_up(url: str, concurrency: int) -> None:
    """Every kind of step once, with tokens of no trace; then an empty cache."""
    length, answer = 1024, 16
    trace = [
        Request(n, 0, 0.0, np.full(length + answer, n % FIRST_TEXT_ID, dtype=np.int32), length)
        for n in range(2 * concurrency)
    ]
    failed = [o.error for o in asyncio.run(drive(url, trace, concurrency, None)) if o.error]
    if failed:
        raise ServerFailed(f"the warm-up failed: {failed[0]}")
    requests.post(url + "/flush_cache", params={"timeout": 30}, timeout=60).raise_for_status()


def measure(
    configuration: Configuration,
    common: Sequence[str],
    trace: Sequence[Request],
    concurrency: int,
    time_scale: float | None,
    limit: float,
) -> Result:
    """Start the configuration's server, warm it up, send the trace, stop it.

    A server that has not answered everything after `limit` seconds has failed.
    """
    result = Result(configuration)
    try:
        with configuration.server(common) as server:
            result.pools = pools(server.log.read_text(errors="replace"))
            warm_up(server.url, concurrency)
            before = metrics(server.url)
            start = time.perf_counter()
            result.outcomes, result.slots_free = asyncio.run(
                watched(server.url, drive(server.url, trace, concurrency, time_scale), limit)
            )
            result.seconds = time.perf_counter() - start
            if server.process is not None and server.process.poll() is not None:
                result.error = f"the server ended (log: {server.log}):\n{server.tail()}"
            else:
                after = metrics(server.url)
                evicted = "sglang:evicted_tokens_total"
                result.kv_evicted = int(after.get(evicted, 0) - before.get(evicted, 0))
    except TimeoutError:
        result.error = f"not done after {limit:.0f} s (--limit)"
    except (ServerFailed, requests.RequestException) as error:
        result.error = str(error)
    return result


def measure_in_pairs(
    configurations: Sequence[Configuration],
    common: Sequence[str],
    trace: Sequence[Request],
    limit: float,
) -> list[Result]:
    """`measure` for all at once. One that fails fails all; nothing is watched meanwhile."""
    results = [Result(configuration) for configuration in configurations]
    try:
        with contextlib.ExitStack() as stack:
            servers = []
            for result in results:
                servers.append(stack.enter_context(result.configuration.server(common)))
                result.pools = pools(servers[-1].log.read_text(errors="replace"))
                warm_up(servers[-1].url, 1)
            driving = drive_in_pairs([server.url for server in servers], trace)
            outcomes = asyncio.run(asyncio.wait_for(driving, limit))
    except TimeoutError:
        outcomes, results[0].error = [], f"not done after {limit:.0f} s (--limit)"
    except (ServerFailed, requests.RequestException) as error:
        outcomes, results[0].error = [], str(error)
    for result, of_one in zip(results, outcomes, strict=bool(outcomes)):
        result.outcomes = of_one
        result.seconds = sum(outcome.seconds for outcome in of_one)
    return results


def against_the_first(results: Sequence[Result]) -> str:
    """Request by request, how times to first token compare with the first configuration's."""
    first = results[0].outcomes
    lines = []
    for result in results[1:]:
        pairs = zip(result.outcomes, first, strict=True)
        ratios = [mine.ttft / its.ttft for mine, its in pairs if not mine.error and not its.error]
        if ratios:
            low, middle, high = np.percentile(ratios, (25, 50, 75)).tolist()
            lines.append(
                f"{result.configuration.name}: a request's time to first token is {middle:.2f}x "
                f"({low:.2f}x to {high:.2f}x, quartiles) that of {results[0].configuration.name}."
            )
    return "\n".join(lines)


def metrics(url: str) -> dict[str, float]:
    """The server's own metrics, summed over their labels."""
    totals: dict[str, float] = {}
    text = requests.get(url + "/metrics", timeout=30).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def pools(log: str) -> tuple[str, ...]:
    """What the server said about the pools that it allocated."""
    return tuple(re.findall(r"(?:Mamba|KV) Cache is allocated\. (.*\S)", log))


def table(results: Sequence[Result]) -> str:
    """Markdown; ratios are to the first row, and `best` is SGLang's own row that hits most."""
    own = [result for result in results if not result.configuration.ours and not result.error]
    best = max(own, key=lambda result: result.hit_rate, default=None)
    base = results[0]
    lines = [
        "| configuration | token hit rate | prefilled tokens | TTFT P5 / P50 / P95, ms "
        "| wall, s | served / failed | KV evicted, fewest slots free |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        name = result.configuration.name + (" (SGLang's best)" if result is best else "")
        if result.error:
            lines.append(f"| {name} | failed: {' '.join(result.error.split())[:80]} | | | | | |")
            continue
        times = " / ".join(f"{ms:,.0f}" for ms in result.ttft)
        ratio = " / ".join(times_of(ms, of) for ms, of in zip(result.ttft, base.ttft, strict=True))
        lines.append(
            f"| {name} | {result.hit_rate:.1%} ({times_of(result.hit_rate, base.hit_rate)}) "
            f"| {result.prefilled:,} ({times_of(result.prefilled, base.prefilled)}) "
            f"| {times} ({ratio}) "
            f"| {result.seconds:.0f} ({times_of(result.seconds, base.seconds)}) "
            f"| {len(result.served)} / {len(result.outcomes) - len(result.served)} "
            f"| {result.kv_evicted:,}, {result.slots_free} |"
        )
    return "\n".join(lines)


def times_of(value: float, base: float) -> str:
    """`value` as a multiple of `base`."""
    return f"{value / base:.2f}x" if base else "-"


def preset_of(trace: Path) -> Preset | None:
    """The preset whose name the trace's file name begins with."""
    return next((PRESETS[name] for name in PRESETS if trace.name.startswith(name)), None)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, help="a compact or a Mooncake trace")
    parser.add_argument("--preset", choices=PRESETS, help="default: by the trace's file name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every outcome goes there")
    cut = parser.add_argument_group("slice (each overrides the preset)")
    cut.add_argument("--requests", type=int)
    cut.add_argument("--skip", type=int, help="requests of the trace left out at its start")
    cut.add_argument("--scale", type=int, help="keep one token of so many")
    cut.add_argument("--max-prompt-tokens", type=int, help="leave longer prompts out")
    cut.add_argument("--max-total-tokens", type=int, help="prompt tokens of the slice at most")
    cut.add_argument("--max-answer-tokens", type=int, help="cut answers, also where repeated")
    server = parser.add_argument_group("server, the same for every configuration")
    server.add_argument("--model-path", help="a directory (default: nemotron-h of 25 M)")
    server.add_argument("--kv-tokens", type=int, help="the KV pool (--max-total-tokens)")
    server.add_argument("--state-slots", type=int, help="--max-mamba-cache-size")
    server.add_argument("--running", type=int, help="--max-running-requests (--concurrency)")
    server.add_argument("--flags", help="further flags of SGLang for every configuration")
    parser.add_argument("--concurrency", type=int, default=4, help="requests under way")
    parser.add_argument(
        "--paired", action="store_true", help="all servers at once, one request at a time"
    )
    parser.add_argument(
        "--time-scale",
        type=float,
        help="seconds per second of the trace between arrivals (default: as fast as answered)",
    )
    parser.add_argument(
        "--limit", type=float, default=1200.0, help="seconds for a configuration (%(default)s)"
    )
    parser.add_argument(
        "--sglang",
        action="append",
        metavar="FLAGS",
        help="a candidate for SGLang's best instead of the listed; an empty one is none",
    )
    parser.add_argument(
        "--ours", action="append", metavar="FLAGS", default=[], help="a further one of ours"
    )
    options = parser.parse_args()
    preset = PRESETS[options.preset] if options.preset else preset_of(options.trace)
    if preset is None:
        parser.error(f"no preset is named as {options.trace.name} begins; give --preset")
    changed = {
        name: getattr(options, name)
        for name in asdict(preset.slice)
        if getattr(options, name) is not None
    }
    options.slice = replace(preset.slice, **changed)
    options.running = options.running or options.concurrency
    if options.paired:
        options.concurrency = 1
    if min(options.slice.scale, options.slice.requests, options.concurrency) < 1:
        parser.error("--requests, --scale and --concurrency must be at least 1")
    options.kv_tokens = options.kv_tokens or preset.kv_tokens
    options.state_slots = options.state_slots or preset.state_slots
    options.flags = preset.flags if options.flags is None else options.flags
    return options


def configurations(sglang: Sequence[str], ours: Sequence[str]) -> list[Configuration]:
    """SGLang's default first, ours last."""
    default = [Configuration("SGLang, default", (), ours=False)]
    own = [Configuration(f"SGLang, `{f}`", tuple(shlex.split(f)), ours=False) for f in sglang if f]
    hybrid = ("--radix-cache-backend", "hybrid")
    rest = [Configuration(f"ours, `{f}`", (*hybrid, *shlex.split(f)), ours=True) for f in ours]
    return [*default, *own, Configuration("ours, default", hybrid, ours=True), *rest]


def vocabulary_of(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def default_model() -> Path:
    """Built once, beside the embedded default model."""
    directory = default_model_directory("nemotron-h-25m")
    if not (directory / "config.json").is_file():
        build_tiny_model("nemotron-h", directory, scale="25m")
    return directory


def main() -> int:
    options = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the server is stopped then, too
    model = Path(options.model_path) if options.model_path else default_model()
    try:
        whole = read_trace(options.trace)
    except (OSError, ValueError) as error:
        print(f"bench_ab: {error}", file=sys.stderr)
        return 1
    cut = options.slice.cut(whole)
    if not cut:
        print("bench_ab: the slice is empty; raise its bounds.", file=sys.stderr)
        return 1
    trace, distinct = to_vocabulary(cut, FIRST_TEXT_ID, vocabulary_of(model))
    common = [
        *("--model-path", str(model), "--max-total-tokens", str(options.kv_tokens)),
        *("--max-mamba-cache-size", str(options.state_slots)),
        *("--max-running-requests", str(options.running)),
        *("--enable-custom-logit-processor", "--enable-metrics"),
        *shlex.split(options.flags),
    ]
    prompts = sum(request.input_len for request in trace)
    answers = sum(len(request.tokens) - request.input_len for request in trace)
    print(f"Machine: {machine()}. Date: {date.today()}. ", end="")
    print(f"Command: `{shlex.join(['python', 'scripts/bench_ab.py', *sys.argv[1:]])}`.\n")
    print(
        f"{options.trace.name}: {len(trace)} requests of {len({r.session for r in trace})} "
        f"sessions, {prompts:,} prompt tokens, of which {reusable_tokens(trace) / prompts:.1%} "
        f"repeat something before, {answers:,} answer tokens; {options.slice}; ids "
        f"{'numbered' if distinct else 'hashed'}. {options.concurrency} at a time. "
        f"KV pool of {options.kv_tokens:,} tokens, {options.state_slots} state slots"
        + (f"; all with `{options.flags}`" if options.flags else "")
        + ".",
        flush=True,
    )
    results: list[Result] = []
    interrupted = False
    candidates = CANDIDATES if options.sglang is None else options.sglang
    chosen = configurations(candidates, options.ours)
    try:
        if options.paired:
            results, chosen = measure_in_pairs(chosen, common, trace, options.limit), []
        for configuration in chosen:
            print(f"{configuration.name} ...", end=" ", file=sys.stderr, flush=True)
            result = measure(
                configuration,
                common,
                trace,
                options.concurrency,
                options.time_scale,
                options.limit,
            )
            results.append(result)
            print(
                result.error or f"{result.hit_rate:.1%}, {result.seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted", file=sys.stderr)
    for pool in dict.fromkeys(pool for result in results for pool in result.pools):
        print(f"Pool: {pool}.")
    if len({result.pools for result in results if result.pools}) > 1:
        print("The pools are NOT the same for all.")
    errors = [outcome.error for result in results for outcome in result.outcomes if outcome.error]
    print("".join(f"Failed: {error}.\n" for error in dict.fromkeys(errors)))
    if results:
        print(table(results))
    if options.paired and results:
        print("\n" + against_the_first(results))
    if options.json:
        record = {
            "trace": options.trace.name,
            "slice": asdict(options.slice),
            "common": common,
            "results": [result.record() for result in results],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    failed = interrupted or errors or any(result.error for result in results)
    return 130 if interrupted else int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
