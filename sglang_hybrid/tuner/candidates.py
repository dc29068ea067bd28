"""What the tuner chooses from, and how a candidate is tried."""

from __future__ import annotations

from dataclasses import replace

from sglang_hybrid.replay.simulator import Outcome
from sglang_hybrid.replay.systems import Setting, Spec
from sglang_hybrid.replay.traces import Request
from sglang_hybrid.tuner.window import Window

ALPHAS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Of Marconi. At 0 it is LRU."""

CANDIDATES = (
    Spec("reuse"),
    Spec("lru"),
    *(Spec("marconi", (("alpha", alpha),)) for alpha in ALPHAS),
)


def as_text(spec: Spec) -> str:
    """What `Spec.parse` reads."""
    return f"{spec.name}:{','.join(f'{name}={value!r}' for name, value in spec.options)}"


def replay(window: Window, spec: Spec) -> list[Outcome]:
    """What each request of `window` [n] would have found under `spec`, from an empty cache on."""
    cache = spec.build(
        Setting(window.cost, window.budget, window.requests, window.min_branch_tokens)
    )
    return [cache.serve(_as_cached(request)) for request in window.requests]


def _as_cached(request: Request) -> Request:
    """The last token of an answer was never read by the model, so a server does not cache it."""
    if len(request.tokens) == request.input_len:
        return request
    return replace(request, tokens=request.tokens[:-1])
