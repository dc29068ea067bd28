"""Values of our flags as text: what is accepted, and what it means."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from sglang_hybrid.core.extensions import OFF
from sglang_hybrid.core.options import MOST_SECONDS, integer, number, read_by
from sglang_hybrid.core.sentences import suggest
from sglang_hybrid.core.tiers.rates import parse_links

SMALLER_CODECS: Final = ("bf16", "int8")
"""Names of `sglang_hybrid.storage.codecs.codecs.Codec`, which needs torch."""

SHARED = "mooncake://"
"""The beginning of `--hybrid-disk-folder` where several servers share a store:
mooncake://HOST:PORT, of Mooncake's master.
"""

API_KEY, REQUIRED = "api-key", "required"
TENANTS = (API_KEY, REQUIRED)
"""The words of `--hybrid-tenants`."""

TRAINED: Final = "trained"
"""The embedded model whose weights are in this package."""

TINY_MODELS: Final = (
    *("falcon-h1", "falcon-mamba", "gigachat-3.5", "glm-5-next", "granite-hybrid", "jet-nemotron"),
    *("kimi-linear", "lfm2", "lfm2-moe", "ling-2.5", "ling-3", "mamba2", "minicpm-sala"),
    *("nemotron-3", "nemotron-h", "qwen3-next", "qwen3.5", "qwen3.5-vl", "qwen4-exp"),
    *("transformer", "zaya"),
)
"""Embedded models of random weights, in alphabetical order."""

AUTO_ALPHA = "auto"
DEFAULT_ALPHA = 1.0

Fields = dict[str, Any]
"""The values of several settings that one flag gives, by the names of `HybridConfig`'s fields."""


class Eviction(Enum):
    """The policy that chooses what is evicted first when a pool is full. SGLANG_LRU: SGLang's own
    order, without our tree of records; LRU: the least recently used by our records.
    """

    AUTO = "auto"
    MARCONI = "marconi"
    REUSE = "reuse"
    SGLANG_LRU = "sglang-lru"
    LRU = "lru"
    SEGLEN = "seglen"
    GDSF = "gdsf"


class Admission(Enum):
    """Positions of a prefill that get a checkpoint."""

    JUDICIOUS = "judicious"
    ALL = "all"


class Schedule(Enum):
    """Orders in which waiting requests run. SGLANG: as --schedule-policy says."""

    SGLANG = "sglang"
    WINDOW = "window"
    CAR = "car"
    FCFS = "fcfs"
    LPM = "lpm"

    @property
    def is_ours(self) -> bool:
        """True if this package orders the queue; otherwise one of SGLang's policies does."""
        return self in (Schedule.WINDOW, Schedule.CAR)


class Memory(Enum):
    """The division of bytes between KV and states."""

    AUTO = "auto"
    ONE = "one"
    SPLIT = "split"


class Ui(Enum):
    """The parts of prompts that the live page shows, or that there is no page."""

    OFF = "off"
    LENGTHS = "lengths"
    TEXT = "text"


@dataclass(frozen=True)
class CodecChoice:
    """The codec of copies of KV and states, or how it is chosen.

    codec: one of `SMALLER_CODECS`, or how a flag says that there is none. error: largest difference
    of a log probability that copies may make, if the codec is chosen by that; 0 if it is not.
    """

    codec: str
    error: float = 0.0

    @property
    def may_change(self) -> bool:
        """True if copies may be something else than what was computed."""
        return self.error > 0 or self.codec in SMALLER_CODECS

    def __str__(self) -> str:
        """The value of a flag that means this choice."""
        return f"auto:{self.error:g}" if self.error else self.codec


EXACT_COPIES: Final = CodecChoice("exact")
NO_CODED_ENTRIES: Final = CodecChoice("off")


class FullHit(Enum):
    """The switch for answering a prompt that is asked for the third time without a forward."""

    OFF = "off"
    ON = "on"


class NativeKernels(Enum):
    """The switch for compiling kernels on the CPU platform."""

    AUTO = "auto"
    OFF = "off"


class Guard(Enum):
    """The switch for checks of requests and mends of SGLang's server that its cache does not need
    (extensions/guard).
    """

    ON = "on"
    OFF = OFF


class ClientLines(Enum):
    """The treatment of lines that clients put before a system prompt and that change with every
    request.
    """

    DROP = "drop"
    KEEP = "keep"


def flag_name(field: str) -> str:
    """The flag of a field of our settings, or of SGLang's arguments."""
    return "--" + field.replace("_", "-")


def variable_name(field: str) -> str:
    """The environment variable of a field of our settings."""
    return "SGLANG_" + field.upper()


nonnegative = number(0, MOST_SECONDS)
count = integer(0)
share = number(0, 1)


def alpha(text: str) -> float | None:
    """A number of 0 or more, or None for `auto`."""
    return None if text == AUTO_ALPHA else nonnegative(text)


def eviction(text: str) -> Fields:
    """A policy, or `marconi:ALPHA`."""
    policy, colon, weight = text.partition(":")
    found: Fields = {"hybrid_eviction": _check_name(Eviction, policy, text)}
    if not colon:
        return found
    if policy != Eviction.MARCONI.value:
        raise argparse.ArgumentTypeError(f"{text!r}: only marconi takes an alpha")
    return found | {"hybrid_alpha": alpha(weight)}


def order(text: str) -> Fields:
    """An order of waiting requests, or `NAME:size=N,overtaken=N,seconds=S` of ours."""
    name, colon, more = text.partition(":")
    found: Fields = {"hybrid_schedule": _check_name(Schedule, name, text)}
    if colon and not Schedule(name).is_ours:
        raise argparse.ArgumentTypeError(f"{text!r}: only window and car take options")
    for option in filter(None, more.split(",")):
        key, _, value = option.partition("=")
        if key not in ORDER_OPTIONS:
            known = ", ".join(ORDER_OPTIONS)
            raise argparse.ArgumentTypeError(f"{option!r} in {text!r} is none of {known}")
        field, read = ORDER_OPTIONS[key]
        found[field] = read(value)
    return found


def codec(none: str) -> Callable[[str], CodecChoice]:
    """Reads a codec, `auto:LOGPROB` (by the error that is measured), or `none`, for none."""

    def read(text: str) -> CodecChoice:
        if text.startswith("auto:"):
            return CodecChoice(none, nonnegative(text.removeprefix("auto:")))
        if text not in (none, *SMALLER_CODECS):
            known = ", ".join((none, *SMALLER_CODECS))
            raise argparse.ArgumentTypeError(f"{text!r} is none of {known}, auto:LOGPROB")
        return CodecChoice(text)

    return read


def tenants(text: str) -> str:
    """Some of `TENANTS` with commas between them, still as text; "" is none."""
    for word in filter(None, text.split(",")):
        if word not in TENANTS:
            raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(TENANTS)}")
    return text


def hosts(text: str) -> str:
    """Names of hosts with commas between them, in small letters, still as text; "" is none."""
    for name in filter(None, text.split(",")):
        if not re.fullmatch(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+", name):
            raise argparse.ArgumentTypeError(
                f"{name!r} is no name of a host; give it alone, as in cache.example.org"
            )
    return text.lower()


def one_of(kind: type[Enum]) -> Callable[[str], str]:
    """Reads a value of an Enum, still as text."""
    return lambda text: _check_name(kind, text, text)


def _check_name(kind: type[Enum], name: str, text: str) -> str:
    """`name`, which is a value of an Enum, of a flag's `text`. Raises ArgumentTypeError."""
    names = [each.value for each in kind]
    if name not in names:
        near = suggest(name, names)
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}{near}")
    return name


def links(text: str) -> str:
    """Bandwidths of tiers as `parse_links` reads them, still as text."""
    read_by(parse_links)(text)
    return text


ORDER_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "size": ("hybrid_schedule_window", count),
    "overtaken": ("hybrid_schedule_overtaken", count),
    "seconds": ("hybrid_schedule_seconds", nonnegative),
}
"""Options of an order of ours: the setting that each says, and how it is read."""
