"""Tasks whose context is several documents, in any order, and models that are trained on them."""

from __future__ import annotations

import random
from collections import deque
from typing import Literal, get_args

import torch
from torch import Tensor

from scripts.train.hybrids import Hybrid, Kind, Sizes
from scripts.train.recall import (
    ASK,
    BATCH_TOKENS,
    BOTH,
    FILLER,
    KEYS,
    NOTHING,
    STATES,
    VALUES,
    Asked,
    fit,
)
from scripts.train.recall import WORDS as RECALL_WORDS

Task = Literal["pair", "later", "chain"]
"""The source of the answer to a question about a key. pair: a pair of one document. later: the
later one of two documents with the key. chain: one document has a name for the key, another one the
value of the name.
"""
TASKS: tuple[Task, ...] = get_args(Task)

DOCUMENT, ASK_CHAIN = RECALL_WORDS, RECALL_WORDS + 1
NAMES = range(RECALL_WORDS + 2, RECALL_WORDS + 66)
WORDS = NAMES.stop
COUNTS = (2, 4, 8)
"""Documents of a prompt."""
PAIRS, SUFFIX = 16, 128


def draw(
    task: Task, documents: int, length: int, pairs: int, batch: int, drawn: random.Random, n: int
) -> Asked:
    """Prompts of documents [b, documents * length], and ``n`` tokens of questions behind them."""
    rows = [_draw(task, documents, length, pairs, drawn, n) for _ in range(batch)]
    return Asked(*(torch.tensor(column) for column in zip(*rows, strict=True)))


def _draw(
    task: Task, documents: int, length: int, pairs: int, drawn: random.Random, n: int
) -> tuple[list[int], list[int], list[int]]:
    texts = [[DOCUMENT, *drawn.choices(FILLER, k=length - 1)] for _ in range(documents)]
    after, target = drawn.choices(FILLER, k=n), [NOTHING] * n
    places = [drawn.sample(range((length - 1) // 2), (length - 1) // 2) for _ in texts]

    def tell(document: int, pair: tuple[int, int]) -> None:
        at = 1 + 2 * places[document].pop()
        texts[document][at : at + 2] = pair

    turn, apart = drawn.sample(range(documents), documents), drawn.randrange(1, documents)
    answers = {}
    keys = drawn.sample(KEYS, pairs if task == "pair" else pairs // 2)
    for number, (key, name) in enumerate(zip(keys, drawn.sample(NAMES, len(keys)), strict=True)):
        answers[key], other = drawn.sample(VALUES, 2)
        first = turn[number % documents]
        if task == "pair":
            tell(first, (key, answers[key]))
            continue
        second = turn[(number + apart) % documents]
        if task == "later":
            tell(min(first, second), (key, other))
            tell(max(first, second), (key, answers[key]))
        else:
            tell(first, (key, name))
            tell(second, (name, answers[key]))
    for place in range(0, n - 1, 2):
        key = drawn.choice(keys)
        after[place : place + 2] = ASK_CHAIN if task == "chain" else ASK, key
        target[place + 1] = answers[key]
    return [token for text in texts for token in text], after, target


def train(kind: Kind, steps: int, sizes: Sizes, seed: int = 0) -> Hybrid:
    """A model that answers questions about documents.

    It learns to answer from pairs in 64 tokens first, where attention sees 16 tokens only. Then all
    is asked, attention sees all in every second group of three steps, and contexts grow to 512
    tokens in the first half of the steps that are left.
    """
    torch.manual_seed(seed)
    model, drawn, begun = Hybrid(kind, WORDS, sizes), random.Random(seed), steps
    shares: deque[float] = deque([0.0], maxlen=12)

    def answers(step: int, _: float) -> tuple[Tensor, Tensor]:
        nonlocal begun
        if begun == steps and sum(shares) > 0.85 * 12:
            begun = step
        task, context, reach = TASKS[0], 64, STATES
        if begun < steps:
            grown = min(1.0, 2 * (step - begun) / (steps - begun))
            task, context, reach = (
                TASKS[step % 3],
                int(64 * 8**grown),
                (STATES, BOTH)[step // 3 % 2],
            )
        logits, target = _answers(model, task, context, reach.window, drawn)
        shares.append((logits.argmax(-1) == target).float().mean().item())
        return logits, target

    return fit(model, steps, answers)


def _answers(
    model: Hybrid, task: Task, context: int, window: int, drawn: random.Random
) -> tuple[Tensor, Tensor]:
    """Logits of all questions of a batch, and the right words. context: tokens at most."""
    count = drawn.choice(COUNTS)
    length = max(8, int(context * drawn.uniform(0.5, 1)) // count)
    pairs = min(drawn.randint(4, PAIRS), count * ((length - 1) // 2) // 2)
    batch = max(1, BATCH_TOKENS // (count * length + SUFFIX))
    asked = draw(task, count, length, pairs, batch, drawn, SUFFIX)
    out, _ = model(torch.cat([asked.before, asked.after], 1), None, window)
    wanted = asked.target != NOTHING
    return model.head(out[:, -SUFFIX:][wanted]), asked.target[wanted]
