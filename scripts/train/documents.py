"""Tasks whose context is several documents, in any order, and models that are trained on them."""

from __future__ import annotations

import random
from typing import Literal, get_args

import torch
from torch import Tensor

from scripts.train.hybrids import Hybrid, Kind, Sizes
from scripts.train.recall import ASK, BOTH, FILLER, KEYS, NOTHING, STATES, VALUES, Asked, fit
from scripts.train.recall import WORDS as RECALL_WORDS
from scripts.train.segments import composed

Task = Literal["one", "later", "chain"]
"""What answers a question: a pair of one document; the later one of two documents that tell of the
same key; a name that one document tells, and the value of the name, which another one tells.
"""
TASKS: tuple[Task, ...] = get_args(Task)

DOCUMENT, ASK_CHAIN = RECALL_WORDS, RECALL_WORDS + 1
NAMES = range(RECALL_WORDS + 2, RECALL_WORDS + 66)
WORDS = NAMES.stop
COUNTS = (2, 4, 8)
"""Documents of a prompt."""
BATCH_TOKENS, SUFFIX = 2048, 64


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
    places = [drawn.sample(range((length - 1) // 2), (length - 1) // 2) for _ in texts]

    def tell(document: int, pair: tuple[int, int]) -> None:
        at = 1 + 2 * places[document].pop()
        texts[document][at : at + 2] = pair

    turn = drawn.sample(range(documents), documents)
    answers = {}
    keys = drawn.sample(KEYS, pairs if task == "one" else pairs // 2)
    for number, (key, name) in enumerate(zip(keys, drawn.sample(NAMES, len(keys)), strict=True)):
        answers[key], other = drawn.sample(VALUES, 2)
        first = turn[number % documents]
        if task == "one":
            tell(first, (key, answers[key]))
            continue
        second = turn[(number + drawn.randrange(1, documents)) % documents]
        if task == "later":
            tell(min(first, second), (key, other))
            tell(max(first, second), (key, answers[key]))
        else:
            tell(first, (key, name))
            tell(second, (name, answers[key]))
    after, target = drawn.choices(FILLER, k=n), [NOTHING] * n
    for place in range(0, n - 1, 2):
        key = drawn.choice(keys)
        after[place : place + 2] = ASK_CHAIN if task == "chain" else ASK, key
        target[place + 1] = answers[key]
    return [token for text in texts for token in text], after, target


def train(kind: Kind, steps: int, apart: bool, sizes: Sizes, seed: int = 0) -> Hybrid:
    """A model that answers questions about documents. apart: in every second step, the documents
    are computed apart and composed.

    Contexts grow from 64 to 512 tokens, and from 4 to 32 pairs, as it learns. At first attention
    sees 16 tokens only, later in every second step.
    """
    torch.manual_seed(seed)
    drawn, model = random.Random(seed), Hybrid(kind, WORDS, sizes)

    def answers(step: int, grown: float) -> tuple[Tensor, Tensor]:
        count = drawn.choice(COUNTS)
        length = int(64 * grown * drawn.uniform(0.5, 1)) // count
        pairs = max(2, int(4 * grown * drawn.uniform(0.5, 1)))
        pairs = min(pairs, count * ((length - 1) // 2) // 2)
        batch = max(1, BATCH_TOKENS // (count * length + SUFFIX))
        asked = draw(TASKS[step % 3], count, length, pairs, batch, drawn, SUFFIX)
        reach = STATES if step < steps // 4 else (BOTH, STATES)[step // 3 % 2]
        if apart and step // 6 % 2:
            documents = asked.before.unflatten(1, (count, length))
            cache = composed(model, documents, 0, reach.window)
        else:
            cache = model(asked.before, None, reach.window)[1]
        wanted = asked.target != NOTHING
        logits = model.head(model(asked.after, cache, reach.window)[0][wanted])
        return logits, asked.target[wanted]

    return fit(model, steps, answers)
