"""Eviction policies of research on agents: CacheScout, PBKV and CacheWise, as far as they are
public.

Each orders the entries that `reuse` orders, under the paper's admission or the server's, so that
what differs is what it knows. All were made for KV alone; here they order states too. A policy
knows of agents only what a trace tells (`traces.workflows.Step`). Prefetches, and orders of waiting
requests, are left out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Final

import numpy as np

from sglang_hybrid.core.costs.cost import FloatArray
from sglang_hybrid.core.records.nodes import NEVER, Clock, Node
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.core.victims.eviction import Policy
from sglang_hybrid.core.victims.table import Table
from sglang_hybrid.extensions.lab.simulation.traces.workflows import AgentRequest, Step

END: Final = "end"
"""The name that follows the last request of a workflow, in the place of an agent."""


class AgentKnowledge(ABC):
    """The knowledge of a policy of agents (`told.Knowledge`): what passed each node last, as a
    number, and when, counted in requests.
    """

    def __init__(self) -> None:
        self.tick = 0
        self._numbers: dict[Hashable, int] = {}
        self._current = 0
        self._latest: dict[tuple[str, int], Request] = {}  # by tenant and session
        self._passed: dict[int, tuple[int, int]] = {}  # by node id

    @abstractmethod
    def owner(self, request: Request) -> Hashable:
        """The agent, workflow or session that the nodes on the path of `request` then belong to."""

    @abstractmethod
    def learn(self, request: Request, before: Request | None) -> Iterable[Node]:
        """`request` is seen for the first time, after `before` in its session. Returns the nodes to
        be described anew.
        """

    def on_request(self, request: Request) -> None:
        self._current = self._numbers.setdefault(self.owner(request), len(self._numbers))

    def on_path(self, request: Request, path: Sequence[Node]) -> Iterable[Node]:
        self.on_request(request)
        session = request.tenant, request.session
        before = self._latest.get(session)
        changed: Iterable[Node] = ()
        if before is not request:
            self._latest[session] = request
            self.tick += 1
            changed = self.learn(request, before)
        for node in path:
            self._passed[node.id] = self._current, self.tick
        return [*changed, *path]

    def forget(self, node: Node) -> None:
        self._passed.pop(node.id, None)

    def passed(self, node: Node) -> tuple[int, int]:
        """The owner that passed `node` last, and when; of one in no tree, the latest request's."""
        return self._passed.get(node.id, (self._current, self.tick))


def step_of(request: Request) -> Step:
    """The step of a request. Where the trace has none, its session is a workflow of one agent
    without a name.
    """
    return request.step if isinstance(request, AgentRequest) else Step(request.session, "")


class AgentPolicy(Policy):
    """A policy that reads `knowledge`, which all policies of a cache share."""

    def __init__(self, knowledge: Any) -> None:
        self.knowledge = knowledge

    def forget(self, node: Node) -> None:
        self.knowledge.forget(node)


class Transitions(AgentKnowledge):
    """The graph of agents that follow one another, by CacheScout (arXiv 2608.14624, 3.2 and 3.3).

    Agents are told apart by the first FINGERPRINT tokens of their prompts. The likelihood that one
    follows another is counted; a change that is as likely as EDGE is an edge of a graph, and an
    agent that is n edges from the present one survives by 1 - n / HORIZON. Anchors, as the paper
    calls what all prompts of an agent begin with, are what several sessions passed. Sketch: the
    paper gives no constants, and has one present agent for all traffic; here each workflow that the
    trace names has one, and survival is the mean over the LATEST of them.
    """

    FINGERPRINT: Final = 32
    EDGE: Final = 0.1
    HORIZON: Final = 4
    LATEST: Final = 8

    def __init__(self) -> None:
        super().__init__()
        self.survival: FloatArray = np.zeros(1)
        self._first: dict[int, Hashable] = {}  # the session that passed a node first, by node id
        self._anchors: set[int] = set()
        self._follows: dict[int, Counter[int]] = defaultdict(Counter)
        self._present: OrderedDict[int, int] = OrderedDict()  # agents, by workflow, oldest first

    def owner(self, request: Request) -> Hashable:
        return request.tenant, request.tokens[: self.FINGERPRINT].tobytes()

    def learn(self, request: Request, before: Request | None) -> Iterable[Node]:
        named = isinstance(request, AgentRequest)
        workflow = step_of(request).workflow if named else 0
        earlier = self._present.get(workflow)
        self._present[workflow] = self._current
        self._present.move_to_end(workflow)
        if len(self._present) > self.LATEST:
            self._present.popitem(last=False)
        if earlier is not None and earlier != self._current:
            self._follows[earlier][self._current] += 1
        total = np.zeros(len(self._numbers))
        for agent in self._present.values():
            for other, hops in self._hops(agent).items():
                total[other] += 1 - hops / self.HORIZON
        self.survival = total / len(self._present)
        return ()

    def on_path(self, request: Request, path: Sequence[Node]) -> Iterable[Node]:
        session = request.tenant, request.session
        for node in path:
            if self._first.setdefault(node.id, session) != session:
                self._anchors.add(node.id)
        return super().on_path(request, path)

    def forget(self, node: Node) -> None:
        super().forget(node)
        self._first.pop(node.id, None)
        self._anchors.discard(node.id)

    def is_anchor(self, node: Node) -> bool:
        return node.id in self._anchors

    def _hops(self, agent: int) -> dict[int, int]:
        """Edges from `agent` to each that is fewer than HORIZON away."""
        hops, reached = {agent: 0}, deque([agent])
        while reached:
            one = reached.popleft()
            counts = self._follows[one]
            least = self.EDGE * counts.total()
            for other, count in counts.items():
                if count >= least and other not in hops and hops[one] + 1 < self.HORIZON:
                    hops[other] = hops[one] + 1
                    reached.append(other)
        return hops


class CacheScout(AgentPolicy):
    """CacheScout (arXiv 2608.14624, equation 9): (survival + FLOOR) * (e^(-DECAY * age) + FLOOR),
    where age is in requests, and only anchors survive; its third factor, the tokens of a block, is
    the same for all blocks. The constants are those that hit most of generated workflows of two
    seeds which no page shows.
    """

    name = "cachescout"
    columns = 3
    DECAY: Final = 0.2
    FLOOR: Final = 0.01

    def describe(self, node: Node, saved: float, freed: int) -> tuple[float, ...]:
        agent, tick = self.knowledge.passed(node)
        return float(agent), float(tick), float(self.knowledge.is_anchor(node))

    def scores(self, table: Table, clock: Clock) -> FloatArray:
        survival = table.column(2) * self.knowledge.survival[table.column(0).astype(np.int64)]
        recency = np.exp(-self.DECAY * (self.knowledge.tick - table.column(1)))
        scores: FloatArray = (survival + self.FLOOR) * (recency + self.FLOOR)
        return scores


class Invocations(AgentKnowledge):
    """The next agents of a workflow, for PBKV (arXiv 2605.06472): for each of the next STEPS
    requests the likelihood of each agent, the n-th counting GAMMA^(n-1) times.

    Sketch: the paper predicts by a network that is trained beforehand on workflows and reads the
    model's hidden states; here the last two agents predict the next, by counts. GAMMA is assumed.
    """

    STEPS: Final = 3
    GAMMA: Final = 0.8

    def __init__(self) -> None:
        super().__init__()
        self._follows: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
        self._path: dict[Hashable, tuple[str, ...]] = {}  # the last two agents, by workflow
        self._expected: dict[Hashable, dict[str, float]] = {}  # by workflow and agent
        self._nodes: dict[Hashable, dict[int, Node]] = {}
        self._users: dict[int, dict[Hashable, set[str]]] = defaultdict(dict)  # by node id

    def owner(self, request: Request) -> Hashable:
        return request.tenant, step_of(request).workflow

    def learn(self, request: Request, before: Request | None) -> Iterable[Node]:
        workflow, step = self.owner(request), step_of(request)
        path = self._path.get(workflow, ())
        self._count(path, step.agent)
        self._path[workflow] = path = (*path, step.agent)[-2:]
        nodes = self._nodes.setdefault(workflow, {})
        if step.last:
            self._count(path, END)
        self._expected[workflow] = {} if step.last else self._foresee(path)
        return nodes.values()

    def on_path(self, request: Request, path: Sequence[Node]) -> Iterable[Node]:
        changed = super().on_path(request, path)
        workflow, step = self.owner(request), step_of(request)
        for node in path:
            self._users[node.id].setdefault(workflow, set()).add(step.agent)
            self._nodes[workflow][node.id] = node
        return changed

    def forget(self, node: Node) -> None:
        super().forget(node)
        for workflow in self._users.pop(node.id, {}):
            self._nodes[workflow].pop(node.id, None)

    def worth(self, node: Node) -> float | None:
        """The calls to expect of agents whose workflows passed `node`; None if all have ended."""
        users = self._users.get(node.id)
        if users is None:
            return sum(self._expected.get(self._owner, {}).values())
        found = [(self._expected[workflow], agents) for workflow, agents in users.items()]
        if not any(expected for expected, _ in found):
            return None
        return sum(expected.get(agent, 0.0) for expected, agents in found for agent in agents)

    def on_request(self, request: Request) -> None:
        super().on_request(request)
        self._owner = self.owner(request)

    def _count(self, path: tuple[str, ...], agent: str) -> None:
        for known in {path, path[-1:]}:
            self._follows[known][agent] += 1

    def _foresee(self, path: tuple[str, ...]) -> dict[str, float]:
        """Expected calls of each agent after `path`."""
        expected: dict[str, float] = defaultdict(float)
        ways = {path: 1.0}
        for step in range(self.STEPS):
            further: dict[tuple[str, ...], float] = defaultdict(float)
            for way, chance in ways.items():
                follows = self._follows.get(way) or self._follows[way[-1:]]
                for agent, count in follows.items():
                    if agent != END:
                        likely = chance * count / follows.total()
                        expected[agent] += self.GAMMA**step * likely
                        further[(*way, agent)[-2:]] += likely
            ways = further
        expected.setdefault(path[-1], 0.0)
        return expected


class Pbkv(AgentPolicy):
    """PBKV (arXiv 2605.06472, section 4.2): what only workflows that have ended passed goes first,
    then what the fewest calls to come are expected to pass.
    """

    name = "pbkv"

    def describe(self, node: Node, saved: float, freed: int) -> tuple[float, ...]:
        worth = self.knowledge.worth(node)
        return (node.last_used - NEVER if worth is None else worth,)


class Durations(AgentKnowledge):
    """Seconds that sessions still wait for tools, for CacheWise (arXiv 2606.16824): for each tool,
    the mean remaining time of earlier calls that took longer than it has by now; of calls side by
    side, the longest.

    Sketch: the paper also groups calls by their arguments, which no trace here has. A pause without
    a call, and all pauses of a trace that names no tools, are those of one tool more.
    """

    REMEMBERED: Final = 1_000
    """Calls of each tool."""

    def __init__(self) -> None:
        super().__init__()
        self._took: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=self.REMEMBERED))
        self._sorted: dict[str, tuple[list[float], FloatArray]] = {}
        self._waits: list[tuple[float, tuple[str, ...]]] = []  # since when and for what, by number
        self._left: tuple[float, FloatArray] = (-1.0, np.zeros(0))

    def owner(self, request: Request) -> Hashable:
        return request.tenant, request.session

    def learn(self, request: Request, before: Request | None) -> Iterable[Node]:
        if before is not None:
            calls = step_of(before).calls
            for call in calls:
                self._add(call.name, call.seconds)
            if not calls:
                self._add("", request.arrival - before.arrival)
        names = tuple(call.name for call in step_of(request).calls) or ("",)
        while len(self._waits) < len(self._numbers):
            self._waits.append((0.0, ("",)))
        self._waits[self._current] = request.arrival, names
        self._left = -1.0, self._left[1]
        return ()

    def left(self, now: float) -> FloatArray:
        """Seconds until each session is expected back, by its number."""
        if self._left[0] != now or len(self._left[1]) < len(self._waits):
            seconds = [
                max(self._left_of(name, now - since) for name in names)
                for since, names in self._waits
            ]
            self._left = now, np.array(seconds)
        return self._left[1]

    def _left_of(self, tool: str, passed: float) -> float:
        if tool not in self._sorted:
            took = sorted(self._took[tool])
            sums = np.concatenate([[0.0], np.cumsum(took[::-1])])[::-1]
            self._sorted[tool] = took, sums
        took, sums = self._sorted[tool]
        shorter = bisect_right(took, passed)
        longer = len(took) - shorter
        return float(sums[shorter]) / longer - passed if longer else passed

    def _add(self, tool: str, seconds: float) -> None:
        self._took[tool].append(max(0.0, seconds))
        self._sorted.pop(tool, None)


class CacheWise(AgentPolicy):
    """CacheWise (arXiv 2606.16824): what belongs to the session that is expected back last goes
    first. A node belongs to the session that passed it last.
    """

    name = "cachewise"

    def describe(self, node: Node, saved: float, freed: int) -> tuple[float, ...]:
        session, _ = self.knowledge.passed(node)
        return (float(session),)

    def scores(self, table: Table, clock: Clock) -> FloatArray:
        left: FloatArray = self.knowledge.left(clock.stamp)
        return -left[table.column(0).astype(np.int64)]
