"""The command line; see the package's docstring."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from torch import multiprocessing

from scripts.train.training import train
from sglang_hybrid.models import build_tiny_model


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a tiny model that answers.")
    parser.add_argument("--output", type=Path, required=True, help="new directory for the model")
    parser.add_argument("--minutes", type=float, default=50)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rate", type=float, default=5e-3, help="the highest learning rate")
    args = parser.parse_args()
    try:  # all but the weights, so that a place that is taken is known before the training
        build_tiny_model("nemotron-h", args.output)
    except OSError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as scratch:
        meeting = Path(scratch) / "meeting"
        multiprocessing.spawn(train, (args, meeting), nprocs=args.processes)


if __name__ == "__main__":
    main()
