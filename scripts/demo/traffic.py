"""The traffic: agents, chats, documents with questions, and prompts with samples at once."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scripts.train.chats import about
from scripts.train.facts import Fact

SAMPLES = 4
"""Answers to the same prompt, asked for at once."""
LEAST_FACTS = 64
"""About a module that is talked of: an agent reads no page of it twice."""

Message = dict[str, str]


@dataclass(frozen=True)
class Step:
    """One prompt that is sent `at` seconds after the start, `samples` times at once.

    messages: what the prompt adds to the earlier messages and answers of its session.
    """

    at: float
    kind: str
    session: str
    messages: tuple[Message, ...]
    samples: int = 1


class Writer:
    """Prompts about Python's standard library, which the embedded model answers questions about."""

    def __init__(self, facts: Sequence[Fact], drawn: random.Random) -> None:
        self._drawn = drawn
        modules = defaultdict(list)
        for fact in facts:
            modules[fact.name.partition(".")[0]].append(fact)
        self._modules = {
            name: found for name, found in modules.items() if len(found) >= LEAST_FACTS
        }

    def modules(self, count: int) -> list[str]:
        """Names of `count` modules, all different."""
        return self._drawn.sample(list(self._modules), count)

    def question(self, module: str) -> Message:
        fact = self._drawn.choice(self._modules[module])
        return {"role": "user", "content": about(fact, self._drawn)}

    def reference(self, module: str, lines: int, first: int = 0) -> str:
        """A line for each of so many names of a module."""
        found = self._modules[module][first : first + lines]
        return "\n".join([f"Reference of {module}", *(f"{one.name}: {one.says}" for one in found)])

    def document(self, modules: Sequence[str], lines: int) -> Message:
        """A system prompt with so many names of each module, from any place on."""
        starts = [self._drawn.randrange(LEAST_FACTS - lines) for _ in modules]
        parts = [
            self.reference(module, lines, first)
            for module, first in zip(modules, starts, strict=True)
        ]
        return {"role": "system", "content": "\n".join(parts)}


def agents(write: Writer, drawn: random.Random, name: str, start: float) -> Iterator[Step]:
    """One agent: a system prompt that all agents share, then a result of a tool in each turn."""
    rules = (
        "You are a coding agent. You look names up in the reference before you answer. You have "
        "the tools search, read and run. The reference of the modules that this project uses:\n"
    )
    system = {"role": "system", "content": rules + write.reference("os", 40)}
    (module,) = write.modules(1)
    messages = [system]
    for turn in range(drawn.randint(5, 8)):
        found = write.reference(module, 8, first=8 * turn)
        messages.append({"role": "tool", "content": f"search {module}, page {turn + 1}\n{found}"})
        messages.append(write.question(module))
        yield Step(start, "agents", name, tuple(messages))
        messages, start = [], start + drawn.uniform(1, 4)


def chats(write: Writer, drawn: random.Random, name: str, start: float) -> Iterator[Step]:
    """One person, who thinks between the turns."""
    messages: list[Message] = [{"role": "system", "content": "You are a helpful assistant."}]
    for _ in range(drawn.randint(3, 8)):
        messages.append(write.question(*write.modules(1)))
        yield Step(start, "chats", name, tuple(messages))
        messages, start = [], start + drawn.uniform(3, 12)


def documents(write: Writer, drawn: random.Random, name: str, start: float) -> Iterator[Step]:
    """Several questions about one document, each asked anew."""
    modules = write.modules(3)
    document = write.document(modules, 20)
    for number in range(drawn.randint(3, 6)):
        question = write.question(drawn.choice(modules))
        yield Step(start, "documents", f"{name}.{number}", (document, question))
        start += drawn.uniform(2, 8)


def fan_out(write: Writer, drawn: random.Random, name: str, start: float) -> Iterator[Step]:
    """One long prompt, of which several answers are sampled."""
    modules = write.modules(4)
    messages = (write.document(modules, 10), write.question(modules[0]))
    yield Step(start, "fan-out", name, messages, SAMPLES)


KINDS = {
    "agents": (agents, 11.0),
    "chats": (chats, 9.0),
    "documents": (documents, 10.0),
    "fan-out": (fan_out, 8.0),
}
"""Kinds of traffic: what writes a session, and the mean seconds between the starts of two."""


def plan(facts: Sequence[Fact], seed: int, seconds: float) -> list[Step]:
    """The traffic of so many seconds, in the order of time; the same for the same seed."""
    steps: list[Step] = []
    for kind, (session, gap) in KINDS.items():
        drawn = random.Random(f"{seed} {kind}")
        write = Writer(facts, drawn)
        start, number = drawn.random(), 0
        while start < seconds:
            steps += session(write, drawn, f"{kind} {number}", start)
            start, number = start + gap * drawn.uniform(0.5, 1.5), number + 1
    return sorted((step for step in steps if step.at < seconds), key=lambda step: step.at)
