"""Transitions are recorded of the layers of SGLang that have them, and windows are joined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_hybrid.checkpoints.tracks import StateTracks
from sglang_hybrid.extensions.schemas.composition.losses import LOSSES, Loss
from sglang_hybrid.extensions.schemas.composition.recording import Recording, SegmentTracks
from sglang_hybrid.extensions.schemas.composition.states import joined_windows
from sglang_hybrid.extensions.schemas.endpoints import apart
from sglang_hybrid.kernels.composition import Segment
from tests.checkpoints.layers import (
    Case,
    Outcome,
    run_flashinfer,
    run_gdn,
    run_jet,
    run_kda,
    run_lightning,
    run_mamba2,
)

Run = Callable[[Case], Outcome]
COMPOSED: dict[str, tuple[Run, int]] = {
    "mamba2": (run_mamba2, 7),
    "gated delta net": (run_gdn, 70),
    "kda": (run_kda, 70),
    "kda, decays with a bound": (partial(run_kda, lower_bound=-5.0), 3),
}
"""Layers, and tokens of a segment behind which a state has not faded."""
OTHERS: dict[str, Run] = {
    "jet": run_jet,
    "lightning": run_lightning,
    "flashinfer": run_flashinfer,
}


@dataclass
class Recorded(Case):
    """A batch whose first sequences are segments, with windows of zeros in front of all."""

    recordings: list[Recording] = field(default_factory=list)

    @property
    def tracks(self) -> Any:
        tracks = super().tracks
        if not self.recordings:
            return tracks
        for row, recording in enumerate(self.recordings):
            recording.begin(self.prefixes[row], self.prefixes[row] + self.lengths[row])
        assert tracks is None or isinstance(tracks, StateTracks)
        return SegmentTracks(tracks, list(enumerate(self.recordings)))

    def pools(self, channels: int, *state: int) -> SimpleNamespace:
        pools = super().pools(channels, *state)
        pools.conv[0].zero_()
        return pools


def leaves(run: Run, case: Recorded, row: int = 0) -> tuple[Tensor, Tensor]:
    """The state that a sequence starts from, and the one that it ends in."""
    outcome, slot = run(case), case.slots[row]
    return outcome.before.temporal[slot], outcome.after.temporal[slot]


@pytest.mark.parametrize("kind", COMPOSED)
@pytest.mark.parametrize("asked", [[], [(0, 2), (1, 4)]], ids=["alone", "with states"])
def test_a_transition_says_what_a_segment_makes_of_any_state(
    kind: str, asked: list[tuple[int, int]]
) -> None:
    """The segment is computed once from zero, when it is recorded, and once from a state."""
    (run, tokens), recording = COMPOSED[kind], Recording()
    _, added = leaves(run, Recorded([tokens, 5], [0, 3], asked, recordings=[recording]))
    (transition,) = recording.whole(tokens, 1) or []
    before, expected = leaves(run, Recorded([tokens, 5], [7, 3], asked))
    assert recording.kind is not None and before.any()
    segment = Segment(added, transition, recording.kind.is_matrix)
    torch.testing.assert_close(segment.after(before), expected, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(expected, added, atol=1e-3), "the state left no trace"
    wrong = Segment(added, 0.9 * transition, recording.kind.is_matrix)
    assert not torch.allclose(wrong.after(before), expected, atol=1e-4)


@pytest.mark.parametrize("kind", COMPOSED)
def test_states_are_left_beside_recordings(kind: str) -> None:
    run, tokens = COMPOSED[kind]
    asked = [(0, 2), (0, tokens), (1, 4)]
    case = Recorded([tokens, 5], [0, 3], asked, recordings=[Recording()])
    outcome = run(case)
    for (row, taken), slot in zip(asked, case.targets, strict=True):
        state = outcome.states[row][taken].float()
        torch.testing.assert_close(outcome.after.temporal[slot], state, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", OTHERS)
def test_nothing_is_recorded_of_layers_whose_loss_was_not_measured(kind: str) -> None:
    recording = Recording()
    OTHERS[kind](Recorded([9], [0], [], recordings=[recording]))
    assert recording.whole(9, 1) is None


def test_the_transition_of_several_forwards_is_a_product() -> None:
    first, second = torch.rand(2, 2, 3, 3)
    recording = Recording()
    recording.kind = SimpleNamespace(is_matrix=True)  # type: ignore[assignment]
    for start, end, transition in ((0, 4, first), (4, 6, second)):
        recording.begin(start, end)
        recording.add(transition)
    (found,) = recording.whole(6, 1) or []
    torch.testing.assert_close(found, first @ second)
    recording.kind = SimpleNamespace(is_matrix=False)  # type: ignore[assignment]
    recording.begin(6, 7)
    recording.add(second)
    torch.testing.assert_close((recording.whole(7, 1) or [])[0], first @ second * second)


@pytest.mark.parametrize("spans", [[(1, 4)], [(0, 4), (5, 6)], [(0, 4), (2, 6)], [(0, 3)]])
def test_a_segment_whose_forwards_leave_a_gap_has_no_transition(
    spans: list[tuple[int, int]],
) -> None:
    recording = Recording()
    for start, end in spans:
        recording.begin(start, end)
        recording.add(torch.ones(1))
    assert recording.whole(spans[-1][1], 1) is None or spans == [(0, 3)]
    assert recording.whole(4, 1) is None
    assert recording.whole(3, 2) is None


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("tokens", [[5], [5, 9], [9, 1], [1, 1], [2, 1, 1], [1], [3, 3]])
def test_the_window_is_that_of_the_last_inputs(tokens: list[int], axis: int) -> None:
    inputs = [torch.randn(2, each) for each in tokens]
    past = 3
    padded = torch.cat([torch.zeros(2, past), *inputs], 1)[:, -past:]
    windows = [torch.cat([torch.zeros(2, past), each], 1)[:, -past:] for each in inputs]
    if axis == -2:
        padded, windows = padded.mT, [window.mT for window in windows]
    assert torch.equal(joined_windows(windows, tokens, axis), padded)


@pytest.mark.parametrize(
    ("model", "more", "said"),
    [
        ({"model_type": "qwen3_next"}, {}, ""),
        ({"model_type": "qwen3_5_text"}, {}, ""),
        ({"model_type": "kimi_linear"}, {}, ""),
        ({"model_type": "falcon_mamba"}, {}, "falcon_mamba, a model with recurrent layers"),
        ({"model_type": "lossy"}, {}, "up to 3.4 points with lossy layers, and 3.3 is the most"),
        ({"model_type": "qwen3_next"}, {"speculative_algorithm": "NGRAM"}, "speculative"),
        ({"model_type": "qwen3_next"}, {"page_size": 16}, "end within pages"),
        ({"model_type": "llama"}, {}, ""),
    ],
)
def test_prompts_are_whole_where_states_are_not_composed(
    model: dict[str, str], more: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOSSES, "lossy", Loss("lossy layers", 3.4, seam=16))
    has_states = SimpleNamespace(state_bytes=int(model["model_type"] != "llama"))
    monkeypatch.setattr(apart, "CostModel", SimpleNamespace(from_config=lambda _: has_states))
    args = {"radix_cache_backend": "hybrid", "page_size": 1, "speculative_algorithm": None}
    config = SimpleNamespace(
        hf_config=SimpleNamespace(to_dict=dict), hf_text_config=SimpleNamespace(**model)
    )
    manager: Any = SimpleNamespace(
        server_args=SimpleNamespace(**{**args, **more}), model_config=config
    )
    why = apart.why_whole.__wrapped__(manager)
    assert (said in why) if said else not why
