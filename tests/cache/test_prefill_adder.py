"""Our PrefillAdder: what it decides beyond SGLang's."""

from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder, _PrefillAdmission

from sglang_hybrid.cache.prefill_adder import HybridPrefillAdder

REQUEST = SimpleNamespace()
FITS = _PrefillAdmission(
    prefix_len=0, extend_len=100, max_new_tokens=8, is_chunked=False, replay_len=0
)
CUT_OFF = _PrefillAdmission(
    prefix_len=0, extend_len=60, max_new_tokens=0, is_chunked=True, replay_len=0
)


def admit(
    monkeypatch: pytest.MonkeyPatch,
    sglangs: _PrefillAdmission,
    *,
    cut: int | None = None,
    from_before: bool = False,
    in_this_batch: bool = False,
) -> _PrefillAdmission | AddReqResult:
    """What becomes of SGLang's verdict if a state is wanted at `cut` and another prefill is
    unfinished: one from an earlier batch, or one that this batch begins.
    """
    monkeypatch.setattr(PrefillAdder, "_select_prefill_admission", lambda *_, **__: sglangs)
    adder = object.__new__(HybridPrefillAdder)
    adder.tree_cache = SimpleNamespace(next_cut=lambda *_: cut)
    adder.rem_chunk_tokens = 60
    adder.new_chunked_req = SimpleNamespace() if in_this_batch else None
    return adder._select_prefill_admission(REQUEST, has_chunked_req=from_before)


def test_a_prefill_stops_where_a_state_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = admit(monkeypatch, FITS, cut=40)
    assert (stopped.extend_len, stopped.is_chunked, stopped.max_new_tokens) == (40, True, 0)


@pytest.mark.parametrize("unfinished", ["from_before", "in_this_batch"])
@pytest.mark.parametrize(("sglangs", "cut"), [(CUT_OFF, None), (CUT_OFF, 40), (FITS, 40)])
def test_two_prefills_are_never_unfinished_at_once(
    monkeypatch: pytest.MonkeyPatch, unfinished: str, sglangs: _PrefillAdmission, cut: int | None
) -> None:
    """One that stopped for a state leaves room in the chunk, but not for another that stops."""
    verdict = admit(monkeypatch, sglangs, cut=cut, **{unfinished: True})
    assert verdict is AddReqResult.OTHER


@pytest.mark.parametrize("unfinished", ["from_before", "in_this_batch"])
def test_one_that_fits_whole_fills_the_room_beside_it(
    monkeypatch: pytest.MonkeyPatch, unfinished: str
) -> None:
    assert admit(monkeypatch, FITS, **{unfinished: True}) is FITS
