"""Full hits (`--hybrid-full-hit`): a prompt that was asked before is answered without a forward.

A hit ends before a prompt's last token, which is computed to know what comes next. When a prompt
comes for the second time, its prefill of this one token leaves the state behind it, too, and the
hidden state of that token (`checkpoints/last_hidden.py`). From then on its requests take that state
and the tree's KV, and their first token is sampled from the hidden state. Prompts that nobody
repeats cost nothing.

A batch is made of such requests or of others; one that cannot join a batch now is computed as ever.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_hybrid.checkpoints.last_hidden import Answers, HiddenCapture, LastHidden
from sglang_hybrid.serving.per_request import PerRequest
from sglang_hybrid.serving.requests.cache_fields import fields_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult

    from sglang_hybrid.cache.radix_cache import HybridRadixCache


class FullHits:
    """The repeated prompts of one cache. most: hidden states that are kept, above 0."""

    def __init__(self, cache: HybridRadixCache, most: int) -> None:
        self._cache = cache
        self._most = most
        self._kept: OrderedDict[int, LastHidden] = OrderedDict()  # by the node at the prompt's end
        self._found: PerRequest[LastHidden] = PerRequest()
        self._wants: PerRequest[bool] = PerRequest()
        self._under_way: PerRequest[tuple[HiddenCapture, int]] = PerRequest()
        self._may_join = True
        self.answered = 0

    def begin_batch(self) -> None:
        """A prefill batch begins to be filled."""
        self._may_join = True

    def on_computed_request(self) -> None:
        """A request that must be computed joined the batch."""
        self._may_join = False

    def look_up(self, params: MatchPrefixParams, result: MatchResult) -> MatchResult:
        """The match that a request that may be admitted resumes from, given what it found without:
        all of its prompt, if that was kept.
        """
        req = params.req
        if req is None:
            return result
        self._found.pop(req)
        if not self._kept:
            return result
        end = self._end_of(req, params)
        kept = None if end is None else self._kept.get(end.id)
        if end is None or kept is None or not self._may_join:
            return result
        whole = result._replace(
            device_prefix_len=len(params.key),
            full_kv_hit_length=len(params.key),
            last_device_node=end.id,
            last_host_node=end.id,
            best_match_node=end.id,
        )
        states = self._cache.components[ComponentType.MAMBA]
        taken: MatchResult = states.finalize_match_result_in_cache(params, whole)
        if taken is whole:
            self._found[req] = kept
            self._kept.move_to_end(end.id)
        return taken

    def is_full_hit(self, req: Req) -> bool:
        """True if the last look-up of `req` found all of its prompt."""
        return req in self._found

    def wants_state(self, req: Req, hit_len: int) -> bool:
        """True if the prefill of `req`, which resumes at `hit_len`, shall leave the state behind
        its prompt: the prompt was asked before, as its last token in the tree shows.
        """
        last = hit_len == len(req.origin_input_ids) - 1 and self._can_skip_forward(req)
        again = last and self._cache.tree_core.following(req, hit_len) is not None
        self._wants[req] = again
        return again

    def plan_forward(self, batch: ScheduleBatch) -> None:
        """The prefill of `batch` is about to start: it is answered from what is kept, or leaves
        what is wanted.
        """
        batch.last_hidden = None
        found = [self._found.pop(req) for req in batch.reqs]
        states = [state for state in found if state is not None]
        if states:
            assert len(states) == len(found), "full hits share a batch with other requests"
            batch.last_hidden = Answers(states)
            self._take_last_kv(batch)
            self.answered += len(states)
            return
        rows = [row for row, req in enumerate(batch.reqs) if self._wants.pop(req)]
        if rows:
            batch.last_hidden = wanted = HiddenCapture(rows)
            for number, row in enumerate(rows):
                self._under_way[batch.reqs[row]] = wanted, number

    def on_publish(self, req: Req) -> None:
        """Called when what a step of `req` has left is in the tree."""
        wanted, number = self._under_way.pop(req) or (None, 0)
        if wanted is None or not wanted.left:
            return
        core = self._cache.tree_core
        end = core.node_by_id(req.last_node)
        if core.shadow_tree.record(end).depth != len(req.origin_input_ids):
            return  # its state was not worth a slot
        self._kept[end.id] = wanted.left[number]
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def forget_all(self) -> None:
        """Forget all hidden states, after the tree was emptied."""
        self._kept.clear()

    def info(self) -> dict[str, int]:
        """The values for /server_info."""
        held = sum(kept.nbytes for kept in self._kept.values())
        return {"kept": len(self._kept), "bytes": held, "answered": self.answered}

    def _can_skip_forward(self, req: Req) -> bool:
        """True if a hidden state says all that `req` wants to know."""
        return not (
            req.output_ids  # it was retracted
            or req.return_hidden_states
            or req.multimodal_inputs is not None
            or req.input_embeds is not None
            or fields_of(req).imported is not None  # the transition of a segment is wanted, too
            or req.session is not None
        )

    def _end_of(self, req: Req, params: MatchPrefixParams) -> Any | None:
        """The tree's node at the end of the prompt of `req`, which was just looked up but for its
        last token; None if there is none with KV and state on the device.
        """
        core = self._cache.tree_core
        if len(params.key) != len(req.origin_input_ids) - 1 or not self._can_skip_forward(req):
            return None
        end = core.following(req, len(params.key)) if core.is_plain else None
        if end is None or len(end.key) != 1 or end.evicted:
            return None
        if end.component_data[ComponentType.MAMBA].value is None:
            return None
        displaced_kv = self._cache.parts.displaced_kv
        return end if displaced_kv is None or displaced_kv.make_readable(end) else None

    def _take_last_kv(self, batch: ScheduleBatch) -> None:
        """The last token of each prompt has KV in the tree: its request needs none of its own."""
        core, pool = self._cache.tree_core, self._cache.req_to_token_pool
        self._cache.token_to_kv_pool_allocator.free(batch.out_cache_loc)
        batch.out_cache_loc = batch.out_cache_loc.clone()
        for row, req in enumerate(batch.reqs):
            end = core.node_by_id(req.last_node)
            last = end.component_data[ComponentType.FULL].value
            pool.write((req.kv.req_pool_idx, slice(req.prefix_len, req.prefix_len + 1)), last)
            batch.out_cache_loc[row : row + 1] = last
            req.kv.cache_protected_len = req.prefix_len + 1
