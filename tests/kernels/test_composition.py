"""The state after two modules, from what each leaves alone and the second one's transition.

A recurrent layer is linear in its state: what a module does to it is one linear map, its
transition, and what it adds to a state of zeros. docs/prompts.md says why the server does not
compute this.
"""

import torch

from sglang_hybrid.kernels import naive

FIRST, SECOND = 37, 53  # tokens
TOKENS = FIRST + SECOND


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))
    )


def test_of_mamba2_it_is_a_number_for_each_head() -> None:
    x, b, c = draw(TOKENS, 4, 8), draw(TOKENS, 2, 16), draw(TOKENS, 2, 16)
    dt, rate = draw(TOKENS, 4).abs(), -draw(4).abs()

    def last(part: slice) -> torch.Tensor:
        return naive.ssd(x[part], dt[part], rate, b[part], c[part])[1][-1]

    transition = (dt[FIRST:].sum(0) * rate).exp()
    composed = transition[:, None, None] * last(slice(FIRST)) + last(slice(FIRST, None))
    torch.testing.assert_close(composed, last(slice(None)))


def test_of_mamba1_it_is_a_number_for_each_element() -> None:
    x, dt = draw(TOKENS, 12), draw(TOKENS, 12).abs()
    rate, b, c = -draw(12, 16).abs(), draw(TOKENS, 16), draw(TOKENS, 16)

    def last(part: slice) -> torch.Tensor:
        return naive.selective_scan(x[part], dt[part], rate, b[part], c[part])[1][-1]

    transition = (dt[FIRST:].sum(0)[:, None] * rate).exp()
    composed = transition * last(slice(FIRST)) + last(slice(FIRST, None))
    torch.testing.assert_close(composed, last(slice(None)))


def test_of_gated_delta_nets_it_is_a_matrix_as_large_as_the_state() -> None:
    q, k, v = (draw(TOKENS, 2, 8) for _ in range(3))
    g, beta = -draw(TOKENS, 2).abs(), draw(TOKENS, 2).sigmoid()

    def last(part: slice, v: torch.Tensor, start: torch.Tensor | None = None) -> torch.Tensor:
        found = naive.gated_delta_rule(
            q[part], k[part], v[part], g[part], beta[part], l2norm=True, initial_state=start
        )
        return found[1][-1]

    second = slice(FIRST, None)
    transition = last(
        second, torch.zeros_like(v), torch.eye(8, dtype=torch.float64).expand(2, 8, 8)
    )
    composed = last(slice(FIRST), v) @ transition + last(second, v)
    torch.testing.assert_close(composed, last(slice(None), v))
