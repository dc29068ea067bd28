"""Conditions under which states without a slot may lie in the place of KV."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import PURE_SSM_ARCHITECTURES

from sglang_hybrid.checkpoints.support import plans_checkpoints
from sglang_hybrid.core.costs.cost import SHARE_OF_SLOTS, CostModel
from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.flag_values import Eviction, Memory

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

SPARE, LEAST_SPARE = 5, 8
"""One slot in so many is left for the states of prefills under way, and so many at least, but no
more than half. A state can move to KV once it is in the tree."""

STRATEGIES: Final = ("no_buffer", "extra_buffer")
"""SGLang's strategies: a request holds its state alone, or the buffers of its decode, too."""

SHARE_WITH_BUFFERS: Final = 0.6
"""Share of the slots if a request holds three of the five it counts for (see `SHARE_OF_SLOTS`)."""

MORE_BESIDE_SLOTS: Final = ("Qwen4ExpForConditionalGeneration", "InklingForConditionalGeneration")
"""Models that keep more for each slot than SGLang's pool of states has."""

PLAIN_KV: Final = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
"""Types of KV whose rows have no scales beside them; SGLang's unified pool has these."""


def states_spill(server_args: ServerArgs) -> bool:
    """True if states without a slot may lie in the place of KV, as far as flags and model tell.

    server_args: SGLang's, resolved or as far as they are.
    """
    view, options = resolving_view(server_args), HybridConfig.from_environment()
    return (
        options.hybrid_memory is not Memory.SPLIT
        and options.policy is not Eviction.SGLANG_LRU
        and not options.hybrid_device_codec.may_change
        and plans_checkpoints(view)
        and view.mamba_radix_cache_strategy in STRATEGIES
        and not _forbidden_by_flags(view)
        and _has_plain_states(model_config_of(server_args))
    )


def share_of_slots(server_args: ServerArgs) -> float:
    """The share of the usual slots that states get if those without one may lie in KV's place."""
    buffers = resolving_view(server_args).mamba_radix_cache_strategy == "extra_buffer"
    return SHARE_WITH_BUFFERS if buffers else SHARE_OF_SLOTS


def slots_per_request(slots: int | None, held: int) -> Fraction:
    """State slots that a running request, which holds `held` of them, counts for, of a pool with
    `slots`; None: that is not known yet.
    """
    if slots is None or slots <= held:
        return held * Fraction(SPARE, SPARE - 1)
    spare = min(slots // 2, max(LEAST_SPARE, slots // SPARE), slots - held)
    return held * Fraction(slots, slots - spare)


def _forbidden_by_flags(view: Any) -> bool:
    return bool(
        view.enable_unified_memory
        or view.speculative_algorithm is not None
        or view.enable_hierarchical_cache
        or view.pp_size > 1
        or view.disaggregation_mode != "null"
        or view.enable_kv_cache_sharding
        or view.kv_cache_dtype not in PLAIN_KV
    )


def _has_plain_states(model: Any) -> bool:
    """True if the model has one pool of KV, and states with nothing beside them that are large
    enough to be worth copies.
    """
    names = set(model.hf_config.architectures or ())
    return (
        mambaish_config(model) is not None
        and not model.is_hybrid_swa
        and not names & {*MORE_BESIDE_SLOTS, *PURE_SSM_ARCHITECTURES}
        and _has_large_states(model.hf_config)
    )


def _has_large_states(hf_config: Any) -> bool:
    """True if the model's config can be read, and says so."""
    try:
        return CostModel.from_config(hf_config.to_dict()).spilled_tokens > 0
    except ValueError:
        return False
