"""Conditions under which checkpoints are planned, and the slots that a running request then needs.

SGLang tracks states in buffers that belong to a request, so that the overlap scheduler's next step
does not change a state while it is being kept: two slots beside the live one. A planned state has a
slot of its own from the start, and what a finished request leaves is its live state: one slot is
enough.
"""

from __future__ import annotations

from typing import Any

from sglang_hybrid.serving.config import BACKEND, CPU_ATTENTION, HybridConfig

WITHOUT_PAGES = ("triton", "flashinfer", "fa3", "torch_native", CPU_ATTENTION)
"""Attention backends that have pages of one token unless somebody asks for more."""

EXACT_DRAFTS = ("NGRAM", "EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
"""Algorithms of speculative decoding beside which states are exact."""

MIXERS_INSIDE_GRAPHS = ("FalconH1ForCausalLM",)
"""Models with attention and a Mamba2 mixer in each layer: SGLang captures prefills of such a model
in a CUDA graph, and of these the mixer with it (models/falcon_h1.py:345). Others have layers
without attention, which keeps SGLang from a graph, or a break at each mixer.
"""


CHAINS_ONLY = (
    *("Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Lfm2VlForConditionalGeneration"),
    "ZayaForCausalLM",
    *("BailingMoeV2_5ForCausalLM", "MiniCPMSALAForCausalLM"),
    *("Qwen4ExpForConditionalGeneration", "InklingForConditionalGeneration"),
)
"""Models of short convolutions or lightning attention, which read drafts as chains only."""


def why_unplanned(flags: Any) -> str | None:
    """The reason why prefills cannot leave the states that we want; None if they can.

    flags: SGLang's server arguments, or its view of them while they are resolved.
    """
    drafts = (flags.speculative_algorithm or "").upper()
    several = {
        f"speculative decoding by {drafts}": drafts not in ("", *EXACT_DRAFTS),
        "ReplaySSM": flags.enable_linear_replayssm or flags.enable_linear_replayssm_spec,
        "states come from a prefill server": receives_states(flags),
        "two-batch overlap": flags.enable_two_batch_overlap,
        # A hit elsewhere would cut the scan into other chunks, and round otherwise.
        "deterministic inference": flags.enable_deterministic_inference,
        "decode context parallelism": flags.dcp_size > 1,
    }
    return next((what for what, asked in several.items() if asked), None)


def why_no_full_hits(flags: Any, params: Any) -> str | None:
    """The reason why a prompt that was asked before cannot be answered without a forward; None if
    it can. flags: SGLang's server arguments. params: those of its cache.
    """
    several = {
        "pages of several tokens": params.page_size > 1,
        "copies on the host": flags.enable_hierarchical_cache,
        "stages of a pipeline": params.pp_size > 1,
        "data-parallel attention": flags.enable_dp_attention,
        "chunks mixed with decodes": flags.enable_mixed_chunk,
        "speculative decoding": flags.speculative_algorithm is not None,
        "disaggregation": flags.disaggregation_mode != "null",
    }
    return next((what for what, asked in several.items() if asked), None)


def receives_states(flags: Any) -> bool:
    """True if every request brings its state from a prefill server, so that a hit needs none."""
    mode: str = flags.disaggregation_mode
    return mode == "decode"


def keeps_kv_only(flags: Any) -> bool:
    """True if the server's cache will be ours and have no states, since requests bring theirs."""
    return (
        flags.radix_cache_backend == BACKEND
        and not flags.disable_radix_cache
        and receives_states(flags)
    )


def plans_checkpoints(flags: Any) -> bool:
    """True if the server's cache will be ours and plan its checkpoints."""
    return (
        flags.radix_cache_backend == BACKEND
        and not flags.disable_radix_cache
        and HybridConfig.from_environment().is_judicious
        and why_unplanned(flags) is None
    )


def kept_states_never_change(flags: Any) -> bool:
    """True if no later step changes a state that the cache keeps: a planned one has a slot of its
    own, and a cache of KV only has none.
    """
    return plans_checkpoints(flags) or keeps_kv_only(flags)


def one_slot_per_request(flags: Any) -> bool:
    """True if a running request should hold its live state only (SGLang's `no_buffer`), which is
    possible with pages of one token, in prefills and in decoding. With speculative decoding a step
    may take a request past its end, so that its live state cannot be kept.
    """
    from sglang.srt.arg_groups.model_override_base import attention_backends_of

    return (
        kept_states_never_change(flags)
        and flags.speculative_algorithm is None
        and flags.page_size in (None, 1)
        and set(attention_backends_of(flags)) <= set(WITHOUT_PAGES)
    )
