"""Our flags: their names, defaults and checks, in one place.

The launcher puts them into the environment, where every process that SGLang starts finds them; so
can anyone who starts an `sglang.Engine`: SGLANG_HYBRID_EVICTION=marconi is --hybrid-eviction
marconi.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from sglang_hybrid.core.admission import MIN_BRANCH_TOKENS
from sglang_hybrid.core.pins import DEFAULT_SHARE, MOST_OF_ALL
from sglang_hybrid.models import ARCHITECTURES
from sglang_hybrid.tiers.links import parse_links

BACKEND = "hybrid"
"""Our name for SGLang's --radix-cache-backend."""

CPU_ATTENTION = "hybrid_cpu"
"""Our name for SGLang's --attention-backend, on the CPU platform."""

TIER_CODECS = ("exact", "bf16", "int8")
"""Names of `sglang_hybrid.tiers.codecs.Codec`, which needs torch."""

GROUP = "sglang_hybrid"
AUTO_ALPHA = "auto"
DEFAULT_ALPHA = 1.0
_PREFIX = "SGLANG_"


class Eviction(Enum):
    """What is evicted first when a pool is full. SGLANG_LRU: SGLang's own order, without our tree
    of records; LRU: the least recently used by our records.
    """

    AUTO = "auto"
    MARCONI = "marconi"
    REUSE = "reuse"
    SGLANG_LRU = "sglang-lru"
    LRU = "lru"
    SEGLEN = "seglen"
    GDSF = "gdsf"


class Admission(Enum):
    """Which positions of a prefill get a checkpoint."""

    JUDICIOUS = "judicious"
    ALL = "all"


class Schedule(Enum):
    """In which order waiting requests run. SGLANG: as --schedule-policy says."""

    SGLANG = "sglang"
    WINDOW = "window"
    CAR = "car"
    FCFS = "fcfs"
    LPM = "lpm"

    @property
    def is_ours(self) -> bool:
        """Whether SGLang does not know it."""
        return self in (Schedule.WINDOW, Schedule.CAR)


class Memory(Enum):
    """Whether KV and states share their bytes."""

    AUTO = "auto"
    ONE = "one"
    SPLIT = "split"


class NativeKernels(Enum):
    """Whether the CPU platform compiles kernels of its own."""

    AUTO = "auto"
    OFF = "off"


def nonnegative(text: str) -> float:
    """A number of 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return value


def alpha(text: str) -> float | None:
    """A number of 0 or more, or None for `auto`."""
    return None if text == AUTO_ALPHA else nonnegative(text)


def count(text: str) -> int:
    """A whole number of 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def share(text: str) -> float:
    """A number of 0 to 1."""
    value = nonnegative(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 to 1")
    return value


def links(text: str) -> str:
    """Bandwidths of tiers as `parse_links` reads them, still as text."""
    try:
        parse_links(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


@dataclass(frozen=True)
class HybridConfig:
    """What `python -m sglang_hybrid.launch_server` takes beside SGLang's own flags."""

    hybrid_eviction: Eviction = Eviction.AUTO
    hybrid_alpha: float | None = None
    hybrid_admission: Admission = Admission.JUDICIOUS
    hybrid_min_branch_tokens: int = MIN_BRANCH_TOKENS
    hybrid_slots_per_request: int = 0
    hybrid_memory: Memory = Memory.AUTO
    hybrid_schedule: Schedule = Schedule.SGLANG
    hybrid_schedule_window: int = 128
    hybrid_schedule_overtaken: int = 64
    hybrid_schedule_seconds: float = 60.0
    hybrid_history_mb: int = 64
    hybrid_answers_mb: int = 64
    hybrid_burst_ms: float = 3.0
    hybrid_drain_seconds: float = 3.0
    hybrid_tuner_workers: int = 0
    hybrid_tuner_window: int = 0
    hybrid_record: str = ""
    hybrid_prewarm: str = ""
    hybrid_pin_share: float = DEFAULT_SHARE
    hybrid_offload_watermark: float = 0.9
    hybrid_simulate_bandwidth: str = ""
    hybrid_native_kernels: NativeKernels = NativeKernels.AUTO
    hybrid_disk_folder: str = ""
    hybrid_disk_mb: int = 0
    hybrid_warm_start: int = 0
    hybrid_tier_codec: str = "exact"
    hybrid_tier_error: float = 0.0
    hybrid_default_model: str = "nemotron-h"

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
            return 0.0 if self.tuned else DEFAULT_ALPHA
        return self.hybrid_alpha

    @property
    def smaller_copies(self) -> str:
        """The flag that asks for copies that may not be exact, with its value; "" without one."""
        if self.hybrid_tier_error:
            return f"--hybrid-tier-error {self.hybrid_tier_error:g}"
        smaller = self.hybrid_tier_codec != TIER_CODECS[0]
        return f"--hybrid-tier-codec {self.hybrid_tier_codec}" if smaller else ""

    @property
    def judicious(self) -> bool:
        """Whether states are kept only where they are likely to be used again."""
        return self.hybrid_admission is Admission.JUDICIOUS

    @property
    def pinned(self) -> bool:
        """Whether a policy was asked for by name or by its alpha."""
        return self.hybrid_eviction is not Eviction.AUTO or self.hybrid_alpha is not None

    @property
    def tuned(self) -> bool:
        """Whether other policies are tried on the traffic."""
        tunable = self.hybrid_eviction in (Eviction.AUTO, Eviction.MARCONI)
        return tunable and self.hybrid_alpha is None and self.hybrid_tuner_workers > 0

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser) -> None:
        """Add our flags to `parser`, in a group of their own."""
        group = parser.add_argument_group(
            GROUP, "flags of sglang_hybrid; all others are SGLang's own"
        )
        group.add_argument(
            "--hybrid-eviction",
            choices=[policy.value for policy in Eviction],
            default=HybridConfig.hybrid_eviction.value,
            help="what is evicted first when KV or state slots run short: the node that saves the "
            "fewest FLOPs per byte, weighed by recency (marconi) or by how likely it is used again "
            "(reuse), the node whose own last hit is longest ago (lru), what SGLang itself would "
            "evict (sglang-lru; no decisions are recorded), the node that is cheapest to replay "
            "(seglen), greedy-dual size frequency (gdsf); auto starts with reuse and switches to "
            "what finds more in a replay of the server's own traffic (default: %(default)s)",
        )
        group.add_argument(
            "--hybrid-alpha",
            type=alpha,
            metavar="NUMBER",
            default=AUTO_ALPHA,
            help="weight of FLOP efficiency against recency for --hybrid-eviction marconi; 0 is "
            "recency alone. A number pins that policy; auto is what the tuner finds, or "
            f"{DEFAULT_ALPHA:g} under --hybrid-eviction marconi without one (default: %(default)s)",
        )
        group.add_argument(
            "--hybrid-admission",
            choices=[mode.value for mode in Admission],
            default=HybridConfig.hybrid_admission.value,
            help="judicious: exact states where prompts branch, at the start of the last message, "
            "at the end of a prompt and of an answer, each if it is worth more than what it pushes "
            "out; all: every state that SGLang tracks (default: %(default)s)",
        )
        group.add_argument(
            "--hybrid-min-branch-tokens",
            type=count,
            metavar="N",
            default=HybridConfig.hybrid_min_branch_tokens,
            help="a branch point must gain this many tokens over the hit to get a state "
            "(default: %(default)s)",
        )
        group.add_argument(
            "--hybrid-slots-per-request",
            type=count,
            metavar="N",
            default=HybridConfig.hybrid_slots_per_request,
            help="state slots that a running request counts for when SGLang caps the running "
            "requests by the state pool; fewer let more requests run and leave fewer slots for "
            "checkpoints. 0 is SGLang's number, 3, or 5 with the extra buffer (default: "
            "%(default)s)",
        )
        group.add_argument(
            "--hybrid-memory",
            choices=[memory.value for memory in Memory],
            default=HybridConfig.hybrid_memory.value,
            help="one: KV and states share one budget of bytes, which is what SGLang's two pools "
            "(--max-total-tokens and --max-mamba-cache-size, or their defaults) would take "
            "together, and what is worth least makes room for either; split: each has its "
            "pool; auto: one on the CPU platform for a hybrid model with planned checkpoints, "
            "split elsewhere and with --mamba-full-memory-ratio (default: %(default)s)",
        )
        group.add_argument(
            "--hybrid-schedule",
            choices=[schedule.value for schedule in Schedule],
            default=HybridConfig.hybrid_schedule.value,
            help="in which order waiting requests run: of those at the front of the queue, first "
            "those of whose prefill least remains (window), or those that reuse something, then "
            "those that reuse nothing, then those that must load (car); as they came (fcfs), or "
            "the longest hit first (lpm), as in SGLang; sglang is what --schedule-policy says "
            "(default: %(default)s)",
        )
        group.add_argument(
            "--hybrid-schedule-window",
            type=count,
            metavar="N",
            default=HybridConfig.hybrid_schedule_window,
            help="how many requests, from the front of the queue, window and car choose from "
            "(default: %(default)s)",
        )
        group.add_argument(
            "--hybrid-schedule-overtaken",
            type=count,
            metavar="N",
            default=HybridConfig.hybrid_schedule_overtaken,
            help="a request that so many later ones have overtaken is overtaken no more, under "
            "window and car (default: %(default)s)",
        )
        group.add_argument(
            "--hybrid-schedule-seconds",
            type=nonnegative,
            metavar="SECONDS",
            default=HybridConfig.hybrid_schedule_seconds,
            help="a request that has waited so long is overtaken no more, under window and car "
            "(default: %(default)s)",
        )
        group.add_argument(
            "--hybrid-history-mb",
            type=count,
            metavar="N",
            default=HybridConfig.hybrid_history_mb,
            help="MiB for the history of prompts and answers that reuse learns from: two bytes per "
            "token and 600 per fork or end; when it is full, the tenant that holds most forgets "
            "what it sent longest ago (default: %(default)s)",
        )
        group.add_argument(
            "--hybrid-burst-ms",
            type=nonnegative,
            metavar="MS",
            default=HybridConfig.hybrid_burst_ms,
            help="an idle server that gets a long prompt waits this long for requests sent at the "
            "same time, so that they can share its prefix; 0 turns it off (default: %(default)s)",
        )
        group.add_argument(
            "--hybrid-drain-seconds",
            type=nonnegative,
            metavar="SECONDS",
            default=HybridConfig.hybrid_drain_seconds,
            help="how long running requests may go on after SIGTERM or Ctrl-C; then they end with "
            "an error of status 503 (default: %(default)s)",
        )
        group.add_argument(
            "--hybrid-answers-mb",
            type=count,
            metavar="N",
            default=HybridConfig.hybrid_answers_mb,
            help="MiB for what answers and clients' hints tell of a return, for --hybrid-eviction "
            "reuse: 3 per tenant, of tenants that came last; 0 turns that off (default: "
            "%(default)s)",
        )
        group.add_argument(
            "--hybrid-tuner-workers",
            type=count,
            metavar="N",
            default=HybridConfig.hybrid_tuner_workers,
            help="processes of lowest priority that now and then replay recent requests under "
            "other policies, for --hybrid-eviction auto, or other alphas, for marconi; 0 turns "
            "that off (default: %(default)s)",
        )
        group.add_argument(
            "--hybrid-tuner-window",
            type=count,
            metavar="N",
            default=HybridConfig.hybrid_tuner_window,
            help="requests before they first do; 0 is twice those that ended before the first "
            "eviction, 64 at least and 4,096 at most (default: %(default)s)",
        )
        group.add_argument(
            "--hybrid-record",
            metavar="FILE",
            default=HybridConfig.hybrid_record,
            help="write every finished request's token ids and arrival there, for `python -m "
            "sglang_hybrid.replay`",
        )
        group.add_argument(
            "--hybrid-prewarm",
            metavar="FILE",
            default=HybridConfig.hybrid_prewarm,
            help="compute the prompts in this file when the server has started: one JSON object a "
            "line, with messages, text, input_ids or pml as in a request, or with schema and "
            "budget_mb",
        )
        group.add_argument(
            "--hybrid-pin-share",
            type=share,
            metavar="SHARE",
            default=HybridConfig.hybrid_pin_share,
            help="share of the device's memory, of KV and of states, that what one tenant pins may "
            f"take; all tenants together pin {MOST_OF_ALL:g} of it at most; 0: nothing is pinned "
            "(default: %(default)s)",
        )
        group.add_argument(
            "--hybrid-offload-watermark",
            type=share,
            metavar="SHARE",
            default=HybridConfig.hybrid_offload_watermark,
            help="with --enable-hierarchical-cache: when more of the device's memory than this "
            "share is in use and nothing waits, what would be evicted next is copied to the host; "
            "1 turns that off (default: %(default)s)",
        )
        group.add_argument(
            "--hybrid-simulate-bandwidth",
            type=links,
            metavar="TIER=SPEED,...",
            default=HybridConfig.hybrid_simulate_bandwidth,
            help="for measurements on the CPU platform: copies to and from a tier take as long as "
            "at this bandwidth, with this latency if one is given, as in "
            "host=25GB/s+20us,disk=3GB/s; without it they take what they take on this machine",
        )
        group.add_argument(
            "--hybrid-native-kernels",
            choices=[choice.value for choice in NativeKernels],
            default=HybridConfig.hybrid_native_kernels.value,
            help="CPU platform: auto compiles C++ kernels at the first start, into the user's "
            "folder of caches, and does without them where there is no compiler; off is plain "
            "torch (default: %(default)s)",
        )
        group.add_argument(
            "--hybrid-disk-folder",
            metavar="DIR",
            default=HybridConfig.hybrid_disk_folder,
            help="where --hicache-storage-backend file keeps KV and states; by default what "
            "SGLang's own settings name, or sglang_hybrid/tiers in the user's folder of caches",
        )
        group.add_argument(
            "--hybrid-disk-mb",
            type=count,
            metavar="N",
            default=HybridConfig.hybrid_disk_mb,
            help="MiB that the folder may take, shared by all ranks; 0 is all but 5%% of the disk "
            "(default: %(default)s)",
        )
        group.add_argument(
            "--hybrid-warm-start",
            type=count,
            metavar="MB",
            default=HybridConfig.hybrid_warm_start,
            help="MiB of what the disk holds that a starting server reads into memory while it "
            "already serves, per rank: what was used last, states first (default: %(default)s)",
        )
        group.add_argument(
            "--hybrid-tier-codec",
            choices=TIER_CODECS,
            default=HybridConfig.hybrid_tier_codec,
            help="how copies of KV and states are stored below the device: as they are, as "
            "bfloat16, or as int8 with a scale for each row; hits on copies that are not exact "
            "say so (default: %(default)s)",
        )
        group.add_argument(
            "--hybrid-tier-error",
            type=nonnegative,
            metavar="LOGPROB",
            default=HybridConfig.hybrid_tier_error,
            help="instead of one codec for all layers: measure at the start how far each layer's "
            "smaller copies move log probabilities, and give each the smallest codec within this "
            "bound; 0 turns that off (default: %(default)s)",
        )
        group.add_argument(
            "--hybrid-default-model",
            metavar="ARCHITECTURE",
            choices=sorted(ARCHITECTURES),
            default=HybridConfig.hybrid_default_model,
            help="architecture of the embedded tiny model with random weights that is served when "
            f"no --model-path is given: {', '.join(sorted(ARCHITECTURES))} (default: %(default)s)",
        )

    @classmethod
    def split(cls, argv: Sequence[str]) -> tuple[HybridConfig, list[str]]:
        """Our part of a command line that has been parsed already, and what is left for SGLang.
        Raises ValueError for flags that do not fit together.
        """
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        cls.add_flags(parser)
        namespace, rest = parser.parse_known_args(list(argv))
        return cls._from(vars(namespace)), rest

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> HybridConfig:
        """What the variables say, defaults elsewhere; raises ValueError for a bad value."""
        environment = os.environ if environment is None else environment
        argv = []
        for field in fields(cls):
            value = environment.get(_PREFIX + field.name.upper())
            if value is not None:
                argv += ["--" + field.name.replace("_", "-"), value]
        parser = _Raising(add_help=False)
        cls.add_flags(parser)
        return cls._from(vars(parser.parse_args(argv)))

    def to_environment(self, environment: MutableMapping[str, str] | None = None) -> None:
        """Put every setting where `from_environment` finds it."""
        environment = os.environ if environment is None else environment
        for field in fields(self):
            value = getattr(self, field.name)
            text = value.value if isinstance(value, Enum) else str(value)
            if value is None:
                text = AUTO_ALPHA
            environment[_PREFIX + field.name.upper()] = text

    @classmethod
    def _from(cls, values: dict[str, Any]) -> HybridConfig:
        known = {field.name: values[field.name] for field in fields(cls)}
        known["hybrid_eviction"] = Eviction(known["hybrid_eviction"])
        known["hybrid_admission"] = Admission(known["hybrid_admission"])
        known["hybrid_memory"] = Memory(known["hybrid_memory"])
        known["hybrid_native_kernels"] = NativeKernels(known["hybrid_native_kernels"])
        known["hybrid_schedule"] = Schedule(known["hybrid_schedule"])
        config = cls(**known)
        if config.hybrid_tier_error and config.hybrid_tier_codec != "exact":
            raise ValueError(
                f"--hybrid-tier-error {config.hybrid_tier_error:g} chooses the codecs itself; "
                f"leave --hybrid-tier-codec {config.hybrid_tier_codec} out."
            )
        if config.hybrid_alpha is not None and config.policy is not Eviction.MARCONI:
            raise ValueError(
                f"--hybrid-alpha {config.hybrid_alpha:g} belongs to --hybrid-eviction marconi and "
                f"means nothing to {config.policy.value}; leave one of the two flags out."
            )
        if config.hybrid_schedule_window < 1:
            raise ValueError("--hybrid-schedule-window 0 leaves nothing to choose; give 1 or more.")
        return config


class _Raising(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(f"sglang_hybrid: {message} (from the environment)")
