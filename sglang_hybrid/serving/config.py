"""Our settings: one table of their names, types, defaults, checks and help.

The launcher puts them into the environment, where every process that SGLang starts finds them; so
can anyone who starts an `sglang.Engine`: SGLANG_HYBRID_EVICTION=marconi is --hybrid-eviction
marconi.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import lru_cache
from typing import Any

from sglang_hybrid.core.costs.cost import MIN_BRANCH_TOKENS
from sglang_hybrid.core.options import MOST_PROCESSES, integer
from sglang_hybrid.core.records.pin import DEFAULT_SHARE, MOST_OF_ALL
from sglang_hybrid.serving.flag_values import (
    DEFAULT_ALPHA,
    EXACT_COPIES,
    NO_CODED_ENTRIES,
    ORDER_OPTIONS,
    TINY_MODELS,
    TRAINED,
    Admission,
    ClientLines,
    CodecChoice,
    Eviction,
    FullHit,
    Guard,
    Memory,
    NativeKernels,
    Schedule,
    Ui,
    codec,
    count,
    eviction,
    flag_name,
    hosts,
    links,
    nonnegative,
    one_of,
    order,
    share,
    tenants,
    variable_name,
)
from sglang_hybrid.serving.flags import VARIABLE, add_flags, flag, variable

BACKEND = "hybrid"
"""Our name for SGLang's --radix-cache-backend."""

CPU_ATTENTION = "hybrid_cpu"
"""Our name for SGLang's --attention-backend, on the CPU platform."""


@dataclass(frozen=True)
class HybridConfig:
    """The settings beside SGLang's own flags, a row each: a flag, a variable of the environment, or
    a part of what the flag above it says.
    """

    # Admission and eviction
    hybrid_eviction: Eviction = flag(
        Eviction.AUTO,
        "what is evicted first when KV or state slots run short: the node that saves the "
        "fewest FLOPs per byte, weighed by recency (marconi; marconi:ALPHA sets the weight of "
        f"FLOPs, 0 is recency alone, {DEFAULT_ALPHA:g} without a tuner) or by how likely it is "
        "used again (reuse), the node whose own last hit is longest ago (lru), what SGLang itself "
        "would evict (sglang-lru; no decisions are recorded), the node that is cheapest to replay "
        "(seglen), greedy-dual size frequency (gdsf); auto is reuse, and with "
        "--hybrid-tuner-workers switches to what finds more in a replay of the server's own "
        "traffic",
        metavar="POLICY",
        read=eviction,
    )
    hybrid_alpha: float | None = None
    hybrid_admission: Admission = flag(
        Admission.JUDICIOUS,
        "which states are kept: exact ones where prompts branch, at the start of the last message, "
        "at the end of a prompt and of an answer, each if it is worth more than what it pushes "
        "out (judicious); every one that SGLang tracks (all)",
    )
    hybrid_memory: Memory = flag(
        Memory.AUTO,
        "how KV and states divide the device's memory: they share one budget of bytes, which is "
        "what SGLang's two pools (--max-total-tokens and --max-mamba-cache-size, or their "
        "defaults) would take together, and what is worth least makes room for either (one); each "
        "has its pool, and lends the other nothing (split); auto is one on the CPU platform for a "
        "hybrid model with planned checkpoints, where SGLang's unified pool can be, and on a GPU "
        "that scripts/gpu_check.sh found fit for it; elsewhere each has its pool, and they lend "
        "each other room where they can",
    )
    hybrid_pin_share: float = flag(
        DEFAULT_SHARE,
        "share of the device's memory that what one payer pins may take: of KV and of states; all "
        f"payers together pin {MOST_OF_ALL:g} of it at most, and with 0 nothing is pinned",
        metavar="SHARE",
        read=share,
    )
    hybrid_full_hit: FullHit = flag(
        FullHit.OFF,
        "answer a prompt that was asked twice without a forward when it comes again: the state "
        "behind its last token is kept, and the hidden state from which its first token is sampled",
    )
    # Order of requests
    hybrid_schedule: Schedule = flag(
        Schedule.SGLANG,
        "in which order waiting requests run: of those at the front of the queue, first "
        "those of whose prefill least remains (window), or those that reuse something, then "
        "those that reuse nothing, then those that must load (car); as they came (fcfs), or "
        "the longest hit first (lpm), as in SGLang; sglang is what --schedule-policy says. "
        "window and car take options, as in window:size=128,overtaken=64,seconds=60: how many "
        "requests they choose from, and how many may overtake one, and for how long it may wait, "
        "before it is overtaken no more",
        metavar="ORDER",
        read=order,
    )
    hybrid_schedule_window: int = 128
    hybrid_schedule_overtaken: int = 64
    hybrid_schedule_seconds: float = 60.0
    # Learning from traffic, and prewarming
    hybrid_tuner_workers: int = flag(
        0,
        "processes that replay recent requests under other policies: now and then, at the lowest "
        "priority, for --hybrid-eviction auto, or under other alphas, for marconi; 0 turns that "
        "off",
        metavar="N",
        read=integer(0, MOST_PROCESSES),
    )
    hybrid_record: str = flag(
        "",
        "write every finished request there, for the replay: its token ids and arrival (python -m "
        "sglang_hybrid.replay)",
        metavar="FILE",
    )
    hybrid_prewarm: str = flag(
        "",
        "compute the prompts in this file when the server has started: one JSON object a "
        "line, with messages, text, input_ids or pml as in a request, or with schema and "
        "budget_mb",
        metavar="FILE",
    )
    # Memory and disk below the device
    hybrid_disk_folder: str = flag(
        "",
        "where --hicache-storage-backend file keeps KV and states: in a folder "
        "sglang_hybrid-tier of its own; by default what SGLang's own settings name, or "
        "sglang_hybrid/tiers in the user's folder of caches; mooncake://HOST:PORT is a store "
        "that several servers share",
        metavar="DIR",
    )
    hybrid_disk_mb: int = flag(
        0,
        "MiB that this folder may take: shared by all ranks; 0 is all but 5%% of the disk",
        metavar="N",
        read=count,
    )
    hybrid_warm_start: int = flag(
        0,
        "MiB of what the disk holds that a starting server reads into memory: per rank, while it "
        "already serves, what is expected to be used most often first",
        metavar="MB",
        read=count,
    )
    hybrid_tier_codec: CodecChoice = flag(
        EXACT_COPIES,
        "how copies of KV and states are stored below the device: as they are (exact), as "
        "bfloat16 (bf16), or as int8 with a scale for each row (int8); hits on copies that are not "
        "exact say so. auto:LOGPROB measures at the start how far each layer's smaller copies "
        "move log probabilities, and gives each the smallest codec within this bound",
        metavar="CODEC",
        read=codec(EXACT_COPIES.codec),
    )
    hybrid_device_codec: CodecChoice = flag(
        NO_CODED_ENTRIES,
        "how KV and states that would be evicted are kept on the device instead: not at all (off), "
        "or in a half or a quarter of their bytes, as bfloat16 (bf16) or as int8 with a scale for "
        "each row (int8); a hit decodes them, and says that it is not exact. auto:LOGPROB measures "
        "at the start how far smaller KV and smaller states move log probabilities, and takes the "
        "smallest codec within this bound for each of both",
        metavar="CODEC",
        read=codec(NO_CODED_ENTRIES.codec),
    )
    # Tenants
    hybrid_tenants: str = flag(
        "",
        "what makes tenants, and whether one is required: beside extra_key, cache_salt and the "
        "header X-Hybrid-Tenant, the API key that a client sends (api-key); and whether a request "
        "without a tenant is refused (required); or both, as api-key,required",
        metavar="WORDS",
        read=tenants,
    )
    # For operators
    hybrid_hosts: str = flag(
        "",
        "names by which this server may be asked at /hybrid_cache/: with commas between them, "
        "beside localhost, the address that it is bound to and this machine's name; a request with "
        "another name in its header Host is refused, since a web page may have made it",
        metavar="NAMES",
        read=hosts,
    )
    hybrid_ui: Ui = flag(
        Ui.OFF,
        "a live page of the cache at /hybrid_cache/: it takes the admin key if one is set, and "
        "shows lengths and hashes of what was sent (lengths), or its text, too (text)",
    )
    # The model of a server without --model-path
    hybrid_default_model: str = flag(
        TRAINED,
        "the embedded tiny model that is served without --model-path: trained, which "
        "answers questions about Python's standard library, or one of random weights: "
        f"{', '.join(TINY_MODELS)}",
        metavar="MODEL",
        choices=[TRAINED, *TINY_MODELS],
    )
    # Variables of the environment that few will set: on no trace does another value gain a point
    # (docs/tried.md), or only measurements set it, or few want another value.
    hybrid_min_branch_tokens: int = variable(MIN_BRANCH_TOKENS, count)
    hybrid_slots_per_request: int = variable(0, count)
    hybrid_history_mb: int = variable(64, count)
    hybrid_answers_mb: int = variable(64, count)
    hybrid_drain_seconds: float = variable(20.0, nonnegative)
    hybrid_tuner_window: int = variable(0, count)
    hybrid_offload_watermark: float = variable(0.6, share)
    hybrid_simulate_bandwidth: str = variable("", links)
    hybrid_native_kernels: NativeKernels = variable(NativeKernels.AUTO, one_of(NativeKernels))
    hybrid_client_lines: ClientLines = variable(ClientLines.DROP, one_of(ClientLines))
    hybrid_guard: Guard = variable(Guard.ON, one_of(Guard))

    @property
    def policy(self) -> Eviction:
        """The policy in force, at first if it is tuned: `auto` is the reuse index, or Marconi if an
        alpha is given.
        """
        if self.hybrid_eviction is not Eviction.AUTO:
            return self.hybrid_eviction
        return Eviction.REUSE if self.hybrid_alpha is None else Eviction.MARCONI

    @property
    def alpha(self) -> float | None:
        """Marconi's alpha, None under another policy; tuned, it starts at 0 as in the paper."""
        if self.policy is not Eviction.MARCONI:
            return None
        if self.hybrid_alpha is None:
            return 0.0 if self.is_tuned else DEFAULT_ALPHA
        return self.hybrid_alpha

    @property
    def smaller_copies(self) -> str:
        """The flag that asks for copies that may not be exact, with its value; "" without one."""
        chosen = self.hybrid_tier_codec
        return f"--hybrid-tier-codec {chosen}" if chosen.may_change else ""

    @property
    def is_judicious(self) -> bool:
        """True if states are kept only where they are likely to be used again."""
        return self.hybrid_admission is Admission.JUDICIOUS

    @property
    def is_pinned(self) -> bool:
        """True if a policy was asked for by name or by its alpha."""
        return self.hybrid_eviction is not Eviction.AUTO or self.hybrid_alpha is not None

    @property
    def pinning_flag(self) -> str:
        """The flag that pins a policy so that no other is tried, with its value; "" without one."""
        if self.hybrid_alpha is not None:
            return f"--hybrid-eviction marconi:{self.hybrid_alpha:g}"
        tunable = self.hybrid_eviction in (Eviction.AUTO, Eviction.MARCONI)
        return "" if tunable else f"--hybrid-eviction {self.hybrid_eviction.value}"

    @property
    def is_tuned(self) -> bool:
        """True if other policies are tried on the traffic."""
        return not self.pinning_flag and self.hybrid_tuner_workers > 0

    @property
    def remembers_requests(self) -> bool:
        """True if the tuner, a recorded file or the page is told of requests that ended."""
        return self.is_tuned or bool(self.hybrid_record) or self.hybrid_ui is not Ui.OFF

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser, *, brief: bool = False) -> None:
        """Add our flags to `parser`, in a group of their own. brief: one line of help for each."""
        add_flags(parser, fields(HybridConfig), brief=brief)

    @classmethod
    def split(
        cls, argv: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> tuple[HybridConfig, list[str]]:
        """Our part of a command line that has been parsed already, and what is left for SGLang.
        What is no flag is read from the environment. Raises ValueError for flags that do not fit
        together.
        """
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        cls.add_flags(parser)
        namespace, rest = parser.parse_known_args(list(argv))
        variables = vars(_read(_as_flags(environment, VARIABLES)))
        given = {name: variables[name] for name in VARIABLES if name in variables}
        return cls._from(given | vars(namespace)), rest

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> HybridConfig:
        """The settings of this process: of its variables, defaults elsewhere. The same object as
        long as they say the same. Raises ValueError for a bad value.
        """
        names = (field.name for field in fields(cls) if field.name not in PARTS)
        return _parsed(_as_flags(environment, names))

    def to_environment(self, environment: MutableMapping[str, str] | None = None) -> None:
        """Put every setting where `from_environment` finds it."""
        environment = os.environ if environment is None else environment
        environment.update({variable_name(name): text for name, text in self._texts().items()})

    def overrides(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Variables of `environment` that say something else than these settings, and the flags
        that would say it.
        """
        ours = {name: text for name, text in self._texts().items() if name not in VARIABLES}
        return {
            variable_name(name): flag_name(name)
            for name, text in ours.items()
            if environment.get(variable_name(name), text) != text
        }

    def changed(self) -> dict[str, str]:
        """The settings that are not the defaults, by the names of their fields, as flags or as
        variables that say them.
        """
        ours, default = self._texts(), HybridConfig()._texts()
        return {
            name: f"{variable_name(name)}={text}"
            if name in VARIABLES
            else f"{flag_name(name)} {text}"
            for name, text in ours.items()
            if text != default[name]
        }

    def _texts(self) -> dict[str, str]:
        """The texts of flags and variables, as `_from` reads them."""
        texts = {}
        for field in fields(self):
            value = getattr(self, field.name)
            texts[field.name] = value.value if isinstance(value, Enum) else str(value)
        if self.hybrid_alpha is not None:
            texts["hybrid_eviction"] = f"{Eviction.MARCONI.value}:{self.hybrid_alpha}"
        if self.hybrid_schedule.is_ours:
            options = [f"{key}={texts[field]}" for key, (field, _) in ORDER_OPTIONS.items()]
            texts["hybrid_schedule"] += ":" + ",".join(options)
        return {name: text for name, text in texts.items() if name not in PARTS}

    @classmethod
    def _from(cls, values: Mapping[str, Any]) -> HybridConfig:
        """The settings of values by flag; a value of several settings has them by their fields."""
        known: dict[str, Any] = {}
        for name, value in values.items():
            known |= value if isinstance(value, dict) else {name: value}
        defaults = {field.name: field.default for field in fields(cls)}
        for name, default in defaults.items():
            if isinstance(default, Enum) and name in known:
                known[name] = type(default)(known[name])
        config = cls(**{name: value for name, value in known.items() if name in defaults})
        if config.hybrid_schedule_window < 1:
            raise ValueError("a window of 0 requests leaves nothing to choose; give 1 or more.")
        return config


VARIABLES: dict[str, Callable[[str], Any]] = {
    setting.name: setting.metadata[VARIABLE]
    for setting in fields(HybridConfig)
    if VARIABLE in setting.metadata
}
"""The readers of settings that are variables and no flags, by their names."""

PARTS = {setting.name for setting in fields(HybridConfig) if not setting.metadata}
"""Settings that the value of another flag sets, as `--hybrid-eviction marconi:0.7`."""


def _as_flags(environment: Mapping[str, str] | None, names: Iterable[str]) -> tuple[str, ...]:
    """The variables of these fields as flags with their values."""
    environment = os.environ if environment is None else environment
    said = ((flag_name(name), environment.get(variable_name(name))) for name in names)
    return tuple(word for flag, text in said if text is not None for word in (flag, text))


@lru_cache(maxsize=1)
def _parsed(argv: tuple[str, ...]) -> HybridConfig:
    return HybridConfig._from(vars(_read(argv)))


def _read(argv: Sequence[str]) -> argparse.Namespace:
    """The values of variables that are given as flags. Raises ValueError."""
    parser = _Raising(add_help=False)
    HybridConfig.add_flags(parser)
    for name, read in VARIABLES.items():
        parser.add_argument(flag_name(name), type=read, default=argparse.SUPPRESS)
    return parser.parse_args(argv)


class _Raising(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(f"sglang_hybrid: {message} (from the environment)")
