"""How a server runs, as far as its hits depend on it: what cache, simulator and tuner share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Serving:
    """How the server runs: prompt tokens per forward (--chunked-prefill-size), and the tokens
    between the boundaries at which SGLang would keep a state (its Mamba cache chunk). one_memory:
    KV and states share all bytes; otherwise each has a pool.
    """

    chunk: int = 8_192
    grid: int = 64
    one_memory: bool = False
