"""Systems of a replay, by name: entered in `simulation/system_names.py`, where they are parsed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sglang_hybrid.core.costs.cost import UNBOUNDED, CostModel
from sglang_hybrid.core.server_settings import Serving, Split
from sglang_hybrid.core.specs import Spec
from sglang_hybrid.core.tiers.rates import Speeds
from sglang_hybrid.core.victims.eviction import POLICIES, Lru, Policy
from sglang_hybrid.extensions.lab.simulation.agent_policies import (
    CacheScout,
    CacheWise,
    Durations,
    Invocations,
    Pbkv,
    Transitions,
)
from sglang_hybrid.extensions.lab.simulation.baselines import (
    SGLANG_RUNNING_STATES,
    ClairvoyantCache,
    NoCache,
    ServedClairvoyant,
    SglangPlus,
    SglangSimulator,
)
from sglang_hybrid.extensions.lab.simulation.block_cache import BlockCache
from sglang_hybrid.extensions.lab.simulation.future import NextUses, Oracle
from sglang_hybrid.extensions.lab.simulation.policies import (
    Density,
    SglangLru,
    TailLru,
    When,
    Whether,
)
from sglang_hybrid.extensions.lab.simulation.rivals import LmCache, TensorRtLlm, VllmCache
from sglang_hybrid.extensions.lab.simulation.server_simulator import ServerSimulator
from sglang_hybrid.extensions.lab.simulation.simulator import Cache, Simulator
from sglang_hybrid.extensions.lab.simulation.system_names import (
    SYSTEMS,
    Setting,
    System,
    build_system,
    options_of,
    parse_spec,
    systems,
)
from sglang_hybrid.extensions.lab.simulation.tiers.hicache import HiCache
from sglang_hybrid.extensions.lab.simulation.tiers.tier_simulator import (
    TieredClairvoyant,
    TieredSimulator,
)
from sglang_hybrid.extensions.lab.simulation.told import (
    Knowledge,
    Told,
    ToldServer,
    ToldTiers,
)
from sglang_hybrid.extensions.lab.simulation.tuner.tuned import SYSTEMS as TUNED

__all__ = [
    "SYSTEMS",
    "Setting",
    "Spec",
    "build_system",
    "parse_spec",
    "smallest_budget",
    "systems",
]


def _evicting(make: Callable[..., Policy]) -> System:
    """A simulator with the policy that `make` makes, twice for a split budget; two that learn share
    one history. SGLang's own order is known for two pools only; elsewhere it is LRU.
    """

    def build(setting: Setting, **options: Any) -> Cache:
        if setting.as_served:
            two_pools = isinstance(setting.memory, Split)
            memory = setting.apart if two_pools and make is SglangLru else setting.memory
            kv_policy, state_policy = _policies(make if two_pools else alone, options)
            return ServerSimulator(
                setting.cost,
                memory,
                kv_policy,
                state_policy,
                setting.min_branch_tokens,
                setting.serving,
            )
        policy, other = _policies(alone, options)
        return Simulator(setting.cost, setting.budget, policy, setting.min_branch_tokens, other)

    def in_tiers(setting: Setting, **options: Any) -> Cache:
        return TieredSimulator(
            setting.cost,
            setting.tiers,
            _speeds(setting),
            _policies(alone, options, len(setting.tiers.present)),
            setting.min_branch_tokens,
        )

    alone = Lru if make is SglangLru else make
    return System(build, options_of(make), in_tiers)


def _with_knowledge(
    learn: Callable[..., Knowledge], make: Callable[..., Policy], *, in_tiers: bool = True
) -> System:
    """A simulator whose policies, which `make` makes, are told what `learn` makes of a setting."""

    def build(setting: Setting) -> Cache:
        knowledge = learn(setting)
        first, other = _policies(partial(make, knowledge), {})
        least = setting.min_branch_tokens
        cache: Told
        if setting.as_served:
            served = setting.serving
            cache = ToldServer(setting.cost, setting.memory, first, other, least, served)
        else:
            cache = Told(setting.cost, setting.budget, first, least, other)
        cache.knowledge = knowledge
        return cache

    def tiered(setting: Setting) -> Cache:
        knowledge = learn(setting)
        policies = _policies(partial(make, knowledge), {}, len(setting.tiers.present))
        least, speeds = setting.min_branch_tokens, _speeds(setting)
        cache = ToldTiers(setting.cost, setting.tiers, speeds, policies, least)
        cache.knowledge = knowledge
        return cache

    return System(build, (), tiered if in_tiers else None)


def _policies(make: Callable[..., Policy], options: dict[str, Any], count: int = 2) -> list[Policy]:
    """`count` policies; those that learn share one history."""
    first = make(**options)
    if first.history is not None:
        options = {**options, "history": first.history}
    return [first, *(make(**options) for _ in range(count - 1))]


def _speeds(setting: Setting) -> Speeds:
    if setting.speeds is None:
        raise ValueError("tiers need speeds")
    return setting.speeds


def _none(setting: Setting) -> Cache:
    return NoCache()


def _vllm(setting: Setting, block: int = 32) -> Cache:
    with_running = setting.serving is not None
    return BlockCache(setting.cost, setting.budget, int(block), with_running=with_running)


def _served_vllm(setting: Setting, groups: int = 3) -> Cache:
    return VllmCache(setting.cost, setting.budget, int(groups))


def _lmcache(setting: Setting, groups: int = 3) -> Cache:
    return LmCache(setting.cost, setting.tiers, int(groups))


def _tensorrt_llm(setting: Setting, turns: int = 3, offset: int = 2, block: int = 32) -> Cache:
    lengths = [len(request.tokens) for request in setting.requests]
    return TensorRtLlm(
        setting.cost,
        setting.budget,
        sum(lengths) / max(1, len(lengths)),
        int(turns),
        int(offset),
        int(block),
        running_states=None if setting.serving is None else 1,
    )


def _sglang_plus(setting: Setting) -> Cache:
    running_states = None if setting.serving is None else 1
    return SglangPlus(setting.cost, setting.budget, setting.min_branch_tokens, running_states)


def _sglang(
    setting: Setting, grid: int | None = None, chunk: int | None = None, interval: int = 256
) -> Cache:
    if not setting.cost.state_bytes:  # then it is a plain radix cache
        return _sglang_plus(setting)
    served = setting.serving or Serving()
    return SglangSimulator(
        setting.cost,
        setting.budget,
        int(grid or served.grid),
        int(chunk or served.chunk),
        int(interval),
        running_states=None if setting.serving is None else SGLANG_RUNNING_STATES,
    )


def _clairvoyant(setting: Setting, remember: int = 1) -> Cache:
    least = setting.min_branch_tokens
    if setting.as_served:
        if not remember:
            raise ValueError("--rules served has no clairvoyant:remember=0")
        return ServedClairvoyant(
            setting.cost, setting.memory, _oracle(setting), least, setting.serving
        )
    return ClairvoyantCache(setting.cost, setting.budget, _oracle(setting), bool(remember), least)


def _tiered_clairvoyant(setting: Setting, remember: int = 1) -> Cache:
    return TieredClairvoyant(
        setting.cost,
        setting.tiers,
        _speeds(setting),
        _oracle(setting),
        bool(remember),
        setting.min_branch_tokens,
    )


def _hicache(setting: Setting, grid: int = 64, chunk: int = 8_192, interval: int = 256) -> Cache:
    return HiCache(
        setting.cost, setting.tiers, _speeds(setting), int(grid), int(chunk), int(interval)
    )


def _oracle(setting: Setting) -> Oracle:
    """The future requests of `setting`; made once for all settings that share oracles."""
    key = id(setting.requests)
    if key not in setting.oracles:
        setting.oracles[key] = Oracle(setting.requests)
    oracle: Oracle = setting.oracles[key]
    return oracle


def _next_uses(setting: Setting) -> NextUses:
    return NextUses(_oracle(setting))


def _unbounded(setting: Setting) -> Cache:
    if setting.as_served:
        least, endless = setting.min_branch_tokens, Split(UNBOUNDED, UNBOUNDED)
        return ServerSimulator(setting.cost, endless, Lru(), Lru(), least, setting.serving)
    return Simulator(setting.cost, None, Lru(), setting.min_branch_tokens)


SYSTEMS.update(
    {
        "none": System(_none),
        "vllm+": System(_vllm, ("block",)),
        "sglang+": System(_sglang_plus),
        "sglang": System(_sglang, ("grid", "chunk", "interval")),
        **{name: _evicting(make) for name, make in POLICIES.items()},
        "sglang-lru": _evicting(SglangLru),
        "tlru": _evicting(TailLru),
        "density": _evicting(Density),
        "vllm": System(_served_vllm, ("groups",)),
        "tensorrt-llm": System(_tensorrt_llm, ("turns", "offset", "block")),
        "cachescout": _with_knowledge(lambda _: Transitions(), CacheScout, in_tiers=False),
        "pbkv": _with_knowledge(lambda _: Invocations(), Pbkv, in_tiers=False),
        "cachewise": _with_knowledge(lambda _: Durations(), CacheWise, in_tiers=False),
        "lmcache": System(None, ("groups",), _lmcache),
        "hicache": System(None, ("grid", "chunk", "interval"), _hicache),
        "clairvoyant": System(_clairvoyant, ("remember",), _tiered_clairvoyant),
        "whether": _with_knowledge(_next_uses, Whether),
        "when": _with_knowledge(_next_uses, When),
        "unbounded": System(_unbounded, (), _unbounded),
        **TUNED,
    }
)


def smallest_budget(cost: CostModel) -> int:
    """Bytes of one state and one token, less than which nothing can be cached."""
    return cost.state_bytes + cost.kv_bytes_per_token
