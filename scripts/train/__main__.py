"""The command line; see the package's docstring."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from torch.multiprocessing.spawn import spawn

from scripts.train.training import train
from sglang_hybrid.core.options import MOST_PROCESSES, integer, number


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a tiny model that answers.")
    parser.add_argument("--output", type=Path, required=True, help="new file for the weights")
    parser.add_argument("--minutes", type=number(0, 1e6), default=45)
    parser.add_argument("--processes", type=integer(1, MOST_PROCESSES), default=os.cpu_count() or 1)
    rate = number(0, 1e3)
    parser.add_argument("--rate", type=rate, default=7e-3, help="the highest learning rate")
    args = parser.parse_args()
    try:  # a place that cannot be written is known before the training
        args.output.touch(exist_ok=False)
    except OSError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as scratch:
        meeting = Path(scratch) / "meeting"
        spawn(train, (args, meeting), nprocs=args.processes)


if __name__ == "__main__":
    main()
