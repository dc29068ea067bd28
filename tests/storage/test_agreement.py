"""Calibration on two ranks that are processes of their own, with gloo: all choose the same copies,
and where one fails all do.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sglang_hybrid.cache.tiers import codec_choice
from sglang_hybrid.serving.flag_values import CodecChoice
from sglang_hybrid.serving.ranks import Ranks
from sglang_hybrid.storage.codecs import probe
from sglang_hybrid.storage.codecs.coded_rows import CodecPlan, CodedRows
from tests.two_ranks import join, on_two_ranks

LAYERS, TOKENS, WIDTH = 3, 256, 8
SECONDS = 2.0
"""Seconds that a rank waits for the others once it failed."""

BOUND = 1.0


class Model:
    """A model of which each rank has a part, as far as `Probe` runs it: logits are a sum over the
    ranks, so a forward waits for all of them.
    """

    def __init__(self, rank: int, group: dist.ProcessGroup) -> None:
        self._group = group
        self.forwards = 0
        generator = torch.Generator().manual_seed(rank)
        self.kv = [
            [torch.randn(TOKENS, 1, WIDTH, generator=generator) for _ in range(2)]
            for _ in range(LAYERS)
        ]
        self.req_to_token_pool = SimpleNamespace(
            req_to_token=torch.arange(TOKENS)[None], clear=lambda: None
        )
        self.token_to_kv_pool_allocator = SimpleNamespace(clear=lambda: None)

    def extend(self, *_: Any) -> Tensor:
        """One forward."""
        self.forwards += 1
        keys = torch.stack([layer[0].mean(dim=(0, 1)) for layer in self.kv])
        logits = keys.sum(0, keepdim=True)
        dist.all_reduce(logits, group=self._group)
        return logits


def _nothing_else(patch: pytest.MonkeyPatch, model: Model, rank: int) -> None:
    pass


def _other_errors(patch: pytest.MonkeyPatch, model: Model, rank: int) -> None:
    """The second rank finds larger errors."""
    agree = Ranks.agree

    def other(self: Ranks, error: float = 0.0) -> float:
        return agree(self, error and error + rank * BOUND)

    patch.setattr(Ranks, "agree", other)


def _a_codec_fails(patch: pytest.MonkeyPatch, model: Model, rank: int) -> None:
    """Fail on the second rank, between two forwards."""
    encode, calls = CodedRows.encode, 0

    def fails(self: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if rank == 1 and calls == 20:
            raise MemoryError("no room")
        return encode(self, *args)

    patch.setattr(CodedRows, "encode", fails)


def _pools_have_no_buffers(patch: pytest.MonkeyPatch, model: Model, rank: int) -> None:
    """Fail on the first rank, before the first forward."""
    if rank == 0:
        patch.setattr(probe, "_kv_buffers", None)


def _forwards_fail(patch: pytest.MonkeyPatch, model: Model, rank: int) -> None:
    patch.setattr(probe, "_extend", None)


def _a_forward_fails(patch: pytest.MonkeyPatch, model: Model, rank: int) -> None:
    """Fail on the second rank; the first one waits for it in that forward."""

    def fails(*_: Any) -> Tensor:
        if rank == 1 and model.forwards == 5:
            raise MemoryError("no room")
        return model.extend()

    patch.setattr(probe, "_extend", fails)


def calibrate(rank: int, folder: str, cases: Sequence[str]) -> None:
    """One rank. What it chooses in each case, or its error, goes into a file."""
    join(rank, folder)
    of_model, of_cpu = dist.new_group([0, 1]), dist.new_group([0, 1])
    found = [choice(case, rank, of_model, of_cpu) for case in cases]
    Path(folder, str(rank)).write_text("\n".join(found))
    os._exit(0)  # without waiting for what other ranks never answered


def choice(case: str, rank: int, of_model: Any, of_cpu: Any) -> str:
    """The choice of one rank."""
    model = Model(rank, of_model)
    options: Any = SimpleNamespace(hybrid_tier_codec=CodecChoice("exact", BOUND))
    context: Any = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=model),
        tp_group=SimpleNamespace(cpu_group=of_cpu),
        tp_size=2,
        params=SimpleNamespace(pp_size=1),
    )
    request = SimpleNamespace(kv=SimpleNamespace(req_pool_idx=0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "_kv_buffers", lambda runner: runner.kv)
        patch.setattr(probe, "_state_tensors", lambda runner: [])
        patch.setattr(probe, "_prompts", lambda tokenizer, runner: [[1], [2]])
        patch.setattr(probe, "_extend", model.extend)
        patch.setattr(probe, "_request", lambda ids: request)
        patch.setattr(codec_choice, "Ranks", lambda group: Ranks(group, SECONDS))
        globals()[case](patch, model, rank)
        try:
            return str(codec_choice.choose_codecs(options, context))
        except RuntimeError:
            return "RuntimeError"


def choices(folder: Path, *cases: Any) -> list[list[str]]:
    """The choices of two ranks, each in all cases; None of one that hangs or ends."""
    names = [case.__name__ for case in cases]
    found = on_two_ranks(calibrate, folder, names)
    return [[] if each is None else each.split("\n") for each in found]


EXACT = str(CodecPlan())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The choices of each rank in all cases; the last one ends it."""
    return choices(
        tmp_path_factory.mktemp("ranks"),
        _nothing_else,
        _other_errors,
        _a_codec_fails,
        _pools_have_no_buffers,
        _forwards_fail,
        _nothing_else,
        _a_forward_fails,
    )


def test_ranks_choose_the_same_and_fail_together(found: list[list[str]]) -> None:
    first, second = ([*rank[:-1]] for rank in found)
    assert first == second
    same, larger_errors, *failed, again = first
    assert same == again != EXACT
    assert larger_errors == EXACT
    assert failed == [EXACT] * 3


def test_a_rank_that_fails_in_a_forward_ends_the_start(found: list[list[str]]) -> None:
    """The server ends with it; the others find that it is gone."""
    first, second = found
    assert second[-1] == "RuntimeError"
    assert len(first) == len(second), "it hung"


def test_one_rank_has_nobody_to_agree_with() -> None:
    alone = Ranks(None)
    alone.give_up()
    assert (alone.agree(0.5), alone.agree(float("nan"))) == (0.5, float("inf"))


def test_a_stage_of_a_pipeline_measures_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """It has no log probabilities to compare; it would wait for the other stages."""
    context: Any = SimpleNamespace(params=SimpleNamespace(pp_size=2))
    options: Any = SimpleNamespace(hybrid_tier_codec=CodecChoice("exact", BOUND))
    assert codec_choice.choose_codecs(options, context) == CodecPlan()
    assert "name a codec" in caplog.text
