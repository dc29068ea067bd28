"""Tasks that need what stands far above, small hybrids trained on them, and how well these answer
when they resume from coded KV and states.

A prefix holds pairs of a key and a value, or a string, among filler; the tokens behind it ask.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from scripts.train.hybrids import PATTERN, WHOLE, WIDTH, Cache, Hybrid, Kind
from scripts.train.training import muon_and_adamw
from sglang_hybrid.storage.codecs.codecs import Codec
from sglang_hybrid.storage.codecs.coded_rows import CodedRows

ASK, COPY = 0, 1
KEYS, VALUES, FILLER = range(2, 66), range(66, 98), range(98, 130)
WORDS = FILLER.stop
NOTHING = -1
"""Target of a token behind which nothing is asked."""

TASKS = ("recall", "copy", "needle")
SUFFIX = 128
BATCH_TOKENS = 2048
LEVELS, RATE = 16, 0.01

TURNS, TURN_QUESTIONS, FIRST_PAIRS, FIRST_TOKENS = 50, 6, 14, 256
"""Turns of a conversation, questions in each, pairs and tokens of its prefix. Turns add pairs."""

Coder = Codec | Callable[[Tensor], Tensor]
"""A codec, or a function of rows to what another codec would decode, of the same shape."""


@dataclass(frozen=True)
class Reach:
    """The parts of the cache that reach back into a prefix. With an attention window shorter than
    the tokens behind it only states do; where states begin anew behind a hit, only KV does.
    """

    name: str
    window: int = WHOLE
    states: bool = True


BOTH, STATES, KV = Reach("KV and states"), Reach("states", window=16), Reach("KV", states=False)
LEARNT = ((BOTH, STATES), (KV,))
"""The reaches of two models: where KV and states could both answer, a model learns only one."""


@dataclass(frozen=True)
class Asked:
    """Prefixes [b, context], tokens behind them [b, n], and for each of these the token that should
    be next [b, n], or `NOTHING`.
    """

    before: Tensor
    after: Tensor
    target: Tensor


def draw(task: str, context: int, count: int, batch: int, drawn: random.Random, n: int) -> Asked:
    """Sequences of a task, with ``n`` tokens behind the prefix. count: pairs, or the length of a
    string; at most `KEYS`, and what the tokens have room for.
    """
    rows = [_draw(task, context, count, drawn, n) for _ in range(batch)]
    return Asked(*(torch.tensor(column) for column in zip(*rows, strict=True)))


def _draw(
    task: str, context: int, count: int, drawn: random.Random, n: int
) -> tuple[list[int], list[int], list[int]]:
    before, after = (drawn.choices(FILLER, k=k) for k in (context, n))
    target = [NOTHING] * n
    if task == "copy":
        text = [COPY, *drawn.sample(KEYS, min(count, context - 1, n - 1))]
        start = drawn.randrange(context - len(text) + 1)
        before[start : start + len(text)] = text
        start = drawn.choice((0, drawn.randrange(n - len(text) + 1)))
        after[start : start + len(text)] = text
        target[start : start + len(text) - 1] = text[1:]
        return before, after, target
    pairs = _pairs(before, 4 if task == "needle" else min(count, context // 2), drawn)
    room = 4 if task == "needle" else 2
    for start in range(0, n - room + 1, room):
        key, value = drawn.choice(pairs)
        place = start + drawn.randrange(room - 1)
        after[place : place + 2] = ASK, key
        target[place + 1] = value
    return before, after, target


def _pairs(before: list[int], count: int, drawn: random.Random) -> list[tuple[int, int]]:
    """Write so many pairs into a prefix."""
    pairs = list(zip(drawn.sample(KEYS, count), drawn.choices(VALUES, k=count), strict=True))
    for place, pair in zip(drawn.sample(range(len(before) // 2), count), pairs, strict=True):
        before[2 * place : 2 * place + 2] = pair
    return pairs


def train(kind: Kind, steps: int, reaches: Sequence[Reach], seed: int = 0) -> Hybrid:
    """A model that answers with each of ``reaches``; the last one begins, as the hardest to learn.

    Contexts grow from 64 to 512 tokens, and from 8 to 64 pairs, as it learns.
    """
    torch.manual_seed(seed)
    drawn, model = random.Random(seed), Hybrid(kind, WORDS)

    def answers(step: int, grown: float) -> tuple[Tensor, Tensor]:
        context = int(64 * grown * drawn.uniform(0.5, 1))
        count, n = int(8 * grown * drawn.uniform(0.5, 1)), min(SUFFIX, context)
        batch = max(1, BATCH_TOKENS // (context + n))
        asked = draw(TASKS[step % 3], context, count, batch, drawn, n)
        reach = reaches[-1 if step < steps // 4 else step // 3 % len(reaches)]
        wanted = asked.target != NOTHING
        cache = model(asked.before, None, reach.window)[1]
        if not reach.states:
            cache = recode(cache, lambda rows: rows, lost)
        logits = model.head(model(asked.after, cache, reach.window)[0][wanted])
        return logits, asked.target[wanted]

    return fit(model, steps, answers)


def fit(
    model: Hybrid, steps: int, answers: Callable[[int, float], tuple[Tensor, Tensor]]
) -> Hybrid:
    """Train a model with `answers`, a function of the step's number and of a factor that grows from
    1 to 8 as the model learns. It returns logits [questions, words] and the right words.
    """
    level, tuned, right = 0, muon_and_adamw(model, RATE), [0.0] * 18
    for step in range(steps):
        logits, target = answers(step, 8 ** (level / LEVELS))
        F.cross_entropy(logits, target).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in tuned:
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1.0, step / 20, 3 * (1.02 - step / steps))
            optimizer.step()
            optimizer.zero_grad()
        share = (logits.argmax(-1) == target).float().mean().item()
        right = [*right[1:], share]
        if sum(right) > 0.85 * len(right) and level < LEVELS:
            level, right = level + 1, [0.0] * len(right)
    return model.eval()


def int4(rows: Tensor) -> Tensor:
    """Rows of 15 steps each, which is too coarse."""
    scales = (rows.abs().amax(-1, keepdim=True) / 7).clamp(min=1e-30)
    return (rows / scales).round() * scales


def wrong_scale(rows: Tensor) -> Tensor:
    """Rows as `Codec.INT8` has them, each decoded with the scale of the row before it: a defect."""
    coded = Codec.INT8.encode(rows)
    width = rows.shape[-1]
    scales = coded[..., width:].roll(1, -2)
    return Codec.INT8.decode(torch.cat([coded[..., :width], scales], -1), rows.dtype)


def fp8(rows: Tensor) -> Tensor:
    """Rows in float8_e4m3, each with a scale of its own."""
    scales = (rows.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-30)
    return (rows / scales).to(torch.float8_e4m3fn).float() * scales


def lost(rows: Tensor) -> Tensor:
    """Zeros in place of the rows, to see whether a model needs them."""
    return torch.zeros_like(rows)


def recode(cache: Cache, kv: Coder, states: Coder, since: int = 0) -> Cache:
    """The cache after encoding and decoding it; of KV only tokens from ``since`` on are coded.
    Attention's window, which no served model has, is never coded.
    """
    found: Cache = []
    for letter, tensors in zip(PATTERN, cache, strict=True):
        if letter == "*":
            *content, window = tensors
            new = [each[:, since:] for each in content]
            coded = _recode([each.flatten(0, 1) for each in new], kv)
            back = (rows.view_as(each) for rows, each in zip(coded, new, strict=True))
            pairs = zip((each[:, :since] for each in content), back, strict=True)
            found.append([*(torch.cat(pair, 1) for pair in pairs), window])
        else:
            found.append(_recode(tensors, states))
    return found


def _recode(tensors: list[Tensor], coder: Coder) -> list[Tensor]:
    """A layer's tensors [slots, ...] after encoding and decoding; a codec leaves windows of
    convolutions in bfloat16, a function as they are.
    """
    if not isinstance(coder, Codec):
        return [coder(each) if each.shape[-1] == WIDTH else each for each in tensors]
    rows = CodedRows.of([tensors], [coder])
    return rows.decode(0, rows.encode(0, tensors))


@dataclass(frozen=True)
class Answers:
    """Log probabilities [questions, words], the right answers, and how far behind the hit each
    question stands, in tokens.
    """

    logprobs: Tensor
    target: Tensor
    distance: Tensor

    @property
    def accuracy(self) -> float:
        return (self.logprobs.argmax(-1) == self.target).double().mean().item()

    def beside(self, exact: Answers) -> tuple[float, float]:
        """Share of questions with the likeliest answer of ``exact``, and the largest difference of
        that answer's log probability.
        """
        likeliest = exact.logprobs.argmax(-1, keepdim=True)
        same = (self.logprobs.argmax(-1, keepdim=True) == likeliest).double().mean().item()
        moved = (self.logprobs - exact.logprobs).gather(-1, likeliest)
        return same, moved.abs().max().item()

    def between(self, first: int, end: int) -> Answers:
        chosen = (self.distance >= first) & (self.distance < end)
        return Answers(self.logprobs[chosen], self.target[chosen], self.distance[chosen])

    @classmethod
    def all_of(cls, parts: list[Answers]) -> Answers:
        fields = ("logprobs", "target", "distance")
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in fields))


@torch.no_grad()
def answer(model: Hybrid, asked: Asked, cache: Cache, reach: Reach) -> tuple[Answers, Cache]:
    """Answers to what is asked behind the prefix of a cache, token by token, and the cache behind
    them.
    """
    out, cache = model(asked.after, cache, reach.window)
    column, row = (asked.target != NOTHING).T.nonzero(as_tuple=True)
    logprobs = model.head(out[row, column]).log_softmax(-1)
    return Answers(logprobs, asked.target[row, column], column), cache


@torch.no_grad()
def prefill(model: Hybrid, tokens: Tensor, reach: Reach) -> Cache:
    cache: Cache = model(tokens, None, reach.window)[1]
    return cache


def conversations(batch: int, drawn: random.Random) -> list[Asked]:
    """The turns of conversations. Only the first has a prefix; each tells a new pair, and asks for
    any that were told.
    """
    rows = [list(_conversation(drawn)) for _ in range(batch)]
    return [
        Asked(*(torch.tensor(column) for column in zip(*turn, strict=True)))
        for turn in zip(*rows, strict=True)
    ]


def _conversation(drawn: random.Random) -> Iterator[tuple[list[int], list[int], list[int]]]:
    before = drawn.choices(FILLER, k=FIRST_TOKENS)
    pairs = _pairs(before, FIRST_PAIRS, drawn)
    new = drawn.sample(sorted({*KEYS} - {key for key, _ in pairs}), TURNS)
    for key in new:
        pairs.append((key, drawn.choice(VALUES)))
        after, target = [*pairs[-1], *drawn.choices(FILLER, k=2)], [NOTHING] * 4
        for asked, value in drawn.choices(pairs, k=TURN_QUESTIONS):
            after += ASK, asked
            target += NOTHING, value
        yield before, after, target
        before = []


def converse(
    model: Hybrid, turns: list[Asked], coder: Coder, reach: Reach, each_token: bool = False
) -> list[Answers]:
    """Answers of each turn of conversations that are coded behind every turn, or every token: KV
    once, states each time.
    """
    states = coder if reach.states else lost
    cache, found = recode(prefill(model, turns[0].before, reach), coder, states), []
    for turn in turns:
        size = 1 if each_token else turn.after.shape[1]
        parts = []
        for after, target in zip(
            turn.after.split(size, 1), turn.target.split(size, 1), strict=True
        ):
            seen = cache[PATTERN.index("*")][0].shape[1]
            answers, cache = answer(model, Asked(turn.before, after, target), cache, reach)
            cache = recode(cache, coder, states, since=seen)
            parts.append(answers)
        found.append(Answers.all_of(parts))
    return found
