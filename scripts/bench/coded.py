"""The benchmark `coded`: errors of models that resume from coded KV and states."""

from __future__ import annotations

import contextlib
import io
import os
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from time import perf_counter, process_time
from typing import Annotated, get_args

import torch

from scripts.bench.commands import Count
from scripts.bench.report import Table, versions
from scripts.train.hybrids import Cache, Hybrid, Kind
from scripts.train.recall import (
    BOTH,
    LEARNT,
    NOTHING,
    STATES,
    SUFFIX,
    TASKS,
    TURN_QUESTIONS,
    TURNS,
    Answers,
    Asked,
    Coder,
    Reach,
    answer,
    conversations,
    converse,
    draw,
    fp8,
    int4,
    lost,
    prefill,
    recode,
    train,
    wrong_scale,
)
from sglang_hybrid.storage.codecs.codecs import Codec

CONTEXTS = (256, 512, 1024)
PAIRS = 48
"""Pairs of a prefix, and tokens of a string to copy."""
DISTANCES = ((0, 16), (16, 64), (64, SUFFIX))
SHOWN_TURNS = (1, 10, 25, TURNS)
NAMES = {"mamba2": "Mamba-2", "gdn": "Gated delta nets", "kda": "KDA"}
EXACT = Codec.EXACT
CODERS: dict[str, Coder] = {codec.value: codec for codec in Codec}
CODERS.setdefault("fp8", fp8)
CODERS |= {"int4": int4, "int8, wrong scales": wrong_scale, "zeros": lost}

Hits = dict[str, list[tuple[Asked, Cache]]]
"""The questions of each task, and the caches that their prefixes left."""

Models = list[tuple[Hybrid, Sequence[Reach]]]
"""Models, and what each has learnt to answer with."""


def coded(
    *kinds: Annotated[Kind, "recurrent layers; all three if none is given"],
    steps: Annotated[Count, "of training"] = 400,
    sequences: Annotated[Count, "of each task and length"] = 16,
    chats: Annotated[Count, "conversations"] = 36,
) -> None:
    """The cost of a hit on coded KV and states, for models that need their context.

    Small hybrids of recurrent layers and attention are trained on tasks that only the context
    answers, one process to a core. Then a prefix is computed, what it leaves is encoded and
    decoded as copies are, and questions behind it are answered from that.
    """
    chosen, begin = kinds or get_args(Kind), perf_counter()
    print(f"{versions()}.\n")
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as processes:
        numbers = (repeat(number) for number in (steps, sequences, chats))
        for tables in processes.map(measure, chosen, *numbers):
            print(tables, flush=True)
    print(f"All of it took {perf_counter() - begin:.0f} s.")


def measure(kind: Kind, steps: int, sequences: int, chats: int) -> str:
    """The tables of one kind of model, which is trained first."""
    torch.set_num_threads(1)
    begin = process_time()
    models: Models = [
        (train(kind, steps // number, reaches), reaches)
        for number, reaches in enumerate(LEARNT, start=1)
    ]
    trained = process_time()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        one_hit(models, sequences)
        print()
        hits_upon_hits(models, chats)
    size = sum(parameter.numel() for parameter in models[0][0].parameters())
    seconds = f"{trained - begin:.0f} s of one core, evaluated in {process_time() - trained:.0f} s"
    learnt = f"{size:,} parameters, seed 0, {steps} and {steps // 2} steps, trained in {seconds}"
    return f"### {NAMES[kind]}\n\n{learnt}.\n\n{printed.getvalue()}"


def one_hit(models: Models, sequences: int) -> None:
    """Print answers behind one hit, by what is coded, task and distance."""
    spans = [f"{first} to {end}" for first, end in DISTANCES]
    drawn = random.Random(1)
    asked = {
        task: [draw(task, context, PAIRS, sequences, drawn, SUFFIX) for context in CONTEXTS]
        for task in TASKS
    }
    questions = {task: torch.cat([one.target for one in asked[task]]) != NOTHING for task in TASKS}
    counts = [f"{each.sum():,} of {task}" for task, each in questions.items()]
    every = torch.cat([*questions.values()]).sum(0)
    counts += [f"{every[slice(*d)].sum():,} at {s}" for d, s in zip(DISTANCES, spans, strict=True)]
    print(f"Questions: {', '.join(counts)} tokens behind the hit.\n")
    table = Table(
        *("reaches back", "coded", "as", *(f"{task}, % right" for task in TASKS)),
        *(f"same answer at {span}, %" for span in spans),
        *(f"moved at {span}" for span in spans),
        text=3,
    )
    for model, reach in ((model, reach) for model, reaches in models for reach in reaches):
        hit = {
            task: [(one, prefill(model, one.before, reach)) for one in asked[task]]
            for task in TASKS
        }
        rows = [("what reaches", name, coder, coder) for name, coder in CODERS.items()]
        if reach is BOTH:
            for name in ("int8", "int4"):
                rows += [("states", name, EXACT, CODERS[name]), ("KV", name, CODERS[name], EXACT)]
        exact = _answers(model, hit, reach, EXACT, EXACT)
        for part, name, kv, states in rows:
            found = _answers(model, hit, reach, kv, states)
            right = [f"{100 * task.accuracy:.1f}" for task in found]
            together, as_exact = Answers.all_of(found), Answers.all_of(exact)
            pairs = [together.between(*d).beside(as_exact.between(*d)) for d in DISTANCES]
            same, moved = zip(*pairs, strict=True)
            table.row(
                *(reach.name, part, name, *right),
                *(f"{100 * share:.2f}" for share in same),
                *(f"{most:.3f}" for most in moved),
            )


def _answers(model: Hybrid, hit: Hits, reach: Reach, kv: Coder, states: Coder) -> list[Answers]:
    """Answers for each task, behind hits on what is coded."""
    states = states if reach.states else lost
    return [
        Answers.all_of(
            [answer(model, one, recode(cache, kv, states), reach)[0] for one, cache in of_task]
        )
        for of_task in hit.values()
    ]


def hits_upon_hits(models: Models, chats: int) -> None:
    """Print answers in conversations of which each turn is a hit on what the one before left."""
    print(f"Conversations: {chats}, with {TURN_QUESTIONS} questions in each turn.\n")
    table = Table(
        *("reaches back", "coded behind each turn as"),
        *(f"turn {turn}: % right / % same / moved" for turn in SHOWN_TURNS),
        text=2,
    )
    turns = conversations(chats, random.Random(2))
    for model, reach in ((model, reach) for model, reaches in models for reach in reaches):
        exact = converse(model, turns, EXACT, reach)
        rows = [(name, coder, False) for name, coder in CODERS.items() if coder is not lost]
        if reach is STATES:
            rows.append(("int8, behind each token", Codec.INT8, True))
        for name, coder, each_token in rows:
            found = (
                converse(model, turns, coder, reach, each_token) if coder is not EXACT else exact
            )
            cells = []
            for turn in SHOWN_TURNS:
                same, moved = found[turn - 1].beside(exact[turn - 1])
                right = found[turn - 1].accuracy
                cells.append(f"{100 * right:.1f} / {100 * same:.1f} / {moved:.3f}")
            table.row(reach.name, name, *cells)
