"""Last hidden states of prompts: which rows a forward leaves, and what a batch is answered from."""

from __future__ import annotations

from typing import Any

import torch

from sglang_hybrid.checkpoints.last_hidden import Answers, HiddenCapture, capturing, current_capture


def test_the_last_token_of_each_wanted_sequence_is_left() -> None:
    wanted = HiddenCapture([2, 0])
    hidden = torch.arange(16.0).reshape(8, 2)  # two of padding
    wanted.take("processor", "head", hidden, [3, 2, 1])
    last = hidden.clone()
    hidden.zero_()  # the forward's buffers are used again
    assert torch.equal(wanted.left[0].hidden, last[5])
    assert torch.equal(wanted.left[1].hidden, last[2])
    assert wanted.left[0].nbytes == 8


def test_each_sequence_keeps_its_own_row_only() -> None:
    """Its reported size is that of all that it keeps of the batch."""
    wanted = HiddenCapture(list(range(64)))
    wanted.take("processor", "head", torch.zeros(70, 8), [1] * 64)
    for left in wanted.left:
        assert left.hidden.untyped_storage().nbytes() == left.nbytes == 32


def test_nothing_is_left_of_states_that_are_not_those_of_all_tokens() -> None:
    wanted = HiddenCapture([0])
    wanted.take("processor", "head", torch.zeros(2, 4), [3, 2])
    assert not wanted.left


def test_what_is_wanted_is_known_while_its_forward_is_launched() -> None:
    wanted = HiddenCapture([0])
    assert current_capture() is None
    try:
        with capturing(wanted):
            assert current_capture() is wanted
            raise RuntimeError
    except RuntimeError:
        assert current_capture() is None


def test_a_batch_is_answered_by_what_read_the_states() -> None:
    read: list[Any] = []

    def processor(input_ids: Any, hidden: torch.Tensor, head: Any, batch: Any) -> str:
        read.append((input_ids, hidden, head, batch))
        return "logits"

    wanted = HiddenCapture([0, 1])
    wanted.take(processor, "head", torch.eye(2), [1, 1])
    ids: Any = "ids"
    answer: Any = Answers(wanted.left[::-1]).logits(ids, "batch")
    assert answer == "logits"
    ((ids, hidden, head, batch),) = read
    assert torch.equal(hidden, torch.eye(2).flip(0)) and (head, batch) == ("head", "batch")
