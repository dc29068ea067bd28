"""A publication: the states that a request leaves become checkpoints of the tree.

`publishing.Publisher` makes one `Publication` after each prefill step and at the end of a request,
and hands it to the component of the states (`state_components.RobustMamba`).
The table says who owns what after each step. `protected`: how many tokens of the request's KV are
the tree's before; `end`: the position of the deepest state.

  step                      planned slots         live slot             KV [protected, end)
  ------------------------  --------------------  --------------------  -------------------
  before                    plan                  request               request
  1 Planner.take_ready      publication           request               request
  2 hand_over               publication           request               request
  3 SGLang's insertion      deepest: tree, if     tree, if it is the    tree
                            its node had none     deepest and new
  4 inserted                deepest, if the tree  request; if it ended  tree
                            did not take it:      and the tree did not
                            freed                 take it: freed
  5 publish_rest            each: tree, or freed  as before             tree

Who frees:
* a slot of the plan: `Planner.drop`; of the publication: `Publication`, by `give_back`; of the
  request: SGLang, `free_mamba_cache`; of the tree: `RobustMamba.evict_component`.
* KV of the request: SGLang, in step 3 what the tree had already, and when the request is released
  what lies behind `end`; of the tree: SGLang, when a leaf is evicted. Steps 4 and 5 move no KV.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.base_prefix_cache import InsertParams

from sglang_hybrid.core.records.nodes import Kind

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import InsertResult

    from sglang_hybrid.cache.request.growth import PathGrowth
    from sglang_hybrid.checkpoints.planner import PendingCheckpoint, StateSlots

NO_CHECKPOINT = (0, Kind.UNKNOWN)


@dataclass
class Publication:
    """The content that one call publishes for `req`.

    ready: planned states that are not in the tree yet, the deepest first. carried: the one that
    SGLang's own insertion carries. inserting: position and kind of the state of the insertion under
    way. published: those that are in the tree now.
    """

    req: Req
    slots: StateSlots
    ready: list[PendingCheckpoint]
    carried: PendingCheckpoint | None = None
    inserting: tuple[int, Kind] = NO_CHECKPOINT
    published: list[tuple[int, Kind]] = field(default_factory=list)

    @property
    def deepest(self) -> int:
        """Position of the deepest planned state; 0 if there is none."""
        return self.ready[0].position if self.ready else 0

    def hand_over(self, insert_params: InsertParams) -> int:
        """SGLang's insertion gets the deepest planned state; returns its position, 0 for none."""
        if not self.ready:
            return 0
        self.carried = self.ready.pop(0)
        insert_params.mamba_value = self.carried.slot
        self.inserting = (self.carried.position, self.carried.kind)
        return self.carried.position

    def on_insert(self, result: InsertResult) -> None:
        """Called after SGLang's insertion."""
        if self.carried is not None:
            self._give_back_if_duplicate(self.carried, result)
            self.carried = None

    def on_commit(self) -> Kind:
        """Called when the tree has taken the state of the insertion; returns the state's kind."""
        self.published.append(self.inserting)
        return self.inserting[1]

    def publish_rest(self, growth: PathGrowth) -> None:
        """Insert the other planned states, at positions whose KV is the tree's by now."""
        for checkpoint in self.ready:
            self.inserting = (checkpoint.position, checkpoint.kind)
            result = growth.insert(self.req, self._params(checkpoint), checkpoint.position)
            self._give_back_if_duplicate(checkpoint, result)
        self.ready = []

    def _params(self, checkpoint: PendingCheckpoint) -> InsertParams:
        return InsertParams(
            mamba_value=checkpoint.slot,
            prev_prefix_len=checkpoint.position,  # nothing is a duplicate: these are the tree's own
            inserted_len=checkpoint.position,
            priority=self.req.priority or 0,
            session_id=self.req.session_id,
        )

    def _give_back_if_duplicate(self, checkpoint: PendingCheckpoint, result: InsertResult) -> None:
        """Free the slot of `checkpoint` if its node has a state: the tree keeps one per node."""
        if result.mamba_exist:
            self.slots.give_back(checkpoint.slot)
