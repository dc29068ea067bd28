"""Systems that can be replayed, by name: `NAME` or `NAME:OPTION=VALUE,..`, as `marconi:alpha=0.3`.

A system is a cache with its policy. `lab/systems.py` enters in `SYSTEMS` what it can build.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from sglang_hybrid.core.costs.cost import MIN_BRANCH_TOKENS, UNBOUNDED, CostModel
from sglang_hybrid.core.server_settings import Budget, Serving, Split
from sglang_hybrid.core.specs import Spec
from sglang_hybrid.core.tiers.rates import Speeds
from sglang_hybrid.core.victims.eviction import POLICIES, Policy, make_policy

HINDSIGHT = "marconi-best"
"""Marconi at the alpha that finds most."""
ORACLES = ("clairvoyant", "whether", "when")
"""Systems that know the rest of the trace."""
FORESIGHT = "oracle"
"""The one of ORACLES that finds most."""
ALPHAS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass
class Setting:
    """The setting that a system is built for.

    serving: policies run as they are served, where the model has states; None: with the paper's
    admission, request after request. requests: of the whole trace, for systems that know the
    future. oracles: what such systems computed, by the id of `requests`; settings may share it.
    tiers, speeds: the tiers of memory (simulation.tiers.tier_budgets.TierBudgets) that there are
    instead of `budget`, and how fast they are; None: the device alone.
    """

    cost: CostModel
    budget: Budget
    requests: Sequence[Any]
    min_branch_tokens: int = MIN_BRANCH_TOKENS
    serving: Serving | None = None
    oracles: dict[int, Any] = field(default_factory=dict)
    tiers: Any = None
    speeds: Speeds | None = None

    @property
    def as_served(self) -> bool:
        return self.serving is not None and self.cost.state_bytes > 0

    @property
    def memory(self) -> Split | int:
        """The budget as it is served: in one memory, or in two pools, split as the server does if
        it is one number of bytes, where states spill into KV.
        """
        if isinstance(self.budget, Split):
            return self.budget
        if self.budget is None:
            return Split(UNBOUNDED, UNBOUNDED)
        if self.serving is not None and self.serving.one_memory:
            return self.budget
        return Split.of(self.budget, self.cost, spills=not self.cost.coded)

    @property
    def apart(self) -> Split:
        """Two pools of the budget that lend each other nothing, as under SGLang's own order."""
        if isinstance(self.budget, int):
            return Split.of(self.budget, self.cost)
        pools = self.memory
        assert isinstance(pools, Split), "without a bound there are two pools"
        return pools.apart


@dataclass(frozen=True)
class System:
    """A builder of a cache from a setting and the `options` it takes: without tiers, in tiers, or
    either.
    """

    build: Callable[..., Any] | None
    options: tuple[str, ...] = ()
    in_tiers: Callable[..., Any] | None = None


SYSTEMS: dict[str, System] = {}
"""Systems that can be built, by name."""


def systems(*, tiered: bool) -> list[str]:
    """Names of the systems that can be built in tiers, or without."""
    built = ((name, one.in_tiers if tiered else one.build) for name, one in SYSTEMS.items())
    return [name for name, build in built if build is not None]


def options_of(make: Callable[..., Policy]) -> tuple[str, ...]:
    """The options of the policies that `make` makes."""
    hidden = ("history", "stateless_first")
    return tuple(name for name in signature(make).parameters if name not in hidden)


BEST_OF: dict[str, list[Spec]] = {
    HINDSIGHT: [Spec("marconi", (("alpha", alpha),)) for alpha in ALPHAS],
    FORESIGHT: [Spec(name) for name in ORACLES],
}
"""Names that stand for whichever of several systems finds most."""


def parse_spec(text: str) -> Spec:
    """The system that `text` names, with its options. Raises ValueError, in one sentence that lists
    what there is.
    """
    name, _, rest = text.partition(":")
    options_by_name = {policy: options_of(make) for policy, make in POLICIES.items()}
    options_by_name |= {known: system.options for known, system in SYSTEMS.items()}
    if name not in options_by_name and name not in BEST_OF:
        there = ", ".join([*(SYSTEMS or POLICIES), *BEST_OF])
        raise ValueError(f"unknown policy {name!r}; known are {there}")
    accepted = options_by_name.get(name, ())
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
    spec = Spec(name, tuple(options))
    if name in POLICIES and options:
        make_policy(name, **dict(options))
    return spec


def build_system(spec: Spec, setting: Setting) -> Any:
    """The cache of the system that `spec` names, which must be in `SYSTEMS`. Raises ValueError if
    it knows no tiers where there are some, or nothing else where there are none.
    """
    system, tiered = SYSTEMS[spec.name], setting.tiers is not None
    build = system.in_tiers if tiered else system.build
    if build is None:
        where = "in" if tiered else "without"
        able = ", ".join(systems(tiered=tiered))
        raise ValueError(f"policy {spec.name!r} is not replayed {where} tiers; these are: {able}")
    return build(setting, **dict(spec.options))


def best_of(spec: Spec) -> list[Spec]:
    """`spec` alone, or the systems that the best is chosen from."""
    return BEST_OF.get(spec.name, [spec])
