"""`--dp-size`: prompts go to the rank that has their prefix (hook `scheduling.send_to_prefix`)."""

from __future__ import annotations

import logging
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

from sglang_hybrid.serving.config import BACKEND
from sglang_hybrid.serving.tenants import tenant_of_sent

if TYPE_CHECKING:
    from sglang_hybrid.core.queue.prefix_ranks import PrefixRanks

logger = logging.getLogger(__name__)

FOLLOWS_PREFIXES = "round_robin"
"""SGLang's --load-balance-method in whose place this is. Who asks for another one gets that."""


def choose_rank(controller: Any, prompt: Any) -> int | None:
    """The rank for a tokenized request; None if SGLang is to choose.

    controller: SGLang's DataParallelController, whose process an exception would end.
    """
    try:
        return _choose(controller, prompt)
    except Exception:
        logger.exception("sglang_hybrid: SGLang chooses the rank of a request.")
        return None


def _choose(controller: Any, prompt: Any) -> int | None:
    if not _follows_prefixes(controller) or prompt.routed_dp_rank is not None:
        return None
    allowed = [rank for rank in controller._active_workers if controller.status[rank]]
    if not allowed or prompt.input_ids is None or prompt.rid.startswith(HEALTH_CHECK_RID_PREFIX):
        return None
    ranks = _prefix_ranks(controller)
    session = getattr(getattr(prompt, "session_params", None), "id", None)
    if session is not None:
        return ranks.of_session(session)
    for told in controller.load_snapshot_reader.read_all():
        requests = told.num_running_reqs + told.num_waiting_reqs
        load = ranks.loads[told.dp_rank]
        load.on_load_report(told.timestamp, requests, told.num_waiting_uncached_tokens)
    return ranks.send(tenant_of_sent(prompt), prompt.input_ids, time.time(), allowed)


def ignores_prefixes(flags: Any) -> str:
    """The method that sends prompts to data-parallel ranks whatever their prefixes; "" where there
    are no such ranks, or a router chooses among them. flags: SGLang's server arguments.
    """
    method = str(flags.load_balance_method).lower()
    several = flags.dp_size > 1 and flags.disaggregation_mode == "null"
    return method if several and method not in (FOLLOWS_PREFIXES, "auto") else ""


@lru_cache(maxsize=1)
def _follows_prefixes(controller: Any) -> bool:
    flags = controller.server_args
    return (
        flags.radix_cache_backend == BACKEND
        and not flags.disable_radix_cache
        and flags.disaggregation_mode == "null"
        and controller.load_balance_method.name.lower() == FOLLOWS_PREFIXES
    )


@lru_cache(maxsize=1)
def _prefix_ranks(controller: Any) -> PrefixRanks:
    from sglang_hybrid.core.queue.prefix_ranks import PrefixRanks

    return PrefixRanks(controller.max_dp_size)
