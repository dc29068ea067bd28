"""How often the files of a disk tier were used, as a file in its folder: what a restarted server
orders them by.

The file is one object as `object_file.py` writes them, beside `learnt_file.py`'s. It names files by
their objects' names, which tell neither tokens nor tenants to anybody without the folder's secret.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from sglang_hybrid.core.costs.cost import IntArray
from sglang_hybrid.core.returns.hazards import INTERVAL_BUCKETS
from sglang_hybrid.core.returns.history import Learnt
from sglang_hybrid.core.returns.reuse import LearntClasses
from sglang_hybrid.storage.disk.learnt_file import pack, unpack
from sglang_hybrid.storage.disk.object_file import NAME_BYTES, BadFile, read_single, write_single

KIND = "uses"


@dataclass(frozen=True)
class Uses:
    """classes: what is known of how long files wait. names [n * NAME_BYTES]: of the first object of
    each file that was used again; uses, buckets [n]: how often, and the bucket of the interval that
    ended last.
    """

    classes: LearntClasses
    names: bytes
    uses: IntArray
    buckets: IntArray

    def of_file(self) -> dict[bytes, tuple[int, int]]:
        """Uses and bucket, by the name of the file's first object."""
        names = (self.names[i : i + NAME_BYTES] for i in range(0, len(self.names), NAME_BYTES))
        return dict(
            zip(names, zip(self.uses.tolist(), self.buckets.tolist(), strict=True), strict=True)
        )


class _UsesContent(msgspec.Struct, array_like=True):
    classes: bytes
    names: bytes
    uses: bytes
    buckets: bytes


def save_uses(path: Path, identity: str, uses: Uses, written: float) -> None:
    """Raises OSError."""
    packed = _UsesContent(
        pack(Learnt(uses.classes)),
        uses.names,
        uses.uses.astype(np.int64).tobytes(),
        uses.buckets.astype(np.int64).tobytes(),
    )
    write_single(path, identity, KIND, msgspec.msgpack.encode(packed), written)


def load_uses(path: Path, identity: str) -> Uses | None:
    """None if there is no such file. Raises BadFile for one that is not whole, contradicts itself
    or belongs to something else; OSError.
    """
    packed = read_single(path, identity, KIND)
    if packed is None:
        return None
    try:
        content = msgspec.msgpack.decode(packed, type=_UsesContent)
        uses, buckets = (
            np.frombuffer(one, dtype=np.int64) for one in (content.uses, content.buckets)
        )
    except (msgspec.DecodeError, ValueError) as error:
        raise BadFile("its content cannot be read") from error
    count = len(content.names) // NAME_BYTES
    sound = len(content.names) == count * NAME_BYTES and len(uses) == len(buckets) == count
    if not sound or (uses < 1).any() or (buckets < 0).any() or (buckets >= INTERVAL_BUCKETS).any():
        raise BadFile("its content contradicts itself")
    return Uses(unpack(content.classes).classes, content.names, uses, buckets)
