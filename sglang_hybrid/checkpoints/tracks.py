"""Recurrent states that a prefill leaves in slots of the state pool, at any of its positions.

`StateTracks` travels with SGLang's batch and says which states are wanted. `PrefillTracks` is made
from it once per forward; every recurrent layer of the patched SGLang uses it
(patches/sglang-0.5.23/0007). Between its `begin` and its scan the layer's `StateWriter` is kept
here, and no function between the two passes it on. A state is the last K-1 inputs of the layer's
convolution (its window) and the layer's matrix:

* Windows are written before the convolution runs, from its inputs.
* Matrices are written inside the scan: from its chunk states (``kernels/checkpoint_states.py``),
  which the delta rule's leaves in float32 where one is wanted, or the scan picks them out itself.
  One that leaves only some is continued from them (``tails.py``).
* What a model keeps in a slot beside its recurrent layers is written by hooks (hooks/states.py).

Which layers do so, and how, is in ``scans.py``.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_hybrid.checkpoints.scans import Save, find_scan
from sglang_hybrid.kernels import checkpoint_states
from sglang_hybrid.kernels.checkpoint_states import DELTA_CHUNK, Targets
from sglang_hybrid.kernels.chunks import Positions
from sglang_hybrid.serving.device_streams import put_integers

if TYPE_CHECKING:
    from sglang_hybrid.checkpoints.tails import Tails


@dataclass(frozen=True)
class StateTracks:
    """The states that one batch shall leave: the i-th is that of sequence ``rows[i]`` (its index in
    the batch) after ``positions[i]`` tokens from its very start, and goes to ``slots[i]``.

    There is at least one. A position lies behind the sequence's prefix and not behind its last
    token; a sequence may have several, in any order. ``slots`` [n] int64 is on the pool's device
    and holds the ids that SGLang allocates (virtual ones with unified memory), each once and none
    of a running request.
    """

    rows: list[int]
    positions: list[int]
    slots: Tensor

    def for_layers(
        self, backend: Any, forward_batch: Any, cache_indices: Tensor, cu_seqlens: Tensor
    ) -> "PrefillTracks":
        """The tracks of the layers of an SGLang ``ForwardBatch``.

        cache_indices [S] are the physical slots of the batch's sequences and cu_seqlens [S + 1]
        their bounds. Raises RuntimeError if the linear-attention ``backend`` is one that would not
        write them.
        """
        scan = find_scan(backend)
        if scan is None:
            raise RuntimeError(
                f"{type(backend).__name__} cannot write states inside a prefill; ask "
                "why_split() first and split the prefill instead."
            )
        slots = backend._translate_mamba_indices(self.slots)
        if slots is not self.slots:  # one that was freed meanwhile is nowhere: row 0 is for padding
            slots = slots.clamp(min=0)
        return PrefillTracks(
            self,
            forward_batch.extend_prefix_lens_cpu,
            forward_batch.extend_seq_lens_cpu,
            slots,
            cache_indices,
            cu_seqlens,
            every=scan.every,
            copies_ends=scan.copies_ends,
        )


class PrefillTracks:
    """`StateTracks` as the layers of one forward read them: n states, tensors on the pool's device.

    ``targets`` are the states: first those inside the sequences, then those at their ends; each by
    sequence and position.
    ``positions`` says the same on the host: (sequence, tokens of this prefill). ``saved`` are those
    that a kernel writes from the scan's chunk states.
    """

    def __init__(
        self,
        tracks: StateTracks,
        prefix_lens: list[int],
        extend_lens: list[int],
        slots: Tensor,
        cache_indices: Tensor,
        cu_seqlens: Tensor,
        *,
        every: int = 1,
        copies_ends: bool = False,
    ) -> None:
        """Lengths are the batch's, per sequence. slots [n] are where the states go, and
        cache_indices [S] where the sequences start from and end in, all physical; cu_seqlens
        [S + 1] are the bounds of the packed batch on the device. every, copies_ends: see `Scan`.

        Nothing waits for the device. Raises ValueError for a position outside its prefill.
        """
        check(tracks, prefix_lens, extend_lens)
        self._extend_lens = extend_lens
        self._cu_seqlens = cu_seqlens
        self._state_indices = cache_indices
        read = [
            position - prefix_lens[row]
            for row, position in zip(tracks.rows, tracks.positions, strict=True)
        ]
        at_end = [taken == extend_lens[row] for row, taken in zip(tracks.rows, read, strict=True)]
        order = sorted(range(len(read)), key=lambda i: (at_end[i], tracks.rows[i], read[i]))
        self.positions: Positions = [(tracks.rows[i], read[i]) for i in order]
        starts = list(accumulate(extend_lens, initial=0))
        sequences, ends, places, resumed = put_integers(
            slots.device,
            [row for row, _ in self.positions],
            [starts[row] + taken for row, taken in self.positions],
            order,
            [int(length > 0) for length in prefix_lens],
        )
        self._resumed = resumed.bool()
        places = slots.long()[places]
        n = at_end.count(False)
        self.targets = Targets(sequences, ends, places)
        inside = Targets(sequences[:n], ends[:n], places[:n])
        state_indices = cache_indices[sequences].long()
        self._end_slots, self._end_state_indices = places[n:], state_indices[n:]
        self.saved = inside if copies_ends else self.targets
        self._tails: Tails | None = None
        if every > 1 and n:
            from sglang_hybrid.checkpoints import tails

            self._tails = tails.Tails(
                self.positions[:n], places[:n], state_indices[:n], extend_lens
            )
        self._windows: dict[int, _Windows] = {}

    @cached_property
    def chosen_chunks(self) -> tuple[int, Tensor, Tensor] | None:
        """The number of chunks of 64 tokens, counted from each sequence's start, that have a state
        that a kernel writes, and what `ChosenChunks` has as marks and rows; None if there is none.
        """
        wanted = self.positions[: len(self.saved)]
        if not wanted:
            return None
        counts = [-(-length // DELTA_CHUNK) for length in self._extend_lens]
        first = list(accumulate(counts, initial=0))
        chunks = [
            first[row] + min(tokens // DELTA_CHUNK, counts[row] - 1) for row, tokens in wanted
        ]
        row_of = {chunk: row for row, chunk in enumerate(dict.fromkeys(chunks))}
        marks = [row_of.get(chunk, -1) for chunk in range(first[-1])]
        rows = [row_of[chunk] for chunk in chunks]
        marked, chosen = put_integers(self._cu_seqlens.device, marks, rows)
        return len(row_of), marked, chosen

    @property
    def arguments(self) -> dict[str, Any]:
        """Further fields of SGLang's ``ForwardMetadata``."""
        return {} if self._tails is None else self._tails.arguments

    def save_windows(self, conv_states: Tensor, inputs: Tensor) -> None:
        """Write the window at every position; to be called before the convolution runs.

        inputs [T, D] is what the convolution reads, packed, and conv_states [slots, D, K-1] the
        pool: what a window lacks in front of this prefill is in the sequence's own slot, if it has
        a prefix, and zero otherwise.
        """
        where = {
            "state_indices": self._state_indices,
            "resumed": self._resumed,
            "cu_seqlens": self._cu_seqlens,
        }
        if inputs.is_cuda:
            checkpoint_states.save_windows(conv_states, self.targets, inputs=inputs, **where)
            return
        past = conv_states.shape[2]
        if past not in self._windows:
            self._windows[past] = _Windows(past, self.targets, **where)
        self._windows[past].save(conv_states, inputs)

    def save_tokens(self, contexts: Tensor, seen: Tensor) -> None:
        """Write the last N tokens at every position. contexts [slots, N] is the pool, and seen
        [S, N + longest prefill] what each sequence had there, then the tokens of this prefill.
        """
        sequences = self.targets.sequences.long()
        taken = self.targets.ends - self._cu_seqlens[sequences]
        last = taken[:, None] + torch.arange(contexts.shape[1], device=contexts.device)
        contexts[self.targets.slots] = seen[sequences[:, None], last]

    def into(self, ssm_states: Tensor) -> "StateWriter":
        """These states, written to a layer's pool [slots, ...] by its scan."""
        return StateWriter(self, ssm_states)

    def begin(self, ssm_states: Tensor, **_: Any) -> None:
        """Called before a scan, which gets its writer by `taken_writer`. ssm_states: the layer's
        pool [slots, ...]. Mamba2 tells its layer and the time steps, too, for transitions
        (extensions/schemas/composition).
        """
        if self._tails is not None:
            self._tails.begin(ssm_states)
        _writer.set(self.into(ssm_states))

    def finish(self, ssm_states: Tensor, left: Tensor | None, kernel: Any, **inputs: Any) -> None:
        """The same behind a scan that writes to the slots its sequences start from:
        `Tails.finish`, and states at the ends of sequences are copied from the slots that these
        ended in.
        """
        _writer.set(None)
        if self._tails is not None:
            self._tails.finish(ssm_states, left, kernel, **inputs)
        ssm_states[self._end_slots] = ssm_states[self._end_state_indices]


@dataclass
class StateWriter:
    """A writer that a scan calls to leave states in one layer's pool.

    chosen: what the delta rule's scan was asked for, if it was.
    """

    tracks: PrefillTracks
    pool: Tensor
    chosen: "ChosenChunks | None" = None

    def choose_chunks(self) -> "ChosenChunks | None":
        """The chunk states that the delta rule's scan shall leave beside its own; None if it takes
        no state from them.
        """
        chosen = self.tracks.chosen_chunks
        if chosen is not None:
            count, marks, rows = chosen
            states = self.pool.new_empty(count, *self.pool.shape[1:], dtype=torch.float32)
            self.chosen = ChosenChunks(states, marks, rows)
        return self.chosen

    def save(self, kernel: Save, **scan: Any) -> None:
        """Write states by a kernel of ``kernels/checkpoint_states.py``, from what the scan holds:
        the kernel's own keywords, chunk states and all.

        With `Scan.copies_ends` these are the states inside the sequences; those at the ends are
        left to `PrefillTracks.finish`, which copies the live ones.
        """
        kernel(self.pool, self.tracks.saved, **scan)

    def save_ssd(self, **scan: Any) -> None:
        """`save` states of Mamba2."""
        self.save(checkpoint_states.save_ssd_states, **scan)

    def save_delta(self, **scan: Any) -> None:
        """`save` states of a gated delta net, from the chunks that it was asked for."""
        self._save_chosen(checkpoint_states.save_delta_states, **scan)

    def save_kda(self, **scan: Any) -> None:
        """`save` states of KDA, from the chunks that it was asked for."""
        self._save_chosen(checkpoint_states.save_kda_states, **scan)

    def _save_chosen(self, kernel: Save, **scan: Any) -> None:
        chunks = self.chosen
        if chunks is not None:
            self.save(kernel, chunk_states=chunks.states, rows=chunks.rows, **scan)

    def put(self, states: Tensor) -> None:
        """Write states [n, ...] of a scan that was asked for ``tracks.positions``."""
        self.pool[self.tracks.targets.slots] = states.to(self.pool.dtype)

    def of(self, sequence: int) -> "SequenceWriter":
        """The same for a scan of one sequence of the batch, by its index."""
        slots = self.tracks.targets.slots.unsqueeze(1)
        pairs = zip(self.tracks.positions, slots, strict=True)
        return SequenceWriter(
            [(tokens, slot) for (owner, tokens), slot in pairs if owner == sequence], self.pool
        )


@dataclass(frozen=True)
class ChosenChunks:
    """The states in front of those chunks of a delta rule's scan in which a state is wanted.

    states: float32 [R, Hv, Dv, Dk], to be filled by the scan: its own chunk states are rounded to
    the type of its inputs. marks: [C] of all chunks, sequence after sequence, the row of its state
    or -1. rows: [n] of each wanted state, the row of its chunk.
    """

    states: Tensor
    marks: Tensor
    rows: Tensor


@dataclass(frozen=True)
class SequenceWriter:
    """A writer that the scan of one sequence calls to leave its states in one layer's pool.

    ``asked`` are pairs of a position, in tokens of this prefill, and a slot [1].
    """

    targets: list[tuple[int, Tensor]]
    pool: Tensor

    @property
    def positions(self) -> list[int]:
        """The numbers of tokens after which a state is wanted, each once, in order."""
        return sorted({tokens for tokens, _ in self.targets})

    def put(self, state: Tensor, tokens: int) -> None:
        """Write the sequence's state after so many tokens, if it is wanted. state: a slot's values
        in the pool's order, in any shape.
        """
        for wanted, slot in self.targets:
            if wanted == tokens:
                self.pool[slot] = state.view(self.pool.shape[1:]).to(self.pool.dtype)


class _Windows:
    """``checkpoint_states.save_windows`` in plain torch, with windows of ``past`` inputs. Where
    they are is found once and is the same in every layer of a forward.
    """

    def __init__(
        self,
        past: int,
        targets: Targets,
        *,
        state_indices: Tensor,
        resumed: Tensor,
        cu_seqlens: Tensor,
    ) -> None:
        starts = cu_seqlens[targets.sequences].long()[:, None]
        tokens = targets.ends[:, None] + torch.arange(-past, 0, device=targets.ends.device)
        self._tokens = tokens.maximum(starts)
        self._slots = targets.slots
        self._earlier = tokens < starts
        self._reaches_back = bool(self._earlier.any())
        self._owners = state_indices[targets.sequences].long()
        self._resumed = resumed[targets.sequences][:, None, None]
        self._step = (tokens - starts + past).clamp(max=past - 1)[:, None]

    def save(self, pool: Tensor, inputs: Tensor) -> None:
        windows = inputs[self._tokens].transpose(1, 2).to(pool.dtype)
        if self._reaches_back:
            before = torch.where(self._resumed, pool[self._owners], 0)
            before = before.gather(2, self._step.expand_as(before))
            windows = torch.where(self._earlier[:, None], before, windows)
        pool[self._slots] = windows


def check(tracks: StateTracks, prefix_lens: list[int], extend_lens: list[int]) -> None:
    """Raises ValueError if a position is outside its prefill or the lengths do not fit."""
    if not 0 < len(tracks.rows) == len(tracks.positions) == len(tracks.slots):
        raise ValueError(
            f"{len(tracks.rows)} rows, {len(tracks.positions)} positions and {len(tracks.slots)} "
            "slots do not make state tracks; there must be one of each per state, and a state."
        )
    for row, position in zip(tracks.rows, tracks.positions, strict=True):
        if not 0 <= row < len(extend_lens):
            raise ValueError(f"Row {row} is tracked in a batch of {len(extend_lens)} sequences.")
        first, last = prefix_lens[row] + 1, prefix_lens[row] + extend_lens[row]
        if not first <= position <= last:
            raise ValueError(
                f"Position {position} of row {row} is tracked in a prefill that reaches positions "
                f"{first} to {last}."
            )


_writer: ContextVar[StateWriter | None] = ContextVar("_writer", default=None)
"""The writer of the layer whose scan comes next, and None outside of layers that leave states."""


def taken_writer() -> StateWriter | None:
    """The writer of the layer whose scan asks, once: None if it leaves no states."""
    writer = _writer.get()
    if writer is not None:
        _writer.set(None)
    return writer


def wanted_chunks() -> ChosenChunks | None:
    """`ChosenChunks` of the layer whose delta rule's scan asks, before it takes the writer; None if
    it leaves no states.
    """
    writer = _writer.get()
    return None if writer is None else writer.choose_chunks()
