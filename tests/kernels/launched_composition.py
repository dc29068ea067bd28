"""The kernel of `composition`, in Triton's interpreter or on a GPU; run by test_checkpoint_states
and test_composition_compiled.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import Draw, batches, bounds, few, placed, seeds

from sglang_hybrid.kernels import composition, naive

CLOSE = 2e-5


@few
@given(
    seed=seeds,
    lengths=batches(longest=40),
    size=st.sampled_from([(1, 1, 16), (2, 6, 16), (2, 2, 24), (1, 2, 32)]),
    by_channel=st.booleans(),
    l2norm=st.booleans(),
    strong=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_launch_returns_the_transition_of_the_definition(
    seed: int,
    lengths: list[int],
    size: tuple[int, int, int],
    by_channel: bool,
    l2norm: bool,
    strong: bool,
    dtype: torch.dtype,
) -> None:
    """Tensors are parts of a wider projection, as a layer's are. Decays may leave nothing at all,
    as those with a bound of -5 for each token do."""
    d, cu = Draw(seed), bounds(lengths)
    key_heads, heads, keys = size
    projected = d.normal(cu[-1], key_heads * keys + 8).to(dtype)
    k = projected[:, 8:].view(cu[-1], key_heads, keys) / keys**0.5
    g = -d.uniform(0, 1, cu[-1], heads, *([keys] if by_channel else [])) * (60 if strong else 0.2)
    beta = d.uniform(0, 1, cu[-1], heads)
    found = composition.launched_transitions(
        *(placed(each) for each in (k, g, beta)), cu, l2norm=l2norm
    ).cpu()
    wide = k.repeat_interleave(heads // key_heads, 1).double()
    for segment, (begin, end) in enumerate(pairwise(cu)):
        part = slice(begin, end)
        zeros = torch.zeros(end - begin, heads, keys)
        expected = torch.eye(keys, dtype=torch.float64).expand(heads, keys, keys)
        if end > begin:
            inputs = (wide[part], wide[part], zeros.double(), g[part].double(), beta[part].double())
            expected = naive.gated_delta_rule(*inputs, l2norm=l2norm, initial_state=expected)[1][-1]
        torch.testing.assert_close(found[segment].double(), expected, atol=CLOSE, rtol=CLOSE)


def test_a_planted_error_is_seen() -> None:
    """Errors are the order of the rule's two factors, and tokens in reverse."""
    d = Draw(0)
    k, g, beta = d.normal(9, 1, 16), -d.uniform(0, 1, 9, 1, 16), d.uniform(0, 1, 9, 1)
    inputs = [placed(each) for each in (k, g, beta)]
    right = composition.launched_transitions(*inputs, [0, 9], l2norm=True)
    turned = [each.flip(0) for each in inputs]
    wrong = composition.launched_transitions(*turned, [0, 9], l2norm=True)
    assert not torch.allclose(right, wrong, atol=1e-3)
    assert not torch.allclose(right.mT, right, atol=1e-3)


def test_rows_that_are_not_dense_are_refused() -> None:
    k, g, beta = (placed(torch.zeros(4, 1, *more)) for more in ([32], [], []))
    with pytest.raises(ValueError, match="rows must be dense"):
        composition.launched_transitions(k[..., ::2], g, beta, [0, 4])
    with pytest.raises(ValueError, match="no segment longer"):
        composition.launched_transitions(k, g, beta, [0, 5])
