"""Requests that overlap: a cache is asked to begin, prefill and finish them in any order."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from sglang_hybrid.core.traffic.requests import Request


def interleaved(cache: Any, requests: Sequence[Request], rng: random.Random) -> Iterator[list[Any]]:
    """Serve all requests; requests begin in their order, everything else is drawn from `rng`.

    Yields what is running after each step: what `begin` returned for requests that have not
    finished.
    """
    waiting, prefilling, decoding = list(requests), list[Any](), list[Any]()
    while waiting or prefilling or decoding:
        step = rng.randrange(3)
        if step == 0 and waiting:
            prefilling.append(cache.begin(waiting.pop(0)))
        elif step == 1 and prefilling:
            ticket = prefilling.pop(rng.randrange(len(prefilling)))
            cache.end_prefill(ticket)
            decoding.append(ticket)
        elif step == 2 and decoding:
            cache.finish(decoding.pop(rng.randrange(len(decoding))))
        yield [*prefilling, *decoding]
