"""How fast a tier gives and takes bytes, as text: a bandwidth and a latency."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from sglang_hybrid.core.tiers.rates import Link

TIERS: Final = ("host", "disk")
"""The tiers below the device, the nearest first."""

_BYTES: Final = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LINK: Final = re.compile(
    r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[KMGT]?)B/s"
    r"(?:\+(?P<wait>\d+(?:\.\d+)?)(?P<time>us|ms|s))?"
)


def parse_links(text: str) -> Mapping[str, Link]:
    """`host=25GB/s+20us,disk=3GB/s` as a link per tier; nothing for an empty text.

    Raises ValueError for an unknown tier, a bandwidth of 0, or another form.
    """
    links: dict[str, Link] = {}
    for part in filter(None, text.split(",")):
        tier, _, speed = part.partition("=")
        found = _LINK.fullmatch(speed)
        if tier not in TIERS or tier in links or not found:
            raise ValueError(
                f"{part!r} is not a tier's bandwidth; write {' or '.join(TIERS)}, each once, "
                "as in host=25GB/s+20us,disk=3GB/s"
            )
        rate = float(found["number"]) * _BYTES[found["unit"]]
        if not rate:
            raise ValueError(f"{part!r} is a bandwidth of 0; give more, or leave the tier out")
        wait = float(found["wait"] or 0) * _SECONDS[found["time"] or "s"]
        links[tier] = Link(rate, wait)
    return links
