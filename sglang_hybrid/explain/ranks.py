"""Questions of the HTTP server to the schedulers of all data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from sglang_hybrid.core.extensions import guard
from sglang_hybrid.serving.config import BACKEND
from sglang_hybrid.serving.requests import fields

if TYPE_CHECKING:
    from sglang.srt.managers.communicator import FanOutCommunicator
    from sglang.srt.managers.io_struct import BaseReq
    from sglang.srt.managers.tokenizer_manager import TokenizerManager


def has_our_cache(manager: TokenizerManager) -> bool:
    """True if the server runs sglang_hybrid's cache."""
    from sglang.srt.arg_groups.overrides import resolving_view

    return bool(resolving_view(manager.server_args).radix_cache_backend == BACKEND)


def check_prompt(manager: TokenizerManager, ids: Sequence[int], field: str = "input_ids") -> None:
    """Raises ValueError where `ids` [n] are too many for this server, or no tokens of its model:
    then neither this process nor a scheduler spends time on them.
    """
    longest = manager.context_len
    if len(ids) > longest:
        raise ValueError(
            f"the prompt has {len(ids):,} tokens; the longest of this server has {longest:,}."
        )
    fields.token_ids(field, ids, manager.model_config.vocab_size)


async def ask_ranks(manager: TokenizerManager, question: BaseReq, kind: Any) -> list[Any]:
    """The answers of all ranks, which are of class `kind`. Questions with answers of one class are
    asked one after another. Raises `Refused` where a rank failed; without the guard a rank that
    fails ends the server.
    """
    manager.auto_create_handle_loop()
    answers: list[Any] = await _communicator(manager, kind)(question)
    if (control := guard("control")) is not None:
        control.raise_failure(answers)
    return answers


@lru_cache(maxsize=16)
def _communicator(manager: TokenizerManager, kind: type[Any]) -> FanOutCommunicator[Any, Any]:
    """A communicator, made as SGLang makes its own (tokenizer_control_mixin.py)."""
    from sglang.srt.managers.communicator import FanOutCommunicator
    from sglang.srt.runtime_context import get_parallel
    from sglang.utils import TypeBasedDispatcher

    communicator = FanOutCommunicator(manager._dispatch_to_scheduler, get_parallel().num_dp_ranks)
    manager._result_dispatcher += TypeBasedDispatcher([(kind, communicator.handle_recv)])
    return communicator
