"""What can be replayed, by name: `NAME` or `NAME:OPTION=VALUE,..`, as `marconi:alpha=0.3`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from typing import Any

from sglang_hybrid.core.admission import MIN_BRANCH_TOKENS
from sglang_hybrid.core.cost import UNBOUNDED, CostModel
from sglang_hybrid.core.eviction import POLICIES, Lru, Policy, make_policy
from sglang_hybrid.core.serving import Serving
from sglang_hybrid.replay.baselines import (
    SGLANG_RUNNING_STATES,
    BlockCache,
    ClairvoyantCache,
    NoCache,
    ServedClairvoyant,
    SglangCache,
    SglangPlus,
)
from sglang_hybrid.replay.future import Oracle
from sglang_hybrid.replay.policies import Density, SglangLru, TailLru
from sglang_hybrid.replay.server_simulator import ServerSimulator
from sglang_hybrid.replay.simulator import Budget, Cache, Simulator, Split
from sglang_hybrid.replay.traces import Request

HINDSIGHT = "marconi-best"
ALPHAS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass
class Setting:
    """What a system is built for. The oracle is made when one first asks for it.

    serving: policies run as they are served, where the model has states; None: with the paper's
    admission, request after request.
    """

    cost: CostModel
    budget: Budget
    requests: Sequence[Request]
    min_branch_tokens: int = MIN_BRANCH_TOKENS
    serving: Serving | None = None
    oracles: dict[int, Oracle] = field(default_factory=dict)

    @property
    def as_served(self) -> bool:
        return self.serving is not None and self.cost.state_bytes > 0

    @property
    def memory(self) -> Split | int:
        """The budget as it is served: in one memory, or in two pools, split as the server does if
        it is one number of bytes.
        """
        if isinstance(self.budget, Split):
            return self.budget
        if self.budget is None:
            return Split(UNBOUNDED, UNBOUNDED)
        if self.serving is not None and self.serving.one_memory:
            return self.budget
        return Split.of(self.budget, self.cost)

    @cached_property
    def oracle(self) -> Oracle:
        key = id(self.requests)
        if key not in self.oracles:
            self.oracles[key] = Oracle(self.requests)
        return self.oracles[key]


@dataclass(frozen=True)
class System:
    """How to build a cache from a setting and the `options` it takes."""

    build: Callable[..., Cache]
    options: tuple[str, ...] = ()


def _evicting(make: Callable[..., Policy]) -> System:
    """A simulator with the policy that `make` makes, twice for a split budget; two that learn share
    one history. SGLang's own order is known for two pools only; elsewhere it is LRU.
    """

    def build(setting: Setting, **options: Any) -> Cache:
        if setting.as_served:
            two_pools = isinstance(setting.memory, Split)
            return ServerSimulator(
                setting.cost,
                setting.memory,
                *_pair(make if two_pools else alone, options),
                setting.min_branch_tokens,
                setting.serving,
            )
        policy, other = _pair(alone, options)
        return Simulator(setting.cost, setting.budget, policy, setting.min_branch_tokens, other)

    alone = Lru if make is SglangLru else make
    hidden = ("history", "stateless_first")
    options = [name for name in signature(make).parameters if name not in hidden]
    return System(build, tuple(options))


def _pair(make: Callable[..., Policy], options: dict[str, Any]) -> tuple[Policy, Policy]:
    policy = make(**options)
    if policy.history is None:
        return policy, make(**options)
    return policy, make(**options, history=policy.history)


def _none(setting: Setting) -> Cache:
    return NoCache()


def _vllm(setting: Setting, block: int = 32) -> Cache:
    with_running = setting.serving is not None
    return BlockCache(setting.cost, setting.budget, int(block), with_running=with_running)


def _sglang_plus(setting: Setting) -> Cache:
    running_states = None if setting.serving is None else 1
    return SglangPlus(setting.cost, setting.budget, setting.min_branch_tokens, running_states)


def _sglang(setting: Setting, grid: int = 64, chunk: int = 8_192, interval: int = 256) -> Cache:
    if not setting.cost.state_bytes:  # then it is a plain radix cache
        return _sglang_plus(setting)
    return SglangCache(
        setting.cost,
        setting.budget,
        int(grid),
        int(chunk),
        int(interval),
        running_states=None if setting.serving is None else SGLANG_RUNNING_STATES,
    )


def _clairvoyant(setting: Setting, remember: int = 1) -> Cache:
    least = setting.min_branch_tokens
    if setting.as_served:
        return ServedClairvoyant(
            setting.cost, setting.memory, setting.oracle, least, setting.serving
        )
    return ClairvoyantCache(setting.cost, setting.budget, setting.oracle, bool(remember), least)


def _unbounded(setting: Setting) -> Cache:
    if setting.as_served:
        least, endless = setting.min_branch_tokens, Split(UNBOUNDED, UNBOUNDED)
        return ServerSimulator(setting.cost, endless, Lru(), Lru(), least, setting.serving)
    return Simulator(setting.cost, None, Lru(), setting.min_branch_tokens)


def _tuned(name: str) -> System:
    """`name` of the tuner's, which replays and so builds on this module."""

    def build(setting: Setting, **options: float) -> Cache:
        from sglang_hybrid.tuner.tuned import build_tuned

        return build_tuned(name, setting, **options)

    return System(build, ("delay", "window"))


SYSTEMS: dict[str, System] = {
    "none": System(_none),
    "vllm+": System(_vllm, ("block",)),
    "sglang+": System(_sglang_plus),
    "sglang": System(_sglang, ("grid", "chunk", "interval")),
    **{name: _evicting(make) for name, make in POLICIES.items()},
    "sglang-lru": _evicting(SglangLru),
    "tlru": _evicting(TailLru),
    "density": _evicting(Density),
    **{name: _tuned(name) for name in ("marconi-tuned", "tuned")},
    "clairvoyant": System(_clairvoyant, ("remember",)),
    "unbounded": System(_unbounded),
}


@dataclass(frozen=True)
class Spec:
    """A system's name and options, as written on a command line."""

    name: str
    options: tuple[tuple[str, float], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Spec:
        """Raises ValueError, in one sentence that lists what there is."""
        name, _, rest = text.partition(":")
        known = [*SYSTEMS, HINDSIGHT]
        if name not in known:
            raise ValueError(f"unknown policy {name!r}; known are {', '.join(known)}")
        accepted = SYSTEMS[name].options if name in SYSTEMS else ()
        options: list[tuple[str, float]] = []
        for part in filter(None, rest.split(",")):
            option, _, value = part.rpartition("=")
            option = option or (accepted[0] if accepted else "")
            if option not in accepted:
                there = f"its options are {', '.join(accepted)}" if accepted else "it has none"
                raise ValueError(f"policy {name!r} has no option {option or value!r}; {there}")
            try:
                options.append((option, float(value)))
            except ValueError:
                raise ValueError(f"{value!r} is no number for {option} of {name!r}") from None
        spec = cls(name, tuple(options))
        if name in POLICIES and options:
            make_policy(name, **dict(options))
        return spec

    def __str__(self) -> str:
        shown = (
            f"{value:g}" if name == "alpha" else f"{name}={value:g}" for name, value in self.options
        )
        return " ".join([self.name, *shown])

    def build(self, setting: Setting) -> Cache:
        return SYSTEMS[self.name].build(setting, **dict(self.options))

    def candidates(self) -> list[Spec]:
        """Itself, or what the best in hindsight is chosen from."""
        if self.name != HINDSIGHT:
            return [self]
        return [Spec("marconi", (("alpha", alpha),)) for alpha in ALPHAS]


def smallest_budget(cost: CostModel) -> int:
    """Bytes of one state and one token, less than which nothing can be cached."""
    return cost.state_bytes + cost.kv_bytes_per_token
