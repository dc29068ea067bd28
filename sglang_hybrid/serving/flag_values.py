"""Values of our flags as text: what is accepted, and what it means."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from sglang_hybrid.core.tiers.links import parse_links

TIER_CODECS = ("exact", "bf16", "int8")
"""Names of `sglang_hybrid.storage.codecs.codecs.Codec`, which needs torch."""

AUTO_ALPHA = "auto"
DEFAULT_ALPHA = 1.0


Fields = dict[str, Any]
"""What one flag says of several settings, by the names of `HybridConfig`'s fields."""


def flag_name(field: str) -> str:
    """The flag of a field of our settings, or of SGLang's arguments."""
    return "--" + field.replace("_", "-")


def values_of(member: Enum) -> list[str]:
    """What a flag with this default may be."""
    return [each.value for each in type(member)]


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


def eviction(policies: Sequence[str]) -> Callable[[str], Fields]:
    """Reads a policy, or `marconi:ALPHA`."""

    def read(text: str) -> Fields:
        policy, colon, weight = text.partition(":")
        if policy not in policies:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(policies)}")
        if colon and policy != "marconi":
            raise argparse.ArgumentTypeError(f"{text!r}: only marconi takes an alpha")
        found: Fields = {"hybrid_eviction": policy}
        return found | {"hybrid_alpha": alpha(weight)} if colon else found

    return read


def order(names: Sequence[str]) -> Callable[[str], Fields]:
    """Reads an order of waiting requests, or `NAME:size=N,overtaken=N,seconds=S` of ours."""

    def read(text: str) -> Fields:
        name, colon, more = text.partition(":")
        if name not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
        if colon and name not in ("window", "car"):
            raise argparse.ArgumentTypeError(f"{text!r}: only window and car take options")
        found: Fields = {"hybrid_schedule": name}
        for option in filter(None, more.split(",")):
            key, _, value = option.partition("=")
            if key not in ORDER_OPTIONS:
                known = ", ".join(ORDER_OPTIONS)
                raise argparse.ArgumentTypeError(f"{option!r} in {text!r} is none of {known}")
            field, of_text = ORDER_OPTIONS[key]
            found[field] = of_text(value)
        return found

    return read


def codec(text: str) -> Fields:
    """A codec of `TIER_CODECS`, or `auto:LOGPROB`: by each layer's measured error."""
    if text.startswith("auto:"):
        bound = nonnegative(text.removeprefix("auto:"))
        return {"hybrid_tier_codec": TIER_CODECS[0], "hybrid_tier_error": bound}
    if text not in TIER_CODECS:
        known = ", ".join(TIER_CODECS)
        raise argparse.ArgumentTypeError(f"{text!r} is none of {known}, auto:LOGPROB")
    return {"hybrid_tier_codec": text}


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    """Reads one of these words."""

    def read(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
        return text

    return read


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


ORDER_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "size": ("hybrid_schedule_window", count),
    "overtaken": ("hybrid_schedule_overtaken", count),
    "seconds": ("hybrid_schedule_seconds", nonnegative),
}
"""Options of an order of ours: the setting that each says, and how it is read."""
