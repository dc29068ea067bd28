"""Hooks on models: their configs, their logits, and updates of their weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def pad_only_heads(adjust: Callable[..., Any], model_config: Any, *more: Any, **named: Any) -> Any:
    """Attention heads are padded to the ranks of a CPU only in models that have any."""
    if model_config.num_attention_heads is None:  # pure state-space models
        return model_config
    return adjust(model_config, *more, **named)


def use_serving_dtype(
    make: Callable[..., None],
    layer: Any,
    batch: int,
    input_size: int,
    output_size: int,
    dtype: Any,
    **named: Any,
) -> None:
    """The gates of KDA are projected in the type that the model is served in. SGLang takes that of
    the config, and a server with another `--dtype` ends at its first forward.
    """
    import torch

    make(layer, batch, input_size, output_size, torch.get_default_dtype(), **named)


def multiply_by_lm_head(
    compute: Callable[..., Any],
    processor: Any,
    hidden_states: Any,
    lm_head: Any,
    embedding_bias: Any = None,
    **named: Any,
) -> Any:
    """A platform's own product with the head's weight: where its embedding method has
    `lm_head_product(lm_head, hidden_states)`, and SGLang would call torch's product.
    """
    from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method

    method = getattr(lm_head, "quant_method", None)
    product = getattr(method, "lm_head_product", None)
    if (
        product is None
        or hasattr(lm_head, "apply_lora")
        or getattr(lm_head, "use_intel_amx_backend", False)
        or should_apply_lm_head_quant_method(lm_head, method)
        or processor.use_fp32_lm_head
        or processor.rl_on_policy_target is not None
    ):
        return compute(processor, hidden_states, lm_head, embedding_bias, **named)
    return product(lm_head, hidden_states.to(lm_head.weight.dtype))


def forget_old_weights(refused: str | None, model: Any = None) -> None:
    """Called before weights are updated in place: layers' methods forget what they derived from
    them (`forget_derived_weights(layer)`), and the tiers below the device are told.
    """
    if refused is not None:
        return
    from sglang_hybrid.storage import weights

    for module in () if model is None else model.modules():
        method: Any = getattr(module, "quant_method", None)
        if hasattr(method, "forget_derived_weights"):
            method.forget_derived_weights(module)
    weights.on_change()


def forget_released_weights(manager: Any, request: Any) -> None:
    """Called before weights leave the device's memory. Unless the host keeps them meanwhile
    (`--enable-weights-cpu-backup`), others come back, and KV that is computed before these are
    updated must not outlive the server: the tiers below the device are told.
    """
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
    from sglang.srt.runtime_context import get_server_args

    from sglang_hybrid.storage import weights

    leave = not request.tags or GPU_MEMORY_TYPE_WEIGHTS in request.tags
    kept = not manager.memory_saver_adapter.enabled or get_server_args().enable_weights_cpu_backup
    if leave and not kept:
        weights.on_change()


def use_own_layers(*, model: Any, model_num_layers: int) -> tuple[tuple[()], dict[str, Any]] | None:
    """A model whose inner model alone says which layers this stage of a pipeline has (Nemotron-H):
    SGLang takes it to have all of them, so that each stage has pools for all, and a prefill server
    in stages hands over states that it never computed.
    """
    from sglang.srt.runtime_context import get_parallel

    inner = getattr(model, "model", None)
    if get_parallel().pp_size == 1 or hasattr(model, "start_layer"):
        return None
    if not hasattr(inner, "start_layer"):
        return None
    return (), {"model": inner, "model_num_layers": model_num_layers}
