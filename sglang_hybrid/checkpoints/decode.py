"""States that a decode leaves on its way (hooks/states.py).

A request that ends leaves its live state, exact to the token, so that nothing need be tracked
before, unless answers come back shortened (`Planner.plan_decode`). A tree with pages can only name
a page's end: there the last page's end is tracked.

With speculative decoding a step reads several tokens. A request may end inside of them, and with
the overlap scheduler the next step has begun by then: the live state has read too much. There
SGLang keeps the state at the last multiple of some tokens, in two slots by turns
(`speculative_grid`).
"""

from __future__ import annotations

from sglang_hybrid.core.costs.cost import ENDLESS

_grid: int | None = None


def plan_for(page_size: int, drafted: int | None = None, *, lazily: bool = False) -> None:
    """Let this process track decode states for a tree of `page_size`.

    drafted: tokens that a step of speculative decoding reads of a request; None without. lazily:
    the second slot comes only where a state is near (`extra_buffer_lazy`).
    """
    global _grid
    if drafted is None:
        _grid = page_size if page_size > 1 else ENDLESS
    else:
        _grid = None if lazily else speculative_grid(page_size, drafted)


def use_sglang_grid() -> None:
    """Let this process track decode states every `--mamba-track-interval` tokens."""
    global _grid
    _grid = None


def speculative_grid(page_size: int, drafted: int) -> int:
    """Tokens between two states that a decode leaves where a step reads `drafted` tokens.

    Two steps in a row must not both leave one: when the second begins, SGLang does not know yet
    whether the first has, and writes to the same slot. That needs twice the tokens of a step.
    """
    return -(-2 * drafted // page_size) * page_size


def track_grid() -> int | None:
    """Tokens between two positions at which a decode leaves a state; None if SGLang decides."""
    return _grid
