"""Hooks on the scheduler: who runs next, and what it hears and tells while it runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sglang_hybrid.core.extensions import extension


def provide_prefill_adder(adder: type, scheduler: Any) -> Any:
    """The cache brings the `PrefillAdder` that knows its state slots, and gives it the queue, and
    on a prefill server those that reach the queue once a decode server has room for them. Stages
    of a pipeline learn of that at different times.
    """
    ours = getattr(scheduler.tree_cache, "prefill_adder_class", None)
    if ours is None:
        return None
    coming: list[Any] = []
    if scheduler.disaggregation_mode.value == "prefill" and scheduler.tree_cache.pp_size == 1:
        coming = scheduler.disagg_prefill_bootstrap_queue.queue
    return partial(ours, waiting_queue=scheduler.waiting_queue, coming=coming)


def handle_our_requests(_: None, scheduler: Any) -> None:
    """The dispatcher hands the cache what is for it: messages of a step, and questions."""
    from sglang.utils import TypeBasedDispatcher

    for name in ("step_messages", "explainer", "page", "resumable"):
        part = getattr(scheduler.tree_cache, name, None)
        if part is not None:
            if name in ("page", "resumable"):
                part.scheduler = scheduler
            scheduler._request_dispatcher += TypeBasedDispatcher(part.handlers())


def add_step_messages(aborts: list[Any], scheduler: Any) -> None:
    """Send the messages of the rank that receives requests to all ranks with these requests."""
    step_messages = getattr(scheduler.tree_cache, "step_messages", None)
    if step_messages is not None:
        aborts.extend(step_messages.poll())


def show_waiting_queue(_: None, scheduler: Any, *__: Any, **___: Any) -> None:
    """The cache sees the waiting queue at every step, also while no place is free, and tells its
    readers what the last step changed, where SGLang would wait for the next prefill.
    """
    resumable = getattr(scheduler.tree_cache, "resumable", None)
    if resumable is not None:
        resumable.publish()
    schedule = getattr(scheduler.tree_cache, "schedule", None)
    if schedule is not None:
        schedule.step(scheduler.waiting_queue)


def rank_changed(
    policy: Any, waiting_queue: list[Any], *more: Any, **named: Any
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Ranking looks up only those waiting requests that may find something else than before."""
    changed = getattr(policy.tree_cache, "changed_matches", None)
    if changed is None:
        return None
    from sglang.srt.managers.schedule_policy import IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD

    few = changed(waiting_queue, IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD)
    return (policy, few, *more), named


def time_prefill(
    run: Callable[..., Any], scheduler: Any, batch: Any, *more: Any, **named: Any
) -> Any:
    """The cache is told when a batch is launched, and when all of it has been."""
    speeds: Any = getattr(scheduler.tree_cache, "speeds", None)
    timed = None if speeds is None else speeds.begin_forward(scheduler, batch)
    result = run(scheduler, batch, *more, **named)
    if timed is not None:
        speeds.on_launch(timed)
    return result


def count_newest_token(count: Callable[[Any], None], batch: Any) -> None:
    """A decode step counts, for penalties, the token at its position. Drafts are counted by
    SGLang, one of those that a step accepts.
    """
    penalties = extension("guard.penalties")
    (count if not batch.spec_algorithm.is_none() else penalties.count_newest)(batch)


def count_earlier_tokens(_: None, orchestrator: Any, *__: Any, **___: Any) -> None:
    """Penalties of a request that was retracted count what it had answered before."""
    if orchestrator.is_required:
        extension("guard.penalties").count_earlier(orchestrator)


def survive_profiler_errors(step: Callable[[Any, Any], None], profiler: Any, batch: Any) -> None:
    """A profile that cannot be written ends the profile, and the server goes on."""
    extension("guard.control").profile_step(step, profiler, batch)


def send_to_prefix(controller: Any, request: Any, *more: Any, **named: Any) -> None:
    """A data-parallel controller sends a prompt to the rank that has its prefix."""
    from sglang_hybrid.serving.data_parallel import choose_rank

    rank = choose_rank(controller, request)
    if rank is not None:
        request.routed_dp_rank = rank


def tell_of_closed_session(controller: Any, request: Any) -> None:
    """The cache learns which requests of a closed session nobody continued."""
    session = controller.sessions.get(request.session_id)
    if session is not None and hasattr(controller.tree_cache, "on_session_close"):
        nodes = session.req_nodes.values()
        controller.tree_cache.on_session_close([node.req for node in nodes if not node.children])


def compute_hidden_states(_: int, request: Any, *__: Any) -> int | None:
    """A prompt whose hidden states are wanted is computed as a whole: a hit would leave out those
    of its tokens.
    """
    return 0 if request.return_hidden_states is True else None


def name_tenant(_: None, request: Any, *__: Any, **___: Any) -> None:
    """A request without an adapter stays out of the adapters' parts of the tree."""
    from sglang_hybrid.serving.stored_keys import apart_from_adapters

    if request.lora_id is None and request.extra_key is not None:
        request.extra_key = apart_from_adapters(request.extra_key)


def take_cache_fields(request: Any, _: Any, tokenized: Any, *__: Any, **___: Any) -> None:
    """A request keeps our fields of the tokenized one that it is made of; in a session, whose
    prompt is longer than the client's, its route alone. One that asks for exact copies stays out of
    what may come from others.
    """
    from sglang_hybrid.serving.requests.cache_fields import CacheFields, fields_of
    from sglang_hybrid.storage.codecs.exactness import storage_key

    said = fields_of(tokenized)
    request.hybrid = said if request.session is None else CacheFields(route=said.route)
    request.extra_key = storage_key(request.extra_key, request.hybrid)


def set_image_identities(_: Any, request: Any, inputs: Any) -> None:
    """Images of a request get token ids that no other image has, before the prompt gets them."""
    from sglang_hybrid.serving.images import set_image_identity
    from sglang_hybrid.serving.tenants import tenant_of

    for item in inputs.mm_items:
        set_image_identity(item, tenant_of(request))
    inputs.padded_input_ids = None


def bound_grammars(_: None, backend: Any, *__: Any, **___: Any) -> None:
    """SGLang keeps each compiled grammar for ever; the oldest ones go beyond a bound."""
    backend.cache = extension("guard.grammars").Grammars()


def bound_compiler(_: None, backend: Any, *__: Any, **___: Any) -> None:
    """xgrammar keeps what it has compiled, too; SGLang gives it no bound."""
    from xgrammar import GrammarCompiler

    most = extension("guard.grammars").MOST_BYTES
    backend.grammar_compiler = GrammarCompiler(
        tokenizer_info=backend._tokenizer_info, cache_limit_bytes=most
    )
