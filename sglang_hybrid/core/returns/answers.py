"""Predicts whether a session goes on after an answer: learnt from the answer's first and last
tokens, and from what the client says.

A session goes on after a tool call and ends with an agent's last answer. Both kinds of answers are
learnt online, by a logistic regression per tenant. A client's hint is believed as far as
that tenant's hints have proved true. The expected return is one more feature of the classes of the
reuse index.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.returns.feature_weights import (
    FEATURE_BYTES,
    FIRST_SQUARES,
    WEIGHT_BITS,
    Features,
    FeatureWeights,
    Floats,
)
from sglang_hybrid.core.returns.hint_record import HintRecord
from sglang_hybrid.core.returns.hints import Hint

TOKENS_AT_EACH_END = 64
RATE = 0.05
DECAY = 1e-4
POSITIVES, NEGATIVES = 2_000, 1_000
"""Labelled answers of each sign that are kept for replays."""
WAITING = 2_000
"""Answers that wait for a return; of more, the oldest is given up."""
REPLAYS = 2
"""Replayed answers of each sign, per label."""
INTERVALS = 512
"""Last intervals until a return, from which it is judged when none comes any more."""
PATIENCE, QUANTILE = 2.0, 0.9
REFIT_EVERY = 16
"""Returns after which it is judged anew."""
LEAST_LABELS = 3
"""Labels of each sign that are needed before a prediction counts."""
GAIN, EVIDENCE = 0.05, 6.0
"""Nats per label, and in all, by which predictions must have been better than the share of returns.
"""
MEMORY = 256
"""Labels over which that is judged: after so many others the weight of one is halved."""
THRESHOLDS = (0.2, 0.8)
EXPECTATIONS = 2 + len(THRESHOLDS)
"""Buckets by what is expected: nothing, or one of the likelihoods of a return."""
WAITS = (8.0, 64.0)
"""Seconds by which likely returns are told apart where a client's hint said when."""
BUCKETS = EXPECTATIONS + 1 + len(WAITS)
"""The number of buckets: `bucket_of` returns less."""
MODEL_BYTES = 8 << 10
"""Bytes of a model, as it begins."""
ANSWER_BYTES = 500
"""Bytes of what is known of an answer."""
INTERVAL_BYTES = 32
LEARNT_BYTES = 2 << 10
"""Bytes of what a model has learnt (`LearntAnswers`), beside its features and intervals."""


def features_of(answer: npt.ArrayLike) -> Features:
    """The features, of 2^16, that an answer [n] of token ids has: one for each token among its
    first 64, and one for each among its last 64. Unique, at most 128.
    """
    ids = np.asarray(answer).astype(np.uint32, copy=False)
    first = ids[:TOKENS_AT_EACH_END] * np.uint32(2) + np.uint32(1)
    last = ids[-TOKENS_AT_EACH_END:] * np.uint32(2)
    mixed = np.concatenate([first, last]) * np.uint32(2654435761)
    features: Features = (mixed >> np.uint32(32 - WEIGHT_BITS)).astype(np.uint16)
    features.sort()
    first_of_its_kind = np.empty(len(features), dtype=np.bool_)
    first_of_its_kind[:1] = True
    np.not_equal(features[1:], features[:-1], out=first_of_its_kind[1:])
    unique: Features = features[first_of_its_kind]
    return unique


def bucket_of(expected: float | None, wait: float | None = None) -> int:
    """0 where nothing is expected, else 1 and the thresholds that the probability exceeds. wait:
    seconds after which a return is expected; where it is likely, they tell `WAITS` more apart.
    """
    if expected is None:
        return 0
    bucket = 1 + sum(expected > threshold for threshold in THRESHOLDS)
    if wait is None or bucket < EXPECTATIONS - 1:
        return bucket
    return EXPECTATIONS + sum(wait > edge for edge in WAITS)


@dataclass(eq=False, slots=True)
class Answer:
    """An answer that ended at `time`.

    predicted: what the regression said then. hint: what the client said. expected: the probability
    of a return that was believed then, None if neither told anything. wait: seconds from `time` on
    after which a return is expected, None if nobody said so or that is not believed. pace: seconds
    since the answer before it in the session, None if there was none. returned: whether a later
    request resumed from a position that the answer's request opened or resumed from; None while
    that is not known.
    """

    features: Features
    time: float
    predicted: float
    hint: Hint | None = None
    expected: float | None = None
    wait: float | None = None
    pace: float | None = None
    returned: bool | None = None

    @property
    def bucket(self) -> int:
        return bucket_of(self.expected, self.wait)

    @property
    def return_after(self) -> float | None:
        """Seconds after which a return is expected: those that the client named, else the seconds
        between this answer and the one before it. None where no return is likely.
        """
        likely = self.expected is not None and self.expected > THRESHOLDS[-1]
        if not likely:
            return None
        return self.pace if self.wait is None else self.wait

    def expect_nothing(self) -> None:
        """Expect nothing of this answer."""
        self.expected = self.wait = None


@dataclass(frozen=True)
class LearntAnswers:
    """The parameters of a model, for a file. features [n]: those that some answer had; weights,
    squares [n]: theirs. numbers: what else the regression knows (`AnswerModel.NUMBERS`). intervals:
    seconds until the last returns. hints: `HintRecord.as_list`.
    """

    features: npt.NDArray[np.uint16]
    weights: npt.NDArray[np.float32]
    squares: npt.NDArray[np.float32]
    numbers: list[float]
    intervals: list[float]
    hints: list[float]

    @property
    def held_bytes(self) -> int:
        """Memory that the answer takes."""
        parts = FEATURE_BYTES * len(self.features) + INTERVAL_BYTES * len(self.intervals)
        return LEARNT_BYTES + parts


class Calibration:
    """Expected probabilities of a return against what happened, over all tenants.

    returned, given_up [EXPECTATIONS]: answers that a return followed, and those that were given up,
    by bucket of the expected probability. expected [EXPECTATIONS]: sums of these probabilities; 0
    in the first bucket, of which nothing was expected.
    """

    def __init__(self) -> None:
        self.returned = [0] * EXPECTATIONS
        self.given_up = [0] * EXPECTATIONS
        self.expected = [0.0] * EXPECTATIONS

    def judge(self, answer: Answer, count: int = 1) -> None:
        """`answer` got its label; count -1: that is taken back."""
        happened = self.returned if answer.returned else self.given_up
        bucket = bucket_of(answer.expected)
        happened[bucket] += count
        self.expected[bucket] += count * (answer.expected or 0.0)


class AnswerModel:
    """Logistic regression over `features_of`, with an own step size for each weight (AdaGrad); and
    what the tenant's hints were worth.

    Args:
        calibration: is told of every label.
        seed: of the choice of replayed answers; the same calls give the same model.
    """

    NUMBERS = ("_bias", "_bias_squares", "_patience", "_gain", "_weight", "_share")

    def __init__(self, calibration: Calibration | None = None, seed: int = 0) -> None:
        self.hints = HintRecord()
        self._calibration = calibration or Calibration()
        self._weights = FeatureWeights()
        self._bias = 0.0
        self._bias_squares = FIRST_SQUARES
        self._random = random.Random(seed)
        self._open: deque[Answer] = deque()
        self._positives: deque[Answer] = deque(maxlen=POSITIVES)
        self._negatives: deque[Answer] = deque(maxlen=NEGATIVES)
        self._intervals: deque[float] = deque(maxlen=INTERVALS)
        self._patience = np.inf
        self._gain = 0.0  # sums over labels, old ones fading
        self._weight = 0.0
        self._share = 0.5
        self.labels = [0, 0]  # of each sign so far, those taken back left out

    @property
    def has_learnt(self) -> bool:
        """True if it is known of any answer if a return followed it."""
        return any(self.labels)

    @property
    def held_bytes(self) -> int:
        """Memory that the model takes, as the constants above count it."""
        answers = len(self._open) + len(self._positives) + len(self._negatives)
        return (
            MODEL_BYTES
            + self._weights.held_bytes
            + ANSWER_BYTES * answers
            + INTERVAL_BYTES * len(self._intervals)
        )

    def forget_half(self) -> None:
        """Forget half of what takes memory: the older answers and intervals, and the features that
        examples have changed least. Of an answer that waited for a return it will not be known if
        none came.
        """
        for kept in (self._open, self._positives, self._negatives, self._intervals):
            for _ in range((len(kept) + 1) // 2):
                kept.popleft()
        self._weights.forget_half()

    @property
    def can_predict(self) -> bool:
        """True if predictions have been better than the mere share of answers with a return."""
        return min(self.labels) >= LEAST_LABELS and self._gain > max(EVIDENCE, GAIN * self._weight)

    def predict(self, features: Features) -> float:
        """The probability of a return after an answer with these features."""
        return self._probability(self._weights.take(features))

    def _probability(self, weights: Floats) -> float:
        """The result of `predict` for features with these weights."""
        score = self._bias + float(np.add.reduce(weights))
        return 1 / (1 + math.exp(-min(max(score, -30.0), 30.0)))

    def expect(self, features: Features, hint: Hint | None = None) -> float | None:
        """The probability of a return after an answer with these features and this hint; None
        while neither says anything. A hint that says little counts for nothing, unless it says
        when.
        """
        return self._expected(self.predict(features), hint)

    def _expected(self, predicted: float, hint: Hint | None) -> float | None:
        """The result of `expect` where the regression says `predicted`."""
        if hint is not None and (self.hints.is_informative(hint) or self.wait(hint) is not None):
            p = self.hints.probability(hint)
            if not THRESHOLDS[0] < p <= THRESHOLDS[-1]:
                return p
        return predicted if self.can_predict else None

    def wait(self, hint: Hint | None) -> float | None:
        """Seconds after which a return is expected by such a hint, or None."""
        if hint is None or hint.seconds is None:
            return None
        return self.hints.times.expected(hint.seconds)

    def on_answer_end(self, tokens: npt.ArrayLike, time: float, hint: Hint | None = None) -> Answer:
        """An answer [n] of token ids ended; from now on it waits for a return."""
        features = features_of(tokens)
        predicted = self.predict(features)
        expected = self._expected(predicted, hint)
        answer = Answer(features, time, predicted, hint, expected, self.wait(hint))
        self._open.append(answer)
        return answer

    def on_return(self, answer: Answer, time: float) -> None:
        """A request resumed from a position of `answer`. If the answer had been given up, that is
        taken back. It may have been another model of the tenant that gave it up, which is no more.
        """
        if answer.returned:
            return
        if answer.returned is False:
            self.labels[0] = max(self.labels[0] - 1, 0)
            self._calibration.judge(answer, -1)
            self.hints.retract(answer.hint)
        answer.returned = True
        self.labels[1] += 1
        self._intervals.append(time - answer.time)
        self._positives.append(answer)
        self._learn(answer, time - answer.time)
        if self.labels[1] % REFIT_EVERY == 1:
            self._patience = PATIENCE * float(np.quantile(self._intervals, QUANTILE))

    def give_up(self, now: float) -> None:
        """Take answers that waited too long until `now` for the last ones of their sessions."""
        while self._open and (
            len(self._open) > WAITING or now - self._open[0].time > self._patience
        ):
            answer = self._open.popleft()
            if answer.returned is None:
                answer.returned = False
                self.labels[0] += 1
                self._negatives.append(answer)
                self._learn(answer)

    def export(self) -> LearntAnswers:
        """The parameters of the model, without the answers themselves."""
        return LearntAnswers(
            *self._weights.learnt(),
            [float(getattr(self, name)) for name in self.NUMBERS] + [float(n) for n in self.labels],
            list(self._intervals),
            self.hints.as_list(),
        )

    def restore(self, learnt: LearntAnswers) -> None:
        """Begin with what another model has learnt. Raises ValueError."""
        if len(learnt.numbers) != len(self.NUMBERS) + 2:
            raise ValueError(f"a model has {len(self.NUMBERS) + 2} numbers")
        self.hints.restore(learnt.hints)
        self._weights.restore(learnt.features, learnt.weights, learnt.squares)
        for name, value in zip(self.NUMBERS, learnt.numbers, strict=False):
            setattr(self, name, value)
        self.labels = [int(number) for number in learnt.numbers[-2:]]
        self._intervals.extend(learnt.intervals)

    def _judge(self, answer: Answer) -> None:
        right = answer.predicted if answer.returned else 1 - answer.predicted
        guessed = self._share if answer.returned else 1 - self._share
        fade = 0.5 ** (1 / MEMORY)
        self._gain = fade * self._gain + math.log(max(right, 1e-3) / max(guessed, 1e-3))
        self._weight = fade * self._weight + 1
        self._share += (float(bool(answer.returned)) - self._share) / min(self._weight + 1, MEMORY)

    def _learn(self, answer: Answer, after: float = 0.0) -> None:
        """`answer` got its label; a return came `after` so many seconds."""
        self._calibration.judge(answer)
        self.hints.on_outcome(answer.hint, returned=bool(answer.returned), after=after)
        if not len(answer.features):  # no answer, only a hint
            return
        self._judge(answer)
        self._step(answer)
        for kept in (self._positives, self._negatives):
            for _ in range(min(REPLAYS, len(kept))):
                self._step(kept[self._random.randrange(len(kept))])

    def _step(self, answer: Answer) -> None:
        learnt = self._weights
        at = learnt.rows(answer.features)
        weights = learnt.weights.take(at)
        error = self._probability(weights) - float(bool(answer.returned))
        gradient = error + DECAY * weights
        squares = learnt.squares.take(at)
        squares += gradient * gradient
        learnt.squares[at] = squares
        learnt.weights[at] = weights - RATE * gradient / np.sqrt(squares)
        self._bias_squares += error * error
        self._bias -= RATE * error / self._bias_squares**0.5
