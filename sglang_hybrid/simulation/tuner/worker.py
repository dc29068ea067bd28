"""Replays a window under candidates, one JSON line each.

    python -m sglang_hybrid.simulation.tuner.worker

A process of its own and not of `multiprocessing`, whose children import the server's main module
again and cannot be started by a daemon. It imports neither torch nor sglang, leaves the processor
to everyone else, and ends when the process that started it does.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import threading
import time

import msgspec

from sglang_hybrid.core.systems import Spec
from sglang_hybrid.simulation.tuner.candidates import replay
from sglang_hybrid.simulation.tuner.window import unpack

NICE = 19
FAILED = 1


class Score(msgspec.Struct, frozen=True):
    """Tokens that a candidate found in each request that counts, and seconds it took."""

    candidate: str
    hits: list[int]
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--window", type=int, required=True, help="descriptor of the window")
    parser.add_argument("--lifeline", type=int, required=True, help="descriptor that ends us")
    parser.add_argument("--memory", type=int, required=True, help="bytes of private memory")
    parser.add_argument("candidates", nargs="+")
    flags = parser.parse_args()
    os.nice(NICE)
    threading.Thread(target=_end_with, args=(flags.lifeline,), daemon=True).start()
    resource.setrlimit(resource.RLIMIT_DATA, (flags.memory, flags.memory))
    try:
        window = unpack(flags.window)
        for text in flags.candidates:
            begin = time.perf_counter()
            outcomes = replay(window, Spec.parse(text))
            hits = [outcome.hit_len for outcome in outcomes[window.counted_from :]]
            line = msgspec.json.encode(Score(text, hits, time.perf_counter() - begin))
            print(line.decode(), flush=True)
    except MemoryError:
        print(f"more than {flags.memory >> 20} MiB of memory were needed", file=sys.stderr)
        return FAILED
    return 0


def _end_with(lifeline: int) -> None:
    """Wait until the other end is closed, by whatever way its process ended."""
    while os.read(lifeline, 1):
        pass
    os._exit(FAILED)


if __name__ == "__main__":
    sys.exit(main())
