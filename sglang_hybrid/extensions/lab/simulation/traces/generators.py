"""Synthetic traffic with a seed: chat, agent, few-shot, fan-out, transcript, workflow.

Tokens are random ids of a vocabulary: two sequences share exactly what they were made to share,
save for chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.traffic.requests import Request, TokenArray, make_request
from sglang_hybrid.extensions.lab.simulation.traces.arrivals import (
    MOST_TURNS,
    Azure,
    Draw,
    session_starts,
)
from sglang_hybrid.extensions.lab.simulation.traces.lines import Room
from sglang_hybrid.extensions.lab.simulation.traces.workflows import WorkflowMaker


@dataclass(frozen=True)
class Traffic:
    """The parameters of a workload. Lengths in tokens, times in seconds.

    shared: length of what several sessions begin with: the system prompt of chats, system prompt
    and tools of agents and of each role of a workflow, the examples of a few-shot template, the
    document of a fan-out, what a session adds to its transcript. templates: how many different ones
    there are, or transcripts that grow side by side; popular ones come more often (Zipf). turns:
    requests in a session, in a fan-out those sent at once, in a workflow those of an agent before
    it hands over. question, answer: of each request. think: from one request of a session to the
    next, in a workflow from a result to a person's next task. closing: tokens that end the last
    answer of each session and no other, the same in all; 0: nothing tells it from the others.
    azure: supplies arrivals of sessions, and but for workflows the lengths of questions and answers
    in the place of `question` and `answer`.
    """

    shared: Draw
    turns: Draw
    question: Draw
    answer: Draw
    think: Draw
    templates: int = 1
    sessions: int = 100
    session_rate: float = 1.0
    vocabulary: int = 32_000
    max_input: int = 32_768
    closing: int = 0
    azure: Azure | None = None


WORKFLOW = "workflow"

KINDS: dict[str, Traffic] = {
    "chat": Traffic(
        shared=Draw("const", 300),
        turns=Draw("lognormal", 4, 0.7),
        question=Draw("lognormal", 60, 1.0),
        answer=Draw("lognormal", 250, 0.8),
        think=Draw("lognormal", 30, 1.0),
    ),
    "agent": Traffic(
        session_rate=0.2,
        shared=Draw("const", 6_000),
        turns=Draw("lognormal", 15, 0.6),
        question=Draw("lognormal", 400, 1.2),
        answer=Draw("lognormal", 120, 0.8),
        think=Draw("exp", 5),
    ),
    "few-shot": Traffic(
        sessions=500,
        session_rate=2.0,
        shared=Draw("lognormal", 1_500, 0.5),
        templates=25,
        turns=Draw("const", 1),
        question=Draw("lognormal", 60, 1.0),
        answer=Draw("lognormal", 100, 0.5),
        think=Draw("const", 0),
    ),
    "fan-out": Traffic(
        session_rate=0.2,
        shared=Draw("lognormal", 6_000, 0.7),
        templates=0,
        turns=Draw("poisson", 8),
        question=Draw("lognormal", 60, 1.0),
        answer=Draw("lognormal", 150, 0.8),
        think=Draw("exp", 0.2),
    ),
    "transcript": Traffic(
        sessions=200,
        session_rate=0.1,
        templates=3,
        shared=Draw("lognormal", 800, 0.6),
        turns=Draw("poisson", 5),
        question=Draw("lognormal", 40, 0.8),
        answer=Draw("lognormal", 120, 0.8),
        think=Draw("exp", 1),
    ),
    WORKFLOW: Traffic(
        sessions=40,
        session_rate=0.01,
        shared=Draw("const", 3_000),
        turns=Draw("lognormal", 4, 0.6),
        question=Draw("lognormal", 300, 0.8),
        answer=Draw("lognormal", 150, 0.8),
        think=Draw("lognormal", 120, 1.0),
        max_input=65_536,
    ),
}


def traffic(kind: str, **changes: object) -> Traffic:
    """The traffic of `kind` with some parameters changed; None leaves one as it is. Raises
    ValueError for an unknown kind, listing those there are, or for a number out of range.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown workload {kind!r}; known are {', '.join(KINDS)}")
    given = {name: value for name, value in changes.items() if value is not None}
    assert given.keys() <= {field.name for field in fields(Traffic)}
    made = replace(KINDS[kind], **given)  # type: ignore[arg-type]
    for name in ("sessions", "vocabulary", "max_input"):
        if getattr(made, name) < 1:
            raise ValueError(f"{name} must be 1 or more, not {getattr(made, name)}")
    if made.templates < 0:
        raise ValueError(
            f"templates must be 0 (each session its own) or more, not {made.templates}"
        )
    return made


def generate(kind: str, how: Traffic, seed: int) -> list[Request]:
    """Requests in order of arrival; the same seed, the same trace."""
    rng = np.random.default_rng(seed)
    maker = _Maker(how, rng)
    makers: dict[str, Callable[[int, float], Iterator[Request]]] = {
        "fan-out": maker.fan_out,
        "transcript": maker.transcript,
        WORKFLOW: maker.workflow,
    }
    make = makers.get(kind, maker.conversation)
    starts = _starts(how, rng)
    requests: list[Request] = []
    for number, start in enumerate(starts):
        for request in make(number, start):
            maker.room.take(request)
            requests.append(request)
    requests.sort(key=lambda request: request.arrival)
    return requests


def _starts(how: Traffic, rng: np.random.Generator) -> list[float]:
    if how.azure is None:
        return session_starts(rng, how.sessions, how.session_rate)
    return list(how.azure.arrivals[: how.sessions])


class _Maker:
    def __init__(self, how: Traffic, rng: np.random.Generator) -> None:
        self.how = how
        self.rng = rng
        self.room = Room()
        self._shared = [self._text(n) for n in how.shared.lengths(rng, how.templates)]
        popularity = 1 / np.arange(1, how.templates + 1)
        self._popularity = popularity / popularity.sum()
        self._next_session = 0
        self._transcripts: dict[int, TokenArray] = {}
        self._closing = self._text(how.closing) if how.closing else None

    def conversation(self, number: int, start: float) -> Iterator[Request]:
        """Each turn adds a question to all that was said. It ends early at `max_input` tokens."""
        said, time = self._beginning(), start
        starts: list[int] = []
        turns = self._turns()
        thinking = self.how.think.draw(self.rng, turns)
        for turn in range(turns):
            question, answer = self._exchange()
            if self._closing is not None and turn == turns - 1:
                answer = np.concatenate([answer, self._closing])
            starts.append(len(said))
            said = np.concatenate([said, question])
            if len(said) > self.how.max_input:
                return
            yield make_request(number, turn, time, said, answer, tuple(starts))
            starts.append(len(said))
            said = np.concatenate([said, answer])
            time += float(thinking[turn])

    def fan_out(self, number: int, start: float) -> Iterator[Request]:
        """One document, several questions; nobody waits for another's answer."""
        document, time = self._beginning(), start
        branches = self._turns()
        for pause in self.how.think.draw(self.rng, branches):
            question, answer = self._exchange()
            prompt = np.concatenate([document, question])[-self.how.max_input :]
            starts = (len(document),) if len(prompt) > len(document) else ()
            yield make_request(self._next_session, 0, time, prompt, answer, starts)
            self._next_session += 1
            time += float(pause)

    def transcript(self, number: int, start: float) -> Iterator[Request]:
        """A transcript has grown by a piece, and each question is asked behind all of it; the next
        session's piece follows this one's, without questions and answers in between. At `max_input`
        tokens another transcript begins.
        """
        which = int(self.rng.choice(max(1, len(self._shared)), p=self._popularity_of_transcripts()))
        (length,) = self.how.shared.lengths(self.rng, 1)
        said = np.concatenate([self._transcripts.get(which, self._text(0)), self._text(length)])
        questions = self._turns()
        asked = [self._exchange() for _ in range(questions)]
        if len(said) + max(len(question) for question, _ in asked) > self.how.max_input:
            said = said[-length:][: self.how.max_input // 2]
        self._transcripts[which] = said
        time = start
        pauses = self.how.think.draw(self.rng, questions)
        for (question, answer), pause in zip(asked, pauses, strict=True):
            prompt = np.concatenate([said, question])[: self.how.max_input]
            yield make_request(self._next_session, 0, time, prompt, answer, (0, len(said)))
            self._next_session += 1
            time += float(pause)

    def workflow(self, number: int, start: float) -> Iterator[Request]:
        """A task of several agents (`WorkflowMaker`)."""
        return self._workflows.workflow(number, start)

    @cached_property
    def _workflows(self) -> WorkflowMaker:
        return WorkflowMaker(self.how, self.rng, self._text)

    def _popularity_of_transcripts(self) -> npt.NDArray[np.float64]:
        return self._popularity if len(self._shared) else np.ones(1)

    def _beginning(self) -> TokenArray:
        if not self._shared:
            return self._text(self.how.shared.lengths(self.rng, 1)[0])
        return self._shared[self.rng.choice(len(self._shared), p=self._popularity)]

    def _exchange(self) -> tuple[TokenArray, TokenArray]:
        azure = self.how.azure
        if azure is not None:
            row = int(self.rng.integers(len(azure.arrivals)))
            return self._text(azure.prompts[row]), self._text(azure.answers[row])
        (question,) = self.how.question.lengths(self.rng, 1)
        (answer,) = self.how.answer.lengths(self.rng, 1)
        return self._text(question), self._text(answer)

    def _text(self, length: int) -> TokenArray:
        self.room.take_bytes(4 * length)
        return self.rng.integers(0, self.how.vocabulary, length).astype(np.int32)

    def _turns(self) -> int:
        return self.how.turns.lengths(self.rng, 1, MOST_TURNS)[0]


def retime(requests: list[Request], session_rate: float = 1.0, think: float = 1.0) -> list[Request]:
    """The same sessions at `session_rate` times their rate, with `think` times the pauses within
    them, in order of arrival.
    """
    first: dict[int, float] = {}
    moved = []
    for request in requests:
        begin = first.setdefault(request.session, request.arrival)
        arrival = begin / session_rate + (request.arrival - begin) * think
        moved.append(replace(request, arrival=arrival))
    moved.sort(key=lambda request: request.arrival)
    return moved
