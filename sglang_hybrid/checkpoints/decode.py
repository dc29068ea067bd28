"""Which states a decode leaves on its way (patch 0008).

A request that ends leaves its live state, exact to the token, so that nothing need be tracked
before. A tree with pages can only name a page's end: there the last page's end is tracked.
"""

from __future__ import annotations

from sglang_hybrid.core.costs.cost import ENDLESS

_grid: int | None = None


def plan_for_pages_of(page_size: int | None) -> None:
    """From now on this process tracks decode states for a tree of `page_size`; None: as SGLang
    does by itself, every `--mamba-track-interval` tokens.
    """
    global _grid
    _grid = page_size if page_size is None or page_size > 1 else ENDLESS


def track_grid() -> int | None:
    """Tokens between two positions at which a decode leaves a state; None if SGLang decides."""
    return _grid
