"""Smaller copies below the device."""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from scripts.bench.commands import Count
from scripts.bench.report import Table
from scripts.bench.traces import COST, ONE_MEMORY, percent, read_or_generate
from scripts.train.chats import below
from scripts.train.check import document, questions
from sglang_hybrid.extensions.cpu.models import ARCHITECTURES, build_tiny_model
from sglang_hybrid.extensions.cpu.models.tokenizer import (
    EOS,
    FIRST_TEXT_ID,
    SPECIAL_TOKENS,
    build_tokenizer,
)
from sglang_hybrid.extensions.lab.systems import Spec
from sglang_hybrid.serving.flag_values import TRAINED
from sglang_hybrid.storage.codecs.codecs import Codec
from sglang_hybrid.storage.codecs.coded_rows import CodedRows

PREFIX, SUFFIX = 512, 64
DOCUMENT, MOST = 522, 60
"""Tokens of the text above a question, and of an answer at most."""
PURE_SSM = ("mamba2", "falcon_mamba")
TOKEN_BY_TOKEN = ("falcon_mamba",)
"""Transformers forgets this one's state when several tokens follow a cache."""
UNREAD = (
    *("zaya", "ling-2.5", "ling-3", "gigachat-3.5", "jet-nemotron", "minicpm-sala"),
    *("qwen4-exp", "glm-5-next"),
)
"""Models that transformers does not read: it has other names for ZAYA1's tensors, reads Qwen4-Exp
and GLM-5-Next with an index only, and has no class for the others."""

HEAD_DIM, D_STATE = 128, 128
KV_VALUES = 8_192  # numbers of KV per token, bfloat16
SSM_VALUES, CONV_BYTES = 25_165_824, 1_474_560  # of a state: float32 numbers; bytes in bfloat16
"""Sizes of Nemotron-H-8B."""


def codecs(
    prompts: Count = 4,
    seeds: Count = 1,
    facts: Count = 200,
) -> None:
    """Smaller copies below the device: bytes, what they change in a model's answers, hit rates.

    For each tiny architecture that transformers reads, a prefix of 512 tokens is computed, its KV
    and states are encoded and decoded once, and the next 64 tokens are computed from them
    (transformers' own models, float32). Errors are differences of log probabilities to what the
    untouched copy gives: over all tokens of the vocabulary at all 64 positions, and of the token
    that is most likely. The trained model answers questions about as many facts below a text, from
    copies of all but the last token. Then generated traffic is replayed with sizes of
    Nemotron-H-8B in one memory of so many gigabytes.
    """
    print("Bytes of tiny models' copies, and errors of log probabilities\n")
    table = Table(
        *("architecture", "codec", "state, bytes", "KV, bytes per token"),
        *("largest error", "mean error", "largest, likeliest token"),
        text=2,
    )
    with tempfile.TemporaryDirectory() as folder:
        for architecture in [name for name in ARCHITECTURES if name not in UNREAD]:
            path = build_tiny_model(architecture, Path(folder) / architecture)
            show_errors(table, architecture, path, prompts)
        print("\nRight answers of the trained model from a copy, of so many questions\n")
        show_answers(build_tiny_model(TRAINED, Path(folder) / TRAINED), facts)
    print("\nHit rates with sizes of Nemotron-H-8B, percent of prompt tokens\n")
    show_hit_rates(seeds)


class Model:
    """A model of transformers, with or without a cache."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        kind = self._model.config.model_type
        self._cache = "cache_params" if kind in PURE_SSM else "past_key_values"
        self._one_by_one = kind in TOKEN_BY_TOKEN

    @torch.no_grad()
    def logprobs(self, ids: list[int], cache: Any = None) -> tuple[Tensor, Any]:
        """Log probabilities [len(ids), vocabulary] behind a cache, and the cache after them."""
        alone = cache is not None and self._one_by_one
        found = []
        for piece in [[one] for one in ids] if alone else [ids]:
            output = self._model(torch.tensor([piece]), **{self._cache: cache, "use_cache": True})
            cache = getattr(output, self._cache)
            found.append(output.logits[0])
        return torch.cat(found).log_softmax(-1), cache


def tensors_of(cache: Any) -> Iterator[tuple[str, list[Tensor]]]:
    """Of each layer: "state" and its tensors [1, ...], or "kv" and its tensors [tokens, ...]."""
    for layer in cache.layers:
        if getattr(layer, "recurrent_states", None) and layer.recurrent_states[0] is not None:
            yield "state", [layer.recurrent_states[0], layer.conv_states[0]]
        if getattr(layer, "keys", None) is not None:
            yield "kv", [layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)]


def round_trip(cache: Any, codec: Codec) -> dict[str, int]:
    """Replace all of a cache by what is decoded of it; bytes of a slot of each kind."""
    sizes = {"state": 0, "kv": 0}
    for kind, tensors in tensors_of(cache):
        rows = CodedRows([[(tuple(one.shape[1:]), one.dtype) for one in tensors]], [codec])
        decoded = rows.decode(0, rows.encode(0, tensors))
        for tensor, values in zip(tensors, decoded, strict=True):
            tensor.copy_(values)
        sizes[kind] += rows.bytes
    return sizes


def show_errors(table: Table, architecture: str, folder: Path, prompts: int) -> None:
    model, source = Model(folder), random.Random(0)
    texts = [
        [source.randrange(FIRST_TEXT_ID, 32_000) for _ in range(PREFIX + SUFFIX)]
        for _ in range(prompts)
    ]
    caches = [model.logprobs(text[:PREFIX])[1] for text in texts]
    exact = [
        model.logprobs(text[PREFIX:], copy.deepcopy(cache))[0]
        for text, cache in zip(texts, caches, strict=True)
    ]
    for codec in Codec:
        errors, likeliest = [], []
        for text, cache, right in zip(texts, caches, exact, strict=True):
            smaller = copy.deepcopy(cache)
            sizes = round_trip(smaller, codec)
            error = (model.logprobs(text[PREFIX:], smaller)[0] - right).abs()
            errors.append(error)
            likeliest.append(error.gather(1, right.argmax(-1)[:, None]))
        every = torch.cat(errors)
        table.row(
            *(architecture, codec.value, f"{sizes['state']:,}", f"{sizes['kv']:,}"),
            *(f"{every.max():.1e}", f"{every.mean():.1e}", f"{torch.cat(likeliest).max():.1e}"),
        )


def show_answers(folder: Path, count: int) -> None:
    model, tokenizer = Model(folder), build_tokenizer()
    end, text = SPECIAL_TOKENS.index(EOS), document(DOCUMENT)
    right = dict.fromkeys(Codec, 0)
    for question, sentence in questions(count):
        ids = tokenizer.encode(below(text, question)).ids
        _, before = model.logprobs(ids[:-1])
        for codec in Codec:
            cache, said = copy.deepcopy(before), ids[-1:]
            round_trip(cache, codec)
            while said[-1] != end and len(said) < MOST:
                logprobs, cache = model.logprobs(said[-1:], cache)
                said.append(int(logprobs[-1].argmax()))
            right[codec] += tokenizer.decode(said[1:]).strip() == sentence
    table = Table("questions", *(codec.value for codec in Codec))
    table.row(str(count), *map(str, right.values()))


def sizes_of_nemotron_h_8b(codec: Codec) -> tuple[int, int]:
    """Bytes of a KV token and of a state."""
    kv = codec.fit(HEAD_DIM, torch.bfloat16).row_bytes(HEAD_DIM, torch.bfloat16)
    row = codec.fit(D_STATE, torch.float32).row_bytes(D_STATE, torch.float32)
    return KV_VALUES // HEAD_DIM * kv, SSM_VALUES // D_STATE * row + CONV_BYTES


def show_hit_rates(seeds: int) -> None:
    runner, rows = read_or_generate(Path(), seeds)
    sizes = [sizes_of_nemotron_h_8b(codec) for codec in Codec]
    heads = [
        f"{codec.value} (state {state / 1e6:.1f} MB, KV {kv:,} B)"
        for codec, (kv, state) in zip(Codec, sizes, strict=True)
    ]
    table = Table("traffic", "GB", *heads)
    for trace, size in rows:
        gigabytes = 2.3 * size  # as in `pools`: this model's states are larger than the paper's
        rates = []
        for kv, state in sizes:
            cost = COST.with_sizes(kv_bytes_per_token=kv, state_bytes=state)
            budget = int(gigabytes * 1e9)
            rate = percent(runner, Spec("reuse"), trace, budget, cost, serving=ONE_MEMORY)
            rates.append(f"{rate:.1f}")
        table.row(trace, f"{gigabytes:.1f}", *rates)
