"""The right answers of a model: transformers' own torch implementation on the CPU, in float32
unless another type is asked for.

The reference shares no code with SGLang or with our kernels. Models that transformers lacks are in
``twins.py``. Prompts are computed in one pass without a cache; decoding uses transformers' cache,
one token at a time. Both are checked against each other in ``tests/extensions/cpu/models``. Four
things in transformers 5.19 are not to be trusted:

* Falcon-Mamba forgets its state when it is given several tokens and a cache (the scan starts from
  zero). ``Reference.extend`` therefore feeds that architecture token by token.
* Nemotron-H clamps time steps to ``time_step_min`` in a prefill but not in decoding. The tiny
  models set that bound to almost zero.
* Qwen4-Exp and GLM-5-Next have an index in each attention layer, without which transformers does
  not make them. Ours have none (``twins.Qwen4Exp``, ``twins.Glm5Next``).
* ZAYA1 has other names for its tensors than SGLang reads, and no conversion; ours is `zaya.py`.
  Importing SGLang puts its own configuration in place of transformers', which is asked for by name.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    ZayaForCausalLM,
    logging,
)

from tests.twins import GigaChat, Glm5Next, JetNemotron, Ling, MiniCPM, Qwen4Exp
from tests.zaya import name_tensors

_log: Any = logging
_PURE_SSM = ("mamba2", "falcon_mamba")
_FORGETFUL = ("falcon_mamba",)
TWINS: dict[str, Any] = {
    "bailing_hybrid": Ling,
    "gigachat3_5": GigaChat,
    "glm5_next": Glm5Next,
    "jet_nemotron": JetNemotron,
    "minicpm_sala": MiniCPM,
    "qwen4_exp": Qwen4Exp,
}
"""Models that transformers does not have, or not so, by the name of their type."""


def load_model(model_dir: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model in a directory, by transformers or as its twin."""
    config = json.loads((model_dir / "config.json").read_text())
    kind = config["model_type"]
    if kind in TWINS:
        return TWINS[kind].load(model_dir).to(dtype)
    kinds: Any = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    if kind == "zaya":
        name_tensors(config["num_hidden_layers"])
        kinds = ZayaForCausalLM
    return kinds.from_pretrained(model_dir, dtype=dtype, attn_implementation="eager")


class Reference:
    """A model loaded by transformers, with its log probabilities."""

    def __init__(self, model_dir: Path, dtype: torch.dtype = torch.float32) -> None:
        _log.set_verbosity_error()
        _log.disable_progress_bar()
        self.model: Any = load_model(model_dir, dtype)
        kind = self.model.config.model_type
        self._cache_name = "cache_params" if kind in _PURE_SSM else "past_key_values"
        self._token_by_token = kind in _FORGETFUL

    @torch.no_grad()
    def logprobs(self, ids: list[int]) -> Tensor:
        """Log probabilities ``[len(ids), vocab]`` after each token, computed in one pass."""
        logits: Tensor = self.model(torch.tensor([ids]), use_cache=False).logits[0]
        return logits.float().log_softmax(-1)

    @torch.no_grad()
    def extend(self, ids: list[int], cache: Any = None) -> tuple[Tensor, Any]:
        """Log probabilities ``[len(ids), vocab]`` after a cached prefix, and the new cache.

        The cache is changed in place.
        """
        pieces = [ids]
        if cache is not None and self._token_by_token:
            pieces = [[token] for token in ids]
        logits = []
        for piece in pieces:
            options = {self._cache_name: cache, "use_cache": True}
            output = self.model(torch.tensor([piece]), **options)
            cache = getattr(output, self._cache_name)
            logits.append(output.logits[0])
        return torch.cat(logits).float().log_softmax(-1), cache

    def greedy(self, prompt_ids: list[int], max_new_tokens: int) -> tuple[list[int], list[float]]:
        """The most likely continuation and the log probability of each of its tokens.

        Goes on behind an end-of-sequence token, like a request with ``ignore_eos``.
        """
        tokens: list[int] = []
        logprobs: list[float] = []
        scores, cache = self.extend(prompt_ids)
        while True:
            best = scores[-1].max(-1)
            tokens.append(int(best.indices))
            logprobs.append(float(best.values))
            if len(tokens) == max_new_tokens:
                return tokens, logprobs
            scores, cache = self.extend(tokens[-1:], cache)


@lru_cache(maxsize=2)
def load_reference(model_dir: Path) -> Reference:
    """The reference of ``model_dir``; the last two stay loaded."""
    return Reference(model_dir)


def hf_greedy(
    model_dir: Path, prompt_ids: list[int], max_new_tokens: int
) -> tuple[list[int], list[float]]:
    """Greedy tokens after ``prompt_ids`` and their log probabilities."""
    return load_reference(Path(model_dir)).greedy(prompt_ids, max_new_tokens)


def hf_prompt_logprobs(model_dir: Path, prompt_ids: list[int]) -> list[float]:
    """Log probability of each prompt token but the first, given those before it."""
    scores = load_reference(Path(model_dir)).logprobs(prompt_ids)
    targets = torch.tensor(prompt_ids[1:])[:, None]
    chosen: list[float] = scores[:-1].gather(1, targets)[:, 0].tolist()
    return chosen


def recurrent_layers(cache: Any) -> list[Any]:
    """The layers of a cache that hold a recurrent state (``conv_states``, ``recurrent_states`` or
    both).
    """
    layers = [layer for layer in cache.layers if hasattr(layer, "conv_states")]
    return [layer for layer in layers if _states(layer)]


def _states(layer: Any) -> list[Tensor]:
    states = (*layer.conv_states.values(), layer.recurrent_states[0])
    return [state for state in states if state is not None]


def zero_state(cache: Any) -> None:
    """Forget the recurrent state of ``cache``, but not its keys and values."""
    for layer in recurrent_layers(cache):
        for state in _states(layer):
            state.zero_()


def copy_state(source: Any, target: Any) -> None:
    """Give ``target`` the recurrent state of ``source``; its keys and values stay."""
    pairs = zip(recurrent_layers(source), recurrent_layers(target), strict=True)
    for source_layer, target_layer in pairs:
        for state, into in zip(_states(source_layer), _states(target_layer), strict=True):
            into.copy_(state)
