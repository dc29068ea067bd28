"""Hooks of SGLang's resolution of flags, about recurrent states where our cache serves.

SGLang settles how states are kept before it knows the attention backend and the page size
(arg_groups/pipeline.py:225, 242), which one slot for a running request depends on. So this is
settled at its step `handle_mamba_backend` (251), when both are known. A value that was given by a
flag stays.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups import mamba_hook
from sglang.srt.arg_groups.model_override_base import attention_backends_of, model_config_of
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.configs.model_config import PURE_SSM_ARCHITECTURES

from sglang_hybrid.cache.learnt_split import read_split, split_path
from sglang_hybrid.cache.sizes import cost_of_model
from sglang_hybrid.cache.state_slots.spill_choice import share_of_slots, states_spill
from sglang_hybrid.checkpoints.support import (
    CHAINS_ONLY,
    MIXERS_INSIDE_GRAPHS,
    keeps_kv_only,
    one_slot_per_request,
    plans_checkpoints,
)
from sglang_hybrid.serving import warm_up
from sglang_hybrid.serving.backend import why_not_unified
from sglang_hybrid.serving.config import BACKEND, HybridConfig
from sglang_hybrid.serving.devices import serves_on_cpu

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

OURS = "sglang_hybrid"
SGLANGS = "_mamba_radix_cache_resolution"
"""The name under which SGLang's choice of a strategy declares a value
(arg_groups/overrides.py:453).
"""

THIS_MODEL = "this model"
QWEN4 = "Qwen4ExpForConditionalGeneration"
JET_NEMOTRON = {"JetNemotronForCausalLM", "JetVLMForConditionalGeneration"}

OF_MINICPM = "_minicpm_sala_overrides"
SPARSE = ("minicpm_flashattn", "minicpm_flashinfer")
"""The names under which it is declared that MiniCPM has no prefix cache, and its backends of sparse
attention.
"""

LAYOUTS_OF_STATES = ("page_first", "page_first_direct")
STORES_WITH_A_LAYOUT = ("mooncake", "npu_memcache")
"""Values of --hicache-storage-backend with which SGLang takes another layout for `layer_first`
(arg_groups/hicache_hook.py:195).
"""

TOKENS_WITHOUT_KV = 1 << 22
"""KV tokens of a model without attention. The list of free ones takes 32 MiB."""


def resolve_state_flags(server_args: ServerArgs) -> None:
    """Declare how states are kept, which kernels leave them, and what room they get.

    Raises ValueError where one buffer per request was asked for beside pages of several tokens, for
    drafts, ranks and stages that SGLang would answer wrongly with, for host memory below a tree of
    KV only or of windows and states, or in a layout that holds none, and for what one memory cannot
    be combined with.
    """
    _prefixes_of_minicpm(server_args)
    check_unified_memory(server_args)
    reject_unsupported_speculation(server_args)
    _reject_pipeline_of_zaya(server_args)
    _reject_unsupported_tensor_parallelism(server_args)
    check_device_codec(server_args)
    _reject_host_tier_of_decode_server(server_args)
    _reject_host_tier_of_windows(server_args)
    _reject_layout_without_states(server_args)
    _choose_one_slot_per_request(server_args)
    _choose_buffers_of_pure_ssm(server_args)
    _reject_no_buffer_with_pages(server_args)
    _raise_token_limit_without_kv(server_args)
    _choose_states_to_kv_ratio(server_args)
    _choose_prefill_kernels(server_args)
    _disable_graphs_over_mixers(server_args)
    warm_up_with_hits(server_args)


def _prefixes_of_minicpm(server_args: ServerArgs) -> None:
    """SGLang 0.5.23 turns the prefix cache off for MiniCPM-SALA (model_overrides/minicpm.py:27).

    Its sparse attention keeps compressed keys of each request (attention/minicpm/cache.py), which a
    hit would lack. Where attention is dense a hit needs KV and states as for any other model, so
    our cache serves, with SGLang's strategy for lightning attention (arg_groups/overrides.py:453).
    """
    view = resolving_view(server_args)
    if view.radix_cache_backend != BACKEND or server_args.disable_radix_cache:
        return
    declared = declared_sources(server_args, "disable_radix_cache")
    config = model_config_of(server_args).hf_config
    if declared != {OF_MINICPM} or not config.has_lightning_layers:
        return
    if sparse := sorted(set(attention_backends_of(view)) & set(SPARSE)):
        logger.warning(
            "sglang_hybrid: MiniCPM's sparse attention (%s) keeps compressed keys of each request, "
            "and a hit would lack them, so nothing is cached; SGLANG_MINICPM_FORCE_DENSE=1 in the "
            "environment makes attention dense, and prompts are cached.",
            sparse[0],
        )
        return
    declare_resolution(server_args, OURS, disable_radix_cache=False, uses_mamba_radix_cache=True)
    if view.mamba_radix_cache_strategy == "auto":
        declare_resolution(server_args, SGLANGS, mamba_radix_cache_strategy="extra_buffer")
    elif view.mamba_radix_cache_strategy == "no_buffer":
        mamba_hook.validate_mamba_no_buffer(view, config.architectures[0])


def check_unified_memory(server_args: ServerArgs) -> None:
    """Raises ValueError where our cache does not serve SGLang's unified pool."""
    view = resolving_view(server_args)
    if not view.enable_unified_memory or view.radix_cache_backend != BACKEND:
        return
    flag, why = why_not_in_unified_pool(server_args)
    if flag:
        other = "" if flag == THIS_MODEL else f"leave out {flag}, or "
        raise ValueError(
            f"KV and states cannot share SGLang's unified pool with {flag}: {why}; {other}use "
            "--hybrid-memory split."
        )


def why_not_in_unified_pool(server_args: ServerArgs) -> tuple[str, str]:
    """The flag, or `THIS_MODEL`, with which our cache does not serve SGLang's unified pool, and
    why; two empty texts if there is none.
    """
    flag, why = why_not_unified(resolving_view(server_args))
    text = model_config_of(server_args).hf_text_config
    if _is_pure(server_args):
        return THIS_MODEL, "it has no KV"
    if JET_NEMOTRON & _architectures(server_args):
        return THIS_MODEL, "SGLang's scan of its layers writes states to a copy of the pool"
    if _has_windows_beside_states(server_args):
        return THIS_MODEL, "KV of its sliding windows would be a third kind"
    if QWEN4 in _architectures(server_args):
        return THIS_MODEL, "SGLang does not serve it there yet"
    if getattr(text, "kv_lora_rank", None) and not getattr(text, "qk_rope_head_dim", None):
        return THIS_MODEL, "its latent keys have no positions, for which the pool has room"
    return flag, why


def check_device_codec(server_args: ServerArgs) -> None:
    """Raises ValueError where entries are to be coded on the device and cannot be."""
    view, options = resolving_view(server_args), HybridConfig.from_environment()
    if not options.hybrid_device_codec.may_change or view.radix_cache_backend != BACKEND:
        return
    why = ""
    if not view.uses_mamba_radix_cache:
        why = "a model without recurrent states"
    elif _has_windows_beside_states(server_args):
        why = "a model with sliding windows"
    elif view.enable_unified_memory and not serves_on_cpu():
        why = "one memory on a GPU; use --hybrid-memory split"
    elif view.disaggregation_mode not in (None, "null"):
        why = f"--disaggregation-mode {view.disaggregation_mode}"
    elif view.pp_size > 1:  # stages without attention would code other entries than those with it
        why = f"--pp-size {view.pp_size}"
    elif view.dcp_size > 1:
        why = f"--dcp-size {view.dcp_size}: a rank has a part of each token's KV"
    if why:
        codec = options.hybrid_device_codec
        raise ValueError(f"--hybrid-device-codec {codec} cannot be combined with {why}.")


def reject_unsupported_speculation(server_args: ServerArgs) -> None:
    """Refuse speculative decoding that answers wrongly: SGLang 0.5.23 leaves states of models
    without attention where they were, whatever was accepted, and convolves trees of drafts as if
    they were chains where a model has short convolutions (models/lfm2.py:223): both answer wrongly.
    Jet-Nemotron's layers take a row of drafts for one token (models/jet_nemotron.py:298). Lightning
    attention ends the start where drafts are trees, and names a flag that n-grams do not read;
    Qwen4-Exp ends the first step with n-grams or trees (models/qwen4_exp.py:259). A streaming
    session gives back the KV of what was read too much (streaming_session.py:164), and keeps the
    state.
    """
    view = resolving_view(server_args)
    if view.speculative_algorithm is None:
        return
    if _is_pure(server_args):
        raise ValueError(
            "speculative decoding answers wrongly with a model that has no attention: SGLang does "
            "not move its states on; leave out --speculative-algorithm."
        )
    if JET_NEMOTRON & _architectures(server_args):
        raise ValueError(
            "Jet-Nemotron's layers in SGLang cannot read drafts; leave out --speculative-algorithm."
        )
    if view.enable_streaming_session and view.uses_mamba_radix_cache:
        raise ValueError(
            "a streaming session keeps the state of its last turn, which has read too much where "
            "tokens are drafted; leave out --enable-streaming-session or --speculative-algorithm."
        )
    by_ngrams = view.speculative_algorithm.upper() == "NGRAM"
    if by_ngrams and QWEN4 in _architectures(server_args):
        raise ValueError(
            "Qwen4-Exp knows no drafts from n-grams: SGLang would stop in the first step; use "
            "another --speculative-algorithm, or none."
        )
    flag = "--speculative-ngram-max-bfs-breadth" if by_ngrams else "--speculative-eagle-topk"
    width = view.speculative_ngram_max_bfs_breadth if by_ngrams else view.speculative_eagle_topk
    if _architectures(server_args) & set(CHAINS_ONLY) and (width or 1) > 1:
        raise ValueError(
            "a model of short convolutions or lightning attention reads drafts as chains; where "
            f"one is a tree SGLang answers wrongly or stops; use {flag} 1."
        )


def _reject_pipeline_of_zaya(server_args: ServerArgs) -> None:
    """Refuse stages of ZAYA1. A router adds the output of the one before it; SGLang 0.5.23 begins
    each stage of a pipeline without that (models/zaya.py:1512), and answers wrongly.
    """
    if resolving_view(server_args).pp_size == 1 or "ZayaForCausalLM" not in _architectures(
        server_args
    ):
        return
    if model_config_of(server_args).hf_config.zaya_use_eda:
        raise ValueError(
            "stages of a pipeline answer wrongly with ZAYA1: SGLang does not hand what its routers "
            "keep from one to the next; leave out --pp-size."
        )


def _reject_unsupported_tensor_parallelism(server_args: ServerArgs) -> None:
    """Refuse ranks for two models. SGLang 0.5.23 divides the projections of Jet-Nemotron's layers
    and then splits their output as if it were whole (models/jet_nemotron.py:271): the first
    forward ends a rank. MiniCPM-SALA norms the outputs of all heads of lightning attention; SGLang
    norms those of each rank by themselves (models/minicpm.py:278), and answers wrongly.
    """
    if resolving_view(server_args).tp_size == 1:
        return
    if JET_NEMOTRON & _architectures(server_args):
        raise ValueError(
            "SGLang cannot divide the layers of Jet-Nemotron among ranks; leave out --tp-size."
        )
    config = model_config_of(server_args).hf_config
    if getattr(config, "has_lightning_layers", False) and config.use_output_norm:
        raise ValueError(
            "several ranks answer wrongly with MiniCPM-SALA: SGLang norms the heads of each rank "
            "by themselves, where the model norms all of them together; leave out --tp-size."
        )


def _reject_host_tier_of_decode_server(server_args: ServerArgs) -> None:
    """Refuse host memory on a decode server, whose tree keeps no states: SGLang has no host pool
    for a hybrid model's KV without them (hybrid_pool_assembler.py:2431).
    """
    view = resolving_view(server_args)
    has_states = view.uses_mamba_radix_cache or _is_pure(server_args)
    if view.enable_hierarchical_cache and has_states and keeps_kv_only(view):
        raise ValueError(
            "a decode server of a model with states keeps KV on the device only; leave out "
            "--enable-hierarchical-cache there, or --disaggregation-decode-enable-radix-cache."
        )


def _reject_host_tier_of_windows(server_args: ServerArgs) -> None:
    """Refuse host memory for sliding windows beside states. Copies are chosen by the FLOPs that KV
    and states save; a request that resumes also needs a window, which the choice ignores.
    """
    view = resolving_view(server_args)
    ours = view.radix_cache_backend == BACKEND and not view.disable_radix_cache
    if ours and view.enable_hierarchical_cache and _has_windows_beside_states(server_args):
        raise ValueError(
            "a model with sliding windows beside states has no copies on the host; leave out "
            "--enable-hierarchical-cache."
        )


def _reject_layout_without_states(server_args: ServerArgs) -> None:
    """Refuse layouts that SGLang's host pool of states lacks (pool_host/mamba.py:103): it ends the
    start at an assertion, once the model is loaded.
    """
    view = resolving_view(server_args)
    if not view.enable_hierarchical_cache or not view.uses_mamba_radix_cache:
        return
    of_sglang = view.hicache_storage_backend in STORES_WITH_A_LAYOUT
    if view.hicache_mem_layout not in LAYOUTS_OF_STATES and not of_sglang:
        raise ValueError(
            f"--hicache-mem-layout {view.hicache_mem_layout} has no room for states; leave it out, "
            f"or give {' or '.join(LAYOUTS_OF_STATES)}."
        )


def _choose_one_slot_per_request(server_args: ServerArgs) -> None:
    """Use `no_buffer` with the overlap scheduler in place of a strategy that SGLang itself chose.
    It serves some models with `no_buffer` only (arg_groups/overrides.py:402); if its default
    attention backend brings pages, they get another one.
    """
    view = resolving_view(server_args)
    by_sglang = declared_sources(server_args, "mamba_radix_cache_strategy") == {SGLANGS}
    of_a_phase = _asked(server_args, "prefill_attention_backend", "decode_attention_backend")
    one_buffer = by_sglang and view.mamba_radix_cache_strategy == "no_buffer"
    if one_buffer and not view.disable_radix_cache and not of_a_phase:
        _avoid_default_pages(server_args)
        view = resolving_view(server_args)
    if not by_sglang or not one_slot_per_request(view):
        return
    declared: dict[str, Any] = {"mamba_radix_cache_strategy": "no_buffer"}
    stopped = declared_sources(server_args, "disable_overlap_schedule") == {SGLANGS}
    if stopped and not server_args.disable_overlap_schedule:
        declared["disable_overlap_schedule"] = False
    declare_resolution(server_args, OURS, **declared)


def _choose_buffers_of_pure_ssm(server_args: ServerArgs) -> None:
    """Keep one state per request of Mamba and Mamba2 models.

    SGLang resolves its strategy for the hybrid architectures only (arg_groups/overrides.py:453-487)
    and leaves these with one buffer and the overlap scheduler. If it keeps states by copying that
    buffer, the next step changes a state while it is being stored, and hits answer wrongly: then
    overlap is turned off. Planned checkpoints do not need that. If its default attention backend
    brings pages, which these models do not need, another one is chosen.
    """
    view = resolving_view(server_args)
    if view.disable_radix_cache or not _is_pure(server_args):
        return
    if view.mamba_radix_cache_strategy != "auto":
        return
    declared: dict[str, Any] = {"mamba_radix_cache_strategy": "no_buffer"}
    if not plans_checkpoints(view):
        declared["disable_overlap_schedule"] = True
    declare_resolution(server_args, OURS, **declared)
    _avoid_default_pages(server_args)


def _avoid_default_pages(server_args: ServerArgs) -> None:
    """Use pages of one token, unless pages or an attention backend were asked for."""
    paged = resolving_view(server_args).page_size not in (None, 1)
    if paged and not _asked(server_args, "attention_backend", "page_size"):
        declare_resolution(server_args, OURS, attention_backend="triton", page_size=1)


def _raise_token_limit_without_kv(server_args: ServerArgs) -> None:
    """Raise the tokens of a model without attention, whose KV takes no memory: SGLang's default is
    the length of the longest request (pool_configurator.py:246), room for a few prompts' states.
    """
    view = resolving_view(server_args)
    if _is_pure(server_args) and plans_checkpoints(view) and view.max_total_tokens is None:
        tokens = max(TOKENS_WITHOUT_KV, model_config_of(server_args).context_len)
        declare_resolution(server_args, OURS, max_total_tokens=tokens)


def _reject_no_buffer_with_pages(server_args: ServerArgs) -> None:
    """Refuse `no_buffer` with pages: SGLang does so for hybrid models only, and before a default
    attention backend brings pages.
    """
    view = resolving_view(server_args)
    has_states = view.uses_mamba_radix_cache or _is_pure(server_args)
    if view.disable_radix_cache or not has_states or view.page_size in (None, 1):
        return
    if view.mamba_radix_cache_strategy != "no_buffer":
        return
    asked = _asked(server_args, "page_size")
    backends = " and ".join(dict.fromkeys(attention_backends_of(view)))
    why = "" if asked else f", and attention by {backends} has pages of {view.page_size}"
    mend = f"leave out --page-size {view.page_size}" if asked else "add --attention-backend triton"
    also = "" if _is_pure(server_args) else ", or leave --mamba-radix-cache-strategy out"
    raise ValueError(
        f"one state for each request (no_buffer) needs pages of one token{why}; {mend}{also}."
    )


def _choose_states_to_kv_ratio(server_args: ServerArgs) -> None:
    """Set the default of --mamba-full-memory-ratio if checkpoints are planned: the ratio that the
    last server's traffic asked for, or `CostModel.states_to_kv`. SGLang's default is meant for a
    state per chunk of a prefill, and planned ones are fewer.

    If pools lend each other room, states get about half of it, whatever the traffic. Otherwise they
    get more if prompts can only be short: a slot that no running request holds, every other one,
    has no more KV beside it than the longest request.
    """
    view = resolving_view(server_args)
    if view.mamba_full_memory_ratio is not None or not plans_checkpoints(view):
        return
    cost = cost_of_model(model_config_of(server_args).hf_config)
    if cost is None or not cost.state_bytes:
        return
    spills = states_spill(server_args)
    if spills:
        ratio = round(cost.spilling_states_to_kv(share_of_slots(server_args)), 3)
    else:
        longest = model_config_of(server_args).context_len * max(1, cost.kv_bytes_per_token)
        least = 2.1 * cost.state_bytes / longest  # pools are not to the byte what they should be
        ratio = round(max(cost.states_to_kv, least), 3)
    path = None if view.max_mamba_cache_size is not None else split_path(server_args)
    learnt = read_split(path) if path and not spills else None
    if learnt:
        hits, hits_now = 100 * learnt.hits, 100 * learnt.hits_now
        found = f"{hits:.1f} % would have been hit instead of {hits_now:.1f} %"
        if learnt.hits <= learnt.hits_now:
            found = f"{hits_now:.1f} % would have been hit, and no more with other splits"
        logger.info(
            "sglang_hybrid: memory is divided as the traffic of the last server asked for: "
            "--mamba-full-memory-ratio %s, by default %s; of the prompts of its last %s requests "
            "%s.",
            *(f"{learnt.states_to_kv:.3f}", ratio, f"{learnt.requests:,}", found),
        )
        ratio = round(learnt.states_to_kv, 3)
    declare_resolution(server_args, OURS, mamba_full_memory_ratio=ratio)


def _choose_prefill_kernels(server_args: ServerArgs) -> None:
    """Have gated delta nets and KDA prefill with Triton, whose scan leaves states at any position.

    Without a flag SGLang chooses FlashInfer's scan on some GPUs when the model is loaded
    (linear/gdn_backend.py:191, linear/kda_backend.py:74), which leaves them every 64 tokens only,
    or none that we can store.
    """
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config, hybrid_kda_config

    view = resolving_view(server_args)
    model = model_config_of(server_args)
    if (
        plans_checkpoints(view)
        and view.linear_attn_prefill_backend is None
        and view.linear_attn_backend == "triton"
        and (hybrid_gdn_config(model) is not None or hybrid_kda_config(model) is not None)
    ):
        declare_resolution(server_args, OURS, linear_attn_prefill_backend="triton")


def _disable_graphs_over_mixers(server_args: ServerArgs) -> None:
    """Turn CUDA graphs of prefills off where they would capture recurrent layers with the rest: a
    replay repeats what these did at the capture, and leaves no states.
    """
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    view = resolving_view(server_args)
    if (
        plans_checkpoints(view)
        and _architectures(server_args) & set(MIXERS_INSIDE_GRAPHS)
        and (Phase.PREFILL, "backend") not in server_args._cuda_graph_config_locked
        and view.cuda_graph_config.prefill.backend == Backend.BREAKABLE
    ):
        graphs = with_phase(view.cuda_graph_config, Phase.PREFILL, backend=Backend.DISABLED)
        declare_resolution(server_args, OURS, cuda_graph_config=graphs)


def warm_up_with_hits(server_args: ServerArgs) -> None:
    """Give the server's warm-up a hit where kernels are compiled (serving/warm_up.py)."""
    view = resolving_view(server_args)
    if view.device != "cuda" or view.skip_server_warmup or not plans_checkpoints(view):
        return
    names = [name for name in (view.warmups, warm_up.NAME) if name]
    declare_resolution(server_args, OURS, warmups=",".join(names))


def declared_sources(server_args: ServerArgs, field: str) -> set[str]:
    """The names under which a value for a field was declared so far."""
    return {source for source, fields in server_args._resolved_overrides if field in fields}


def _asked(server_args: ServerArgs, *flags: str) -> bool:
    """True if somebody gave one of these flags."""
    return any(getattr(server_args, flag) is not None for flag in flags)


def _is_pure(server_args: ServerArgs) -> bool:
    """True if the model has states and no attention."""
    return bool(_architectures(server_args) & set(PURE_SSM_ARCHITECTURES))


def has_states(server_args: ServerArgs) -> bool:
    """True if the model has recurrent states, with attention or without."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return _is_pure(server_args) or mambaish_config(model_config_of(server_args)) is not None


def _has_windows_beside_states(server_args: ServerArgs) -> bool:
    """True if KV of the model's sliding windows has a pool of its own, beside one of states."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    model = model_config_of(server_args)
    return bool(model.is_hybrid_swa) and mambaish_config(model) is not None


def _architectures(server_args: ServerArgs) -> set[str]:
    return set(model_config_of(server_args).hf_config.architectures or ())
