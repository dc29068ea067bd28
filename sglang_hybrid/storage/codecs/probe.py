"""Measures how far a model's log probabilities move when its copies are smaller: at the start, on
the served model, before there is a cache.

A few prompts are computed, what they left in the pools is encoded and decoded, and the next tokens
are computed from that, as for a hit on copies from the host. All ranks do the same; each changes
the part of KV and states that it has, and all find the same errors.
"""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sglang_hybrid.serving.ranks import Ranks
from sglang_hybrid.storage.codecs.coded_pools import kv_tensors
from sglang_hybrid.storage.codecs.coded_rows import CodecPlan, CodedRows

PREFIX, SUFFIX = 192, 16
"""Tokens of a prompt whose copies are changed, and tokens behind them."""

PROMPTS = 4

TEXT = """
The archive keeps every letter that the observatory received. In the spring of 1874 the keeper
wrote that the new telescope had arrived in eleven crates, and that two of the lenses were
cracked. He asked for money, for glass, and for a second assistant who could read German. def
mean(values): return sum(values) / len(values). The answer came in June: there was no money, but
a lens could be had from Hamburg if it was ordered before the frost. {"name": "lens",
"diameter_mm": 212, "price": 1450.0}. A question remained open: who had opened the crates? Der
Zoll hatte sie nicht geöffnet. According to the report, 3 of 11 crates had been sealed twice;
the difference in weight was 0.4 kg. Let x be the mass of the glass and y that of the straw,
then x + y = 31.5 and x - 2y = 4.2. She closed the book, put it back on the shelf, and went out
to look at the sky, which had cleared after nine days of rain.
"""


class Probe:
    """Runs prompts through a model runner whose pools are empty, and leaves them empty.

    ranks: those that compute the model together. Every method raises AnotherRankFailed if another
    rank failed.
    """

    def __init__(self, tp_worker: Any, ranks: Ranks) -> None:
        self._ranks = ranks
        self._runner = tp_worker.model_runner
        self._prompts = _prompts(getattr(tp_worker, "tokenizer", None), self._runner)
        self._kv = _kv_buffers(self._runner)
        self._states = _state_tensors(self._runner)
        self._exact = self._logprobs(CodecPlan())
        self._likeliest = self._exact.argmax(-1, keepdim=True)

    @property
    def layers(self) -> tuple[int, int]:
        """Attention layers with KV, and layers with a state."""
        return len(self._kv), len(self._states)

    def error(self, plan: CodecPlan) -> float:
        """Largest difference of the likeliest token's log probability, of all prompts and ranks."""
        moved = self._logprobs(plan) - self._exact
        return self._ranks.agree(float(moved.gather(-1, self._likeliest).abs().max()))

    @torch.no_grad()
    def _logprobs(self, plan: CodecPlan) -> Tensor:
        """Log probabilities [prompts, vocabulary] behind the prompts, each computed alone: a server
        may have slots for a single request.
        """
        logits = [self._logits(prompt, plan) for prompt in self._prompts]
        return torch.cat(logits).float().log_softmax(-1)

    def _logits(self, prompt: list[int], plan: CodecPlan) -> Tensor:
        try:
            request = _request(prompt)
            self._ranks.agree()
            _extend(self._runner, request, 0, PREFIX)
            self._change(request, plan)
            self._ranks.agree()
            return _extend(self._runner, request, PREFIX, PREFIX + SUFFIX)
        finally:
            self._runner.req_to_token_pool.clear()
            self._runner.token_to_kv_pool_allocator.clear()

    def _change(self, request: Any, plan: CodecPlan) -> None:
        pool, kv = self._runner.req_to_token_pool, request.kv
        tokens = pool.req_to_token[kv.req_pool_idx, :PREFIX].long()
        state = kv.mamba_pool_idx.reshape(1).long() if self._states else tokens[:0]
        allocator = self._runner.token_to_kv_pool_allocator
        if hasattr(allocator, "translate_kv_loc"):  # ids of the unified pool name rows
            tokens = allocator.translate_kv_loc(tokens)
            state = pool.translate_mamba_indices(state).long()
        for layers, codecs, slots in (
            (self._kv, plan.kv, tokens),
            (self._states, plan.states, state),
        ):
            for number, tensors in enumerate(layers):
                codec = codecs[min(number, len(codecs) - 1)]
                coded = CodedRows.of([tensors], [codec])
                content = coded.encode(0, [tensor[slots] for tensor in tensors])
                for tensor, values in zip(tensors, coded.decode(0, content), strict=True):
                    tensor[slots] = values


def _kv_buffers(runner: Any) -> list[list[Tensor]]:
    """The tensors of a token's KV in each attention layer (`kv_tensors`)."""
    pool = runner.token_to_kv_pool_allocator.get_kvcache()
    pool = getattr(pool, "full_kv_pool", pool)
    if not getattr(pool, "layer_num", 0):
        return []
    return kv_tensors(pool.get_device_pool_infos()[0].buffer_info)


def _state_tensors(runner: Any) -> list[list[Tensor]]:
    """Each recurrent layer's SSM state and convolution windows, [slots, ...]."""
    pool = getattr(runner.req_to_token_pool, "mamba_pool", None)
    if pool is None:
        return []
    cache = pool.mamba_cache
    tensors = [cache.temporal, *cache.conv]
    return [[t[layer] for t in tensors if t.numel()] for layer in range(len(cache.temporal))]


def _prompts(tokenizer: Any, runner: Any) -> list[list[int]]:
    """Token ids of the text, from several places in it; ids at random without a tokenizer."""
    size = PREFIX + SUFFIX
    if tokenizer is None:
        ids = torch.randint(
            runner.model_config.vocab_size,
            (PROMPTS * size,),
            generator=torch.Generator().manual_seed(0),
        ).tolist()
    else:
        ids = list(tokenizer.encode(TEXT, add_special_tokens=False))
    starts = [number * len(ids) // PROMPTS for number in range(PROMPTS)]
    long = ids * (1 + 2 * size // len(ids))
    return [long[start : start + size] for start in starts]


def _request(ids: list[int]) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(temperature=0, max_new_tokens=1)
    request = Req("calibration", "", array("q", ids), sampling)
    request.logprob_start_len = -1
    return request


class _NoCache(SimpleNamespace):
    """A stand-in for the cache that a batch asks while it is prepared."""

    def supports_swa(self) -> bool:
        return False

    def supports_mamba(self) -> bool:
        return False

    def supports_prefix_sharing(self) -> bool:
        return True

    def evict(self, params: Any) -> None:
        raise RuntimeError("the pools are too small for calibration")

    def maybe_hand_to_session(self, request: Any) -> None:
        pass


def _extend(runner: Any, request: Any, start: int, end: int) -> Tensor:
    """Prefill tokens [start, end) of the request. Logits [1, vocabulary] behind them."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.runtime_context import get_schedule
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    request.full_untruncated_fill_ids = request.origin_input_ids[:end]
    request.prefix_len, request.extend_end = start, end
    allocator = runner.token_to_kv_pool_allocator
    batch = ScheduleBatch.init_new(
        reqs=[request],
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool_allocator=allocator,
        tree_cache=_NoCache(
            page_size=get_schedule().page_size,
            device=runner.device,
            token_to_kv_pool_allocator=allocator,
        ),
        model_config=runner.model_config,
        enable_overlap=False,
        spec_algorithm=SpeculativeAlgorithm.NONE,
    )
    batch.prepare_for_extend()
    if batch.input_ids is None:
        batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device)
        batch.prefill_input_ids_cpu = None
    forward = ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)
    output = runner.forward(forward).logits_output
    logits: Tensor = output.next_token_logits
    return logits
