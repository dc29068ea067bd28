"""Prints what processes of a server have loaded of this package: files and lines by room, and
memory.

    python scripts/loaded.py                      # of a default server
    python scripts/loaded.py --model-path MODEL   # arguments are the server's

A room is a folder or a file right below `sglang_hybrid/`, or one below `extensions/` there. Lines
are those of the files that the process has imported. Memory is what would be free without the
process (psutil's `uss`).
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the package of this checkout, wherever another one is installed

from sglang_hybrid.serving.server_process import ServerProcess  # noqa: E402

PACKAGE: Final = ROOT / "sglang_hybrid"
PATIENCE: Final = 30.0
"""Seconds until each process has answered; a scheduler does between two steps."""

TELLS: Final = """
import json, os, signal, sys

def tell(number, frame):
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    path = os.path.join(os.environ["LOADED_FOLDER"], f"{os.getpid()}.json")
    with open(path + "~", "w") as file:
        json.dump([each for each in files if isinstance(each, str)], file)
    os.replace(path + "~", path)

signal.signal(signal.SIGUSR2, tell)
"""
"""Python imports this at the start of each process (`sitecustomize`)."""


def loaded(arguments: Sequence[str] = ()) -> dict[str, tuple[set[Path], int]]:
    """Files of this package, and bytes of memory, by the title of each process of a server. Raises
    TimeoutError for a process that does not answer.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(TELLS)
        environment = {"PYTHONPATH": f"{folder}:{ROOT}", "LOADED_FOLDER": name}
        with ServerProcess(arguments, environment=environment, timeout=600) as server:
            processes = [each for each in server.processes() if not _is_tracker(each)]
            for process in processes:
                process.send_signal(signal.SIGUSR2)
            return {
                _title(process): (_files(folder / f"{process.pid}.json"), _memory(process))
                for process in processes
            }


def by_room(files: set[Path]) -> Counter[str]:
    """Lines of these files by room; those of the extensions' rooms apart."""
    lines: Counter[str] = Counter()
    for file in files:
        parts = file.relative_to(PACKAGE).parts
        room = "/".join(parts[:2]) if parts[0] == "extensions" else parts[0]
        lines[room] += len(file.read_text().splitlines())
    return lines


def table(found: dict[str, tuple[set[Path], int]]) -> Table:
    """A row for each room, a column for each process."""
    made = Table("lines of", *found)
    lines = {title: by_room(files) for title, (files, _) in found.items()}
    rooms = Counter[str]()
    for each in lines.values():
        rooms |= each
    for room, _ in rooms.most_common():
        made.add_row(room, *(f"{each[room]:,}" for each in lines.values()))
    made.add_section()
    made.add_row("the product", *(f"{product(each):,}" for each in lines.values()))
    made.add_row("all", *(f"{each.total():,}" for each in lines.values()))
    made.add_row("files", *(f"{len(files):,}" for files, _ in found.values()))
    made.add_row("MiB of memory", *(f"{memory >> 20:,}" for _, memory in found.values()))
    return made


def product(lines: Counter[str]) -> int:
    """Lines of the product, given those of each room. Extensions are none of it, nor are kernels,
    which a CPU has by its extension: their definitions (`kernels/`) are beside the package.
    """
    beside = ("extensions/", "kernels")
    return sum(count for room, count in lines.items() if not room.startswith(beside))


def main() -> int:
    parser = argparse.ArgumentParser(description="All other arguments are the server's.")
    _, arguments = parser.parse_known_args()
    Console().print(table(loaded(arguments)))
    return 0


def _is_tracker(process: psutil.Process) -> bool:
    return "resource_tracker" in " ".join(process.cmdline())


def _title(process: psutil.Process) -> str:
    title = process.cmdline()[0]
    return title if "::" in title else "first process"


def _memory(process: psutil.Process) -> int:
    return int(process.memory_full_info().uss)


def _files(answer: Path) -> set[Path]:
    deadline = time.monotonic() + PATIENCE
    while not answer.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {answer.stem} does not answer.")
        time.sleep(0.05)
    names = map(Path, json.loads(answer.read_text()))
    return {name for name in names if name.is_relative_to(PACKAGE)}


if __name__ == "__main__":
    sys.exit(main())
