"""Rows that are coded in their own memory come back within the codec's error, whatever else is
coded around them.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sglang_hybrid.storage.codecs import in_place
from sglang_hybrid.storage.codecs.codecs import Codec
from sglang_hybrid.storage.codecs.in_place import InPlace, Names
from tests.examples import examples

SLOTS = 12


def pool(dtype: torch.dtype, *shape: int) -> Tensor:
    torch.manual_seed(3)
    return torch.randn(SLOTS, *shape).mul(5).to(dtype)


def bound(codec: Codec, rows: Tensor) -> Tensor:
    """The largest error that a codec may make, for each number."""
    wide = rows.float()
    if codec is Codec.BF16:
        return wide.abs() * 2**-8
    rounding = 2**-8 if rows.dtype is torch.bfloat16 else 1e-6
    return wide.abs().amax(-1, keepdim=True) / 253 + wide.abs() * rounding


@pytest.mark.parametrize(
    ("dtype", "codec", "parts"),
    [
        (torch.bfloat16, Codec.INT8, 2),
        (torch.float32, Codec.INT8, 4),
        (torch.float32, Codec.BF16, 2),
        (torch.bfloat16, Codec.BF16, 1),
        (torch.float32, Codec.EXACT, 1),
    ],
)
def test_a_slot_has_room_for_so_many(dtype: torch.dtype, codec: Codec, parts: int) -> None:
    assert InPlace([pool(dtype, 3, 32)[None]], [], codec).parts == parts


def test_rows_that_are_too_short_for_a_scale_are_left_as_they_are() -> None:
    assert InPlace([pool(torch.bfloat16, 8, 3)[None]], [], Codec.INT8).parts == 1


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.BF16])
def test_any_slots_in_any_parts(codec: Codec) -> None:
    """Rows that are coded, moved and decoded, with a window of three numbers beside them. The
    places are among the slots, as where entries are coded in their own memory.
    """

    @examples(20)
    @given(data=st.data())
    def property(data: st.DataObject) -> None:
        state, window = pool(torch.float32, 2, 4, 16), pool(torch.float32, 7, 3)
        before = state.clone(), window.clone()
        rows = InPlace([state[None]], [window[None]], codec)
        count = data.draw(st.integers(1, 2 * rows.parts))
        slots = torch.tensor(data.draw(st.permutations(range(SLOTS)))[:count])
        names = [(int(slots[at // rows.parts]), at % rows.parts) for at in range(count)]
        names = data.draw(st.permutations(names))
        places, parts = (torch.tensor(each) for each in zip(*names, strict=True))
        rows.encode(slots, places, parts)
        for slot in set(range(SLOTS)) - set(places.tolist()):
            assert torch.equal(state[slot], before[0][slot])
        target, into = [slot for slot in range(SLOTS) if slot not in places.tolist()][:2]
        to, first = torch.tensor([target]), torch.tensor([0])
        rows.move(places[:1], parts[:1], to, first)
        places, parts = torch.cat([to, places[1:]]), torch.cat([first, parts[1:]])
        for number, slot in enumerate(slots.tolist()):
            some = slice(number, number + 1)
            rows.decode(places[some], parts[some], torch.tensor([into]))
            error = (state[into] - before[0][slot]).abs()
            assert (error <= bound(codec, before[0][slot]) + 1e-7).all()
            error = (window[into] - before[1][slot]).abs()  # its numbers share a scale
            assert error.max() <= before[1][slot].abs().max() / 127

    property()


def test_coding_again_what_was_decoded_changes_nothing() -> None:
    """Errors do not add up then if an entry is hit and coded again and again."""
    keys = pool(torch.bfloat16, 2, 64)
    rows = InPlace([keys[None]], [], Codec.INT8)
    slot, place, part = (torch.tensor([number]) for number in (0, 5, 1))
    seen = []
    for _ in range(6):
        rows.encode(slot, place, part)
        rows.decode(place, part, slot)
        seen.append(keys[0].clone())
    assert torch.equal(seen[1], seen[5])


def test_slots_with_something_between_them() -> None:
    """Latents and the part of the key beside them are views of one tensor."""
    whole = pool(torch.bfloat16, 1, 96)
    before = whole.clone()
    latents, keys = whole.split((64, 32), -1)
    rows = InPlace([latents[None], keys[None]], [], Codec.INT8)
    rows.encode(torch.tensor([3, 4]), torch.tensor([3, 3]), torch.tensor([0, 1]))
    rows.decode(torch.tensor([3, 3]), torch.tensor([1, 0]), torch.tensor([8, 9]))
    for slot, was in ((9, 3), (8, 4)):
        for part in (slice(64), slice(64, 96)):
            error = (whole[slot, 0, part] - before[was, 0, part]).float().abs()
            assert (error <= bound(Codec.INT8, before[was, 0, part])).all()


def test_layers_together_are_layers_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools are in one tensor or in several, slots are many at once or few."""
    states = pool(torch.float32, 5, 2, 16).transpose(0, 1).contiguous()  # [5, slots, 2, 16]
    one_by_one = [states[layer].clone()[None] for layer in range(5)]
    slots, places = torch.arange(8), torch.arange(8) // 4
    parts = torch.arange(8) % 4
    InPlace([states], [], Codec.INT8).encode(slots, places, parts)
    monkeypatch.setattr(in_place, "BYTES_AT_ONCE", 1)
    InPlace(one_by_one, [], Codec.INT8).encode(slots, places, parts)
    assert torch.equal(states.view(torch.uint8), torch.cat(one_by_one).view(torch.uint8))


def test_slots_that_name_rows_which_move() -> None:
    """More slots than rows, as in one memory. What lies beside the pool stays with its slot."""
    state, window = pool(torch.float32, 2, 4, 16), pool(torch.float32, 7, 3)
    before = state.clone(), window.clone()
    table = torch.full((40,), -1)
    table[20:32] = torch.randperm(SLOTS)
    names = Names(len(table), lambda slots: table[slots])
    rows = InPlace([state[None]], [window[None]], Codec.INT8, names)
    slots, place, parts = torch.arange(20, 24), torch.tensor([20] * 4), torch.arange(4)
    was = table[slots].tolist()
    rows.encode(slots, place, parts)
    for tensor in (state, window):  # the row of slot 20 moves to that of slot 31
        tensor[table[31]] = tensor[table[20]]
    table[31], table[20] = table[20].item(), table[31].item()
    rows.move(place[:1], parts[:1], torch.tensor([30]), parts[3:])
    for number, row in enumerate(was):
        at, part = (30, 3) if number == 0 else (20, number)
        rows.decode(torch.tensor([at]), torch.tensor([part]), torch.tensor([25]))
        error = (state[table[25]] - before[0][row]).abs()
        assert (error <= bound(Codec.INT8, before[0][row]) + 1e-7).all()
        error = (window[table[25]] - before[1][row]).abs()
        assert error.max() <= before[1][row].abs().max() / 127
