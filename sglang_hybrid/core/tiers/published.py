"""Names and bounds that a server and the readers of what it publishes of its tree agree on."""

from __future__ import annotations

from typing import Final

from sglang_hybrid.core.tiers.rates import Tier

KV: Final = "full"
STATE: Final = "mamba"
"""Components of a block, by SGLang's names."""

MEDIA: Final = {"GPU": Tier.DEVICE, "CPU_PINNED": Tier.HOST, "DISK": Tier.DISK}
"""Tiers of SGLang's storage media; any other medium is as slow as the disk."""

PAGE_TOKENS: Final = 8_192
"""Tokens after which a page of a snapshot ends, some milliseconds of a scheduler's time
(cache/resumable.py). All pages but the last have as many.
"""

LEAST_RATE: Final = 1e-3
MOST_RATE: Final = 1e7
"""Tokens per second of a prefill that a server may say it has."""
