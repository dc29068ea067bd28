"""The command line of `python -m sglang_hybrid.replay`: its options, and what they mean."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from sglang_hybrid.core.costs.cost import MIN_BRANCH_TOKENS, CostModel
from sglang_hybrid.core.named_files import read_json
from sglang_hybrid.core.options import MOST_PROCESSES, MOST_SECONDS, integer, number, port, read_by
from sglang_hybrid.core.programs import Parser, UsageError
from sglang_hybrid.core.sentences import escape, quote
from sglang_hybrid.core.server_settings import Budget, Serving, Split
from sglang_hybrid.core.specs import Spec
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.core.victims.eviction import POLICIES
from sglang_hybrid.extensions.lab.runner import Job
from sglang_hybrid.extensions.lab.simulation.device_codec import NUMBER_BYTES
from sglang_hybrid.extensions.lab.simulation.prefill_time import (
    PAPER,
    PrefillTime,
    at_papers_rate,
)
from sglang_hybrid.extensions.lab.simulation.replicas import ROUTERS
from sglang_hybrid.extensions.lab.simulation.shared_store import StoreBudget
from sglang_hybrid.extensions.lab.simulation.sizes import parse_bytes
from sglang_hybrid.extensions.lab.simulation.system_names import (
    BEST_OF,
    FORESIGHT,
    ORACLES,
    SYSTEMS,
    parse_spec,
)
from sglang_hybrid.extensions.lab.simulation.tiers.tier_budgets import (
    EXAMPLE,
    CopyCodec,
    TierBudgets,
)
from sglang_hybrid.extensions.lab.simulation.traces.arrivals import Azure, Draw
from sglang_hybrid.extensions.lab.simulation.traces.declared_hints import DRAWN, with_hints
from sglang_hybrid.extensions.lab.simulation.traces.declared_hints import KINDS as HINTS
from sglang_hybrid.extensions.lab.simulation.traces.formats import (
    FORMATS,
    OF_FORMATS,
    Format,
    read_trace,
    recognise,
)
from sglang_hybrid.extensions.lab.simulation.traces.generators import (
    KINDS,
    WORKFLOW,
    generate,
    traffic,
)
from sglang_hybrid.extensions.lab.simulation.traces.lines import Reading, Skipped
from sglang_hybrid.extensions.lab.simulation.tuner.tuned import SYSTEMS as TUNED
from sglang_hybrid.extensions.lab.systems import smallest_budget

ONE_MEMORY = "one"
TIER_POLICIES = "hicache,lru,reuse,oracle,unbounded"
DEFAULT_POLICIES = "none,vllm+,sglang+,sglang,lru,marconi-best,reuse,oracle,unbounded"
REPLICATED_POLICIES = "sglang,lru,reuse"
WITHOUT_TREES = ("none", "vllm+", "vllm", *TUNED)

MOST_SESSIONS = 100_000
MOST_REPLICAS = 1_000
MOST_SEED = 2**64 - 1
MOST_POOL = 2**48
"""Tokens or slots of a pool."""

PROFILES = {"paper-7b": CostModel.paper_7b}

TRACE, REPLICAS = "a trace", "several --replicas"

NEEDED: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("format", "stitch", "tokenizer"), (TRACE,)),
    **dict.fromkeys(("sessions", "templates", "shared", "turns", "think"), ("--generate",)),
    **dict.fromkeys(("question", "answer", "azure"), ("--generate",)),
    "skip_bad": (TRACE, "--azure"),
    "to": ("--record",),
    **dict.fromkeys(("chunk", "grid", "device_codec"), ("--rules served",)),
    **dict.fromkeys(("routing", "late", "store"), (REPLICAS,)),
    "metrics_port": ("--follow",),
}
"""Options that have an effect only where one of these is there."""

USELESS: Final[dict[str, tuple[str, ...]]] = {
    "--azure": ("session_rate",),
    **{f"--generate {kind} --azure": ("question", "answer") for kind in KINDS if kind != WORKFLOW},
    "--record": (
        *("cache", "pools", "tiers", "model", "profile", "policy", "min_branch_tokens", "rules"),
        *("chunk", "grid", "device_codec", "replicas", "routing", "late", "store"),
        *("instant", "prefill", "json", "report", "workers", "follow", "metrics_port"),
    ),
    **{f"--to {name}": ("hints",) for name in FORMATS if name != "recorded"},
    "--follow": (
        *("generate", "limit", "hints", "format", "skip_bad"),
        *("prefill", "json", "report", "workers"),
    ),
    "--tiers": ("cache", "pools"),
    "--instant": ("prefill",),
}
"""Options that have no effect where this is there."""


def parser() -> argparse.ArgumentParser:
    command = Parser(
        prog="python -m sglang_hybrid.replay",
        description="Replays a request trace through the server's cache, without a model. `avmp` "
        "in the place of a trace compares memory of running requests, as the AVMP paper does.",
    )
    add = command.add_argument_group("traffic").add_argument
    add("trace", nargs="?", type=Path, help="a trace, gzip or not; the format is recognised")
    add("--format", metavar="NAME", choices=FORMATS, help=", ".join(FORMATS))
    add("--limit", type=integer(1), help="only the N requests that arrive first")
    add("--max-input", type=integer(1), help="leave out Mooncake's longer prompts")
    add("--stitch", action="store_true", help="fill Mooncake's answers in from later prompts")
    add("--skip-bad", action="store_true", help="count bad lines and go on")
    add("--tokenizer", metavar="DIR", help="a model's directory, for conversations of text")
    add("--generate", metavar="KIND", choices=KINDS, help=", ".join(KINDS))
    seed = integer(0, MOST_SEED)
    add("--seed", type=seed, default=0, help="of generated traffic and of arrivals")
    add("--sessions", type=integer(1, MOST_SESSIONS))
    add("--session-rate", type=number(1e-6, 1e6), help="sessions a second")
    templates = integer(0, MOST_SESSIONS)
    add("--templates", type=templates, help="different shared beginnings, 0: each session its own")
    for name in ("shared", "turns", "question", "answer", "think"):
        about = "seconds" if name == "think" else "requests" if name == "turns" else "tokens"
        add(
            f"--{name}",
            type=read_by(Draw.parse),
            metavar="DIST",
            help=f"{about}: const:N, exp:MEAN, lognormal:MEDIAN:SIGMA",
        )
    add(
        "--azure",
        type=Path,
        metavar="CSV",
        help="arrivals and lengths of generated traffic; of workflows arrivals",
    )
    kinds = ", ".join(HINTS)
    add("--hints", metavar="KIND", choices=HINTS, help=f"add what clients say: {kinds}")
    add("--record", type=Path, metavar="FILE", help="write the trace and stop")
    writable = [known.name for known in FORMATS.values() if known.write]
    add("--to", default="recorded", choices=writable, metavar="NAME", help="format of --record")
    add = command.add_argument_group("cache").add_argument
    sizes = read_by(_sizes)
    add("--cache", type=sizes, help="sizes, as 5GB,10GB: one budget for KV and states")
    add(
        "--pools",
        type=read_by(_pools),
        help="two pools, as TOKENS:SLOTS,TOKENS:SLOTS, which lend each other room with --rules "
        "served; one, with --rules served and --cache: KV and states share all bytes",
    )
    add(
        "--tiers",
        type=read_by(TierBudgets.parse),
        help=f"device, host and disk instead of --cache, as {EXAMPLE}; policies are then those "
        f"that know tiers, by default {TIER_POLICIES}",
    )
    add("--model", type=Path, metavar="PATH", help="a config.json, or the directory it is in")
    add("--profile", choices=PROFILES, help="a cost profile instead of a model's (paper-7b)")
    add("--policy", type=read_by(specs), help=f"{', '.join([*SYSTEMS, *BEST_OF])}")
    add("--min-branch-tokens", type=integer(0), default=MIN_BRANCH_TOKENS)
    add(
        "--rules",
        choices=["paper", "served"],
        default="paper",
        help="paper: its admission, and the cache holds what is cached; served: what the server "
        "plans and hits, with room for running requests, in two pools, into which --cache is split "
        "as the server splits its memory; `sglang` splits as SGLang does (%(default)s)",
    )
    add("--chunk", type=integer(1), help="served: prompt tokens per forward (8192)")
    codecs = [codec.value for codec in NUMBER_BYTES]
    add(
        "--device-codec",
        choices=codecs,
        help="served: our policies once more, with what they would evict kept coded on the device "
        "(%(choices)s)",
    )
    add("--grid", type=integer(1), help="served: tokens between SGLang's own states (64)")
    replicas = integer(1, MOST_REPLICAS)
    add("--replicas", type=replicas, default=1, metavar="N", help="servers, each with such a cache")
    add(
        "--routing",
        type=read_by(_routers),
        metavar="NAMES",
        help=f"how requests are sent to replicas; all by default: {', '.join(ROUTERS)}",
    )
    add(
        "--late",
        type=number(0, MOST_SECONDS),
        default=0.0,
        metavar="SECONDS",
        help="by_states hears so late of a state that came or went (%(default)s)",
    )
    add(
        "--store",
        type=read_by(StoreBudget.parse),
        metavar="SIZE@RATE",
        help="what all replicas share, as 2TB@3GB/s for each",
    )
    add = command.add_argument_group("time").add_argument
    add("--instant", action="store_true", help="serve each request at once, as the paper does")
    add("--prefill", type=Path, metavar="JSON", help="times that scripts/fit_prefill.py measured")
    add = command.add_argument_group("output").add_argument
    add("--json", type=Path, metavar="FILE", help="write the summary; - for stdout")
    add("--report", type=Path, metavar="DIR", help="write a page with plots")
    add("--workers", type=integer(1, MOST_PROCESSES), default=1, help="processes")
    add = command.add_argument_group("live traffic").add_argument
    add(
        "--follow",
        action="store_true",
        help="the trace is what a server writes with --hybrid-record: go on with what it writes, "
        "request after request, until Ctrl-C; a line each day",
    )
    add(
        "--metrics-port",
        type=port,
        metavar="PORT",
        help="--follow: tokens replayed and hit by policy, for Prometheus on this machine",
    )
    return command


def name_of(options: argparse.Namespace) -> str:
    """A name for what is replayed. Raises UsageError."""
    if (options.trace is None) == (options.generate is None):
        raise UsageError("give a trace or --generate KIND, one of them")
    return escape(options.generate or options.trace.name.split(".")[0])


def given(options: argparse.Namespace) -> set[str]:
    """Names of the options that have another value than by default."""
    usual = vars(parser().parse_args([]))
    return {name for name, value in vars(options).items() if value != usual[name]}


def reject_useless_options(options: argparse.Namespace) -> None:
    """Raises UsageError for an option that would do nothing beside the others."""
    named = given(options)
    there = {_flag(name) for name in named}
    there |= {f"--rules {options.rules}", f"--to {options.to}"}
    if options.trace is not None:
        there.add(TRACE)
    if options.replicas > 1:
        there.add(REPLICAS)
    if options.azure is not None:
        there.add(f"--generate {options.generate} --azure")
    for name, needed in NEEDED.items():
        if name in named and not there.intersection(needed):
            raise UsageError(f"{_flag(name)} is for {' or '.join(needed)} only")
    for beside, useless in USELESS.items():
        for name in useless:
            if beside in there and name in named:
                raise UsageError(f"{beside} does not go with {_flag(name)}, which would do nothing")


def reject_useless_reading(options: argparse.Namespace, how: Format) -> None:
    """Raises UsageError for an option of reading that this format has no use for."""
    drawn = {"seed"} if options.hints in DRAWN else set()
    useless = given(options) - drawn - {*how.options}
    for name in OF_FORMATS:
        if name in useless:
            raise UsageError(f"{_flag(name)} does nothing with a trace in format {how.name}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def traffic_of(options: argparse.Namespace, console: Console) -> Sequence[Request]:
    """The requests. Raises UsageError, and FileError for a trace that cannot be read."""
    skipped = Skipped(options.skip_bad)
    if options.generate is None:
        how = recognise(options.trace) if options.format is None else FORMATS[options.format]
        reject_useless_reading(options, how)
        rate = 1.0 if options.session_rate is None else options.session_rate
        reading = Reading(
            options.limit,
            options.max_input,
            options.tokenizer,
            rate,
            options.seed,
            skipped,
            options.stitch,
        )
        requests = read_trace(options.trace, reading, how.name)
    else:
        names = ("shared", "turns", "question", "answer", "think")
        draws = {name: getattr(options, name) for name in names}
        made = traffic(
            options.generate,
            sessions=options.sessions,
            session_rate=options.session_rate,
            templates=options.templates,
            max_input=options.max_input,
            azure=None if options.azure is None else Azure.read(options.azure, skipped=skipped),
            **draws,
        )
        requests = generate(options.generate, made, options.seed)[: options.limit]
        if not requests:
            raise UsageError("no request was generated: every prompt is longer than --max-input")
    if skipped.count:
        console.print(f"bad lines skipped: {skipped.count:,}")
    if options.hints is not None:
        requests = with_hints(requests, options.hints, options.seed)
    return requests


def jobs_of(options: argparse.Namespace, trace: str) -> list[Job]:
    """The jobs to be replayed of `trace`: every policy with every size of the cache.

    Raises UsageError for options that do not go together, and FileError.
    """
    cost = _cost(options)
    tiers = _tiers(options, cost)
    budgets = _budgets(options, cost) if tiers is None else [None]
    policies = options.policy or specs(_default_policies(options))
    time = _time(options, cost)
    serving = _serving(options)
    routings = _routings(options, policies)
    least = options.min_branch_tokens
    jobs = [
        Job(
            spec,
            trace,
            cost,
            budget,
            time,
            least,
            serving,
            tiers,
            losses=True,
            replicas=options.replicas,
            routing=routing,
            late=options.late,
            store=options.store,
        )
        for budget in budgets
        for spec in policies
        for routing in routings
    ]
    if options.device_codec is not None and not any(spec.name in POLICIES for spec in policies):
        raise UsageError(f"--device-codec is for these policies only: {', '.join(POLICIES)}")
    return [each for job in jobs for each in (job, *_coded(job, options))]


def _coded(job: Job, options: argparse.Namespace) -> list[Job]:
    """`job` with entries that are kept coded, if that is asked for and the policy is one of
    ours.
    """
    if options.device_codec is None or job.spec.name not in POLICIES:
        return []
    return [replace(job, device_codec=CopyCodec(options.device_codec))]


def _routings(options: argparse.Namespace, specs: Sequence[Spec]) -> list[str]:
    """Names of routers, or an empty one for a single server. Raises UsageError for what is not
    replayed behind a router.
    """
    if options.replicas == 1:
        return [""]
    routings = list(ROUTERS) if options.routing is None else options.routing
    if options.late and "by_states" not in routings:
        raise UsageError("--late is for --routing by_states only")
    if (options.late or options.store) and any(spec.name in WITHOUT_TREES for spec in specs):
        raise UsageError(f"neither --late nor --store is for {', '.join(WITHOUT_TREES)}")
    if options.instant:
        raise UsageError("--instant has no queues to route by: leave it out with --replicas")
    for name in ("tiers", "report"):
        if getattr(options, name) is not None:
            raise UsageError(f"--{name} is for one server: leave it out with --replicas")
    for spec in specs:
        if spec.name in (*ORACLES, FORESIGHT):
            raise UsageError(
                f"{spec.name} knows the future of one server: leave it out with --replicas"
            )
    return routings


def _default_policies(options: argparse.Namespace) -> str:
    if options.replicas > 1:
        return REPLICATED_POLICIES
    return DEFAULT_POLICIES if options.tiers is None else TIER_POLICIES


def _time(options: argparse.Namespace, cost: CostModel) -> PrefillTime | None:
    """The time that prefills take; None: each request is served at once."""
    if options.prefill is None and not options.instant:
        return PAPER if options.model is None else at_papers_rate(cost)
    return None if options.prefill is None else PrefillTime.read(options.prefill)


def _cost(options: argparse.Namespace) -> CostModel:
    if options.model is None:
        return PROFILES[options.profile or "paper-7b"]()
    if options.profile is not None:
        raise UsageError("give --model or --profile, not both")
    path = options.model / "config.json" if options.model.is_dir() else options.model
    return CostModel.from_config(read_json(path, dict[str, Any], "model's config"))


def _serving(options: argparse.Namespace) -> Serving | None:
    if options.rules == "paper":
        if options.pools == ONE_MEMORY:
            raise UsageError(
                "--pools one is for --rules served; by the paper's rules it is so anyway"
            )
        return None
    steps = {name: getattr(options, name) for name in ("chunk", "grid")}
    steps = {name: value for name, value in steps.items() if value is not None}
    return Serving(**steps, one_memory=options.pools == ONE_MEMORY)


def _budgets(options: argparse.Namespace, cost: CostModel) -> Sequence[Budget]:
    """Raises UsageError for one that holds less than a state and a token."""
    if options.pools == ONE_MEMORY and options.cache is None:
        raise UsageError("--pools one shares the bytes of --cache; give that too")
    if options.pools != ONE_MEMORY and (options.cache is None) == (options.pools is None):
        raise UsageError("give --cache or --pools, one of them")
    least = smallest_budget(cost)
    if options.cache is not None:
        for size in options.cache:
            if size < least:
                raise UsageError(
                    f"a cache of {size:,} bytes holds no state: one state and one token of this "
                    f"model are {least:,} bytes"
                )
        sizes: list[int] = options.cache
        return sizes
    pools: list[Split] = options.pools
    if cost.state_bytes and not all(pool.slots for pool in pools):
        raise UsageError("pools without slots hold no state: they need 1:1 at least")
    if options.rules == "served":
        return [pool.lending(cost) for pool in pools]
    return pools


def _sizes(text: str) -> list[int]:
    return [parse_bytes(size) for size in text.split(",")]


def _pools(text: str) -> list[Split] | str:
    """Pools from a list, or the word for one memory."""
    if text == ONE_MEMORY:
        return text
    count = integer(1, MOST_POOL), integer(0, MOST_POOL)
    pools = []
    for pool in text.split(","):
        parts = pool.split(":")
        try:
            tokens, slots = (read(part) for read, part in zip(count, parts, strict=True))
        except (ValueError, argparse.ArgumentTypeError):
            raise ValueError(f"pools are written as TOKENS:SLOTS, not {quote(pool)}") from None
        pools.append(Split(tokens, slots))
    return pools


def _routers(text: str) -> list[str]:
    routings = text.split(",")
    for routing in routings:
        if routing not in ROUTERS:
            raise ValueError(f"unknown routing {quote(routing)}; known are {', '.join(ROUTERS)}")
    return routings


def _tiers(options: argparse.Namespace, cost: CostModel) -> TierBudgets | None:
    """Raises UsageError for what tiers cannot be combined with, or a device that holds no state."""
    if options.tiers is None:
        return None
    if options.rules == "served":
        raise UsageError("tiers are replayed by the paper's rules: leave out --rules served")
    tiers: TierBudgets = options.tiers
    if tiers.sizes[0] < smallest_budget(cost):
        raise UsageError(
            f"a device of {tiers.sizes[0]:,} bytes holds no state: one state and one token of this "
            f"model are {smallest_budget(cost):,} bytes"
        )
    return tiers


def specs(text: str) -> list[Spec]:
    """Policies from a list; options of one policy are separated by commas too (`tlru:a=1,b=2`)."""
    parts: list[str] = []
    for part in text.split(","):
        if parts and "=" in part and ":" not in part:
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    specs = [parse_spec(part.strip()) for part in parts if part.strip()]
    if not specs:
        raise ValueError("it is empty")
    return list(dict.fromkeys(specs))
