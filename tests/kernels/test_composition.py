"""The state behind segments that were computed alone is that behind all their tokens, for every
kind of recurrent layer; a wrong transition or order is seen. Rotated keys can be moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, permutations

import pytest
import torch
from torch import Tensor

from sglang_hybrid.kernels import naive
from sglang_hybrid.kernels.composition import (
    Segment,
    compose,
    decaying_segments,
    delta_rule_segments,
)

BOUNDS = [0, 7, 8, 18, 27]
"""The tokens at which segments begin and end; one of the segments has a single token."""
TOKENS, HEADS, KEYS = BOUNDS[-1], 2, 8

State = Callable[[list[int], Tensor | None], Tensor]
"""The state behind tokens, from a state or from zero, by the definition."""


def draw(*shape: int) -> Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))
    )


def spans() -> list[list[int]]:
    return [list(range(begin, end)) for begin, end in pairwise(BOUNDS)]


def decaying(state: State, log_decay: Tensor) -> tuple[State, list[Segment]]:
    finals = torch.stack([state(part, None) for part in spans()])
    return state, decaying_segments(finals, log_decay, BOUNDS)


def mamba2() -> tuple[State, list[Segment]]:
    x, b, c = draw(TOKENS, 4, 8), draw(TOKENS, HEADS, 16), draw(TOKENS, HEADS, 16)
    dt, rate = draw(TOKENS, 4).abs() / 9, -draw(4).abs()

    def state(part: list[int], start: Tensor | None) -> Tensor:
        one = (x[part], dt[part], rate, b[part], c[part])
        return naive.ssd(*one, initial_state=start)[1][-1]

    return decaying(state, (dt * rate)[..., None, None])


def mamba1() -> tuple[State, list[Segment]]:
    x, dt = draw(TOKENS, 12), draw(TOKENS, 12).abs() / 9
    rate, b, c = -draw(12, 16).abs(), draw(TOKENS, 16), draw(TOKENS, 16)

    def state(part: list[int], start: Tensor | None) -> Tensor:
        one = (x[part], dt[part], rate, b[part], c[part])
        return naive.selective_scan(*one, initial_state=start)[1][-1]

    return decaying(state, dt[..., None] * rate)


def gated_linear_attention(by_channel: bool) -> tuple[State, list[Segment]]:
    k, v = draw(TOKENS, HEADS, KEYS), draw(TOKENS, HEADS, 4)
    log_decay = -draw(TOKENS, HEADS, KEYS if by_channel else 1).abs()[:, :, None] / 9

    def state(part: list[int], start: Tensor | None) -> Tensor:
        found = torch.zeros_like(v[0, :, :, None] * k[0, :, None]) if start is None else start
        for t in part:
            found = log_decay[t].exp() * found + v[t, :, :, None] * k[t, :, None]
        return found

    return decaying(state, log_decay)


def delta_rule(by_channel: bool) -> tuple[State, list[Segment]]:
    q, k, v = (draw(TOKENS, HEADS, KEYS) for _ in range(3))
    g = -draw(TOKENS, HEADS, KEYS if by_channel else 1).abs() / 9
    g, beta = g if by_channel else g[..., 0], draw(TOKENS, HEADS).sigmoid()

    def scan(part: list[int], v: Tensor, start: Tensor | None) -> Tensor:
        one = (q[part], k[part], v[part], g[part], beta[part])
        return naive.gated_delta_rule(*one, l2norm=True, initial_state=start)[1][-1]

    identity = torch.eye(KEYS, dtype=torch.float64).expand(HEADS, KEYS, KEYS)
    segments = [
        Segment(scan(part, v, None), scan(part, torch.zeros_like(v), identity), is_matrix=True)
        for part in spans()
    ]
    return lambda part, start: scan(part, v, start), segments


KINDS: dict[str, Callable[[], tuple[State, list[Segment]]]] = {
    "mamba2": mamba2,
    "mamba1": mamba1,
    "lightning": lambda: gated_linear_attention(by_channel=False),
    "gated linear attention": lambda: gated_linear_attention(by_channel=True),
    "gated delta net": lambda: delta_rule(by_channel=False),
    "KDA": lambda: delta_rule(by_channel=True),
}


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> tuple[State, list[Segment]]:
    return KINDS[request.param]()


def test_segments_in_any_order_leave_what_their_tokens_leave(
    kind: tuple[State, list[Segment]],
) -> None:
    state, segments = kind
    for order in list(permutations(range(len(segments))))[::5]:
        tokens = [token for number in order for token in spans()[number]]
        composed = compose([segments[number] for number in order])
        torch.testing.assert_close(composed.added, state(tokens, None))


def test_what_was_composed_is_a_segment_behind_any_state(
    kind: tuple[State, list[Segment]],
) -> None:
    state, segments = kind
    before = draw(*segments[0].added.shape)
    all_tokens = list(range(TOKENS))
    expected = state(all_tokens, before)
    first, *others = segments
    torch.testing.assert_close(compose(segments).after(before), expected)
    torch.testing.assert_close(first.then(compose(others)).after(before), expected)


def test_a_planted_error_in_a_transition_or_in_the_order_is_seen(
    kind: tuple[State, list[Segment]],
) -> None:
    state, segments = kind
    expected = state(list(range(TOKENS)), None)

    def wrong(planted: list[Segment]) -> bool:
        return not torch.allclose(compose(planted).added, expected, rtol=1e-4, atol=1e-4)

    assert not wrong(segments)
    assert wrong(segments[::-1])
    assert wrong([*segments[:2], segments[3], segments[2]])
    last = segments[-1]
    for transition in (0.9 * last.transition, last.transition.roll(1, 0), segments[2].transition):
        if not torch.equal(transition, last.transition):
            assert wrong([*segments[:-1], replace(last, transition=transition)])
    if last.is_matrix:
        assert wrong([*segments[:-1], replace(last, transition=last.transition.mT)])


@pytest.mark.parametrize("by_channel", [False, True], ids=["gated delta net", "KDA"])
def test_one_scan_returns_outputs_states_and_transitions_of_a_batch(by_channel: bool) -> None:
    heads, values = 4, 6
    q, k, v = (*(draw(TOKENS, HEADS, KEYS) for _ in "qk"), draw(TOKENS, heads, values))
    g = -draw(TOKENS, heads, *([KEYS] if by_channel else [])).abs() / 9
    beta = draw(TOKENS, heads).sigmoid()
    inputs = [each.float() for each in (q, k, v, g, beta)]
    found, segments = delta_rule_segments(*inputs, BOUNDS, l2norm=True)
    for part, segment in zip(spans(), segments, strict=True):
        one = [each[part] for each in (q, k, v, g, beta)]
        y, states = naive.gated_delta_rule(*one, l2norm=True)
        torch.testing.assert_close(found[part].double(), y, atol=1e-5, rtol=1e-5)
        before = draw(heads, values, KEYS)
        _, later = naive.gated_delta_rule(*one, l2norm=True, initial_state=before)
        for start, expected in ((torch.zeros_like(before), states[-1]), (before, later[-1])):
            behind = segment.after(start.float()).double()
            torch.testing.assert_close(behind, expected, atol=1e-5, rtol=1e-5)


def test_segments_of_two_kinds_or_of_none_are_refused() -> None:
    numbers, matrices = (KINDS[name]()[1] for name in ("lightning", "gated delta net"))
    with pytest.raises(ValueError, match="cannot be composed"):
        compose([numbers[0], matrices[0]])
    with pytest.raises(ValueError, match="none to compose"):
        compose([])


def test_rotated_keys_move_by_a_rotation() -> None:
    """Keys of a segment that was computed at the positions from 0 on, turned by the angle of the
    first position that it takes, are those of the positions that it takes."""
    keys, query = draw(TOKENS, 8), draw(8)
    angles = 10_000.0 ** -(torch.arange(4, dtype=torch.float64) / 4)

    def rotated(x: Tensor, positions: Tensor) -> Tensor:
        turned = torch.polar(torch.ones(()).double(), positions[:, None] * angles)
        pairs = torch.view_as_complex(x.unflatten(-1, (4, 2))) * turned
        return torch.view_as_real(pairs).flatten(-2)

    tokens, first = torch.arange(TOKENS).double(), torch.tensor([1234.0]).double()
    expected = rotated(keys, tokens + first)
    moved = rotated(rotated(keys, tokens), first)
    torch.testing.assert_close(moved, expected)
    asks = rotated(query[None], first + TOKENS)[0]
    torch.testing.assert_close(moved @ asks, expected @ asks)
    too_far = rotated(rotated(keys, tokens), first + 1)
    assert not torch.allclose(too_far @ asks, expected @ asks, atol=1e-3)
