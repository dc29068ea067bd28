"""The benchmark `modular`: prompts that are composed of documents which were computed apart."""

from __future__ import annotations

import contextlib
import io
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product, repeat
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, sleep
from typing import Annotated, get_args

import torch
from torch import Tensor

from scripts.bench.coded import NAMES
from scripts.bench.commands import Count
from scripts.bench.report import BenchFailed, Table, seconds_of, versions
from scripts.bench.servers import hybrid_cache, post
from scripts.train.documents import (
    COUNTS,
    PAIRS,
    SUFFIX,
    TASKS,
    WORDS,
    Task,
    draw,
    train,
)
from scripts.train.hybrids import TINY, Hybrid, Kind, Sizes
from scripts.train.recall import BOTH, STATES, Answers, Reach, answer, prefill
from scripts.train.segments import Apart, append, composed, encode
from sglang_hybrid.core.options import integer
from sglang_hybrid.extensions.cpu.models import build_tiny_model
from sglang_hybrid.extensions.cpu.models.lexicon import STEMS
from sglang_hybrid.extensions.schemas.composition.losses import MOST_POINTS
from sglang_hybrid.serving.server_process import ServerProcess

CONTEXT = 768
"""Tokens of all documents of a prompt."""
SEAMS = (0, 3, 16, 64)
"""Tokens at the beginning of each document that are computed with everything in front of them. The
short convolutions of these models mix three tokens with those in front."""
TIMED_SEAMS = (0, 16, 64)
REACHES = (BOTH, STATES)
LEARNT = 0.75
"""Share of answers below which a model has not learnt a task, so that nothing can be lost."""
LARGE = Sizes("RRR*" * 5, hidden=1024, heads=8, width=128)
DOCUMENTS, TOKENS, QUESTION = 4, 1000, 32
"""Documents of the prompt that is timed, tokens of each, and tokens of the question."""
SERVED: dict[Kind, str] = {"mamba2": "nemotron-h", "gdn": "qwen3-next", "kda": "kimi-linear"}
WORDS_OF_A_DOCUMENT = 960
"""A word is a token or more."""
SECONDS_FOR_FRAMES = 5
"""Time for a server to compute the chat template's text, after the answer that lacked it."""


def modular(
    *kinds: Annotated[Kind, "recurrent layers; all three if none is given"],
    steps: Annotated[int, integer(0), "of training; with 0 there are only the times"] = 480,
    sequences: Annotated[Count, "prompts of each task and number of documents"] = 4,
    repeats: Annotated[Count, "of each time, of which the shortest counts"] = 2,
    served: Annotated[bool, "time servers instead, of models that are not trained"] = False,
) -> None:
    """Loss and savings of prompts that are composed of documents which were computed apart.

    Small hybrids of recurrent layers and attention are trained on prompts of documents, one process
    to each core that may be used. Each document is then computed alone, and the states, keys and
    values of several are composed in their order; questions behind them are answered from that, and
    from the whole prompt. Then a prompt of four documents is timed, with models that are not
    trained.
    """
    chosen, begin = kinds or get_args(Kind), perf_counter()
    print(f"{versions()}.\n")
    if served:
        times_of_servers(chosen)
        return
    trained = chosen if steps else ()
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, get_context("spawn")) as processes:
        for text in processes.map(measure, trained, repeat(steps), repeat(sequences)):
            print(text, flush=True)
    times(chosen, repeats)
    print(f"\nAll of it took {perf_counter() - begin:.0f} s.")


def measure(kind: Kind, steps: int, sequences: int) -> str:
    """The tables of one kind of model, which is trained first."""
    torch.set_num_threads(1)
    begin = process_time()
    model = train(kind, steps, TINY)
    trained = process_time()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        quality(model, sequences)
    size = sum(parameter.numel() for parameter in model.parameters())
    seconds = f"{trained - begin:.0f} s of one core, evaluated in {process_time() - trained:.0f} s"
    learnt = f"{size:,} parameters, seed 0, {steps} steps, trained in {seconds}"
    return f"### {NAMES[kind]}\n\n{learnt}.\n\n{printed.getvalue()}"


def quality(model: Hybrid, sequences: int) -> None:
    """Print answers of whole and composed prompts, and the smallest seams that are good enough."""
    found = {row: _answers(model, *row, sequences) for row in product(REACHES, TASKS, COUNTS)}
    questions = min(len(row[0].target) for row in found.values())
    print(f"At least {questions} questions in each cell: % right / % same / moved.\n")
    heads = ("reaches back", "answer", "documents", "whole, % right")
    table = Table(*heads, *(f"seams of {seam}" for seam in SEAMS), text=2)
    for (reach, task, documents), (exact, *rest) in found.items():
        right = f"{100 * exact.accuracy:.1f}"
        table.row(reach.name, task, documents, right, *(_cell(one, exact) for one in rest))
    print(f"\nThe smallest seam that loses at most {MOST_POINTS} points, and what it loses.\n")
    smallest = Table("reaches back", *(f"answer: {task}" for task in TASKS))
    for reach in REACHES:
        cells = (smallest_seam([found[reach, task, n] for n in COUNTS]) for task in TASKS)
        smallest.row(reach.name, *cells)
    print()


def _answers(model: Hybrid, reach: Reach, task: Task, count: int, sequences: int) -> list[Answers]:
    """Answers behind the whole prompt, and behind composed ones by `SEAMS`."""
    drawn = random.Random(1)
    asked = draw(task, count, CONTEXT // count, PAIRS, sequences, drawn, SUFFIX)
    documents = asked.before.view(sequences, count, -1)
    with torch.no_grad():
        caches = [
            prefill(model, asked.before, reach),
            *(composed(model, documents, seam, reach.window) for seam in SEAMS),
        ]
    return [answer(model, asked, cache, reach)[0] for cache in caches]


def _cell(found: Answers, exact: Answers) -> str:
    same, moved = found.beside(exact)
    return f"{100 * found.accuracy:.1f} / {100 * same:.1f} / {moved:.2f}"


def smallest_seam(rows: Sequence[list[Answers]]) -> str:
    """The smallest seam with which no row loses more than `MOST_POINTS`, and what it loses."""
    learnt = min(exact.accuracy for exact, *_ in rows)
    if learnt < LEARNT:
        return f"not learnt ({100 * learnt:.1f} %)"
    gained = [
        min(100 * (rest[number].accuracy - exact.accuracy) for exact, *rest in rows) + 0.0
        for number in range(len(SEAMS))
    ]
    for seam, points in zip(SEAMS, gained, strict=True):
        if points >= -MOST_POINTS:
            return f"{seam} ({points:+.1f})"
    return f"none ({max(gained):+.1f})"


@torch.no_grad()
def times(kinds: Sequence[Kind], repeats: int) -> None:
    """Print the seconds to the first token of whole and composed prompts, and a segment's bytes."""
    torch.set_num_threads(1)
    print(
        f"### Time to the first token\n\n{DOCUMENTS} documents of {TOKENS:,} tokens in an order "
        f"that was not sent before, and {QUESTION} tokens; one thread, the shortest of {repeats}.\n"
    )
    table = Table(
        *("model", "parameters", "whole, s", "documents apart, s"),
        *(f"composed with seams of {seam}, s" for seam in TIMED_SEAMS),
        *("KV of a document, KiB", "states, KiB", "transitions, KiB"),
    )
    for kind, sizes in product(kinds, (TINY, LARGE)):
        model = Hybrid(kind, WORDS, sizes).eval()
        size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        kept = (f"{each / 1024:,.0f}" for each in encode(model, _texts(), 0)[:1].bytes)
        table.row(NAMES[kind], f"{size:.1f} M", *_seconds(model, repeats), *kept)


def _texts() -> Tensor:
    return torch.randint(WORDS, (DOCUMENTS, TOKENS))


def _seconds(model: Hybrid, repeats: int) -> list[str]:
    """Times of the whole prompt, of its documents apart, and of composed ones by `TIMED_SEAMS`."""
    texts, question = _texts(), torch.randint(WORDS, (1, QUESTION))

    def first_token(tokens: Tensor, apart: Apart | None) -> Tensor:
        cache = model.empty(1)
        if apart is not None:
            for number in reversed(range(DOCUMENTS)):
                cache = append(model, cache, apart[number : number + 1])
        logits: Tensor = model.head(model(tokens, cache)[0][:, -1])
        return logits

    works: list[Callable[[], object]] = [
        partial(first_token, torch.cat([texts.view(1, -1), question], 1), None),
        partial(encode, model, texts, 0),
        *(partial(first_token, question, encode(model, texts, seam)) for seam in TIMED_SEAMS),
    ]
    return [f"{min(seconds_of(work) for _ in range(repeats)):.3f}" for work in works]


def times_of_servers(kinds: Sequence[Kind]) -> None:
    """Print the seconds to the first token of whole and composed prompts on servers. Every document
    is a module at every place, so none of the orders was sent before.
    """
    print(
        f"{DOCUMENTS} documents of {WORDS_OF_A_DOCUMENT} words and a question, each time in an "
        f"order that was not sent before: the shortest of {DOCUMENTS}.\n"
    )
    table = Table(
        *("model", "size", "whole, s", "composed, s", "times as long"),
        *("all modules, s", "KV of a document, KiB", "state, KiB", "transition, KiB"),
        text=2,
    )
    with tempfile.TemporaryDirectory() as folder:
        for kind, scale in product(kinds, ("tiny", "100m")):
            model = build_tiny_model(SERVED[kind], Path(folder) / f"{kind}-{scale}", scale=scale)
            weights = [] if list(model.glob("*.safetensors")) else ["--load-format", "dummy"]
            with ServerProcess(["--model-path", str(model), *weights]) as server:
                size = scale.replace("100m", "100 M")
                table.row(SERVED[kind], size, *_served(server.url))


def _served(url: str) -> list[str]:
    drawn = random.Random(0)
    texts = [
        " ".join(drawn.choices(STEMS.split(), k=WORDS_OF_A_DOCUMENT)) for _ in range(DOCUMENTS)
    ]
    places = [
        "".join(
            f"<module name='d{place}{number}'>{text}</module>" for number, text in enumerate(texts)
        )
        for place in range(DOCUMENTS)
    ]
    unions = "".join(f"<union>{place}</union>" for place in places)
    pml = f"<schema name='documents'><user>{unions}</user></schema>"
    post(url, "/v1/prompt_schemas", {"pml": pml})
    orders = [[(at + turn) % DOCUMENTS for at in range(DOCUMENTS)] for turn in range(DOCUMENTS)]
    whole = [_first_token_of(url, order, "exact") for order in orders]
    begin = perf_counter()
    post(url, "/v1/prompt_schemas/documents/prewarm", {"mode": "modular"})
    modules = perf_counter() - begin
    _first_token_of(url, orders[0], "modular")  # what the chat template writes is computed now
    sleep(SECONDS_FOR_FRAMES)
    composed = [_first_token_of(url, order[::-1], "modular") for order in orders]
    if not all(tokens for _, tokens in composed):
        raise BenchFailed("a prompt was not composed, though all of its modules are there")
    long, short = (min(seconds for seconds, _ in found) for found in (whole, composed))
    told = hybrid_cache(url)
    tokens = median(tokens for _, tokens in composed) / DOCUMENTS
    bytes_of = (
        told["kv_bytes_per_token"] * tokens,
        told["state_bytes"],
        told["transitions"]["bytes"] / told["transitions"]["kept"],
    )
    kept = (f"{each / 1024:,.1f}" for each in bytes_of)
    return [f"{long:.3f}", f"{short:.3f}", f"{long / short:.1f}", f"{modules:.2f}", *kept]


def _first_token_of(url: str, order: Sequence[int], mode: str) -> tuple[float, int]:
    """Seconds to the first token of a prompt of documents in this order, and tokens composed."""
    imports = "".join(f"<d{place}{number}/>" for place, number in enumerate(order))
    question = f"<user>{mode} {order}: what is it?</user>"
    pml = f"<prompt schema='documents' mode='{mode}'>{imports}{question}</prompt>"
    body = {"pml": pml, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    begin = perf_counter()
    told = post(url, "/generate", body)["meta_info"]["hybrid_cache"]
    return perf_counter() - begin, told.get("composed_tokens", 0)
