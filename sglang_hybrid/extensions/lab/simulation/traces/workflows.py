"""Workflows of coding agents: a planner, coders side by side, a tester and a reviewer, and the
tools that they call.

A request of such a trace says what a framework of agents knows (`Step`). Servers are not told: what
they see of a call is the text at the end of the answer, which is the same for the same tool.

Of the tools' durations about 70 % are below a second and 5 % above a minute, as TraceLab counted
them (arXiv 2606.30560); which tool takes how long is assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from sglang_hybrid.core.traffic.requests import Request, TokenArray, make_request
from sglang_hybrid.extensions.lab.simulation.traces.arrivals import MOST_TURNS, Draw

if TYPE_CHECKING:
    from sglang_hybrid.extensions.lab.simulation.traces.generators import Traffic

SECONDS_PER_TOKEN: Final = 0.02
"""Time of a token of an answer."""

CALL_TOKENS: Final = 8
"""Tokens of a tool's name in an answer, and of what ends an answer."""

ARGUMENT_TOKENS: Final = Draw("lognormal", 20, 0.8)

TASK: Final = "Task"
"""The tool by which a planner has others work; it is done when they are."""


@dataclass(frozen=True)
class Tool:
    """seconds: until its result is there. tokens: of the result."""

    seconds: Draw
    tokens: Draw


TOOLS: Final = {
    "Read": Tool(Draw("lognormal", 0.05, 1.0), Draw("lognormal", 900, 1.0)),
    "Grep": Tool(Draw("lognormal", 0.2, 1.0), Draw("lognormal", 250, 1.0)),
    "Glob": Tool(Draw("lognormal", 0.1, 1.0), Draw("lognormal", 120, 0.8)),
    "Edit": Tool(Draw("lognormal", 0.1, 1.0), Draw("lognormal", 150, 0.5)),
    "Write": Tool(Draw("lognormal", 0.1, 1.0), Draw("lognormal", 40, 0.3)),
    "Bash": Tool(Draw("lognormal", 1.5, 1.8), Draw("lognormal", 400, 1.2)),
    "WebFetch": Tool(Draw("lognormal", 3, 0.8), Draw("lognormal", 1_200, 0.8)),
    "run_tests": Tool(Draw("lognormal", 40, 1.2), Draw("lognormal", 600, 1.0)),
}

ROLES: Final[dict[str, dict[str, float]]] = {
    "planner": {"Read": 4, "Grep": 3, "Glob": 2, "WebFetch": 1},
    "coder": {"Read": 5, "Grep": 2, "Edit": 4, "Write": 1, "Bash": 3},
    "tester": {"Read": 2, "Bash": 2, "run_tests": 3},
    "reviewer": {"Read": 5, "Grep": 3, "Bash": 1},
}
"""The tools that each role calls, and how often."""

PARALLEL: Final = (0.65, 0.2, 0.1, 0.05)
"""The likelihood that an answer makes one, two, three or four calls at once."""

MOST_CODERS: Final = 3
MOST_ROUNDS: Final = 3
"""Rounds of one workflow: a person asks the same planner once more."""
MOST_REPAIRS: Final = 3
AGAIN: Final = 0.4
"""The likelihood that a person asks once more, tests fail, or a reviewer wants changes."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool: its name, and the seconds until its result is there."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Step:
    """The facts that a framework of agents knows of a request.

    workflow: number of the task that it serves. agent: its role. calls: of the tools that its
    answer calls, all at once; none where the answer goes to another agent or to a person. last: no
    other request of the workflow follows.
    """

    workflow: int
    agent: str
    calls: tuple[ToolCall, ...] = ()
    last: bool = False


@dataclass(frozen=True, slots=True)
class AgentRequest(Request):
    """A request of which the step is known."""

    step: Step = field(default_factory=lambda: Step(0, ""))


def with_step(request: Request, step: Step) -> AgentRequest:
    known = {each.name: getattr(request, each.name) for each in fields(Request)}
    return AgentRequest(**known, step=step)


@dataclass
class Conversation:
    """One agent's conversation: its number, its role, what was said, where messages begin, and its
    requests so far.
    """

    number: int
    agent: str
    said: TokenArray
    starts: list[int] = field(default_factory=list)
    turns: int = 0


class WorkflowMaker:
    """Makes workflows of `how`. text: random tokens of a length."""

    def __init__(
        self, how: Traffic, rng: np.random.Generator, text: Callable[[int], TokenArray]
    ) -> None:
        self.how, self.rng, self._text = how, rng, text
        self._prompts = [self._role_prompts() for _ in range(how.templates)]
        popularity = 1 / np.arange(1, how.templates + 1)
        self._popularity = popularity / popularity.sum()
        self._names = {name: text(CALL_TOKENS) for name in (*TOOLS, TASK, "")}
        self._conversations = 0

    def workflow(self, number: int, start: float) -> Iterator[Request]:
        """A person's task, and perhaps others after it: planned, coded by several agents side by
        side, tested and reviewed, with repairs.
        """
        prompts = (
            self._prompts[self.rng.choice(len(self._prompts), p=self._popularity)]
            if self._prompts
            else self._role_prompts()
        )
        self._workflow, self._made = number, list[AgentRequest]()
        planner, time = self._begin("planner", prompts), start
        for _ in range(self._times(MOST_ROUNDS)):
            time = self._round(planner, prompts, time)
            time += float(self.how.think.draw(self.rng, 1)[0])
        self._made.sort(key=lambda request: request.arrival)
        *others, final = self._made
        yield from others
        yield replace(final, step=replace(final.step, last=True))

    def _round(self, planner: Conversation, prompts: dict[str, TokenArray], time: float) -> float:
        """One task of a person, beginning at `time`; returns when it is done."""
        time = self._work(planner, self._question(), time, hands_over=False)
        coders = [self._begin("coder", prompts) for _ in range(self.rng.integers(MOST_CODERS) + 1)]

        def code(began: float) -> list[float]:
            return [self._work(coder, self._question(), began) - began for coder in coders]

        def check(began: float) -> list[float]:
            tester, reviewer = self._begin("tester", prompts), self._begin("reviewer", prompts)
            time = began
            for _ in range(self._times(MOST_REPAIRS)):
                for _ in range(self._times(MOST_REPAIRS)):
                    time = self._work(tester, self._question(), time)
                    time = self._work(coders[0], self._result(["run_tests"]), time)
                time = self._work(reviewer, self._question(), time)
            return [time - began]

        time = self._ask(planner, self._result(["Glob"]), [TASK] * len(coders), time, code)
        time = self._ask(planner, self._result(["Read"] * len(coders)), [TASK], time, check)
        return self._ask(planner, self._result(["Read"]), [], time)

    def _work(
        self, agent: Conversation, question: TokenArray, time: float, *, hands_over: bool = True
    ) -> float:
        """`agent` answers `question` by calls of tools; returns when their last result, or the
        answer that hands over, is there.
        """
        weights = ROLES[agent.agent]
        chances = np.array(list(weights.values())) / sum(weights.values())
        for _ in range(self.how.turns.lengths(self.rng, 1, MOST_TURNS)[0]):
            count = int(self.rng.choice(len(PARALLEL), p=PARALLEL)) + 1
            names = [str(name) for name in self.rng.choice(list(weights), count, p=chances)]
            time = self._ask(agent, question, names, time)
            question = self._result(names)
        return self._ask(agent, question, [], time) if hands_over else time

    def _ask(
        self,
        agent: Conversation,
        question: TokenArray,
        names: Sequence[str],
        time: float,
        seconds: Callable[[float], list[float]] | None = None,
    ) -> float:
        """One request at `time`, whose answer calls the tools `names`; returns when all results are
        there. seconds: of the calls, where it is given, by the time at which they begin.
        """
        prompt = np.concatenate([agent.said, question])
        if len(prompt) > self.how.max_input:
            return time  # its conversation is full: it does no more
        agent.starts.append(len(agent.said))
        answer = self._answer(names)
        began = time + SECONDS_PER_TOKEN * len(answer)
        if seconds is None:
            took = [float(TOOLS[name].seconds.draw(self.rng, 1)[0]) for name in names]
        else:
            took = seconds(began)
        calls = tuple(ToolCall(*call) for call in zip(names, took, strict=True))
        starts = tuple(agent.starts)
        request = make_request(agent.number, agent.turns, time, prompt, answer, starts)
        self._made.append(with_step(request, Step(self._workflow, agent.agent, calls)))
        agent.starts.append(len(prompt))
        agent.said = np.concatenate([prompt, answer])
        agent.turns += 1
        return began + max(took, default=0.0)

    def _answer(self, names: Sequence[str]) -> TokenArray:
        """Text, then each call's name and arguments, then what ends an answer of its kind."""
        (length,) = self.how.answer.lengths(self.rng, 1)
        parts = [self._text(length)]
        for name in names:
            parts += [
                self._names[name],
                self._text(ARGUMENT_TOKENS.lengths(self.rng, 1)[0]),
            ]
        return np.concatenate([*parts, self._names[names[-1] if names else ""]])

    def _result(self, names: Sequence[str]) -> TokenArray:
        return self._text(sum(TOOLS[name].tokens.lengths(self.rng, 1)[0] for name in names))

    def _question(self) -> TokenArray:
        return self._text(self.how.question.lengths(self.rng, 1)[0])

    def _begin(self, role: str, prompts: dict[str, TokenArray]) -> Conversation:
        self._conversations += 1
        return Conversation(self._conversations - 1, role, prompts[role])

    def _role_prompts(self) -> dict[str, TokenArray]:
        lengths = self.how.shared.lengths(self.rng, len(ROLES))
        return {role: self._text(n) for role, n in zip(ROLES, lengths, strict=True)}

    def _times(self, most: int) -> int:
        """Once, and again with the likelihood AGAIN."""
        return int(min(most, self.rng.geometric(1 - AGAIN)))
