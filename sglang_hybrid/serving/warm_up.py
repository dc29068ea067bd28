"""The warm-up of a server on a GPU has hits, so that no user waits for their kernels.

A prefill that goes on from a state launches other variants of SGLang's Triton kernels than one that
starts at nothing, and attention over cached keys other kernels. SGLang's warm-up request starts at
nothing, so the first hit would compile them while a user waits: on an H100 ten seconds with
Mamba2's scan (docs/gpu.md). This is one of the functions that SGLang's `--warmups` names
(entrypoints/warmup.py); cache/resolution.py adds it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Any

logger = logging.getLogger(__name__)

NAME = "hybrid_hits"
"""The name of this warm-up in `--warmups`."""

TOKENS, MORE = 300, 20
"""Tokens of the prompt that leaves a state, and of its continuation: more than one page, and a
prefill of several tokens.
"""


async def send_hits(mode: str, manager: Any) -> None:
    """One prompt, then a hit of it, then two at once, on each data-parallel rank, all at the same
    time: each compiles and tunes SGLang's kernels by itself.

    ``mode`` is SGLang's disaggregation: a decode server, which prefills nothing, is left alone, and
    a prefill server sends what it has computed nowhere. ``manager`` is SGLang's TokenizerManager.
    The prompts are of a tenant of their own, whose key nobody knows. Where they are refused, the
    server starts all the same.
    """
    if mode == "decode" or not manager.model_config.is_generation:
        return
    start = time.perf_counter()
    try:
        ranks = range(manager.server_args.dp_size)
        hits = (_hits_of(rank, manager, mode == "prefill") for rank in ranks)
        found = sum(await asyncio.gather(*hits))
    except Exception as error:  # whatever it is, it ends no start
        logger.warning("sglang_hybrid: no hit was warmed up: %s", error)
        return
    logger.info(
        "sglang_hybrid: warmed up with hits of %d tokens in %.1f s.",
        found,
        time.perf_counter() - start,
    )


async def _hits_of(rank: int, manager: Any, hands_over: bool) -> int:
    """Hit tokens of what is asked of a rank; ``hands_over``: it is a prefill server's."""
    tenant = secrets.token_hex(16)
    prompt = _tokens(manager, 0, min(TOKENS, manager.model_config.context_len // 2))
    await _answers(manager, tenant, rank, [prompt], hands_over)
    found = 0
    for ends in ((1,), (2, 3)):
        prompts = [prompt + _tokens(manager, end, MORE) for end in ends]
        for answer in await _answers(manager, tenant, rank, prompts, hands_over):
            found += int(answer["meta_info"]["cached_tokens"])
    return found


def _tokens(manager: Any, offset: int, count: int) -> list[int]:
    """Token ids that differ at the first one from those of another small offset."""
    size = manager.model_config.vocab_size
    return [(17 * i + offset + 1) % size for i in range(count)]


async def _answers(
    manager: Any, tenant: str, rank: int, prompts: list[list[int]], hands_over: bool
) -> list[dict[str, Any]]:
    """Two tokens each; the server's metrics do not count them."""
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
    from sglang.srt.managers.io_struct import GenerateReqInput

    nowhere = [FAKE_BOOTSTRAP_HOST] * len(prompts) if hands_over else None
    request = GenerateReqInput(
        input_ids=prompts,
        sampling_params={"max_new_tokens": 2, "temperature": 0.0, "ignore_eos": True},
        extra_key=[tenant] * len(prompts),
        routed_dp_rank=rank if manager.server_args.dp_size > 1 else None,
        bootstrap_host=nowhere,
        bootstrap_room=nowhere and [*range(len(prompts))],
        log_metrics=False,
    )
    answers: list[dict[str, Any]] = await anext(manager.generate_request(request, None))
    return answers
