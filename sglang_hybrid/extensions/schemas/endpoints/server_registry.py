"""The registry of schemas that one server has."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from sglang_hybrid.extensions.schemas.declared.registry import Registry
from sglang_hybrid.extensions.schemas.declared.saved import saved_schemas
from sglang_hybrid.extensions.schemas.declared.tokens import PromptTokenizer

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager


@lru_cache(maxsize=1)
def registry_of(manager: TokenizerManager) -> Registry:
    """The schemas of this server; raises ValueError where there can be none."""
    if manager.tokenizer is None:
        raise ValueError("this server has no tokenizer (--skip-tokenizer-init).")
    if manager.server_args.tokenizer_worker_num > 1:
        raise ValueError(
            "this server has several tokenizer processes, which share no schemas; start it with "
            "--tokenizer-worker-num 1."
        )
    return Registry(PromptTokenizer(manager.tokenizer), saved_schemas(manager.server_args))
