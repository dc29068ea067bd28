"""One recurrent layer of the patched SGLang on pools of our own, beside its definition.

The metadata is built by SGLang's backend and the layer runs by SGLang's mixer; only the projections
are left out. `Case` holds the batch, `run_mamba2` and `run_gdn` run it and return what the pool
holds and what the definition says about every position.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.layers.attention.hybrid_linear_attn_backend import (
    HybridLinearAttnBackend,
    Mamba2AttnBackend,
)
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend, GDNKernelDispatcher
from sglang.srt.layers.attention.linear.inkling_sconv_backend import InklingShortConvAttnBackend
from sglang.srt.layers.attention.linear.kda_backend import KDAAttnBackend, KDAKernelDispatcher
from sglang.srt.layers.attention.linear.kernels import gdn_flashinfer
from sglang.srt.layers.attention.linear.lightning_backend import LightningAttentionBackend
from sglang.srt.layers.attention.linear.short_conv_backend import ShortConvAttnBackend
from sglang.srt.layers.attention.linear.utils import LinearAttnKernelBackend
from sglang.srt.layers.attention.mamba import mamba1
from sglang.srt.layers.attention.mamba.mamba import MambaMixer2
from sglang.srt.layers.attention.mamba.mamba1 import MambaMixer1
from sglang.srt.mem_cache.ple_state_pool import NGramPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.models import qwen4_exp
from sglang.srt.models.inkling_common import sconv
from sglang.srt.models.jet_nemotron import DynamicShortConvolution, JetBlock
from sglang.srt.models.lfm2 import Lfm2ShortConv
from sglang.srt.models.lfm2_moe import Lfm2MoeShortConv
from sglang.srt.models.zaya import CCA
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from sglang_hybrid.checkpoints.tracks import StateTracks
from sglang_hybrid.hooks import states as state_hooks
from sglang_hybrid.hooks.patching import load_patches
from sglang_hybrid.kernels import naive

KERNEL, CHUNK = 4, 64
HEADS, WIDTH, GROUPS, SIZE = 4, 3, 2, 5
K_HEADS, V_HEADS, K_DIM, V_DIM = 2, 4, 6, 3

Asked = list[tuple[int, int]]


@dataclass
class Case:
    """A packed batch: extend and prefix lengths, and (sequence, tokens of this prefill) to track.

    Sequence s has slot ``slots[s]``, the i-th track goes to ``targets[i]``.
    """

    lengths: list[int]
    prefixes: list[int]
    asked: Asked
    seed: int = 0
    dtype: torch.dtype = torch.float32
    slots: Tensor = field(init=False)
    targets: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        n = len(self.lengths)
        order = torch.randperm(self.pool_size - 1, generator=self.generator) + 1
        self.slots, self.targets = order[:n], order[n : n + len(self.asked)]

    @property
    def pool_size(self) -> int:
        return len(self.lengths) + len(self.asked) + 3

    @property
    def bounds(self) -> list[int]:
        return list(accumulate(self.lengths, initial=0))

    @property
    def tracks(self) -> StateTracks | None:
        if not self.asked:
            return None
        positions = [self.prefixes[s] + taken for s, taken in self.asked]
        return StateTracks([s for s, _ in self.asked], positions, self.targets)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def pools(self, channels: int, *state: int) -> SimpleNamespace:
        """A layer's pools; what is in a slot is noise, where SGLang does not clear it first."""
        conv = self.normal(self.pool_size, channels, KERNEL - 1).to(self.dtype)
        temporal = self.normal(self.pool_size, *state).to(self.dtype)
        fresh = [int(slot) for slot, p in zip(self.slots, self.prefixes, strict=True) if p == 0]
        temporal[fresh] = 0
        return SimpleNamespace(conv=[conv], temporal=temporal)

    def batch(self) -> ForwardBatch:
        lengths, prefixes = torch.tensor(self.lengths), torch.tensor(self.prefixes)
        tokens = self.bounds[-1]
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(self.lengths),
            input_ids=torch.zeros(tokens, dtype=torch.int64),
            req_pool_indices=torch.arange(len(self.lengths)),
            seq_lens=lengths + prefixes,
            out_cache_loc=torch.zeros(tokens, dtype=torch.int64),
            seq_lens_sum=int((lengths + prefixes).sum()),
            extend_num_tokens=tokens,
            extend_seq_lens=lengths.int(),
            extend_prefix_lens=prefixes.int(),
            extend_start_loc=torch.tensor(self.bounds[:-1], dtype=torch.int32),
            extend_seq_lens_cpu=list(self.lengths),
            extend_prefix_lens_cpu=list(self.prefixes),
            state_tracks=self.tracks,
        )

    def backend(self, kind: type, pools: SimpleNamespace) -> Any:
        """SGLang's backend around one layer's pools, without a model runner."""
        backend = object.__new__(kind)
        backend.device, backend.topk, backend.enable_mis = "cpu", 0, False
        backend._mamba_chunk_size = CHUNK
        backend.conv_states_shape = pools.conv[0].shape
        backend.req_to_token_pool = SimpleNamespace(
            get_mamba_indices=lambda rows: self.slots[rows].int(),
            translate_mamba_indices=lambda indices: indices,
            mamba2_layer_cache=lambda layer: pools,
            mamba_pool=SimpleNamespace(),
        )
        return backend


@dataclass
class Outcome:
    """conv and temporal pools before and after; states[s] [tokens + 1, ...] by definition."""

    before: SimpleNamespace
    after: SimpleNamespace
    windows: list[Tensor]
    states: list[Tensor]


def run_mamba2(case: Case) -> Outcome:
    """A prefill of one MambaMixer2, behind its projections."""
    inner, groups = HEADS * WIDTH, GROUPS * SIZE
    channels, tokens = inner + 2 * groups, case.bounds[-1]
    pools = case.pools(channels, HEADS, WIDTH, SIZE)
    before = copied(pools)
    weight, bias = case.normal(channels, KERNEL), case.normal(channels)
    A, dt_bias = -case.normal(HEADS).abs() - 0.1, case.normal(HEADS)
    D = case.normal(HEADS)
    gate, inputs, dt = case.normal(tokens, inner), case.normal(tokens, channels), None
    dt = case.normal(tokens, HEADS)
    mixer = SimpleNamespace(
        in_proj=lambda h: (h, None),
        out_proj=lambda h: (h, None),
        norm=lambda y, gate: y,
        tp_size=1,
        intermediate_size=inner,
        conv_dim=channels,
        num_heads=HEADS,
        head_dim=WIDTH,
        n_groups=GROUPS,
        groups_ssm_state_size=groups,
        ssm_state_size=SIZE,
        activation="silu",
        conv1d=SimpleNamespace(weight=weight[:, None], bias=bias),
        A=A,
        D=D,
        dt_bias=dt_bias,
    )
    backend = case.backend(Mamba2AttnBackend, pools)
    backend.init_forward_metadata(case.batch())
    MambaMixer2.forward(
        mixer,
        hidden_states=torch.cat([gate, inputs, dt], dim=1),
        layer_cache=pools,
        metadata=backend.forward_metadata,
    )

    def define(at: slice, convolved: Tensor, start: Tensor) -> Tensor:
        x, B, C = convolved.split([inner, groups, groups], dim=1)
        x, B, C = x.view(-1, HEADS, WIDTH), B.view(-1, GROUPS, SIZE), C.view(-1, GROUPS, SIZE)
        return naive.ssd(x, dt[at], A, B, C, D, dt_bias, True, start)[1]

    return Outcome(before, pools, *defined(case, before, inputs, weight, bias, define))


RANK = 2
"""Rank of Mamba1's time steps."""


def run_mamba1(case: Case, kind: type[MambaMixer1] = MambaMixer1) -> Outcome:
    """A prefill of one MambaMixer1, behind its projection."""
    inner, tokens = HEADS * WIDTH, case.bounds[-1]
    pools = case.pools(inner, inner, 1, SIZE)
    before = copied(pools)
    weight, bias = case.normal(inner, KERNEL), case.normal(inner)
    mixed, wide = case.normal(RANK + 2 * SIZE, inner), case.normal(inner, RANK)
    inputs, gate = case.normal(tokens, inner), case.normal(tokens, inner)
    mixer = made(kind)
    attributes: dict[str, Any] = {
        "in_proj": lambda h: (h, None),
        "x_proj": lambda x: (x @ mixed.T, None),
        "dt_proj": lambda t: (t @ wide.T, None),
        "out_proj": lambda y: (y, None),
        "conv1d": SimpleNamespace(weight=weight[:, None], bias=bias),
        "A_log": case.normal(inner, SIZE) - 1,
        "D": case.normal(inner),
        "intermediate_size_per_tp": inner,
        "time_step_rank": RANK,
        "ssm_state_size": SIZE,
        "use_bc_dt_rms": False,
        "activation": "silu",
    }
    for name, value in attributes.items():
        setattr(mixer, name, value)
    backend = case.backend(Mamba2AttnBackend, pools)
    backend.init_forward_metadata(case.batch())
    mixer.forward(
        hidden_states=torch.cat([inputs, gate], dim=1),
        output=None,
        layer_cache=pools,
        metadata=backend.forward_metadata,
    )
    A = -attributes["A_log"].double().exp()

    def define(at: slice, convolved: Tensor, start: Tensor) -> Tensor:
        t, B, C = (convolved @ mixed.T.double()).split([RANK, SIZE, SIZE], dim=1)
        dt = softplus(t @ wide.T.double())
        return naive.selective_scan(convolved, dt, A, B, C, start[:, 0])[1][:, :, None]

    return Outcome(before, pools, *defined(case, before, inputs, weight, bias, define))


def run_short_conv(case: Case, kind: type[Lfm2ShortConv | Lfm2MoeShortConv]) -> Outcome:
    """A prefill of one layer of LFM2, behind its projections. It has no state but the window."""
    channels, tokens = HEADS * WIDTH, case.bounds[-1]
    pools = case.pools(channels, 1, channels, 0)
    before = copied(pools)
    weight, bias = case.normal(channels, KERNEL), case.normal(channels)
    gate, gate_behind, x = (case.normal(tokens, channels) for _ in range(3))
    layer = made(kind)
    attributes: dict[str, Any] = {
        "in_proj": lambda h: (h, None),
        "out_proj": lambda y: (y, None),
        "conv_weight": weight,
        "conv_bias": bias,
        "layer_idx": 0,
    }
    for name, value in attributes.items():
        setattr(layer, name, value)
    backend, batch = case.backend(ShortConvAttnBackend, pools), case.batch()
    backend._cache_indices_buf = None
    backend.init_forward_metadata(batch)
    with mock.patch(f"{kind.__module__}.get_attn_backend", lambda: backend):
        y = layer(torch.cat([gate, gate_behind, x], dim=1), batch)
    inputs = gate * x
    windows, states = defined(case, before, inputs, weight, bias, lambda at, y, start: start[None])
    for s, (begin, end) in enumerate(pairwise(case.bounds)):
        first = before.conv[0][case.slots[s]] if case.prefixes[s] else None
        convolved = naive.causal_conv1d(inputs[begin:end], weight, bias, first, activation=None)[0]
        torch.testing.assert_close(
            y[begin:end], (gate_behind[begin:end] * convolved).float(), rtol=1e-4, atol=1e-4
        )
        states[s] = states[s].expand(end - begin + 1, -1, -1, -1)
    return Outcome(before, pools, windows, states)


def run_sconv(case: Case, fused: bool = False) -> Outcome:
    """A prefill of one short convolution of Inkling, whose kernels are plain torch here. It has no
    state but the window, which SGLang keeps as [slots, K-1, D].

    fused: a kernel of its attention convolves keys and values, and the layer is not called. That
    module cannot be imported here, so the hook on it is.
    """
    channels, tokens = HEADS * WIDTH, case.bounds[-1]
    pools = case.pools(channels, 1, channels, 0)
    before = copied(pools)
    weight = case.normal(channels, KERNEL)
    inputs = case.normal(tokens, 3 * channels)[:, channels:-channels]  # of one projection
    layer: Any = made(sconv.ShortConvolution)
    layer.layer_id, layer.sconv_type, layer.kernel_size = 0, sconv.SconvType.K_FULL, (KERNEL,)
    layer.activation, layer.use_residual = None, True
    layer.weight = nn.Parameter(weight[:, None])
    kept = pools.conv[0].transpose(1, 2)
    backend, batch = case.backend(InklingShortConvAttnBackend, pools), case.batch()
    backend._cache_indices_buf, backend.conv_state_len = None, KERNEL - 1
    backend._slot_gather_recordable = False
    backend.req_to_token_pool.mamba2_layer_index = lambda layer: layer
    others = case.normal(*kept.shape)
    backend._mamba_cache = SimpleNamespace(conv=[[kept], [others]])
    backend.init_forward_metadata(batch)
    kernels: Any = {"causal_conv1d": _convolved, "update_sconv_cache": _keep_windows}
    with (
        forward_context(ForwardContext(attn_backend=backend)),
        mock.patch.multiple(sconv, **kernels),
        torch.no_grad(),
    ):
        if fused:
            other: Any = made(sconv.ShortConvolution)
            other.layer_id, other.sconv_type = 0, sconv.SconvType.V_FULL
            attention = SimpleNamespace(k_sconv=layer, v_sconv=other)
            state_hooks.leave_kv_windows(attention, None, inputs, -inputs, batch)
            meta = backend.sconv_metadata
            indices = meta.cache_indices, meta.has_initial_state, meta.query_start_loc
            _keep_windows(inputs, kept, *indices)
            if case.asked and not any(case.prefixes):
                torch.testing.assert_close(others[case.targets], -kept[case.targets])
        else:
            layer(inputs, None, batch)
    return Outcome(
        before,
        pools,
        *defined(
            case,
            before,
            inputs,
            weight,
            None,
            lambda at, y, start: start[None].expand(len(y) + 1, -1, -1, -1),
        ),
    )


def _convolved(
    x: Tensor,
    weight: Tensor,
    sconv_cache: Tensor,
    cache_mask: Tensor,
    safe_idx: Tensor,
    cu: Tensor,
    **_: Any,
) -> Tensor:
    """Inkling's convolution of a packed batch."""
    rows = zip(pairwise(cu.tolist()), sconv_cache[safe_idx] * cache_mask, strict=True)
    outputs = [
        naive.causal_conv1d(x[begin:end], weight, None, first.T, None)[0]
        for (begin, end), first in rows
    ]
    return x + torch.cat(outputs).to(x.dtype)


def _keep_windows(
    x: Tensor,
    sconv_cache: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor,
    query_start_loc: Tensor,
) -> None:
    """The last inputs of each sequence of a packed batch stay in its slot."""
    past = sconv_cache.shape[1]
    rows = zip(cache_indices, has_initial_state, pairwise(query_start_loc.tolist()), strict=True)
    for slot, resumed, (begin, end) in rows:
        seen = torch.cat([sconv_cache[slot] * resumed, x[begin:end].to(sconv_cache.dtype)])
        sconv_cache[slot] = seen[-past:]


EOS, NGRAM, TOKENS = 7, 3, 32_768


def run_ple(case: Case) -> Outcome:
    """A prefill of the short convolution of Qwen4-Exp's embeddings of n-grams, behind its gate. The
    state is the window, and the last tokens, which the outcome has as `temporal`.
    """
    channels, tokens = HEADS * WIDTH, case.bounds[-1]
    pools = case.pools(channels, NGRAM - 1)
    pools.temporal = torch.randint(TOKENS, pools.temporal.shape, generator=case.generator)
    for slot, prefix in zip(case.slots, case.prefixes, strict=True):
        if not prefix:  # SGLang clears it first
            pools.conv[0][slot], pools.temporal[slot] = 0, EOS
    before = copied(pools)
    ids = torch.randint(TOKENS, (tokens,), generator=case.generator)
    layer: Any = made(qwen4_exp.Qwen4ExpPLELayer)
    layer.layer_id, layer.conv_channels, layer.short_conv_state_len = 0, channels, KERNEL - 1
    layer.short_conv_dilation = 1
    layer.conv1d = nn.Conv1d(channels, channels, KERNEL, groups=channels, bias=False)
    layer.conv1d.weight.data = case.normal(channels, 1, KERNEL)
    backend, batch = case.backend(GDNAttnBackend, pools), case.batch()
    ngrams = NGramPool(
        size=case.pool_size - 1, context_len=NGRAM - 1, eos_token_id=EOS, device="cpu"
    )
    ngrams.context = pools.temporal
    held = backend.req_to_token_pool
    held.ngram_pool, held.short_conv_layer_cache = ngrams, lambda _: pools.conv[0]
    held.get_ngram_context, held.set_ngram_context = ngrams.get_context, ngrams.set_context
    triton = LinearAttnKernelBackend.TRITON
    backend.kernel_dispatcher = GDNKernelDispatcher(triton, triton)
    backend.init_forward_metadata(batch)
    batch.state_tracks = None  # as in the breaks of a prefill's graph
    inputs = case.normal(tokens, channels)
    with forward_context(ForwardContext(attn_backend=backend)), torch.no_grad():
        ple = qwen4_exp._prepare_ple_batch(ids, batch, ngram_size=NGRAM, ngram_eos_token_id=EOS)
        assert ple is not None
        y = layer._short_conv(inputs, batch, ple)
        qwen4_exp._commit_ple_batch(batch=ple, forward_batch=batch)

    def define(at: slice, convolved: Tensor, start: Tensor) -> Tensor:
        torch.testing.assert_close(y[at].double(), convolved, rtol=1e-4, atol=1e-4)
        return torch.cat([start, ids[at]]).unfold(0, NGRAM - 1, 1)

    weight = layer.conv1d.weight.data[:, 0]
    return Outcome(before, pools, *defined(case, before, inputs, weight, None, define))


ZAYA_KV = 2
"""Heads of keys, of which the second half has values of the token before."""


def run_cca(case: Case) -> Outcome:
    """A prefill of what makes queries, keys and values in ZAYA1. Its state is the window of queries
    and keys, and the last hidden state, which the outcome has as `temporal`.
    """
    queries, keys = HEADS * WIDTH, ZAYA_KV * WIDTH
    channels, tokens = queries + keys, case.bounds[-1]
    pools = case.pools(channels, SIZE, 1)
    pools.temporal = case.normal(*pools.temporal.shape).to(case.dtype)  # SGLang does not clear it
    before = copied(pools)
    sizes = {"linear_q": queries, "linear_k": keys, "val_proj1": keys // 2, "val_proj2": keys // 2}
    matrices = {name: case.normal(SIZE, width) for name, width in sizes.items()}
    first = nn.Conv1d(channels, channels, KERNEL - 1, groups=channels)
    second = nn.Conv1d(channels, channels, 2, groups=HEADS + ZAYA_KV)
    attributes = {
        **{name: lambda h, by=matrix: (h @ by, None) for name, matrix in matrices.items()},
        "layer_id": 0,
        "tp_size": 1,
        "clamp_temp": False,
        "total_padding": KERNEL - 1,
        "head_dim": WIDTH,
        "sqrt_head_dim": WIDTH**0.5,
        "num_q_heads": HEADS,
        "num_k_heads": ZAYA_KV,
        "num_k_heads_full": ZAYA_KV,
        "gqa_groups": HEADS // ZAYA_KV,
        "latent_q_dim": queries,
        "temp": nn.Parameter(case.normal(ZAYA_KV)),
        "conv_qk": nn.Sequential(first, second),
    }
    layer: Any = made(CCA)
    for name, value in attributes.items():
        setattr(layer, name, value)
    hidden = case.normal(tokens, SIZE)
    held = SimpleNamespace(conv=[pools.conv[0], pools.temporal])
    backend, batch = case.backend(ShortConvAttnBackend, held), case.batch()
    backend._cache_indices_buf = None
    backend.init_forward_metadata(batch)
    with mock.patch(f"{CCA.__module__}.get_attn_backend", lambda: backend), torch.no_grad():
        q, k, v = layer(hidden, batch)
    inputs = torch.cat([hidden @ matrices["linear_q"], hidden @ matrices["linear_k"]], dim=1)

    def define(at: slice, _: Tensor, start: Tensor) -> Tensor:
        return torch.cat([start[None].to(hidden.dtype), hidden[at, :, None]])

    no_weight = torch.zeros(channels, KERNEL)
    windows, states = defined(case, before, inputs, no_weight, None, define)
    for s, (begin, end) in enumerate(pairwise(case.bounds)):
        at, fresh = slice(begin, end), case.prefixes[s] == 0
        earlier = torch.zeros_like(states[s][0]) if fresh else states[s][0]
        delayed = torch.cat([earlier[None], states[s][1:-1]])[:, :, 0] @ matrices["val_proj2"]
        value = torch.cat([hidden[at] @ matrices["val_proj1"], delayed], dim=1)
        torch.testing.assert_close(v[at].flatten(1), value, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            padded = torch.cat([windows[s][0], inputs[at].T.to(windows[s].dtype)], dim=1)
            mixed = layer.conv_qk(padded.float()[None])[0].T
            mixed = mixed.unflatten(1, (-1, WIDTH)).split([HEADS, ZAYA_KV], dim=1)
            plain = inputs[at].unflatten(1, (-1, WIDTH)).split([HEADS, ZAYA_KV], dim=1)
            right = layer._normalize_qk(*layer._add_grouped_qk_means(*mixed, *plain))
        torch.testing.assert_close((q[at], k[at]), right, rtol=1e-3, atol=1e-3)
    return Outcome(before, pools, windows, states)


def run_mamba1_token_by_token(case: Case) -> Outcome:
    """The same with SGLang's own scan, which the CPU platform replaces."""
    return run_mamba1(case, unbound(mamba1).MambaMixer1)


def unbound(module: ModuleType) -> ModuleType:
    """A patched module of SGLang as other devices have it."""
    source = Path(str(module.__file__))
    patch = load_patches()[module.__name__.replace(".", "/") + ".py"]
    fresh = ModuleType(f"{module.__name__}_unbound")
    exec(compile(patch.apply(source.read_bytes()), source, "exec"), vars(fresh))
    return fresh


def run_gdn(case: Case, kernel: Any = None) -> Outcome:
    """A prefill of one gated delta net, behind its projections. kernel: its scan, if another."""
    keys, values = K_HEADS * K_DIM, V_HEADS * V_DIM
    channels, tokens = 2 * keys + values, case.bounds[-1]
    pools = case.pools(channels, V_HEADS, V_DIM, K_DIM)
    before = copied(pools)
    weight, inputs = case.normal(channels, KERNEL), case.normal(tokens, channels)
    a, b = case.normal(tokens, V_HEADS), case.normal(tokens, V_HEADS)
    layer = SimpleNamespace(
        layer_id=0,
        conv_weights=weight,
        bias=None,
        activation="silu",
        q_dim=keys,
        k_dim=keys,
        v_dim=values,
        num_q_heads=K_HEADS,
        num_k_heads=K_HEADS,
        num_v_heads=V_HEADS,
        head_q_dim=K_DIM,
        head_k_dim=K_DIM,
        head_v_dim=V_DIM,
        A_log=case.normal(V_HEADS) - 2,
        dt_bias=case.normal(V_HEADS),
    )
    backend, batch = case.backend(GDNAttnBackend, pools), case.batch()
    triton = LinearAttnKernelBackend.TRITON
    backend.kernel_dispatcher = GDNKernelDispatcher(triton, triton)
    if kernel is not None:
        backend.kernel_dispatcher.extend_kernel = kernel
    backend._use_strided_target_verify_qkv = False
    backend.init_forward_metadata(batch)
    backend.forward_extend(layer, batch, inputs, a, b)
    g = -layer.A_log.exp() * softplus(a + layer.dt_bias)

    def define(at: slice, convolved: Tensor, start: Tensor) -> Tensor:
        q, k, v = convolved.split([keys, keys, values], dim=1)
        q, k = q.view(-1, K_HEADS, K_DIM), k.view(-1, K_HEADS, K_DIM)
        v = v.view(-1, V_HEADS, V_DIM)
        return naive.gated_delta_rule(q, k, v, g[at], b[at].sigmoid(), None, True, start)[1]

    return Outcome(before, pools, *defined(case, before, inputs, weight, None, define))


JET_KEYS, JET_VALUES = HEADS * K_DIM, HEADS * V_DIM
JET_CHANNELS = 2 * JET_KEYS + JET_VALUES
JET_PARTS = [JET_KEYS, JET_KEYS, JET_VALUES, HEADS, HEADS, JET_VALUES]
"""Parts of the first projection: q, k, v, a, b and the gate."""


def jet_block(case: Case) -> Any:
    """A layer of Jet-Nemotron without its projections: it is given what the first one makes."""
    matrix = case.normal(sum(JET_PARTS), JET_VALUES * KERNEL) / 4
    convolution: Any = made(DynamicShortConvolution)
    attributes = {
        "hidden_size": JET_VALUES,
        "kernel_size": KERNEL,
        "kernel_generator": lambda h: h @ matrix,
    }
    for name, value in attributes.items():
        setattr(convolution, name, value)
    layer: Any = made(JetBlock, dynamic_conv1d=convolution)
    attributes = {
        "qkvabz_proj": lambda h: (h, None),
        "o_norm": lambda o, _: o,
        "o_proj": lambda o: (o, None),
        "A_log": case.normal(HEADS) - 2,
        "dt_bias": case.normal(HEADS),
        "head_k_dim": K_DIM,
        "head_v_dim": V_DIM,
        "layer_id": 0,
        "num_heads": HEADS,
        "total_k_dim": JET_KEYS,
        "total_v_dim": JET_VALUES,
    }
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def call_jet(layer: Any, given: Tensor, backend: Any, batch: Any) -> Tensor:
    """A forward of `jet_block`, given [T, sum(JET_PARTS)], behind a backend with metadata."""
    both = object.__new__(HybridLinearAttnBackend)
    both.linear_attn_backend = backend
    with mock.patch(f"{JetBlock.__module__}.get_attn_backend", lambda: both):
        out: Tensor = layer(positions=None, hidden_states=given, forward_batch=batch)
    return out


def run_jet(case: Case) -> Outcome:
    """A prefill of one layer of Jet-Nemotron. Of a window the outcome has the values, which are all
    that the layer reads and writes.
    """
    pools = case.pools(JET_CHANNELS, HEADS, V_DIM, K_DIM)
    for slot, prefix in zip(case.slots, case.prefixes, strict=True):
        if not prefix:  # SGLang clears it first
            pools.conv[0][slot] = 0
    before = copied(pools)
    layer, given = jet_block(case), case.normal(case.bounds[-1], sum(JET_PARTS))
    backend, batch = case.backend(GDNAttnBackend, pools), case.batch()
    triton = LinearAttnKernelBackend.TRITON
    backend.kernel_dispatcher = GDNKernelDispatcher(triton, triton)
    backend.init_forward_metadata(batch)
    y = call_jet(layer, given, backend, batch)
    q, k, v, a, b, _ = given.split(JET_PARTS, dim=1)
    q, k = (silu(t).view(-1, HEADS, K_DIM) for t in (q, k))
    g = -layer.A_log.exp() * softplus(a + layer.dt_bias)
    taps = layer.dynamic_conv1d.kernel_generator(given).view(-1, JET_VALUES, KERNEL)
    unread = JET_CHANNELS - JET_VALUES
    assert torch.equal(pools.conv[0][:, :unread], before.conv[0][:, :unread])
    before.conv[0], pools.conv[0] = before.conv[0][:, unread:], pools.conv[0][:, unread:]

    def define(at: slice, _: Tensor, start: Tensor) -> Tensor:
        first = before.conv[0][case.slots[case.bounds.index(at.start)]]
        windows = torch.cat([first, v[at].T], dim=1).double().unfold(1, KERNEL, 1)
        values = silu((windows.transpose(0, 1) * taps[at]).sum(-1)).view(-1, HEADS, V_DIM)
        o, states = naive.gated_delta_rule(
            q[at], k[at], values, g[at], b[at].sigmoid(), None, True, start
        )
        torch.testing.assert_close(y[at].double(), o.flatten(1), rtol=1e-4, atol=1e-4)
        return states

    no_weight = torch.zeros(JET_VALUES, KERNEL)
    return Outcome(before, pools, *defined(case, before, v, no_weight, None, define))


def run_kda(case: Case, lower_bound: float | None = None) -> Outcome:
    """A prefill of one KDA layer, behind its projections; its log decays may have a lower bound."""
    keys, values = V_HEADS * K_DIM, V_HEADS * V_DIM
    channels, tokens = 2 * keys + values, case.bounds[-1]
    pools = case.pools(channels, V_HEADS, V_DIM, K_DIM)
    before = copied(pools)
    weight, inputs = case.normal(channels, KERNEL), case.normal(tokens, channels)
    a, b = case.normal(tokens, V_HEADS, K_DIM), case.normal(tokens, V_HEADS)
    layer = SimpleNamespace(
        layer_id=0,
        conv_weights=weight,
        bias=None,
        q_dim=keys,
        k_dim=keys,
        v_dim=values,
        head_q_dim=K_DIM,
        head_k_dim=K_DIM,
        head_v_dim=V_DIM,
        A_log=case.normal(V_HEADS) - 2,
        dt_bias=case.normal(V_HEADS, K_DIM),
        lower_bound=lower_bound,
    )
    # SGLang keeps windows of KDA as [slots, K-1, D].
    kept = SimpleNamespace(conv=[pools.conv[0].transpose(1, 2)], temporal=pools.temporal)
    backend, batch = case.backend(KDAAttnBackend, kept), case.batch()
    backend.conv_states_shape = pools.conv[0].shape
    triton = LinearAttnKernelBackend.TRITON
    backend.kernel_dispatcher = KDAKernelDispatcher(triton, triton, triton)
    backend.accept_lens_pool = None
    backend.init_forward_metadata(batch)
    backend.forward_extend(layer, batch, inputs, a[None], b[None])
    rate, step = layer.A_log.exp()[:, None], a + layer.dt_bias
    g = lower_bound * (rate * step).sigmoid() if lower_bound else -rate * softplus(step)

    def define(at: slice, convolved: Tensor, start: Tensor) -> Tensor:
        q, k, v = convolved.split([keys, keys, values], dim=1)
        q, k, v = q.view(-1, V_HEADS, K_DIM), k.view(-1, V_HEADS, K_DIM), v.view(-1, V_HEADS, V_DIM)
        return naive.gated_delta_rule(q, k, v, g[at], b[at].sigmoid(), None, True, start)[1]

    return Outcome(before, pools, *defined(case, before, inputs, weight, None, define))


def run_lightning(case: Case, dtype: torch.dtype = torch.float32) -> Outcome:
    """A prefill of one lightning attention, behind its projections; it has no convolution. dtype:
    of queries, keys and values.
    """
    tokens = case.bounds[-1]
    pools = case.pools(0, HEADS, SIZE, SIZE)
    pools.conv = [pools.conv[0][..., :0]]
    before = copied(pools)
    q, k, v = case.normal(3, tokens, HEADS, SIZE).to(dtype)
    slopes = case.normal(HEADS, 1, 1).abs()
    layer = SimpleNamespace(
        layer_id=0, scaling=SIZE**-0.5, tp_q_head_num=HEADS, v_head_dim=SIZE, k_scale=None
    )
    backend, batch = case.backend(LightningAttentionBackend, pools), case.batch()
    backend.linear_backend, backend.kv_cache_dtype_str = "seg_la", "auto"
    backend.tp_slope = [slopes]
    backend.init_forward_metadata(batch)
    o = backend.forward_extend(q, k, v, layer, batch).view(tokens, HEADS, SIZE)
    windows, states = [], []
    for s, (begin, end) in enumerate(pairwise(case.bounds)):
        at, steps = slice(begin, end), torch.ones(end - begin, HEADS)
        start = before.temporal[case.slots[s]].transpose(1, 2)
        read, seen = naive.ssd(
            *(v[at], steps, -slopes.flatten(), k[at], q[at].float() * layer.scaling),
            initial_state=start,
        )
        assert o.dtype == dtype
        tolerance = 1e-4 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(o[at].double(), read, rtol=tolerance, atol=tolerance)
        states.append(seen.transpose(2, 3))
        windows.append(torch.zeros(end - begin + 1, *pools.conv[0].shape[1:]))
    return Outcome(before, pools, windows, states)


def run_flashinfer(case: Case) -> Outcome:
    """The same with SGLang's class for FlashInfer, whose one function is plain torch here."""
    kernel = object.__new__(gdn_flashinfer.FlashInferGDNKernel)
    kernel.use_state_pool = kernel._prefill_needs_fp32_state = False
    kernel._prefill_fn = flashinfers_scan
    prepared = {"gdn_prefill_qkv_prepare_fwd": lambda q, k, v: (q, normalised(k), v)}
    with mock.patch.dict(sys.modules, {L2NORM: SimpleNamespace(**prepared)}):
        return run_gdn(case, kernel)


L2NORM = "sglang.kernels.ops.attention.fla.l2norm"


def normalised(keys: Tensor) -> Tensor:
    return keys / keys.double().norm(dim=-1, keepdim=True).to(keys.dtype)


def flashinfers_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    output_state: Tensor,
    state_checkpoints: Tensor | None,
    checkpoint_cu_starts: Tensor | None,
    checkpoint_every_n_tokens: int,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The contract of `flashinfer.gdn_prefill.chunk_gated_delta_rule` on states: those at the ends,
    and of sequence s those after each so many tokens, from row checkpoint_cu_starts[s] on. g is no
    logarithm. Outputs are noise.
    """
    for s, (a, b) in enumerate(pairwise(cu_seqlens.tolist())):
        inputs = (q[a:b], k[a:b], v[a:b], g[a:b].log(), beta[a:b])
        states = naive.gated_delta_rule(*inputs, None, False, initial_state[s])[1]
        output_state[s] = states[-1]
        if state_checkpoints is not None and checkpoint_cu_starts is not None:
            every = states[checkpoint_every_n_tokens::checkpoint_every_n_tokens]
            first = int(checkpoint_cu_starts[s])
            assert len(every) == int(checkpoint_cu_starts[s + 1]) - first
            state_checkpoints[first : first + len(every)] = every
    return torch.randn(v.shape, dtype=v.dtype), output_state


def defined(
    case: Case,
    before: SimpleNamespace,
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    define: Callable[[slice, Tensor, Tensor], Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """Windows [tokens + 1, D, K-1] and states of every sequence, token by token in float64."""
    windows, states = [], []
    for s, (begin, end) in enumerate(pairwise(case.bounds)):
        slot, fresh = case.slots[s], case.prefixes[s] == 0
        y, seen = naive.causal_conv1d(
            inputs[begin:end], weight, bias, None if fresh else before.conv[0][slot]
        )
        windows.append(seen)
        states.append(define(slice(begin, end), y, before.temporal[slot]))
    return windows, states


def copied(pools: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(conv=[pools.conv[0].clone()], temporal=pools.temporal.clone())


def made(kind: type[nn.Module], **children: nn.Module) -> nn.Module:
    """A module of this kind with these children, without its own weights."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name, child in children.items():
        module.add_module(name, child)
    return module
