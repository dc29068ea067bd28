"""The command line; see the package's docstring."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from torch import multiprocessing

from scripts.train.training import train


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the embedded model.")
    parser.add_argument("--output", type=Path, required=True, help="directory for the model")
    parser.add_argument("--minutes", type=float, default=50)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rate", type=float, default=5e-3, help="the highest learning rate")
    args = parser.parse_args()
    multiprocessing.spawn(train, (args,), nprocs=args.processes)


if __name__ == "__main__":
    main()
