"""Values of our flags as text: what is accepted, and what it means."""

from __future__ import annotations

import argparse
import math
from enum import Enum

from sglang_hybrid.core.tiers.links import parse_links

TIER_CODECS = ("exact", "bf16", "int8")
"""Names of `sglang_hybrid.storage.codecs.codecs.Codec`, which needs torch."""

AUTO_ALPHA = "auto"
DEFAULT_ALPHA = 1.0


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
