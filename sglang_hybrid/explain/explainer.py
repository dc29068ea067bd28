"""Questions about misses, answered in the scheduler when somebody asks, by what is loaded then.

Nothing is locked, no access is counted, and the tree stays as it is.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_hybrid.explain.decision_log import DecisionLog
from sglang_hybrid.explain.messages import (
    ExplainReq,
    ExplainReqOutput,
    ResidencyReq,
    ResidencyReqOutput,
    ResumableReq,
    ResumableReqOutput,
)
from sglang_hybrid.serving.tenants import tenant

if TYPE_CHECKING:
    from sglang_hybrid.cache.radix_cache import HybridRadixCache

logger = logging.getLogger(__name__)

MOST_BEFORE = 16_384
"""Tokens before a text whose line is named."""


class Explainer:
    """Gives accounts of prompts and of recent requests of one cache."""

    def __init__(self, cache: HybridRadixCache, decision_log: DecisionLog) -> None:
        self._cache = cache
        self._decision_log = decision_log

    def handlers(self) -> list[tuple[type, Callable[[Any], Any]]]:
        """The handlers that the scheduler's dispatcher must know."""
        ours: list[tuple[type, Callable[[Any], Any]]] = [
            (ExplainReq, self.answer),
            (ResidencyReq, self._residency),
        ]
        return ours if self._cache.resumable else [*ours, (ResumableReq, _publishes_no_states)]

    def answer(self, request: ExplainReq) -> ExplainReqOutput:
        """The report that is asked for, or one sentence that says why there is none."""
        try:
            return self._answer(request)
        except Exception:  # whatever was asked, the scheduler goes on
            logger.exception("sglang_hybrid: a miss could not be explained.")
            return ExplainReqOutput(error="the explanation failed; the server's log says why.")

    def _residency(self, request: ResidencyReq) -> ResidencyReqOutput:
        from sglang_hybrid.explain.prefix_tiers import PrefixTiers

        return PrefixTiers(self._cache).answer(request)

    def _answer(self, request: ExplainReq) -> ExplainReqOutput:
        from sglang_hybrid.explain.explanation import Explanation

        if self._cache.disable:
            return ExplainReqOutput(error="the server runs without a prefix cache.")
        whose = tenant(request.extra_key, request.cache_salt)
        explanation = Explanation(self._cache, self._decision_log, whose)
        if request.request_id is None:
            if not request.input_ids:
                return ExplainReqOutput(error="the prompt has no tokens.")
            prompt = array("q", request.input_ids)
            report = explanation.of_prompt(prompt)
        else:
            seen = self._decision_log.recent.get(whose, request.request_id)
            if seen is None:
                return ExplainReqOutput(error=explanation.unknown(request.request_id))
            report = explanation.of_request(request.request_id, seen)
            prompt = seen.tokens
        before, found = None, None if report.unstored is None else report.unstored.changing_text
        if found is not None and found.position <= MOST_BEFORE:
            before = list(prompt[: found.position])
        return ExplainReqOutput(report=msgspec.to_builtins(report), before=before)


def _publishes_no_states(_: ResumableReq) -> ResumableReqOutput:
    return ResumableReqOutput(error="this server's events say nothing of states.")
