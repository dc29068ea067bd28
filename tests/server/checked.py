"""A server that looks at every step whether each state slot has one owner, and counts its objects.

SGLang accounts for KV at every step, for state slots and for its tree only when nothing runs.
"""

import gc
from collections import Counter
from itertools import chain
from typing import Any

from sglang_hybrid import launch_server  # first: its hook must see every import of SGLang

# isort: split
from sglang.srt.managers.scheduler_components.invariant_checker import SchedulerInvariantChecker

from sglang_hybrid.cache.prefill_adder import HybridPrefillAdder
from sglang_hybrid.cache.radix_cache import HybridRadixCache

STEPS_BETWEEN_TREE_CHECKS = 8

sglangs_own_check = SchedulerInvariantChecker.self_check_during_busy
sglangs_own_preemption = HybridPrefillAdder.preempt_to_schedule
usual_information = HybridRadixCache.server_info
happened: Counter[str] = Counter()


def check(self: SchedulerInvariantChecker) -> None:
    """SGLang's check, that no slot is lost or owned twice, and now and then the whole tree, whose
    check does not hold while a load from the host is under way.
    """
    sglangs_own_check(self)
    happened["steps"] += 1
    check_slots(self)
    due = happened["steps"] // STEPS_BETWEEN_TREE_CHECKS > happened["tree checks"]
    if due and not self.tree_cache.ongoing_load_back:
        happened["tree checks"] += 1
        self.tree_cache.sanity_check()


def check_slots(checker: SchedulerInvariantChecker) -> None:
    cache, pool = checker.tree_cache, checker.req_to_token_pool
    owners = {"free": free_ids(pool.mamba_allocator)}
    owners["tree"] = cache.all_mamba_values_flatten().tolist()
    planner = cache.plans.planner
    if planner is not None:
        prefills = [plan.pending_checkpoints for _, plan in planner.in_flight()]
        answers = [plan.answer_states for plan in planner._answers.values()]
        under_way = chain.from_iterable([*prefills, *answers])
        owners["under way"] = [int(checkpoint.slot) for checkpoint in under_way]
    if cache.parked is not None:
        parked = cache.parked
        owners["parked KV"] = parked._slot_of[list(parked._places._taken_in)].tolist()
    owners |= {req.rid: slots_of(req.kv) for req in checker._requests_owning_rows()}
    owners |= {name: slots_of(kv) for name, kv in cache.session_records().items()}
    counted = Counter(slot for slots in owners.values() for slot in slots)
    assert counted == Counter(range(1, pool.mamba_allocator.size + 1)), (
        f"state slots are lost or shared: {owners}"
    )


def free_ids(allocator: Any) -> list[int]:
    """Ids of slots that nobody has. In SGLang's pool `free_slots` are rows, and ids name them."""
    end = getattr(allocator, "_multi_ended_allocator", None)
    ids: list[int] = (allocator.free_slots if end is None else end.free_virtual_ids).tolist()
    return ids


def slots_of(kv: Any) -> list[int]:
    """The slots of a request's or a session's live state and of what SGLang tracks for it."""
    slots = [] if kv.mamba_pool_idx is None else kv.mamba_pool_idx.reshape(-1).tolist()
    if kv.mamba_ping_pong_track_buffer is not None:
        tracked = kv.mamba_ping_pong_track_buffer.tolist()
        empty = kv.mamba_ping_pong_empty
        slots += [slot for slot, gone in zip(tracked, empty, strict=True) if not gone]
    return slots


def preempt(self: HybridPrefillAdder, *args: Any, **kwargs: Any) -> bool:
    done: bool = sglangs_own_preemption(self, *args, **kwargs)
    happened["preemptions"] += done
    return done


def information(self: HybridRadixCache) -> dict[str, Any]:
    """The cache's information, with what happened and the live objects of SGLang, torch and us."""
    gc.collect()
    kinds = (type(thing) for thing in gc.get_objects())
    live = Counter(
        f"{kind.__module__}.{kind.__qualname__}"
        for kind in kinds
        if str(kind.__module__).split(".")[0] in ("sglang", "sglang_hybrid", "torch")
    )
    return {**usual_information(self), "happened": dict(happened), "live": dict(live)}


SchedulerInvariantChecker.self_check_during_busy = check
HybridPrefillAdder.preempt_to_schedule = preempt
HybridRadixCache.server_info = information

if __name__ == "__main__":
    launch_server.command()
