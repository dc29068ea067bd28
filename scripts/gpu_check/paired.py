"""SGLang's own prefix cache and ours on two servers with the same bytes, by turns.

    python -m scripts.gpu_check.paired
    python -m scripts.gpu_check.paired --stand-ins    # without SGLang's CUDA packages
    python -m scripts.gpu_check.paired --cpu          # small models and little traffic
    python -m scripts.gpu_check.paired --only decode

Both servers have a model of the sizes of Nemotron-H-8B with random weights and are up all the time;
one of them works at a time, and another one begins in each round. Three questions:

traffic   generated agents and chats, as many at once as may run: hits, times to the first token
decode    prompts that all run at once: milliseconds of a decode step, CPU time of the scheduler
copies    the same beside long prompts that push others out, with copies on the host and without
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
import requests

from scripts.bench.measured import Configuration, Result, check_budgets, memory_of, warm_up
from scripts.bench.servers import (
    exactly,
    flags_of,
    flush,
    greedy,
    post,
    random_tokens,
    vocabulary_of,
)
from scripts.bench.traffic import drive
from scripts.gpu_check import stand_ins
from scripts.gpu_check.findings import tell
from scripts.gpu_check.steps import QUESTIONS
from sglang_hybrid.extensions.cpu.models import build_tiny_model
from sglang_hybrid.extensions.cpu.models.tokenizer import FIRST_TEXT_ID
from sglang_hybrid.extensions.cpu.sizing import model_sizes
from sglang_hybrid.extensions.lab.simulation.traces.generators import generate, traffic
from sglang_hybrid.extensions.lab.simulation.traces.slices import Slice, to_vocabulary
from sglang_hybrid.serving.server_process import ServerFailed, ServerProcess

OWN = Configuration("SGLang", (), ours=False)
OURS = Configuration("ours", (), ours=True)
HOST = Configuration("ours, host", ("--enable-hierarchical-cache", "--hicache-ratio", "2"), True)
ROUNDS = 2
"""Each has every server work once."""


@dataclass(frozen=True)
class Load:
    """Sizes of what is sent. at_once: requests that run together; steps: tokens of their answers;
    prompt: tokens of each; long: of each prompt that pushes others out.
    """

    scale: str
    dtype: str
    kv_tokens: int
    slots: int
    running: int
    cut: Slice
    at_once: int
    steps: int
    prompt: int
    long: int


GPU = Load(
    *("8b", "bfloat16", 120_000, 80, 16),
    Slice(requests=80, max_prompt_tokens=16_384, max_total_tokens=600_000),
    *(256, 128, 256, 8_192),
)
CPU = Load(
    *("tiny", "float32", 4_096, 16, 4),
    Slice(requests=12, scale=16, max_prompt_tokens=1_024, max_answer_tokens=8),
    *(4, 8, 256, 256),
)
RUNNING_AT_ONCE = 300
"""State slots on a GPU where 256 requests decode."""


@contextmanager
def servers(
    configurations: Sequence[Configuration], common: Sequence[str], model: Path, dtype: str
) -> Iterator[list[ServerProcess]]:
    """All of them, warm. Raises BenchFailed where their memories have not the same bytes."""
    sizes = model_sizes(str(model), dtype)
    assert sizes is not None
    with ExitStack() as stack:
        started = [stack.enter_context(each.server(common)) for each in configurations]
        pairs = zip(configurations, started, strict=True)
        check_budgets([Result(each, memory=memory_of(server, sizes)) for each, server in pairs])
        for server in started:
            warm_up(server.url, 1)
        yield started


def by_turns(count: int) -> Iterator[int]:
    """The servers' numbers, another first in each round."""
    for turn, number in itertools.product(range(ROUNDS), range(count)):
        yield (number + turn) % count


def scheduler_seconds(server: ServerProcess) -> float:
    """CPU time of the server's scheduler so far."""
    assert server.process is not None
    children = psutil.Process(server.process.pid).children(recursive=True)
    of_schedulers = [it for it in children if "scheduler" in " ".join(it.cmdline())]
    return sum(sum(it.cpu_times()[:2]) for it in of_schedulers)


def compare_traffic(
    configurations: Sequence[Configuration], common: Sequence[str], model: Path, load: Load
) -> None:
    """Report what each server does with generated traffic, from an empty cache each time."""
    with servers(configurations, common, model, load.dtype) as started:
        for kind in ("agent", "chat"):
            made = load.cut.cut(generate(kind, traffic(kind, sessions=40), seed=1))
            trace, _ = to_vocabulary(made, FIRST_TEXT_ID, vocabulary_of(model))
            results = [Result(each) for each in configurations]
            busy = [0.0] * len(started)
            for number in by_turns(len(started)):
                flush(started[number].url)
                begin, cpu = time.perf_counter(), scheduler_seconds(started[number])
                results[number].outcomes += asyncio.run(
                    drive(started[number].url, trace, load.running)
                )
                results[number].seconds += time.perf_counter() - begin
                busy[number] += scheduler_seconds(started[number]) - cpu
            for result, spent in zip(results, busy, strict=True):
                _, middle, high = result.ttft
                answers = ROUNDS * sum(len(it.tokens) - it.input_len for it in trace)
                tell(
                    f"{kind}s, {result.configuration.name}",
                    f"{result.hit_rate:.1%} hit, {result.prefilled // ROUNDS:,} prefilled, first "
                    f"token {middle:,.0f} ms (P95 {high:,.0f}), "
                    f"{answers / result.seconds:,.0f} tokens/s, scheduler busy "
                    f"{spent / result.seconds:.0%}",
                    len(result.served) == len(result.outcomes),
                )


def compare_decodes(
    configurations: Sequence[Configuration],
    common: Sequence[str],
    model: Path,
    load: Load,
    *,
    beside: int = 0,
) -> None:
    """Report the milliseconds of a decode step while many requests run. beside: so many long
    prompts come one after another meanwhile; the time that they take is part of the steps' then.
    """
    source = random.Random(1)
    steps: list[list[float]] = [[] for _ in configurations]
    busy: list[list[float]] = [[] for _ in configurations]
    with servers(configurations, common, model, load.dtype) as started:
        for number in by_turns(len(started)):
            server = started[number]
            alone = seconds_of(server.url, prompts_of(source, load), 1)
            used, begin = scheduler_seconds(server), time.perf_counter()
            long = [random_tokens(source, load.long) for _ in range(beside)]
            with ThreadPoolExecutor() as threads:
                others = threads.map(lambda tokens, url=server.url: one_token(url, tokens), long)
                answered = seconds_of(server.url, prompts_of(source, load), load.steps)
                list(others)
            spent = scheduler_seconds(server) - used
            busy[number].append(spent / (time.perf_counter() - begin))
            steps[number].append(1e3 * (answered - alone) / (load.steps - 1))
    what = f"step of {load.at_once}" + (f" beside prompts of {load.long:,}" if beside else "")
    for each, milliseconds, shares in zip(configurations, steps, busy, strict=True):
        times = median(milliseconds) / median(steps[0])
        tell(
            f"{what}, {each.name}",
            f"{median(milliseconds):.2f} ms ({times:.3f} times the first), scheduler busy "
            f"{median(shares):.0%}",
        )


def prompts_of(source: random.Random, load: Load) -> list[list[int]]:
    return [random_tokens(source, load.prompt) for _ in range(load.at_once)]


def seconds_of(url: str, prompts: list[list[int]], answer: int) -> float:
    """Seconds until all prompts have answers of so many tokens, from an empty cache."""
    flush(url)
    begin = time.perf_counter()
    requests.post(
        url + "/generate", json={"input_ids": prompts, **exactly(answer)}, timeout=600
    ).raise_for_status()
    return time.perf_counter() - begin


def one_token(url: str, tokens: list[int]) -> None:
    post(url, "/generate", greedy(tokens, 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stand-ins", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--only", choices=QUESTIONS)
    options = parser.parse_args()
    load = CPU if options.cpu else GPU
    environment = stand_ins.environment_with(stand_ins=options.stand_ins)

    def set_up(*configurations: Configuration) -> list[Configuration]:
        return [Configuration(it.name, it.flags, it.ours, environment) for it in configurations]

    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        model = build_tiny_model("nemotron-h", Path(scratch) / load.scale, scale=load.scale)
        flags = ["--device", "cpu"] if options.cpu else ["--load-format", "dummy"]
        flags += stand_ins.FLAGS if options.stand_ins else ()
        common = [*flags_of(model, load.kv_tokens, load.slots, load.running), *flags]
        slots = load.slots if options.cpu else RUNNING_AT_ONCE
        many = [*flags_of(model, load.kv_tokens, slots, load.at_once), *flags]
        questions: dict[str, Callable[[], None]] = {
            "traffic": lambda: compare_traffic(set_up(OWN, OURS), common, model, load),
            "decode": lambda: compare_decodes(set_up(OWN, OURS), many, model, load),
            "copies": lambda: compare_decodes(set_up(OURS, HOST), many, model, load, beside=8),
        }
        for name, ask in questions.items():
            if options.only in (None, name):
                try:
                    ask()
                except (ServerFailed, requests.RequestException, TimeoutError) as error:
                    tell(name, " ".join(str(error).split())[-400:], False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
