"""Connects the cache and the tuner: ended requests are told to the tuner, its choice is put into
force.

Loaded only where a flag asks for the tuner, a recorded file or the page, or splits of the memory
are compared. Every rank has a `Tuning` then; the one that receives requests also has the tuner and
the recorded file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_hybrid.cache.memory.shared import shared_memory
from sglang_hybrid.cache.tiers.served_tiers import served_tiers
from sglang_hybrid.core.extensions import extension
from sglang_hybrid.core.returns.hints import Hint
from sglang_hybrid.core.server_settings import Split
from sglang_hybrid.core.specs import PolicySwitch
from sglang_hybrid.serving.flag_values import Eviction, Ui
from sglang_hybrid.serving.tenants import TenantNames, tenant_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_hybrid.cache.parts import Parts
    from sglang_hybrid.cache.radix_cache import HybridRadixCache
    from sglang_hybrid.cache.split_watch import SplitWatch
    from sglang_hybrid.core.traffic.recorder import Recorder, RequestWindow
    from sglang_hybrid.extensions.lab.simulation.tuner.trace_file import TraceFile
    from sglang_hybrid.extensions.lab.simulation.tuner.tuner import Tuner
    from sglang_hybrid.serving.advice import ServerSetup


class Tuning:
    """The things that could change the policy in force, and those that remember ended requests.

    Args:
        cache: whose policies they are; parts: ours of it.
        tuner: on the rank that receives requests, if the policy is not pinned.
        file: where finished requests are written, if wanted.
        recorder: keeps the latest finished requests for whoever asks (`recent`).
    """

    def __init__(
        self,
        cache: HybridRadixCache,
        parts: Parts,
        tuner: Tuner | None = None,
        file: TraceFile | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.tuner = tuner
        self.file = file
        self.recorder = recorder
        self.splits: SplitWatch | None = None
        self._cache = cache
        self._parts = parts
        self._names = TenantNames()
        self._ended = 0

    def watch_splits(self, setup: ServerSetup, server_args: Any = None) -> None:
        """Compare splits of the memory from now on, which must be `ServerSetup.divided`. Needs
        planned checkpoints, which a replay knows, and a policy of ours. server_args: SGLang's; the
        next start with these reads the best split. None: none does.
        """
        parts = self._parts
        if parts.serving is None or parts.shadow_tree is None:
            return
        from sglang_hybrid.cache.split_watch import SplitWatch

        def path() -> Path | None:
            from sglang_hybrid.cache.learnt_split import split_path

            return None if server_args is None else split_path(server_args)

        self.recorder = self.recorder if self.recorder is not None else _make_recorder()
        self.splits = SplitWatch(setup, self.recent, lambda: parts.in_force, path)

    @property
    def needs_requests(self) -> bool:
        """True if it must be told of requests that ended."""
        return (self.tuner, self.file, self.recorder) != (None, None, None)

    def on_request_end(
        self,
        req: Req,
        up_to: int,
        message_starts: Sequence[int],
        reply_start: int,
        hint: Hint | None,
    ) -> None:
        """`req` ended with `up_to` tokens in the tree. message_starts, reply_start: see
        `PrefillPlans.messages`. hint: what is said of its session.
        """
        from sglang_hybrid.core.traffic.recorder import FinishedRequest, compact

        self._ended += 1
        input_len = len(req.origin_input_ids)
        room, evicted = self._room(), bool(self._parts.stats.evicted)
        answer = req.full_untruncated_fill_ids[input_len : up_to + 1]
        record = FinishedRequest(
            compact(req.origin_input_ids, answer),
            input_len,
            self._cache.step_clock.arrival(req) or float(self._ended),
            self._parts.lookups.hit_tokens(req),
            room,
            message_starts=tuple(message_starts),
            reply_start=reply_start,
            tenant=self._names.name(tenant_of(req)),
            hint=hint,
        )
        if self.file is not None:
            self.file.add(record)
        if self.recorder is not None:
            self.recorder.add(record)
        if self.tuner is not None:
            self.tuner.on_request_end(record, evicted=evicted)
        if self.splits is not None:
            self.splits.on_request_end(room, evicted=evicted)

    def recent(self) -> Callable[[], RequestWindow] | None:
        """Makes a window of the latest finished requests, in any thread; None where they are too
        few. The latter half of them counts.
        """
        from sglang_hybrid.core.traffic import recorder

        if self.recorder is None or len(self.recorder) < recorder.FEWEST_REQUESTS:
            return None
        parts = self._parts
        records = self.recorder.latest(recorder.MOST_REQUESTS)
        tiers = served_tiers(self._cache)
        return partial(
            recorder.make_window,
            records,
            (len(records) + 1) // 2,
            parts.cost,
            parts.options.hybrid_min_branch_tokens,
            parts.serving,
            has_states=self._cache.is_mamba_enabled,
            tiers=tiers,
        )

    def _room(self) -> Split | int:
        """The room that running requests leave to the cache."""
        cache, tree = self._cache, self._cache.tree_core
        allocator = cache.token_to_kv_pool_allocator
        kv = int(cache.full_evictable_size() + cache.full_protected_size())
        states = 0
        if cache.is_mamba_enabled:
            states = int(tree.mamba_evictable_size() + tree.mamba_protected_size())
        memory = shared_memory(allocator)
        if memory is not None:
            cached = kv * memory.token_bytes + states * self._parts.cost.state_bytes
            return int(memory.free_bytes + cached)
        if cache.is_mamba_enabled:
            states += int(cache.req_to_token_pool.mamba_allocator.available_size())
        spilled = parked = 0
        if cache.spilled is not None:
            spilled = cache.spilled.tokens
        if cache.parked is not None:
            states, parked = states + cache.parked.slots, cache.parked.tokens_of_slot
        return Split(kv + int(allocator.available_size()), states, spilled, parked)

    def poll(self) -> list[PolicySwitch]:
        """The message of the first rank to all ranks, with the requests of this step."""
        switch = None if self.tuner is None else self.tuner.poll()
        return [] if switch is None else [switch]

    def switch(self, switch: PolicySwitch) -> None:
        """Put `switch` into force; called on every rank at the same step."""
        self._parts.use_policy(switch)
        if self.tuner is not None:
            self.tuner.on_adoption(switch)

    def handlers(self) -> list[tuple[type, Callable[[PolicySwitch], None]]]:
        """The handlers that the scheduler's dispatcher must know."""
        return [(PolicySwitch, self.switch)]

    @property
    def counts(self) -> Mapping[str, float]:
        """The tuner's totals; nothing where there is none."""
        return {} if self.tuner is None else vars(self.tuner.counts)

    @property
    def advice(self) -> list[str]:
        """The settings that would have hit more of the past traffic, a sentence each."""
        return [self.splits.advice] if self.splits is not None and self.splits.advice else []

    def info(self) -> dict[str, Any] | None:
        """The tuner's counts for /server_info; None without a tuner."""
        return None if self.tuner is None else self.tuner.info()

    def recording(self) -> dict[str, Any] | None:
        """The recording's counts for /server_info; None if requests are not recorded."""
        return None if self.file is None else self.file.info()


def make_tuning(cache: HybridRadixCache, parts: Parts, rank: int | None) -> Tuning:
    """The object that may change the policy in `cache`, which must be enabled, with what its flags
    ask for.

    rank: which of several caches with requests of their own this is; None if another rank receives
    its requests. Raises `RecordingError` if requests cannot be recorded where they should be.
    """
    options = parts.options
    if rank is None:
        return Tuning(cache, parts)
    tuner = _make_tuner(cache, parts) if options.is_tuned else None
    file = _make_file(Path(options.hybrid_record), rank) if options.hybrid_record else None
    recorder = None if options.hybrid_ui is Ui.OFF else _make_recorder()
    return Tuning(cache, parts, tuner, file, recorder)


def _make_recorder() -> Recorder:
    from sglang_hybrid.core.traffic.recorder import MOST_RECORD_BYTES, Recorder

    return Recorder(MOST_RECORD_BYTES)


def _make_tuner(cache: HybridRadixCache, parts: Parts) -> Tuner:
    options = parts.options
    limits = extension("lab.simulation.workers").Limits(workers=options.hybrid_tuner_workers)
    candidates = extension("lab.simulation.tuner.candidates")
    lab = extension("lab.simulation.tuner.tuner")
    is_auto = options.hybrid_eviction is Eviction.AUTO
    tuner: Tuner = lab.Tuner(
        parts.cost,
        lab.Rules(window=options.hybrid_tuner_window, limits=limits),
        parts.in_force,
        candidates=candidates.CANDIDATES if is_auto else candidates.MARCONI_ALONE,
        min_branch_tokens=options.hybrid_min_branch_tokens,
        serving=parts.serving,
        has_states=cache.is_mamba_enabled,
        tiers=partial(served_tiers, cache),
    )
    return tuner


def _make_file(path: Path, rank: int) -> TraceFile:
    traces = extension("lab.simulation.tuner.trace_file")
    file: TraceFile = traces.TraceFile(path.with_name(f"{rank}-{path.name}") if rank else path)
    return file
