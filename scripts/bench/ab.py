"""SGLang's own prefix cache and ours on a real server: the same trace, the same pools, in turn.

    python scripts/bench.py ab TRACE ... [--paired] [--json FILE] [--sglang FLAGS] [--ours FLAGS]

Serves SGLang's own cache at its defaults, then with every set of flags of `CANDIDATES` (or with
those of `--sglang`), then ours at its defaults and with every `--ours`; one server at a time. Each
is warmed up, flushed and sent the same slice of the trace in the trace's order; a session's next
turn is sent when the one before has been answered. The model's answers are forced to be those of
the trace, token by token, because the next turn's prompt repeats them.

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
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import requests
from prometheus_client.parser import text_string_to_metric_families

from scripts.bench.pairs import against_the_first
from scripts.bench.report import ROOT, BenchFailed, Table, positive, times_of
from scripts.bench.servers import flags_of, vocabulary_of
from scripts.bench.traces import find, preset_of
from scripts.bench.traffic import Outcome, drive, drive_in_pairs
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


@dataclass(frozen=True)
class Configuration:
    """A server to measure: SGLang's own launcher, or ours."""

    name: str
    flags: tuple[str, ...]
    ours: bool

    def server(self, common: Sequence[str]) -> ServerProcess:
        """With the flags that all have in common, and its own."""
        module = "sglang_hybrid.launch_server" if self.ours else "sglang.launch_server"
        return ServerProcess([*common, *self.flags], module=module, directory=ROOT)


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
        return sum(outcome.prefilled for outcome in self.served)

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


def show(results: Sequence[Result]) -> None:
    """Print the table; ratios are to the first row, and `best` is SGLang's own that hits most."""
    own = [result for result in results if not result.configuration.ours and not result.error]
    best = max(own, key=lambda result: result.hit_rate, default=None)
    table = Table(
        *("configuration", "token hit rate", "prefilled tokens", "TTFT P5 / P50 / P95, ms"),
        *("wall, s", "served / failed", "KV evicted, fewest slots free"),
    )
    for result in results:
        name = result.configuration.name + (" (SGLang's best)" if result is best else "")
        if result.error:
            table.row(name, f"failed: {' '.join(result.error.split())[:80]}", *[""] * 5)
        else:
            table.row(name, *cells(result, results[0]))


def cells(result: Result, base: Result) -> list[str]:
    """What one configuration did, beside another one."""
    times = " / ".join(f"{ms:,.0f}" for ms in result.ttft)
    ratio = " / ".join(times_of(ms, of) for ms, of in zip(result.ttft, base.ttft, strict=True))
    return [
        f"{result.hit_rate:.1%} ({times_of(result.hit_rate, base.hit_rate)})",
        f"{result.prefilled:,} ({times_of(result.prefilled, base.prefilled)})",
        f"{times} ({ratio})",
        f"{result.seconds:.0f} ({times_of(result.seconds, base.seconds)})",
        f"{len(result.served)} / {len(result.outcomes) - len(result.served)}",
        f"{result.kv_evicted:,}, {result.slots_free}",
    ]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="a file, or a trace's name")
    parser.add_argument("--preset", choices=PRESETS, help="default: by the trace's file name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every outcome goes there")
    cut = parser.add_argument_group("slice (each overrides the preset)")
    cut.add_argument("--requests", type=positive)
    cut.add_argument("--skip", type=int, help="requests of the trace left out at its start")
    cut.add_argument("--scale", type=positive, help="keep one token of so many")
    cut.add_argument("--max-prompt-tokens", type=int, help="leave longer prompts out")
    cut.add_argument("--max-total-tokens", type=int, help="prompt tokens of the slice at most")
    cut.add_argument("--max-answer-tokens", type=int, help="cut answers, also where repeated")
    server = parser.add_argument_group("server, the same for every configuration")
    server.add_argument("--model-path", help="a directory (default: nemotron-h of 25 M)")
    server.add_argument("--kv-tokens", type=int, help="the KV pool (--max-total-tokens)")
    server.add_argument("--state-slots", type=int, help="--max-mamba-cache-size")
    server.add_argument("--running", type=int, help="--max-running-requests (--concurrency)")
    server.add_argument("--flags", help="further flags of SGLang for every configuration")
    parser.add_argument("--concurrency", type=positive, default=4, help="requests under way")
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


def configurations(sglang: Sequence[str], ours: Sequence[str]) -> list[Configuration]:
    """SGLang's default first, ours last."""
    default = [Configuration("SGLang, default", (), ours=False)]
    own = [Configuration(f"SGLang, `{f}`", tuple(shlex.split(f)), ours=False) for f in sglang if f]
    hybrid = ("--radix-cache-backend", "hybrid")
    rest = [Configuration(f"ours, `{f}`", (*hybrid, *shlex.split(f)), ours=True) for f in ours]
    return [*default, *own, Configuration("ours, default", hybrid, ours=True), *rest]


def default_model() -> Path:
    """Built once, beside the embedded default model."""
    directory = default_model_directory("nemotron-h-25m")
    if not (directory / "config.json").is_file():
        build_tiny_model("nemotron-h", directory, scale="25m")
    return directory


@dataclass(frozen=True)
class Comparison:
    """One trace's slice in a model's vocabulary, and what all configurations have in common."""

    trace: list[Request]
    common: list[str]
    concurrency: int
    slice: Slice
    about: str

    @classmethod
    def of(cls, path: Path, options: argparse.Namespace) -> Comparison:
        """Raises BenchFailed where the trace cannot be read, or nothing of it is left."""
        preset = PRESETS[options.preset] if options.preset else preset_of(PRESETS, path)
        given = {
            one.name: getattr(options, one.name)
            for one in fields(Slice)
            if getattr(options, one.name) is not None
        }
        how = replace(preset.slice, **given)
        concurrency = 1 if options.paired else options.concurrency
        kv_tokens = options.kv_tokens or preset.kv_tokens
        slots = options.state_slots or preset.state_slots
        flags = preset.flags if options.flags is None else options.flags
        model = Path(options.model_path) if options.model_path else default_model()
        try:
            cut = how.cut(read_trace(path))
        except (OSError, ValueError) as error:
            raise BenchFailed(str(error)) from None
        if not cut:
            raise BenchFailed(f"the slice of {path.name} is empty; raise its bounds")
        trace, distinct = to_vocabulary(cut, FIRST_TEXT_ID, vocabulary_of(model))
        prompts = sum(request.input_len for request in trace)
        answers = sum(len(request.tokens) - request.input_len for request in trace)
        about = (
            f"{path.name}: {len(trace)} requests of {len({r.session for r in trace})} "
            f"sessions, {prompts:,} prompt tokens, of which {reusable_tokens(trace) / prompts:.1%} "
            f"repeat something before, {answers:,} answer tokens; {how}; ids "
            f"{'numbered' if distinct else 'hashed'}. {concurrency} at a time. "
            f"KV pool of {kv_tokens:,} tokens, {slots} state slots"
            + (f"; all with `{flags}`" if flags else "")
            + "."
        )
        common = [
            *flags_of(model, kv_tokens, slots, options.running or options.concurrency),
            *("--enable-metrics", *shlex.split(flags)),
        ]
        return cls(trace, common, concurrency, how, about)

    def results(self, options: argparse.Namespace) -> Iterator[Result]:
        """One configuration after another, or all at once with --paired."""
        candidates = CANDIDATES if options.sglang is None else options.sglang
        chosen = configurations(candidates, options.ours)
        if options.paired:
            yield from measure_in_pairs(chosen, self.common, self.trace, options.limit)
            return
        for configuration in chosen:
            print(f"{configuration.name} ...", end=" ", file=sys.stderr, flush=True)
            result = measure(
                configuration,
                self.common,
                self.trace,
                self.concurrency,
                options.time_scale,
                options.limit,
            )
            said = result.error or f"{result.hit_rate:.1%}, {result.seconds:.0f} s"
            print(said, file=sys.stderr, flush=True)
            yield result


def report(results: Sequence[Result], paired: bool) -> list[str]:
    """Print pools, failures and the table; returns what failed."""
    for pool in dict.fromkeys(pool for result in results for pool in result.pools):
        print(f"Pool: {pool}.")
    if len({result.pools for result in results if result.pools}) > 1:
        print("The pools are NOT the same for all.")
    errors = [outcome.error for result in results for outcome in result.outcomes if outcome.error]
    print("".join(f"Failed: {error}.\n" for error in dict.fromkeys(errors)))
    if results:
        show(results)
    if paired and results:
        print()
        against_the_first([(r.configuration.name, r.outcomes) for r in results])
    print(flush=True)
    return errors + [result.error for result in results if result.error]


def run(options: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the server is stopped then, too
    records, failed = [], 0
    for name in options.traces:
        path = find(name)
        comparison = Comparison.of(path, options)
        print(comparison.about, flush=True)
        results: list[Result] = []
        try:
            for result in comparison.results(options):
                results.append(result)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            failed = 130
        failed = failed or int(bool(report(results, options.paired)))
        records.append(
            {
                "trace": path.name,
                "slice": asdict(comparison.slice),
                "common": comparison.common,
                "results": [result.record() for result in results],
            }
        )
        if failed == 130:
            break
    if options.json:
        options.json.write_text(json.dumps(records, indent=1) + "\n")
    return failed
