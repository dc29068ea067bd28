"""Hooks on the HTTP server, the tokenizer manager and the engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from sglang_hybrid.core.extensions import extension


def send_arrival(state: dict[str, Any], stats: Any) -> None:
    """A request's arrival travels with it, so that all ranks see the same time."""
    state.setdefault("created_time", stats.created_time)


def skip_unloggable(log: Callable[..., None], logger: Any, *args: Any, **kwargs: Any) -> None:
    """A log of requests (--log-requests) decodes their token ids, before they are checked; wrong
    ones are refused by the checks.
    """
    try:
        log(logger, *args, **kwargs)
    except (LookupError, OverflowError, TypeError, ValueError):
        return


def refuse_used_ids(manager: Any, body: Any, *_: Any, **__: Any) -> None:
    """An id of a request that has not ended is refused by the name that its client gave."""
    from sglang_hybrid.serving.requests import ids

    ids.refuse_used_ids(manager.rid_to_state, body.rid)


def keep_owner(regenerate: Callable[[Any], Any], request: Any) -> Any:
    """Each of several answers to one prompt has an id of its own; it is the tenant's, too."""
    from sglang_hybrid.serving.requests.ids import owner_part

    before, made = request.rid, regenerate(request)
    if isinstance(before, str):
        request.rid = made = made + owner_part(before)
    return made


def render_anew(
    chat: Any, messages: Any, *, use_cache: bool, **named: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A chat that is not to be tokenized, or otherwise, is no chat that was tokenized before."""
    from sglang_hybrid.chats.rendering import is_encoded_otherwise

    return (chat, messages), {**named, "use_cache": use_cache and not is_encoded_otherwise()}


def leave_out_changing_lines(_: Any, request: Any, *__: Any, **___: Any) -> None:
    """A chat whose system message begins with a line that changes with every request, as Claude
    Code's do, is rendered without it.
    """
    from sglang_hybrid.chats import client_lines

    if client_lines.are_left_out():
        client_lines.strip_messages(request.messages)


def convert_messages(convert: Callable[[Any, Any], Any], endpoint: Any, request: Any) -> Any:
    """/v1/messages notes what of a request it cannot do as asked, and says so in the answer."""
    from sglang_hybrid.chats import anthropic

    return anthropic.convert(lambda asked: convert(endpoint, asked), request)


def accept_thinking(apply: Callable[..., None], chat: Any, request: Any, enabled: bool) -> None:
    """/v1/messages answers a request for thinking where the model cannot think, too."""
    from sglang_hybrid.chats import anthropic

    anthropic.apply_thinking(lambda: apply(chat, request, enabled))


def tell_span(
    attributes: dict[str, Any], manager: Any, state: Any, outputs: Any, at: int
) -> dict[str, Any]:
    """The span of a request says what the cache did for it, and how long it waited."""
    from sglang_hybrid.serving.telemetry import spans

    if manager.enable_trace and state.cache_report is not None:
        attributes.update(spans.span_attributes(state.cache_report))
    times = (outputs.time_stats or [])[at : at + 1]
    if manager.enable_trace and times and times[0] is not None:
        attributes[spans.QUEUE] = times[0].get_queueing_time()
    return attributes


async def send_prompts(
    send: Callable[[Any, Any], Awaitable[None]], manager: Any, prompts: Any
) -> None:
    """Tokenized prompts, one or several in a message, are sent to a scheduler; one that finds it
    idle, together with all that have reached this process by now. One that is only asked for is not
    sent.
    """
    from sglang_hybrid.explain.prompt_route import answer_prompt_query, is_prompt_query
    from sglang_hybrid.serving.requests.arrivals import are_gathered, arrivals_of

    if is_prompt_query():
        await answer_prompt_query(prompts)
    if are_gathered(manager, prompts):
        await arrivals_of(manager, send).send(prompts)
    else:
        await send(manager, prompts)


def check_overrides(
    manager: Any, _: Any, embeddings: Any, *__: Any, label: str = "input", **___: Any
) -> None:
    """Embeddings in a request for scores are of the model's size before SGLang stacks them."""
    if embeddings:
        width = manager.model_config.hidden_size
        extension("guard.sizes").check_embeddings(f"embed_overrides of {label}", embeddings, width)


def take_token_ids(decode: Callable[[Any], list[int]], value: Any) -> list[int]:
    """A list holds token ids if its elements' types say so; SGLang calls two functions for each."""
    if isinstance(value, list) and set(map(type, value)) <= {int}:
        return list(value)
    return decode(value)


async def end_on_signal(watch: Callable[[Any], Awaitable[None]], manager: Any) -> None:
    """An HTTP server with one tokenizer process ends as `shutdown.py` says. One of several ends as
    SGLang ends it, but at once: its web server would write a traceback of SGLang's `sys.exit`.
    """
    shutdown = extension("guard.shutdown")
    if manager._server_stop_hook is not None:
        await shutdown.end_on_signal(manager)
        return
    try:
        await watch(manager)
    except SystemExit as end:
        if not extension("guard.processes").is_http_worker():
            raise
        shutdown.leave(int(end.code or 0))


def kill_process_tree(kill: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Have `shutdown.py` kill processes where SGLang kills its own."""
    extension("guard.shutdown").kill_process_tree(*args, **kwargs)


def end_processes_at_exit(launch: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """An HTTP server that ends, ends its processes and removes their shared memory, whichever
    program started it: SGLang's kill them, and with them Python's resource tracker.
    """
    try:
        launch(*args, **kwargs)
    finally:
        extension("guard.processes").end_processes()


def note_shared_memory(_: Any, *__: Any, **___: Any) -> None:
    """The processes have started: their shared memory is remembered."""
    extension("guard.processes").note_shared_memory()


def track_load_snapshots(init: Callable[..., None], writer: Any, *args: Any, **named: Any) -> None:
    """Shared memory of load snapshots is known to Python's resource tracker, once it is there."""
    try:
        init(writer, *args, **named)
    finally:
        if getattr(writer, "fd", -1) >= 0:
            extension("guard.processes").register_shared_memory(writer.path)


def hide_keys(arguments: Any, *_: Any, **__: Any) -> Any:
    """Hide keys where SGLang hides the secret of watermarks in arguments."""
    from sglang_hybrid.serving.requests.secrets import with_hidden_keys

    return with_hidden_keys(arguments)


def hide_given_keys(command: Any, *more: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The command line that a server tells has no keys."""
    from sglang_hybrid.serving.requests.secrets import words_without_keys

    return (words_without_keys(command), *more), {}


def with_all_routes(app: Any, *scope: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Routes that were added with `include_router` are looked at, too."""
    from sglang_hybrid.serving.routes import all_routes

    routes = getattr(getattr(app, "router", None), "routes", None) or getattr(app, "routes", [])
    return (SimpleNamespace(routes=all_routes(routes)), *scope), {}


def take_x_api_key(_: None, app: Any, **__: Any) -> None:
    """A key may come in `x-api-key`: before the check of keys it is made a bearer's."""
    from sglang_hybrid.serving.config import HybridConfig
    from sglang_hybrid.serving.flag_values import Ui
    from sglang_hybrid.serving.routes import KeyHeader

    shown = HybridConfig.from_environment().hybrid_ui is not Ui.OFF
    is_page = extension("page.route").is_of_page if shown else None
    app.add_middleware(KeyHeader, is_page=is_page)


def take_default_model(endpoint: Any, model: str | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """/v1/responses takes the model name `default`, as other endpoints do."""
    from sglang.srt.entrypoints.openai.protocol import DEFAULT_MODEL_NAME

    return (endpoint, None if model == DEFAULT_MODEL_NAME else model), {}
