"""A prefill leaves the state at any of its positions, as if it had ended there."""

from __future__ import annotations

import dataclasses
import importlib
import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt import runtime_context
from sglang.srt.layers.attention.hybrid_linear_attn_backend import Mamba2AttnBackend
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
from sglang.srt.layers.attention.linear.inkling_sconv_backend import InklingShortConvAttnBackend
from sglang.srt.layers.attention.linear.kda_backend import KDAAttnBackend
from sglang.srt.layers.attention.linear.kernels.gdn_flashinfer import FlashInferGDNKernel
from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel
from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel
from sglang.srt.layers.attention.linear.lightning_backend import LightningAttentionBackend
from sglang.srt.layers.attention.linear.short_conv_backend import ShortConvAttnBackend
from sglang.srt.layers.attention.mamba.mamba import MambaMixer2
from sglang.srt.layers.attention.mamba.mamba1 import MambaMixer1
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.mem_cache.memory_pool import MambaPool
from sglang.srt.mem_cache.ple_state_pool import NGramPool
from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner
from sglang.srt.models.bailing_moe_linear import BailingMoELinearAttention
from sglang.srt.models.inkling_common.sconv import ShortConvolution
from sglang.srt.models.jet_nemotron import JetBlock
from sglang.srt.models.lfm2 import Lfm2ShortConv
from sglang.srt.models.lfm2_moe import Lfm2MoeShortConv
from sglang.srt.models.minicpm import MiniCPMLightningMixer
from sglang.srt.models.qwen4_exp import Qwen4ExpPLELayer
from sglang.srt.models.zaya import CCA
from torch import Tensor, nn

from sglang_hybrid.checkpoints.scans import SCANS, Scan, name_of, why_split
from sglang_hybrid.checkpoints.tracks import (
    PrefillTracks,
    StateTracks,
)
from tests.checkpoints.layers import (
    CHUNK,
    KERNEL,
    Asked,
    Case,
    Outcome,
    made,
    run_cca,
    run_flashinfer,
    run_gdn,
    run_jet,
    run_kda,
    run_lightning,
    run_mamba1,
    run_mamba1_token_by_token,
    run_mamba2,
    run_ple,
    run_sconv,
    run_short_conv,
)

Run = Callable[[Case], Outcome]
RUNS = {
    "mamba2": run_mamba2,
    "mamba1": run_mamba1,
    "mamba1-token-by-token": run_mamba1_token_by_token,
    "lfm2": partial(run_short_conv, kind=Lfm2ShortConv),
    "lfm2-moe": partial(run_short_conv, kind=Lfm2MoeShortConv),
    "zaya": run_cca,
    "inkling": run_sconv,
    "inkling-keys-and-values": partial(run_sconv, fused=True),
    "qwen4-exp": run_ple,
    "gdn": run_gdn,
    "gdn-flashinfer": run_flashinfer,
    "jet-nemotron": run_jet,
    "kda": run_kda,
    "kda-bounded": partial(run_kda, lower_bound=-5.0),
    "lightning": run_lightning,
    "lightning-of-minicpm": partial(run_lightning, dtype=torch.bfloat16),
}
each = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)

BORDERS = [1, 2, KERNEL - 2, KERNEL - 1, KERNEL, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK]


def everywhere(lengths: list[int], untracked: tuple[int, ...] = ()) -> Asked:
    """The borders and the end of every sequence but the untracked, in no order."""
    asked = [
        (s, taken)
        for s, n in enumerate(lengths)
        if s not in untracked
        for taken in sorted({*BORDERS, n})
        if taken <= n
    ]
    random.Random(7).shuffle(asked)
    return asked


def assert_close(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    assert actual.shape == expected.shape
    if not actual.numel():  # a short convolution has nothing but its window
        return
    error = (actual.double() - expected.double()).abs().max().item()
    scale = expected.double().abs().max().item()
    assert error <= tolerance * scale + 1e-30, f"{what}: error {error:.2e} at scale {scale:.2e}"


def assert_states(case: Case, done: Outcome, tolerance: float = 2e-5) -> None:
    """Every track and every final state is as defined, and no other slot was written."""
    tracks = [(*pair, int(slot)) for pair, slot in zip(case.asked, case.targets, strict=True)]
    finals = [(s, n, int(case.slots[s])) for s, n in enumerate(case.lengths)]
    exact = 0.0 if case.dtype == torch.float32 else tolerance
    for s, taken, slot in tracks + finals:
        what = f"sequence {s} after {taken} tokens"
        assert_close(done.after.conv[0][slot], done.windows[s][taken], exact, f"window, {what}")
        assert_close(done.after.temporal[slot], done.states[s][taken], tolerance, f"state, {what}")
    others = torch.ones(case.pool_size, dtype=torch.bool)
    others[[slot for *_, slot in tracks + finals]] = False
    assert torch.equal(done.after.conv[0][others], done.before.conv[0][others])
    assert torch.equal(done.after.temporal[others], done.before.temporal[others])


@each
@pytest.mark.parametrize("prefixes", [[0, 0, 0, 0, 0], [9, 1, 5, 64, 200], [0, 7, 0, 0, 3]])
def test_states_at_every_border_of_chunk_and_window(run: Run, prefixes: list[int]) -> None:
    lengths = [1, 2 * CHUNK + 9, KERNEL, CHUNK, 3]
    case = Case(lengths, prefixes, everywhere(lengths))
    assert_states(case, run(case))


@each
def test_some_sequences_are_tracked_and_some_are_not(run: Run) -> None:
    lengths = [70, 1, CHUNK + 30, 2, 5]
    case = Case(lengths, [0, 3, 8, 0, 0], everywhere(lengths, untracked=(0, 3)))
    assert_states(case, run(case))


@each
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_states_at_any_positions(run: Run, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=4))
    prefixes = [data.draw(st.sampled_from([0, 1, 77])) for _ in lengths]
    every = [(s, taken) for s, n in enumerate(lengths) for taken in range(1, n + 1)]
    asked = data.draw(st.lists(st.sampled_from(every), min_size=1, max_size=8))
    case = Case(lengths, prefixes, asked, seed=data.draw(st.integers(0, 999)))
    assert_states(case, run(case))


@each
@pytest.mark.parametrize("taken", [1, KERNEL - 2, KERNEL - 1, CHUNK, CHUNK + 1])
def test_one_state_alone(run: Run, taken: int) -> None:
    case = Case([CHUNK + 2], [3], [(0, taken)])
    assert_states(case, run(case))


@each
def test_only_ends(run: Run) -> None:
    case = Case([5, CHUNK], [0, 4], [(1, CHUNK), (0, 5)])
    assert_states(case, run(case))


@each
def test_a_state_is_written_in_the_dtype_of_its_pool(run: Run) -> None:
    lengths = [CHUNK + 1, 2]
    case = Case(lengths, [5, 0], everywhere(lengths), dtype=torch.bfloat16)
    assert_states(case, run(case), tolerance=2e-2)


@each
def test_a_batch_that_asks_for_nothing_leaves_only_final_states(run: Run) -> None:
    case = Case([CHUNK + 1, 2], [0, 9], [])
    assert_states(case, run(case))


def tracks(rows: list[int], positions: list[int]) -> PrefillTracks:
    slots, bounds = torch.arange(len(rows)), torch.tensor([0, 2, 7])
    return PrefillTracks(StateTracks(rows, positions, slots), [8, 0], [2, 5], slots, slots, bounds)


@pytest.mark.parametrize("row, position", [(0, 8), (0, 11), (1, 0), (1, 6)])
def test_a_position_outside_its_prefill_is_refused(row: int, position: int) -> None:
    with pytest.raises(ValueError, match=f"Position {position} of row {row} .* positions"):
        tracks([row], [position])


@pytest.mark.parametrize("row", [-1, 2])
def test_a_row_outside_the_batch_is_refused(row: int) -> None:
    with pytest.raises(ValueError, match=f"Row {row} .* 2 sequences"):
        tracks([row], [1])


def test_another_backend_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"SimpleNamespace cannot write .* split"):
        wanted = StateTracks([0], [1], torch.tensor([1]))
        wanted.for_layers(SimpleNamespace(), SimpleNamespace(), torch.empty(0), torch.empty(0))


def test_no_state_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="0 rows, 0 positions and 0 slots"):
        tracks([], [])


class OtherKernel(TritonGDNKernel):
    pass


class OtherMixer(MambaMixer2):
    pass


class OtherDevice(GDNAttnBackend):
    pass


class BrokenOut(nn.Module):
    """A layer as Nemotron-H's, which SGLang's breakable graphs leave out."""

    def _forward_mamba(self) -> None: ...


def runner(
    kind: type,
    *layers: nn.Module,
    recurrent: int = 1,
    kernel: type = TritonGDNKernel,
    mis: bool = False,
    planned: bool = True,
    graphs: str | None = None,
    side_states: Sequence[object] = (),
    field: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Any:
    """A model runner as far as `why_split` looks at it."""
    backend = object.__new__(kind)
    backend.enable_mis, backend.leaves_states, backend.accept_lens_pool = mis, planned, None
    backend.kernel_dispatcher = SimpleNamespace(extend_kernel=object.__new__(kernel))
    captured = object.__new__(PrefillCudaGraphRunner) if graphs else None
    if captured is not None:
        captured.prefill_backend_name, captured.enable_cp_bcg_capture = graphs, False
    return SimpleNamespace(
        device="cuda",
        dtype=dtype,
        attn_backend=SimpleNamespace(linear_attn_backend=backend),
        model=nn.ModuleList(layers),
        prefill_cuda_graph_runner=captured,
        req_to_token_pool=SimpleNamespace(mamba_pool=state_pool(side_states, field, recurrent)),
    )


def state_pool(side_states: Sequence[object], field: str | None, layers: int) -> MambaPool:
    """A pool with states of a convolution and a scan; ``field``: a part that SGLang does not have
    yet.
    """
    parts = {"conv": [torch.zeros(1, 2, 3)], "temporal": torch.zeros(1, 2, 3)}
    pool: MambaPool = object.__new__(MambaPool)
    if field is None:
        pool.mamba_cache = MambaPool.State(**parts)
    else:
        named = [(field, torch.Tensor, dataclasses.field(kw_only=True))]
        state = dataclasses.make_dataclass("State", named, bases=(MambaPool.State,), frozen=True)
        pool = object.__new__(type("OtherPool", (MambaPool,), {"State": state}))
        pool.mamba_cache = state(**parts, **{field: torch.zeros(1)})
    pool.mamba_layer_ids = list(range(layers))
    for each in side_states:
        pool.register_slot_state(each)
    return pool


def ngram_pool() -> NGramPool:
    return NGramPool(size=4, context_len=2, eos_token_id=0, device="cpu")


MIXER, NEMOTRON = made(MambaMixer2), made(BrokenOut, mixer=made(MambaMixer2))
OUTSIDE = made(nn.Module, mixer=MIXER)
SHORT = made(nn.Module, conv=made(Lfm2ShortConv))
DELTA = made(RadixLinearAttention)
KDA = (KDAAttnBackend, DELTA)
INKLING = (InklingShortConvAttnBackend, made(ShortConvolution))
LING = made(BailingMoELinearAttention)


@pytest.mark.parametrize(
    "model_runner, reason",
    [
        (runner(Mamba2AttnBackend, MIXER), None),
        (runner(Mamba2AttnBackend, made(MambaMixer1)), None),
        (runner(Mamba2AttnBackend, made(OtherMixer)), "1 of 1 recurrent layers write no states"),
        (runner(Mamba2AttnBackend, MIXER, recurrent=3), "2 of 3 recurrent layers write no states"),
        (runner(ShortConvAttnBackend, made(Lfm2ShortConv)), None),
        (runner(ShortConvAttnBackend, made(Lfm2MoeShortConv)), None),
        (runner(ShortConvAttnBackend, SHORT, graphs="breakable"), "inside a prefill's CUDA graph"),
        (runner(ShortConvAttnBackend, made(CCA)), None),
        (runner(*INKLING), None),
        (runner(*INKLING, graphs="full"), "inside a prefill's CUDA graph"),
        (runner(GDNAttnBackend, DELTA), None),
        (runner(GDNAttnBackend, DELTA, kernel=OtherKernel), "GDNAttnBackend with OtherKernel"),
        (runner(GDNAttnBackend, DELTA, kernel=FlashInferGDNKernel), None),
        (runner(GDNAttnBackend, DELTA, mis=True), "GDNAttnBackend with TritonGDNKernel writes no"),
        (runner(GDNAttnBackend, made(JetBlock)), None),
        (runner(GDNAttnBackend, made(JetBlock), graphs="breakable"), "a prefill's CUDA graph"),
        (runner(GDNAttnBackend, made(JetBlock), dtype=torch.float32), "takes no float32"),
        (runner(OtherDevice, DELTA), "OtherDevice with"),
        (runner(*KDA), "KDAAttnBackend with TritonGDNKernel writes no"),
        (runner(*KDA, kernel=TritonKDAKernel), None),
        (runner(*KDA, kernel=TritonKDAKernel, graphs="breakable"), None),
        (
            runner(
                KDAAttnBackend, DELTA, kernel=TritonKDAKernel, graphs="breakable", planned=False
            ),
            "inside a prefill's CUDA graph",
        ),
        (runner(LightningAttentionBackend, LING), None),
        (runner(LightningAttentionBackend, LING, graphs="breakable"), None),
        (runner(LightningAttentionBackend, LING, graphs="full"), "inside a prefill's CUDA graph"),
        (
            runner(LightningAttentionBackend, made(MiniCPMLightningMixer), graphs="breakable"),
            None,
        ),
        (runner(Mamba2AttnBackend, OUTSIDE), None),
        (runner(Mamba2AttnBackend, OUTSIDE, graphs="breakable"), "inside a prefill's CUDA graph"),
        (runner(Mamba2AttnBackend, NEMOTRON, graphs="breakable"), None),
        (runner(Mamba2AttnBackend, NEMOTRON, graphs="full"), "inside a prefill's CUDA graph"),
        (runner(GDNAttnBackend, DELTA, graphs="breakable"), None),
        (runner(GDNAttnBackend, DELTA, graphs="full"), "inside a prefill's CUDA graph"),
        (
            runner(GDNAttnBackend, DELTA, side_states=[ngram_pool()]),
            r"not written .* \(NGramPool\)",
        ),
        (
            runner(GDNAttnBackend, DELTA, made(Qwen4ExpPLELayer), side_states=[ngram_pool()]),
            None,
        ),
        (runner(Mamba2AttnBackend, MIXER, field="gate"), r"not written .* \(gate\)"),
        (runner(GDNAttnBackend, DELTA, field="replayssm_x"), None),
    ],
    ids=[
        "mamba2",
        "mamba1",
        "a-kind-of-mamba2",
        "mamba2-beside-other-layers",
        "lfm2",
        "lfm2-moe",
        "lfm2-in-a-graph",
        "zaya",
        "inkling",
        "inkling-full-graph",
        "gdn",
        "gdn-other-kernel",
        "gdn-flashinfer",
        "gdn-mis",
        "jet-nemotron",
        "jet-nemotron-in-a-graph",
        "jet-nemotron-in-float32",
        "gdn-other-device",
        "kda-other-kernel",
        "kda",
        "kda-out-of-the-graph",
        "kda-in-a-graph",
        "lightning",
        "lightning-out-of-the-graph",
        "lightning-full-graph",
        "lightning-of-minicpm",
        "mamba2-eager",
        "mamba2-in-a-graph",
        "mamba2-out-of-the-graph",
        "mamba2-full-graph",
        "gdn-out-of-the-graph",
        "gdn-full-graph",
        "gdn-beside-a-state-of-the-model",
        "qwen4-exp",
        "mamba2-with-a-part-unknown-yet",
        "gdn-with-rings",
    ],
)
def test_which_prefills_are_split(
    model_runner: Any, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = why_split_on(1, model_runner, monkeypatch)
    assert found is None if reason is None else re.search(reason, str(found))


def test_short_convolutions_of_several_ranks_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel adds up their inputs and convolves the sums."""
    assert "sums of several ranks" in str(why_split_on(2, runner(*INKLING), monkeypatch))


def why_split_on(ranks: int, model_runner: Any, monkeypatch: pytest.MonkeyPatch) -> str | None:
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(tp_size=ranks))
    return why_split(model_runner)


def test_a_model_without_attention_has_the_backend_alone() -> None:
    model_runner = runner(Mamba2AttnBackend, MIXER)
    model_runner.attn_backend = model_runner.attn_backend.linear_attn_backend
    assert why_split(model_runner) is None


@pytest.mark.parametrize("scan", SCANS, ids=lambda scan: f"{scan.backend} {scan.kernel}")
def test_every_class_of_a_row_is_one_of_sglang(scan: Scan) -> None:
    for name in filter(None, [scan.backend, scan.kernel, *scan.layers]):
        module, _, kind = name.partition(":")
        found = getattr(importlib.import_module(module), kind)
        assert name_of(found) == name
