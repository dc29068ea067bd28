"""Verdicts of scripts/gpu_check.sh on one memory: on which GPUs KV and states share it by default.

It is a file with a list of verdicts. One ships with the package; `gpu_check.sh` writes another one
for the machine that it runs on, among the user's cached files, and that one comes first.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from sglang_hybrid.core.own_files import own_caches, read_file, write_file

logger = logging.getLogger(__name__)

FILE = "gpu_verdict.json"
SHIPPED = Path(__file__).with_name(FILE)
MOST_BYTES = 65_536


class Row(msgspec.Struct, frozen=True):
    """A finding that decides. found: what was seen, in words."""

    ok: bool
    found: str


class Verdict(msgspec.Struct, frozen=True):
    """A GPU by the name that its driver gives it, and whether every row was right there. sglang,
    torch, driver: their versions.
    """

    gpu: str
    driver: str
    sglang: str
    torch: str
    passed: bool
    rows: dict[str, Row]

    @property
    def wrong(self) -> list[str]:
        """The names of the rows that were not right."""
        return [name for name, row in self.rows.items() if not row.ok]


def own_file() -> Path:
    """The file of this user's machine. Raises RuntimeError where the user has no home."""
    return own_caches() / FILE


def find_verdict(gpu: str, sglang: str) -> Verdict | None:
    """The verdict on a GPU of this name with this version of SGLang; None if there is none."""
    return next((v for v in _verdicts() if (v.gpu, v.sglang) == (gpu, sglang)), None)


def _verdicts() -> Iterator[Verdict]:
    """Verdicts of this machine, then those that ship. A file that cannot be read has none."""
    with contextlib.suppress(RuntimeError):
        yield from read_verdicts(own_file())
    yield from read_verdicts(SHIPPED)


def read_verdicts(path: Path) -> Sequence[Verdict]:
    """The verdicts of a file; none, and a line of the log, where it cannot be read."""
    try:
        return msgspec.json.decode(read_file(path, MOST_BYTES), type=list[Verdict])
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except (msgspec.DecodeError, UnicodeDecodeError, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else "its content cannot be read"
        logger.warning("sglang_hybrid: the GPU verdicts in %s are not used: %s.", path, why)
        return ()


def write_verdict(path: Path, verdict: Verdict) -> None:
    """Put a verdict into a file, in the place of the one on that GPU and SGLang. Raises OSError."""
    same = (verdict.gpu, verdict.sglang)
    others = [v for v in read_verdicts(path) if (v.gpu, v.sglang) != same]
    content = msgspec.json.format(msgspec.json.encode([verdict, *others]), indent=2)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_file(path, content + b"\n")
