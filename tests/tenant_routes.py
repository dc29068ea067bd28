"""The use of the tenant that a request names, for every route of the HTTP server.

`PROMPTS` are sent by tests/server/test_tenant_routes.py. A route that is in none of these tables
fails tests/test_keys.py: whoever adds one says here whose prompts it serves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

FEW = {"temperature": 0, "max_new_tokens": 2}


def _message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


PROMPTS: dict[str, Callable[[str], dict[str, Any]]] = {
    # path: a body with a long text; the same text again hits its own tenant's part of the tree
    "/generate": lambda text: {"text": text, "sampling_params": FEW},
    "/vertex_generate": lambda text: {
        "instances": [{"text": text}],
        "parameters": {"sampling_params": FEW},
    },
    "/v1/completions": lambda text: {"model": "default", "prompt": text, "max_tokens": 2},
    "/v1/chat/completions": lambda text: {
        "model": "default",
        "messages": _message(text),
        "max_tokens": 2,
    },
    "/invocations": lambda text: {"model": "default", "messages": _message(text), "max_tokens": 2},
    "/v1/responses": lambda text: {"model": "default", "input": text, "max_output_tokens": 2},
    "/v1/messages": lambda text: {
        "model": "default",
        "messages": _message(text),
        "max_tokens": 2,
    },
    "/api/generate": lambda text: {
        "model": "default",
        "prompt": text,
        "stream": False,
        "options": {"num_predict": 2},
    },
    "/api/chat": lambda text: {
        "model": "default",
        "messages": _message(text),
        "stream": False,
        "options": {"num_predict": 2},
    },
    "/v1/score": lambda text: {
        "model": "default",
        "query": text,
        "items": [" yes"],
        "label_token_ids": [5, 6],
    },
    "/v1/decisions": lambda text: {
        "model": "default",
        "input": text,
        "questions": [{"id": "q", "type": "yes_no", "question": "Is it?"}],
    },
}
"""Routes whose prompts are apart for each tenant."""

EMBEDDINGS = {
    "/encode",
    "/classify",
    "/v1/embeddings",
    "/v1/classify",
    "/v1/rerank",
    "/v1/systemone",
}
"""Routes of embedding models; a request that names a tenant is refused (tenants.put_tenant)."""

AUDIO = {"/v1/audio/transcriptions", "/v1/realtime"}
"""Routes of speech models; the tenant is a field of the form, or a parameter of the query."""

KEPT = {
    "/open_session",
    "/close_session",
    "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/cancel",
    "/v1/prompt_schemas",
    "/v1/prompt_schemas/{name}",
    "/v1/prompt_schemas/{name}/prewarm",
    "/v1/prompt_schemas/{name}/lint",
    "/hybrid_cache/explain",
}
"""Routes to what the server keeps for a tenant: each finds its own only."""

NOTHING_KEPT = {
    "/openapi.json",
    "/docs",
    "/docs/oauth2-redirect",
    "/redoc",
    "/",
    "/ready",
    "/health",
    "/health_generate",
    "/ping",
    "/get_model_info",
    "/model_info",
    "/v1/models",
    "/v1/models/{model:path}",
    "/api/tags",
    "/api/show",
    "/tokenize",
    "/v1/tokenize",
    "/detokenize",
    "/v1/detokenize",
    "/v1/messages/count_tokens",
    "/hybrid_cache/prompt/{route:path}",
    "/parse_function_call",
    "/separate_reasoning",
}
"""Routes that reach no cache: they answer from the request, or from the server's settings."""

TOTALS = {"/server_info", "/get_server_info", "/v1/loads", "/get_hicache_l3_cache_layout"}
"""Routes that tell sums over all tenants."""

OPERATORS = {
    "/hybrid_cache/resumable",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/set_internal_state",
    "/flush_cache",
    "/add_external_corpus",
    "/remove_external_corpus",
    "/list_external_corpora",
    "/hicache/storage-backend",
    "/hicache/storage-backend/clear",
    "/start_profile",
    "/stop_profile",
    "/set_trace_level",
    "/freeze_gc",
    "/start_expert_distribution_record",
    "/stop_expert_distribution_record",
    "/dump_expert_distribution_record",
    "/update_weights_from_disk",
    "/init_weights_send_group_for_remote_instance",
    "/send_weights_to_remote_instance",
    "/get_remote_instance_transfer_engine_info",
    "/remote_instance_transfer_engine_info",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/update_weights_from_tensor",
    "/begin_weight_update",
    "/end_weight_update",
    "/update_weights_from_distributed",
    "/update_weights_from_ipc",
    "/update_weight_version",
    "/get_weights_by_name",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/weights_checker",
    "/slow_down",
    "/pd_role_switch",
    "/load_lora_adapter",
    "/load_lora_adapter_from_tensors",
    "/unload_lora_adapter",
    "/configure_logging",
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
}
"""Routes behind the admin key: they act on the whole server, or tell of it."""

PAGE = {
    "/hybrid_cache/",
    "/hybrid_cache/static/{name:path}",
    "/hybrid_cache/changes",
    "/hybrid_cache/nodes/{rank}/{node}",
    "/hybrid_cache/ask",
    "/hybrid_cache/differ",
    "/hybrid_cache/what_if",
}
"""Routes of the live page, which shows an operator all tenants; behind the admin key, and there
with --hybrid-ui only."""

KNOWN = {*PROMPTS, *EMBEDDINGS, *AUDIO, *KEPT, *NOTHING_KEPT, *TOTALS, *OPERATORS, *PAGE}
