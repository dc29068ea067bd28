"""The file of how often the files of a disk tier were used, by which a restarted server orders
them.

The file is one object as `object_file.py` writes them, beside `learnt_file.py`'s. It names files by
their objects' names, which tell neither tokens nor tenants to anybody without the folder's secret.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from sglang_hybrid.core.costs.cost import IntArray
from sglang_hybrid.core.returns.hazards import INTERVAL_BUCKETS
from sglang_hybrid.core.returns.reuse import LearntClasses
from sglang_hybrid.extensions.disk.learnt_file import (
    CLASS_SHAPE,
    checked_classes,
    decode_arrays,
    encode_arrays,
)
from sglang_hybrid.extensions.disk.object_file import (
    NAME_BYTES,
    BadFile,
    cut_names,
    read_single,
    write_single,
)

KIND = "uses"


@dataclass(frozen=True)
class Uses:
    """classes: how long files of each class wait. names [n * NAME_BYTES]: of the first object of
    each file that was used again. uses, buckets [n]: how often that was, and the bucket of the
    interval that ended last. shape: sizes of the classes' parts.
    """

    classes: LearntClasses
    names: bytes
    uses: IntArray
    buckets: IntArray
    shape: tuple[int, ...] = tuple(CLASS_SHAPE)

    def of_file(self) -> dict[bytes, tuple[int, int]]:
        """Uses and bucket, by the name of the file's first object."""
        pairs = zip(self.uses.tolist(), self.buckets.tolist(), strict=True)
        return dict(zip(cut_names(self.names), pairs, strict=True))


def save_uses(path: Path, identity: str, uses: Uses, written: float) -> None:
    """Raises OSError."""
    write_single(path, identity, KIND, encode_arrays(uses), written)


def load_uses(path: Path, identity: str) -> Uses | None:
    """None if there is no such file. Raises BadFile for one that is not whole, contradicts itself
    or belongs to something else; OSError.
    """
    packed = read_single(path, identity, KIND)
    if packed is None:
        return None
    uses = decode_arrays(packed, Uses)
    if list(uses.shape) != CLASS_SHAPE:
        raise BadFile("it counts other classes")
    count = len(uses.names) // NAME_BYTES
    sound = len(uses.names) == count * NAME_BYTES and len(uses.uses) == len(uses.buckets) == count
    known = (uses.uses >= 1).all() and (uses.buckets >= 0).all()
    if not sound or not known or (uses.buckets >= INTERVAL_BUCKETS).any():
        raise BadFile("its content contradicts itself")
    return replace(uses, classes=checked_classes(uses.classes))
