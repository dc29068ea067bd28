"""Learns from requests that ended: by the tuner, by the history of prompts, and by the queue, which
may expect the session to come back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.returns.hints import Hint
from sglang_hybrid.serving.requests.cache_fields import fields_of
from sglang_hybrid.serving.tenants import tenant_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_hybrid.cache.parts import Parts
    from sglang_hybrid.cache.radix_cache import HybridRadixCache

MOST_SESSION_TOKENS: Final = 1 << 22
"""Tokens of the last sequences of all open sessions that SGLang's flag names, 32 MiB; beyond it,
the close of those that were used longest ago tells nothing.
"""


class RequestEndObserver:
    """Tells of the requests of one cache that ended. ``parts``: ours of the cache."""

    def __init__(self, cache: HybridRadixCache, parts: Parts) -> None:
        self._cache = cache
        self._shadow_tree = parts.shadow_tree
        self._learning = parts.learning
        self._sessions: OrderedDict[str, tuple[npt.NDArray[np.int64], Hashable]] = OrderedDict()
        self._session_tokens = 0

    def on_request_end(self, req: Req, up_to: int) -> None:
        """``req`` ended with ``up_to`` tokens in the tree. Nothing is learnt of a prompt that was
        put together from segments.
        """
        cache = self._cache
        if cache.composition(req) is not None:
            return
        starts, reply_start = cache.plans.messages(req)
        by_flag = cache.enable_session_radix_cache
        session = cache.session_refs.session_id_for_req(req) if by_flag else None
        closed = session in cache.session_refs._closed_session_ids
        hint = fields_of(req).hints.session
        if hint is None and session is not None:
            hint = Hint.ENDS if closed else Hint.RETURNS
        if cache.tuning is not None and cache.tuning.needs_requests:
            cache.tuning.on_request_end(req, up_to, starts, reply_start, hint)
        if self._shadow_tree is None:
            return
        tokens = np.asarray(req.full_untruncated_fill_ids)[:up_to]  # no copy
        history_match = cache.plans.history_match(req)
        if session is not None and not closed:
            self._remember(session, tokens.copy(), tenant_of(req))
        self._shadow_tree.on_request_end(
            tokens,
            len(req.origin_input_ids),
            cache.tree_core.node_by_id(req.last_node),
            cache.tree_core.root_node,
            (reply_start, cache.plans.answer_state(req)),
            tenant_of(req),
            history_match,
            hint,
            starts,
        )
        if self._learning is not None:
            self._learning.on_request_end()
        self._expect_return(req)

    def _expect_return(self, req: Req) -> None:
        """Tell the queue when the session of ``req`` may come back, if that is known."""
        schedule, tree = self._cache.schedule, self._cache.tree_core
        node = tree.node_by_id(req.last_node)
        if schedule is None or self._shadow_tree is None or node is tree.root_node:
            return
        place = self._shadow_tree.record(node).history_node
        seconds = None if place is None else place.return_after
        if seconds is not None:
            schedule.expect_return(node.id, seconds)

    def on_session_close(self, last: Sequence[Req]) -> None:
        """A client closed its session, whose ``last`` requests nobody continued."""
        history = None if self._shadow_tree is None else self._shadow_tree.history
        if history is None:
            return
        for req in last:
            history.hint(req.full_untruncated_fill_ids, Hint.ENDS, tenant_of(req))

    def on_radix_session_close(self, session: str) -> None:
        """A client closed a session of `--enable-session-radix-cache`, by its scheduler's id."""
        last = self._forget(session)
        history = None if self._shadow_tree is None else self._shadow_tree.history
        if last is not None and history is not None:
            history.hint(last[0], Hint.ENDS, last[1])

    def _remember(self, session: str, tokens: npt.NDArray[np.int64], tenant: Hashable) -> None:
        """``tokens`` [n] is the latest sequence of ``session``."""
        self._forget(session)
        self._sessions[session] = tokens, tenant
        self._session_tokens += len(tokens)
        while self._session_tokens > MOST_SESSION_TOKENS:
            self._forget(next(iter(self._sessions)))

    def _forget(self, session: str) -> tuple[npt.NDArray[np.int64], Hashable] | None:
        """Remove and return what is remembered of ``session``."""
        last = self._sessions.pop(session, None)
        self._session_tokens -= 0 if last is None else len(last[0])
        return last
