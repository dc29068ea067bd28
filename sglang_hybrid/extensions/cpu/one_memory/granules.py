"""Ids of one kind's rows, handed out granule by granule, and charged to the shared account."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sglang_hybrid.core.memory.account import Account, MemoryKind

Ids = NDArray[np.int64]

GiveBack = Callable[[int, int], None]
"""Gives the physical memory of granules [first, last) back. Raises OSError."""


def _nothing(first: int, last: int) -> None:
    """For tensors that nothing is given back of."""


NO_IDS: Ids = np.empty(0, dtype=np.int64)


class GranulePool:
    """The ids of one kind.

    Ids are numbers of rows (of pages, with pages of several tokens; of state slots). Granule 0 is
    never handed out: it holds row 0, to which padding is written. An id is valid from `take` to
    `put` wherever its bytes are; nothing is copied.

    Args:
        account: charged for every granule.
        kind: on whose behalf.
        granules: how many there are besides granule 0.
        per_granule: ids in one.
        id_bytes: bytes of one id's rows in all tensors.
        padding: bytes of a granule that hold no row.
        give_back: see `GiveBack`.
    """

    def __init__(
        self,
        account: Account,
        kind: MemoryKind,
        *,
        granules: int,
        per_granule: int,
        id_bytes: int,
        padding: int = 0,
        give_back: GiveBack = _nothing,
    ) -> None:
        self.account = account
        self.kind = kind
        self.granules = granules
        self.per_granule = per_granule
        self.id_bytes = id_bytes
        self.granule_bytes = per_granule * id_bytes + padding
        self._give_back = give_back
        self._taken = np.zeros((granules + 1) * per_granule, dtype=np.bool_)
        self._count = np.zeros(granules + 1, dtype=np.int64)  # ids taken of each granule
        self._loose = NO_IDS  # free ids of partly used granules
        self._kept = NO_IDS  # empty granules with memory behind them, ascending
        self._absent: Ids = np.arange(1, granules + 1, dtype=np.int64)  # without, ascending
        self._in_use = 0
        account.join(kind, self.release)

    @property
    def ids(self) -> int:
        """The number of ids."""
        return self.granules * self.per_granule

    @property
    def in_use(self) -> int:
        """Ids that are taken."""
        return self._in_use

    @property
    def used_granules(self) -> int:
        """Granules with an id that is taken."""
        return self.granules - len(self._kept) - len(self._absent)

    @property
    def loose(self) -> int:
        """Free ids of granules that are partly used."""
        return len(self._loose)

    @property
    def available(self) -> int:
        """Ids that `take` can give now, the other kind's kept bytes included."""
        return len(self._loose) + self._whole_granules() * self.per_granule

    def take(self, count: int) -> Ids | None:
        """`count` ids, consecutive as far as possible; None if there are not so many."""
        if count > self.available:
            return None
        whole = min(count // self.per_granule, self._whole_granules())
        rest = count - whole * self.per_granule
        opened = max(0, -(-(rest - len(self._loose)) // self.per_granule))
        chosen = self._choose(whole + opened)
        if chosen is None:
            return None
        full = self._ids_of(chosen[:whole])
        loose = np.concatenate((self._loose, self._ids_of(chosen[whole:])))
        ids = np.concatenate((full, loose[:rest]))
        self._loose = loose[rest:]
        self._mark(ids, taken=True)
        self._charge(chosen=len(chosen), ids=count)
        return ids

    def put(self, ids: Ids) -> None:
        """Take `ids` back. Raises ValueError, and nothing has changed, if one is not taken."""
        if not len(ids):
            return
        ordered = np.sort(ids)
        known = ordered[0] >= self.per_granule and ordered[-1] < len(self._taken)
        if not known or not self._taken[ordered].all() or _repeats(ordered).any():
            raise ValueError(f"{self.kind.value}: ids are given back that are not in use: {ids}")
        self._mark(ordered, taken=False)
        touched = ordered // self.per_granule
        emptied = touched[self._count[touched] == 0]
        emptied = np.concatenate((emptied[:1], emptied[1:][~_repeats(emptied)]))
        loose = np.concatenate((self._loose, ids))
        self._loose = loose[self._count[loose // self.per_granule] > 0]
        self._kept = np.sort(np.concatenate((self._kept, emptied)), kind="stable")
        self._charge(chosen=-len(emptied), ids=-len(ids))

    def clear(self) -> None:
        """Take everything back."""
        self.put(np.flatnonzero(self._taken).astype(np.int64))

    def free_ids(self) -> Ids:
        """All ids that are not taken, with or without memory behind them."""
        free = np.flatnonzero(~self._taken).astype(np.int64)
        return free[free >= self.per_granule]

    def release(self, wanted: int) -> int:
        """Give the memory of kept granules back to the system, `wanted` bytes or a little more,
        the highest ids first. Returns how many; raises OSError if the system refuses the first.
        """
        count = min(len(self._kept), -(-wanted // self.granule_bytes))
        if not count:
            return 0
        leaving = self._kept[-count:]
        released = 0
        try:
            for first, last in runs(leaving):
                self._give_back(first, last)
                released += last - first
        finally:
            # Runs are given back in ascending order: the first `released` ones have left.
            gone, stay = leaving[:released], leaving[released:]
            self._kept = np.concatenate((self._kept[:-count], stay))
            self._absent = np.sort(np.concatenate((self._absent, gone)), kind="stable")
            self.account.on_free(self.kind, released * self.granule_bytes)
        return released * self.granule_bytes

    def check(self) -> None:
        """Raises AssertionError if a granule is lost or in two places."""
        used = np.flatnonzero(self._count)
        where = np.sort(np.concatenate((used, self._kept, self._absent)))
        assert np.array_equal(where, np.arange(1, self.granules + 1)), "a granule is lost"
        per_granule = self._taken.reshape(-1, self.per_granule).sum(axis=1)
        assert np.array_equal(per_granule, self._count), "a granule's count is wrong"
        partly = used[self._count[used] < self.per_granule]
        expected = self._ids_of(partly)
        expected = expected[~self._taken[expected]]
        assert np.array_equal(np.sort(self._loose), expected), "loose ids are wrong"
        account, kind = self.account, self.kind
        assert account.used[kind] == self._in_use * self.id_bytes
        assert account.kept[kind] == len(self._kept) * self.granule_bytes
        assert account.used[kind] + account.waste[kind] == len(used) * self.granule_bytes

    def _whole_granules(self) -> int:
        """Granules that can be had now."""
        at_most = self.account.free // self.granule_bytes
        return min(len(self._kept) + len(self._absent), at_most)

    def _choose(self, count: int) -> Ids | None:
        """`count` empty granules, kept ones first, then others that are claimed; None if the other
        kind does not give the bytes.
        """
        own = min(count, len(self._kept))
        missing = (count - own) * self.granule_bytes
        if missing and not self.account.claim(self.kind, missing):
            return None
        claimed = self._absent[: count - own]
        chosen = np.sort(np.concatenate((self._kept[:own], claimed)))
        self._kept = self._kept[own:]
        self._absent = self._absent[count - own :]
        return chosen

    def _ids_of(self, granules: Ids) -> Ids:
        within = np.arange(self.per_granule, dtype=np.int64)
        return (granules[:, None] * self.per_granule + within).reshape(-1)

    def _mark(self, ids: Ids, *, taken: bool) -> None:
        self._taken[ids] = taken
        np.add.at(self._count, ids // self.per_granule, 1 if taken else -1)
        self._in_use += len(ids) if taken else -len(ids)

    def _charge(self, *, chosen: int, ids: int) -> None:
        """Granules that began to be used, or ended (negative), and ids that were taken."""
        resident, used = chosen * self.granule_bytes, ids * self.id_bytes
        self.account.charge(self.kind, used=used, waste=resident - used, kept=-resident)


def _repeats(ascending: Ids) -> NDArray[np.bool_]:
    """A mask of the numbers, the first excepted, that equal the one before."""
    found: NDArray[np.bool_] = ascending[1:] == ascending[:-1]
    return found


def runs(numbers: Ids) -> list[tuple[int, int]]:
    """Ascending `numbers` as ranges [first, last)."""
    if not len(numbers):
        return []
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    starts = numbers[np.concatenate(([0], cuts))]
    ends = numbers[np.concatenate((cuts - 1, [len(numbers) - 1]))] + 1
    return list(zip(starts.tolist(), ends.tolist(), strict=True))
