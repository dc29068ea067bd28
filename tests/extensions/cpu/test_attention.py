"""The attention backend on SGLang's own pools: like `torch_native`, and like the definition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt.platforms  # noqa: F401 (finds our platform; that cannot be imported before it)
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from sglang_hybrid.extensions.cpu import attention
from sglang_hybrid.extensions.cpu.attention import HybridCpuAttnBackend
from sglang_hybrid.extensions.cpu.native.library import library
from sglang_hybrid.kernels import naive

SIZE = 2_000
"""Slots of a pool."""

CONTEXT = 400
TOLERANCE = 1e-5

few = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True, params=["native", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is true of the native kernel and of its plain twin."""
    if request.param == "torch":
        monkeypatch.setattr(attention, "library", lambda: None)
    elif library() is None:
        pytest.skip("there is no C++ compiler")


class World:
    """Pools with requests in them, whose keys and values are random, and both backends."""

    def __init__(
        self,
        seed: int,
        lengths: list[tuple[int, int]],
        *,
        heads: tuple[int, int] = (4, 2),
        widths: tuple[int, int] = (16, 16),
        page: int = 1,
        encoder: list[int] | None = None,
        pool: Any = None,
        **layer: Any,
    ) -> None:
        self.random = torch.Generator().manual_seed(seed)
        (q_heads, kv_heads), (width, value_width) = heads, widths
        self.lengths = lengths
        self.encoder = encoder
        self.layer = RadixAttention(
            q_heads, width, 0.3, kv_heads, layer_id=0, v_head_dim=value_width, **layer
        )
        self.pool = pool or MHATokenToKVPool(
            SIZE, page, torch.float32, kv_heads, width, 1, "cpu", False, v_head_dim=value_width
        )
        self.requests = ReqToTokenPool(len(lengths) + 2, CONTEXT, "cpu", False)
        runner = SimpleNamespace(
            device="cpu", req_to_token_pool=self.requests, token_to_kv_pool=self.pool
        )
        self.native, self.ours = TorchNativeAttnBackend(runner), HybridCpuAttnBackend(runner)
        self._place_requests(page)
        for buffer in _buffers(self.pool):
            buffer.normal_(generator=self.random)

    def _place_requests(self, page: int) -> None:
        """Give every request slots, page by page, some of them side by side."""
        half = (SIZE // page - 1) // 2
        scattered = half + torch.randperm(half, generator=self.random)
        free = [torch.arange(half), scattered]
        for row, (before, new) in enumerate(self.lengths, start=1):
            total = before + new + (self.encoder[row - 1] if self.encoder else 0)
            count = -(-total // page)
            chosen, free[row % 2] = free[row % 2][:count] + 1, free[row % 2][count:]
            slots = (chosen[:, None] * page + torch.arange(page)).flatten()[:total]
            self.requests.req_to_token[row, :total] = slots.int()

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def rows(self) -> list[int]:
        return list(range(1, len(self.lengths) + 1))

    def batch(self, *, decoding: bool) -> SimpleNamespace:
        """A forward batch; when decoding, only the last new token of each request is new."""
        new = [1 if decoding else n for _, n in self.lengths]
        ends = [before + n for before, n in self.lengths]
        first = self.encoder or [0] * len(new)
        places = [
            self.requests.req_to_token[row, e + end - n : e + end]
            for row, e, end, n in zip(self.rows(), first, ends, new, strict=True)
        ]
        written = [
            self.requests.req_to_token[row, :e] for row, e in zip(self.rows(), first, strict=True)
        ]
        return SimpleNamespace(
            forward_mode=ForwardMode.DECODE if decoding else ForwardMode.EXTEND,
            req_pool_indices=torch.tensor(self.rows()),
            seq_lens=torch.tensor(ends),
            encoder_lens=None if self.encoder is None else torch.tensor(self.encoder),
            extend_seq_lens=None if decoding else torch.tensor(new),
            extend_prefix_lens=torch.tensor([e - n for e, n in zip(ends, new, strict=True)]),
            out_cache_loc=torch.cat(places).long(),
            out_cache_loc_is_physical=False,
            encoder_out_cache_loc=torch.cat(written).long(),
        )

    def run(self, backend: Any, *, decoding: bool, **more: Any) -> Tensor:
        """The answers of a backend to random queries; new tokens get random keys and values."""
        batch = self.batch(decoding=decoding)
        self.random.manual_seed(1)
        tokens, layer = len(batch.out_cache_loc), self.layer
        q = self.normal(tokens, layer.tp_q_head_num * layer.qk_head_dim)
        places = batch.encoder_out_cache_loc if layer.is_cross_attention else batch.out_cache_loc
        stored = len(places)
        k = self.normal(stored, layer.tp_k_head_num, layer.qk_head_dim)
        v = k[..., : layer.v_head_dim]
        if isinstance(self.pool, MHATokenToKVPool | SWAKVPool):
            v = self.normal(stored, layer.tp_v_head_num, layer.v_head_dim)
        backend.init_forward_metadata(batch)
        forward = backend.forward_decode if decoding else backend.forward_extend
        out: Tensor = forward(q, k, v, layer, batch, **more)
        assert out.shape == (tokens, layer.tp_q_head_num * layer.v_head_dim)
        return out

    def defined(self, *, decoding: bool, translate: Any = None, **more: Any) -> Tensor:
        """The result of the definition, from the pool as a backend has left it."""
        batch, layer = self.batch(decoding=decoding), self.layer
        self.random.manual_seed(1)
        q = self.normal(len(batch.out_cache_loc), layer.tp_q_head_num, layer.qk_head_dim)
        keys, values = self.pool.get_key_buffer(0), self.pool.get_value_buffer(0)
        outputs, at = [], 0
        window = layer.sliding_window_size if layer.sliding_window_size > -1 else None
        for row, end in zip(self.rows(), batch.seq_lens.tolist(), strict=True):
            n = 1 if decoding else int(batch.extend_seq_lens[row - 1])
            slots = self.requests.req_to_token[row, :end]
            slots = (slots if translate is None else translate(slots)).long()
            y = naive.attention(
                q[at : at + n], keys[slots], values[slots], layer.scaling, window=window,
                cap=layer.logit_cap, **more,
            )  # fmt: skip
            outputs.append(y.flatten(1))
            at += n
        return torch.cat(outputs)


def _buffers(pool: Any) -> list[Tensor]:
    """Keys and values of layer 0."""
    if isinstance(pool, SWAKVPool):
        return _buffers(pool.swa_kv_pool)
    if isinstance(pool, MLATokenToKVPool):
        return [pool.kv_buffer[0]]
    return [pool.k_buffer[0], pool.v_buffer[0]]


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got.double(), expected.double(), atol=TOLERANCE, rtol=TOLERANCE)


lengths = st.lists(
    st.tuples(st.one_of(st.just(0), st.integers(0, 120)), st.integers(1, 60)),
    min_size=1,
    max_size=4,
)
shapes = st.fixed_dictionaries(
    {
        "heads": st.sampled_from([(4, 4), (4, 2), (6, 1)]),
        "widths": st.sampled_from([(16, 16), (24, 16), (8, 12)]),
        "page": st.sampled_from([1, 16]),
        "sliding_window_size": st.sampled_from([-1, 3, 50]),
    }
)
seeds = st.integers(0, 2**31 - 1)


@few
@given(seeds, lengths, shapes, st.booleans())
def test_like_torch_native(
    seed: int, lengths: list[tuple[int, int]], shape: dict[str, Any], decoding: bool
) -> None:
    world = World(seed, lengths, **shape)
    expected = world.run(world.native, decoding=decoding)
    close(world.run(world.ours, decoding=decoding), expected)
    close(expected, world.defined(decoding=decoding))


@few
@given(seeds, lengths, st.data(), st.booleans(), st.booleans())
def test_encoders_and_decoders_like_torch_native(
    seed: int, lengths: list[tuple[int, int]], data: st.DataObject, cross: bool, decoding: bool
) -> None:
    encoder = data.draw(st.lists(st.integers(1, 90), min_size=len(lengths), max_size=len(lengths)))
    world = World(seed, lengths, encoder=encoder, is_cross_attention=cross)
    expected = world.run(world.native, decoding=decoding)
    close(world.run(world.ours, decoding=decoding), expected)


@few
@given(seeds, lengths)
def test_an_encoder_sees_all_tokens_like_torch_native(
    seed: int, lengths: list[tuple[int, int]]
) -> None:
    world = World(seed, lengths, attn_type=AttentionType.ENCODER_ONLY)
    close(
        world.run(world.ours, decoding=False),
        world.run(world.native, decoding=False),
    )


@pytest.mark.parametrize("decoding", [False, True])
def test_latent_attention_like_torch_native(decoding: bool) -> None:
    pool = MLATokenToKVPool(SIZE, 1, torch.float32, 16, 8, 1, "cpu", False)
    world = World(3, [(40, 7), (0, 20), (300, 1)], heads=(8, 1), widths=(24, 16), pool=pool)
    with get_parallel().override(dcp_enabled=False):
        expected = world.run(world.native, decoding=decoding)
        close(world.run(world.ours, decoding=decoding), expected)


@few
@given(seeds, lengths, shapes, st.booleans(), st.booleans())
def test_caps_and_sinks(
    seed: int,
    lengths: list[tuple[int, int]],
    shape: dict[str, Any],
    capped: bool,
    decoding: bool,
) -> None:
    world = World(seed, lengths, logit_cap=2.0 if capped else 0.0, **shape)
    sinks = world.normal(world.layer.tp_q_head_num)
    got = world.run(world.ours, decoding=decoding, sinks=sinks)
    close(got, world.defined(decoding=decoding, sinks=sinks))


@pytest.mark.parametrize("decoding", [False, True])
def test_layers_with_a_window_pool(decoding: bool) -> None:
    pool = SWAKVPool(
        SIZE, SIZE // 2, 1, torch.float32, 2, 16, [0], [1], "cpu", enable_alt_stream=False
    )
    moved = (torch.arange(SIZE + 2) * 7 + 3) % (SIZE // 2)
    pool.register_mapping(moved)
    world = World(4, [(60, 9), (5, 1)], pool=pool, sliding_window_size=20)
    got = world.run(world.ours, decoding=decoding)
    translate = pool.translate_loc_from_full_to_swa
    close(got, world.defined(decoding=decoding, translate=translate))


@pytest.mark.parametrize("decoding", [False, True])
def test_keys_that_an_earlier_layer_has_stored(decoding: bool) -> None:
    world = World(5, [(40, 7), (0, 20)])
    expected = world.run(world.ours, decoding=decoding)
    batch = world.batch(decoding=decoding)
    world.random.manual_seed(1)
    q = world.normal(*expected.shape)
    world.ours.init_forward_metadata(batch)
    forward = world.ours.forward_decode if decoding else world.ours.forward_extend
    close(forward(q, None, None, world.layer, batch), expected)


@pytest.mark.parametrize("tree", [False, True])
def test_drafts_are_new_tokens_behind_those_that_are_counted(
    tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree that is a chain answers as the chain does."""
    world = World(3, [(30, 4), (7, 4), (0, 4)])
    expected = world.run(world.ours, decoding=False)
    extend = world.batch(decoding=False)
    mask = torch.cat(
        [torch.ones(4, end, dtype=torch.bool).tril(end - 4).flatten() for end in (34, 11, 4)]
    )
    drafts = SimpleNamespace(draft_token_num=4, custom_mask=mask, tree_topk=-1 if tree else 1)
    changed = {"forward_mode": ForwardMode.TARGET_VERIFY, "extend_seq_lens": None}
    changed |= {"seq_lens": extend.seq_lens - 4, "spec_info": drafts}
    verified = SimpleNamespace(**{**vars(extend), **changed})
    monkeypatch.setattr(world, "batch", lambda *, decoding: verified)
    found = world.run(world.ours, decoding=False)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
