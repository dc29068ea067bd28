"""Every slot of a sequence is read once, through views where slots are consecutive."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import few

from sglang_hybrid.kernels.kv_slots import BatchReads, Slots, batch_reads, prefix_slots

runs = st.lists(
    st.tuples(st.sampled_from([0, 1, 40, 700]), st.integers(1, 60)), min_size=1, max_size=8
)


def sequence(pieces: list[tuple[int, int]]) -> np.ndarray:
    """Slots of pieces (first slot, length), each in a part of the pool that no other reaches."""
    return np.concatenate(
        [10_000 * i + np.arange(start, start + n) for i, (start, n) in enumerate(pieces)]
    )


def listed(slots: Slots) -> list[int]:
    if slots.indices is not None:
        return slots.indices.tolist()
    return list(range(slots.start, slots.start + slots.length))


def read_by(reads: BatchReads, sequences: int) -> list[list[int]]:
    """The slots that each sequence reads, in no order."""
    found: list[list[int]] = [[] for _ in range(sequences)]
    everyone = np.arange(sequences)
    places: list[set[int]] = [set() for _ in range(sequences)]
    for slots, rows, place in reads.spans:
        for row in everyone if rows is None else everyone[rows]:
            found[row] += listed(slots)
            assert place not in places[row], "two spans of a sequence share a place"
            places[row].add(place)
            assert place < reads.places
    if reads.loose is not None:
        slots, rows, mask = reads.loose
        chosen = everyone if rows is None else everyone[rows]
        for i, row in enumerate(chosen):
            inside = slice(None) if mask is None else mask[i] == 0
            found[row] += slots[i][inside].tolist()
            assert reads.places - 1 not in places[row]
    return found


@few
@given(st.lists(runs, min_size=1, max_size=5), st.sampled_from([2, 8, 32]))
def test_a_batch_reads_every_slot_once(batch, shortest):
    sequences = [sequence(pieces) for pieces in batch]
    reads = batch_reads(sequences, shortest)
    for slots, found in zip(sequences, read_by(reads, len(sequences)), strict=True):
        assert sorted(found) == sorted(slots.tolist())


@few
@given(runs, st.sampled_from([2, 8, 32]))
def test_a_prefix_is_read_once(pieces, shortest):
    slots = sequence(pieces)
    assert sorted(n for s in prefix_slots(slots, shortest) for n in listed(s)) == sorted(slots)


def test_a_prompt_in_one_span_is_a_view():
    (only,) = prefix_slots(np.arange(100, 200), shortest=16)
    assert only == Slots(100, 100, None)


def test_siblings_read_their_common_span_together():
    document = (1000, 64)
    batch = [sequence([document, (5, 3)]), sequence([document, (90, 2)]), sequence([(7, 1)])]
    reads = batch_reads(batch, shortest=32)
    (span,) = reads.spans
    assert span.slots == Slots(1000, 64, None)
    assert span.rows == slice(0, 2)
    assert reads.loose is not None
    assert reads.loose.rows is None


def test_what_one_sibling_reads_further_is_its_own():
    batch = [sequence([(0, 100)]), sequence([(0, 64), (300, 1)])]
    reads = batch_reads(batch, shortest=32)
    assert [(span.slots.start, span.slots.length) for span in reads.spans] == [(0, 64), (64, 36)]
    assert reads.spans[0].rows is None


def test_many_scattered_slots_are_gathered_alone():
    scattered, short = np.arange(0, 400, 2), np.arange(1001, 1011, 2)
    reads = batch_reads([scattered, short], shortest=16)
    (span,) = reads.spans
    assert span.slots.length == 200
    assert reads.loose is not None
    assert reads.loose.slots.shape == (1, 5)
