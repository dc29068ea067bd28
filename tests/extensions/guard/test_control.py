"""A scheduler that cannot do what it is asked answers, and the answer reaches who asked."""

from __future__ import annotations

import asyncio
import gc
from http import HTTPStatus
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenizedGenerateReqInput,
    CloseSessionReqInput,
    FlushCacheReqInput,
    GetInternalStateReq,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    SendWeightsToRemoteInstanceReqInput,
    SlowDownReqInput,
    TokenizedGenerateReqInput,
    UnloadLoRAAdapterReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightVersionReqInput,
    UpdateWeightVersionReqOutput,
    msgpack_decode,
    msgpack_encode,
)

from sglang_hybrid.cache.queue.clock import ClockTick
from sglang_hybrid.cache.tiers.measured_speeds import SpeedsMeasured
from sglang_hybrid.explain.messages import ExplainReq, ResidencyReq
from sglang_hybrid.extensions.guard.control import ControlFailed, dispatch, handlers
from sglang_hybrid.extensions.guard.refusals import release_memory
from sglang_hybrid.serving.requests.errors import Refused
from sglang_hybrid.storage import weights
from tests.messages import generation


def prompt(rid: str) -> TokenizedGenerateReqInput:
    return generation(None, rid)


class Scheduler:
    """The part of SGLang's scheduler that is used: `handler` is called with every request."""

    def __init__(self, handler: Any, *, idle: bool = True) -> None:
        self._request_dispatcher = handler
        self.sent: list[Any] = []
        send = SimpleNamespace(send_output=lambda output, _: self.sent.append(output))
        self.ipc_channels = SimpleNamespace(send_to_tokenizer=send)
        saver = SimpleNamespace(enabled=True)
        self.weight_updater = SimpleNamespace(memory_saver_adapter=saver, offload_tags=set())
        self._engine_paused = False
        self.is_fully_idle = lambda ignore_waiting: idle


def breaks(request: Any) -> None:
    raise KeyError("broken")


def test_what_a_handler_answers_is_passed_on() -> None:
    answer = UpdateWeightVersionReqOutput()
    assert (
        dispatch(Scheduler(lambda _: answer), UpdateWeightVersionReqInput(new_version="x"))
        is answer
    )


def test_a_handler_that_raises_is_an_answer() -> None:
    failed = dispatch(Scheduler(breaks), UpdateWeightVersionReqInput(new_version="x"))
    assert failed.request == "UpdateWeightVersionReqInput" and failed.status == 500
    assert "KeyError: 'broken'" in failed.message
    assert msgpack_decode(msgpack_encode(failed)) == failed


def test_a_prompt_that_fails_ends_alone() -> None:
    done = []

    def handle(request: Any) -> None:
        if request.rid == "bad":
            raise TypeError("no")
        done.append(request.rid)

    scheduler = Scheduler(handle)
    batch = BatchTokenizedGenerateReqInput(batch=[prompt("a"), prompt("bad"), prompt("b")])
    assert dispatch(scheduler, batch) is None
    assert done == ["a", "b"]
    (abort,) = scheduler.sent
    assert abort.rid == "bad" and abort.finished_reason["status_code"] == 500
    assert "TypeError: no" in abort.finished_reason["message"]


def test_memory_is_not_released_under_running_requests() -> None:
    refused = dispatch(Scheduler(breaks, idle=False), ReleaseMemoryOccupationReqInput())
    assert refused.status == HTTPStatus.CONFLICT and "while requests run" in refused.message


def test_what_was_not_released_is_not_resumed_and_nothing_is_computed_meanwhile() -> None:
    scheduler = Scheduler(lambda _: None)
    assert "was not released" in dispatch(scheduler, ResumeMemoryOccupationReqInput()).message
    assert dispatch(scheduler, ReleaseMemoryOccupationReqInput()) is None
    scheduler.weight_updater.offload_tags.update(("kv_cache", "weights", "cuda_graph"))
    assert "released already" in dispatch(scheduler, ReleaseMemoryOccupationReqInput()).message
    dispatch(scheduler, prompt("early"))
    assert scheduler.sent[0].finished_reason["status_code"] == HTTPStatus.SERVICE_UNAVAILABLE
    assert dispatch(scheduler, ResumeMemoryOccupationReqInput()) is None


@pytest.mark.parametrize(("seconds", "done"), [(None, True), (-1, True), (2, True), (1e9, False)])
def test_a_server_is_slowed_down_within_bounds(seconds: float | None, done: bool) -> None:
    answer = dispatch(Scheduler(lambda _: None), SlowDownReqInput(forward_sleep_time=seconds))
    assert (answer is None) == done


@pytest.mark.parametrize(("ports", "status"), [("1", None), ("2", 400), ("1,2", None)])
def test_weights_are_sent_to_a_group_that_there_is(ports: str, status: int | None) -> None:
    exporter = SimpleNamespace(tp_rank=0, _weights_send_group={"g_1_0": object()})
    scheduler = Scheduler(lambda _: None)
    runner = SimpleNamespace(weight_exporter=exporter)
    scheduler.tp_worker = SimpleNamespace(model_runner=runner)  # type: ignore[attr-defined]
    asked = SendWeightsToRemoteInstanceReqInput(master_address="a", ports=ports, group_name="g")
    failed = dispatch(scheduler, asked)
    assert getattr(failed, "status", None) == status
    assert failed is None or "there is no group 'g' with the ports '2'" in failed.message


class TakesEmbeddings:
    def forward(self, input_ids: Any, input_embeds: Any = None) -> None: ...

    def get_input_embeddings(self) -> None: ...


class TakesRows:
    def forward(self, input_ids: Any, input_embeds: Any = None) -> None: ...


class TakesIds:
    def forward(self, input_ids: Any, inputs_embeds: Any = None) -> None: ...


@pytest.mark.parametrize(
    ("model", "field", "done"),
    [
        (TakesEmbeddings, "positional_embed_overrides", True),
        (TakesEmbeddings, "input_embeds", True),
        (TakesRows, "positional_embed_overrides", False),
        (TakesRows, "input_embeds", True),
        (TakesIds, "positional_embed_overrides", False),
        (TakesIds, "input_embeds", False),
        (TakesIds, "input_text", True),
    ],
)
def test_a_model_gets_no_embeddings_that_it_does_not_take(
    model: type, field: str, done: bool
) -> None:
    """Its forward pass would end, and with it the scheduler."""
    scheduler: Any = Scheduler(lambda _: None)
    runner = SimpleNamespace(model=model())
    scheduler.tp_worker = SimpleNamespace(model_runner=runner)
    sent = prompt("a")
    setattr(sent, field, [[0.5]])
    dispatch(scheduler, sent)
    assert bool(scheduler.sent) is not done
    if not done:
        reason = scheduler.sent[0].finished_reason
        assert reason["status_code"] == 400 and model.__name__ in reason["message"]


def test_who_asked_is_told_and_nobody_else() -> None:
    sent: list[Any] = []
    manager: Any = SimpleNamespace(
        mine=FanOutCommunicator(sent.append, 1), other=FanOutCommunicator(sent.append, 1)
    )
    receive = handlers(manager)

    async def ask() -> None:
        mine = asyncio.create_task(manager.mine(UpdateWeightVersionReqInput(new_version="x")))
        other = asyncio.create_task(manager.other(SlowDownReqInput(forward_sleep_time=None)))
        await asyncio.sleep(0)
        receive(ControlFailed(request="UpdateWeightVersionReqInput", message="no.", status=409))
        with pytest.raises(Refused, match=r"no\.") as refused:
            await mine
        assert refused.value.status_code == 409
        assert not other.done()
        other.cancel()

    asyncio.run(ask())


def test_who_waits_for_weights_from_disk_is_told() -> None:
    """They have no communicator: the client would wait for ever."""
    answers: list[Any] = []
    manager: Any = SimpleNamespace(_handle_update_weights_from_disk_req_output=answers.append)
    failed = dispatch(Scheduler(breaks), UpdateWeightFromDiskReqInput(model_path="m"))
    handlers(manager)(failed)
    (answer,) = answers
    assert not answer.success and "KeyError: 'broken'" in answer.message


def test_what_sglang_checks_itself_is_a_refusal() -> None:
    def checks(request: Any) -> None:
        raise ValueError("the version must not be empty.")

    failed = dispatch(Scheduler(checks), UpdateWeightVersionReqInput(new_version=""))
    assert (failed.status, failed.message) == (400, "the version must not be empty.")


def raises(error: Exception) -> Any:
    """A handler."""

    def handle(request: Any) -> None:
        raise type(error)(*error.args)

    return handle


BROKEN = AssertionError("a slot has two owners")
TENSORS = UpdateWeightsFromTensorReqInput(serialized_named_tensors=[])


@pytest.mark.parametrize(
    "request_",
    [
        FlushCacheReqInput(),
        CloseSessionReqInput(session_id="a"),
        PauseGenerationReqInput(mode="retract"),
        ReleaseMemoryOccupationReqInput(),
        UnloadLoRAAdapterReqInput(lora_name="a", lora_id="b"),
        AbortReq(rid="a"),
        ClockTick(1.0),
        SpeedsMeasured(MagicMock()),
    ],
    ids=lambda request: type(request).__name__,
)
def test_a_broken_invariant_is_no_answer(request_: Any) -> None:
    """The error ends the scheduler, and the server in order (shutdown.py)."""
    with pytest.raises(AssertionError, match="two owners"):
        dispatch(Scheduler(raises(BROKEN)), request_)


@pytest.mark.parametrize("request_", [AbortReq(rid="a"), ClockTick(1.0)])
def test_nobody_waits_for_an_answer(request_: Any) -> None:
    with pytest.raises(KeyError):
        dispatch(Scheduler(breaks), request_)


def test_what_only_reads_breaks_nothing() -> None:
    for request in (GetInternalStateReq(), ExplainReq(input_ids=[1]), ResidencyReq()):
        failed = dispatch(Scheduler(raises(BROKEN)), request)
        assert failed.status == 500 and "two owners" in failed.message


def test_a_loader_of_weights_asserts_what_a_client_must_send() -> None:
    failed = dispatch(Scheduler(raises(AssertionError("[3] is not [4]"))), TENSORS)
    assert (failed.status, failed.message) == (400, "[3] is not [4]")


def test_but_what_a_cache_asserts_while_it_is_emptied_is_an_invariant() -> None:
    updated = Scheduler(lambda _: OfACache().check())
    with pytest.raises(AssertionError):
        dispatch(updated, TENSORS)


class OfACache:
    """Its module is one of a cache."""

    check = FunctionType(
        compile("def check(self): assert False", "cache", "exec").co_consts[0],
        {"__name__": "sglang_hybrid.cache.anything"},
    )


def test_a_mistake_of_another_request_is_the_servers() -> None:
    failed = dispatch(Scheduler(raises(ValueError("no such value"))), FlushCacheReqInput())
    assert failed.status == 500 and "no such value" in failed.message


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("no"), 400), (AssertionError("no"), 500), (KeyError(1), 500)]
)
def test_a_prompt_ends_alone_unless_it_waits_already(error: Exception, status: int) -> None:
    scheduler: Any = Scheduler(raises(error))
    dispatch(scheduler, prompt("a"))
    assert scheduler.sent[0].finished_reason["status_code"] == status
    scheduler.waiting_queue = [SimpleNamespace(rid="a")]
    with pytest.raises(type(error)):
        dispatch(scheduler, prompt("a"))
    assert len(scheduler.sent) == 1


def test_memory_is_released_and_resumed_once() -> None:
    """SGLang would forget in the middle of it that the rest is released."""
    scheduler = Scheduler(breaks)
    scheduler.weight_updater.offload_tags.add("weights")
    for request in (
        ReleaseMemoryOccupationReqInput(tags=["kv_cache", "kv_cache"]),
        ResumeMemoryOccupationReqInput(tags=["weights", "weights"]),
    ):
        refused = dispatch(scheduler, request)
        assert refused.status == 400 and "more than once" in refused.message


@pytest.mark.parametrize("field", ["tools", "messages", "response_format"])
@pytest.mark.parametrize("value", [5, ["a"], "a"])
def test_a_body_of_other_types_is_a_mistake_of_its_sender(field: str, value: Any) -> None:
    from pydantic import ValidationError
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    body: Any = {"model": "default", "messages": [{"role": "user", "content": "a"}], field: value}
    with pytest.raises(ValidationError):
        ChatCompletionRequest(**body)


def test_memory_is_released_once_copies_between_tiers_have_ended() -> None:
    ended: list[None] = []

    class Cache:
        def end_transfers(self) -> None:
            ended.append(None)

    cache = Cache()
    weights.watch_transfers(cache)
    scheduler: Any = SimpleNamespace(
        is_fully_idle=lambda ignore_waiting: bool(ended),
        weight_updater=SimpleNamespace(offload_tags=set()),
        _engine_paused=False,
    )
    release_memory(scheduler, ReleaseMemoryOccupationReqInput())
    assert len(ended) == 1
    del cache
    gc.collect()
    ended.clear()
    with pytest.raises(Refused, match="while requests run"):
        release_memory(scheduler, ReleaseMemoryOccupationReqInput())
