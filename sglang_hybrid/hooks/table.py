"""All hooks: a function of SGLang, when ours runs, and ours, whose docstring says what it does.

`scripts/port.py RELEASE --hook-hashes` makes `sglang-RELEASE.sha256` beside this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sglang_hybrid.hooks import scheduling, serving
from sglang_hybrid.hooks.hook import Hook, Kind

_BEFORE, _AFTER, *_ = Kind


def _in(module: str, *rows: tuple[str, Kind, Callable[..., Any]]) -> Iterator[Hook]:
    return (Hook(f"{module}:{name}", kind, ours) for name, kind, ours in rows)


HOOKS: tuple[Hook, ...] = (
    # The scheduler: who runs next, and what it hears and tells.
    *_in(
        "sglang.srt.managers.scheduler",
        ("Scheduler.get_prefill_adder_class", _AFTER, scheduling.bring_prefill_adder),
        ("Scheduler._process_hicache_events", _AFTER, scheduling.show_waiting_queue),
        ("Scheduler.init_request_dispatcher", _AFTER, scheduling.handle_our_requests),
        ("Scheduler._poll_timeout_aborts", _AFTER, scheduling.add_step_messages),
    ),
    *_in(
        "sglang.srt.managers.schedule_policy",
        ("SchedulePolicy._compute_prefix_matches", _BEFORE, scheduling.rank_what_changed),
    ),
    *_in(
        "sglang.srt.managers.scheduler_components.request_receiver",
        ("SchedulerRequestReceiver._pull_raw_reqs", _AFTER, scheduling.wait_for_burst),
    ),
    *_in(
        "sglang.srt.managers.schedule_batch",
        ("Req.__init__", _AFTER, scheduling.name_tenant),
    ),
    *_in(
        "sglang.srt.session.session_controller",
        ("SessionController.close", _BEFORE, scheduling.tell_of_closed_session),
    ),
    # Serving: requests, keys, and how a server ends.
    *_in(
        "sglang.srt.observability.req_time_stats",
        ("APIServerReqTimeStats.__getstate__", _AFTER, serving.send_arrival),
        ("DPControllerReqTimeStats.__getstate__", _AFTER, serving.send_arrival),
    ),
)
