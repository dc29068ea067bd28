"""An endpoint picker: gateways ask it which server gets a request.

The protocol is that of Kubernetes' Gateway API inference extension
(kubernetes-sigs/gateway-api-inference-extension, docs/proposals/004-endpoint-picker-protocol), over
Envoy's external processing: the gateway sends headers and body of a request, and takes the server's
address from the header `x-gateway-destination-endpoint`. A request for which no server is chosen
goes where the gateway sends it by itself.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final
from urllib.parse import urlsplit

import grpc
import httpx
import msgspec
import numpy
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import (
    ExternalProcessorServicer,
    add_ExternalProcessorServicer_to_server,
)

from sglang_hybrid.replicas.choosing import Choice, Replicas, host_and_port

logger = logging.getLogger(__name__)

DESTINATION: Final = "x-gateway-destination-endpoint"
METADATA: Final = "envoy.lb"  # where the protocol wants the destination once more
PROMPT_ROUTE: Final = "/hybrid_cache/prompt"
SENT_ON: Final = ("authorization", "content-type", "x-api-key", "x-hybrid-", "x-request-id-hybrid-")
"""How the headers begin in which a request names its key, its tenant or its actions."""

CHUNK: Final = 62 << 10  # bytes of a body in a message; the protocol allows 64 KiB
SECONDS: Final = 10.0  # in which a server must have said what a prompt is
_DUPLEX: Final = ProcessingMode.FULL_DUPLEX_STREAMED
ADDRESS_SECONDS: Final = 5.0  # for which the address of a host is remembered


class _Prompt(msgspec.Struct):
    input_ids: list[int]
    tenant: str


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _CachedTokens | None = None


class _Answer(msgspec.Struct):
    """What the answers of /generate and of OpenAI's routes say of cached tokens."""

    meta_info: _CachedTokens | None = None
    usage: _Usage | None = None


class Picker(ExternalProcessorServicer):  # type: ignore[misc]
    """Chooses among `replicas` for each request of a gateway.

    looked_up, unknown, failed: requests whose prompt was looked up, whose prompt no server could
    tell (they are sent by load alone), and for which no server could be reached.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.looked_up = self.unknown = self.failed = 0
        self.replicas = replicas
        self._http = httpx.AsyncClient(timeout=SECONDS)
        self._turns = itertools.count()
        self._addresses: dict[str, tuple[float, str]] = {}

    async def Process(self, stream: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """A request and its answer, message by message."""
        exchange = _Exchange()
        choice: Choice | None = None
        try:
            async for message in stream:
                kind = message.WhichOneof("request")
                if kind.startswith("request_"):
                    if not exchange.is_sent and exchange.is_whole_with(message):
                        choice = await self._choose(exchange)
                        destination = await self._destination(choice) if choice else ""
                        for reply in exchange.send_to(destination, kind):
                            yield reply
                    elif exchange.waits_for_replies:
                        yield ProcessingResponse(**{kind: {}})
                    continue
                reply, is_answered = exchange.on_answer(message)
                if choice is not None and is_answered:
                    self.replicas.on_answer(choice, exchange.cached_tokens())
                    choice = None
                yield reply
        finally:
            if choice is not None:  # the client or the gateway went away
                self.replicas.on_answer(choice)

    async def _choose(self, exchange: _Exchange) -> Choice | None:
        """None for a request that generates nothing, or where no server can be reached."""
        if exchange.method != "POST":
            return None
        prompt = await self._prompt(exchange)
        tokens = numpy.asarray(prompt.input_ids, numpy.int32)
        try:
            choice = self.replicas.choose(tokens, prompt.tenant)
        except LookupError as error:
            self.failed += 1
            logger.warning("%s", error)
            return None
        self.looked_up += bool(prompt.input_ids)
        self.unknown += not prompt.input_ids
        return choice

    async def _prompt(self, exchange: _Exchange) -> _Prompt:
        """What a server says that the request's prompt is; without tokens where none does, as of
        routes without prompts and of requests that will be refused.
        """
        urls = sorted({one.url for one in self.replicas.reachable()})
        first = next(self._turns)
        for number in range(min(2, len(urls))):
            url = urls[(first + number) % len(urls)]
            try:
                answer = await self._http.post(
                    url + PROMPT_ROUTE + exchange.path,
                    content=bytes(exchange.body),
                    headers=exchange.sent_on(),
                )
            except httpx.HTTPError as error:
                logger.warning("%s said nothing of a prompt: %s", url, error or type(error))
                continue
            if answer.is_success:
                return msgspec.json.decode(answer.content, type=_Prompt)
            break
        return _Prompt([], "")

    async def _destination(self, choice: Choice) -> str:
        """Addresses, as the protocol has them: the chosen server's, then those of the others."""
        names = (choice.replica, *choice.others)
        addresses = [await self._address(name) for name in names]
        return ",".join(dict.fromkeys(filter(None, addresses)))

    async def _address(self, replica: str) -> str:
        """Of a server, as ip:port; "" where its host has none."""
        until, address = self._addresses.get(replica, (0.0, ""))
        if time.monotonic() < until:
            return address
        url = urlsplit(replica)
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            found = await asyncio.get_running_loop().getaddrinfo(url.hostname, port)
        except OSError as error:
            logger.warning("%s has no address: %s", replica, error)
            return ""
        address = host_and_port(str(found[0][4][0]), port)
        self._addresses[replica] = (time.monotonic() + ADDRESS_SECONDS, address)
        return address


class _Exchange:
    """A request, as far as it is known, and its answer. method, path, body: the request's.
    is_sent: whether the gateway was told where it goes.

    A gateway sends the body in parts and takes parts back, in between or later (`_DUPLEX`); or it
    keeps the body, which it sends whole after the headers were replied to; or it sends none.
    """

    def __init__(self) -> None:
        self.method = self.path = ""
        self.body = bytearray()
        self.is_sent = False
        self._headers: dict[str, str] = {}
        self._mode = self._answer_mode = _DUPLEX
        self._ends = False  # whether the body was followed by nothing
        self._answer = bytearray()
        self._reads_answer = False

    def is_whole_with(self, message: Any) -> bool:
        """Whether the request is known as a whole, or as far as the gateway tells it, now that this
        message of it has come.
        """
        if message.HasField("request_body"):
            self.body += message.request_body.body
            self._ends = message.request_body.end_of_stream
        elif message.HasField("request_headers"):
            if message.HasField("protocol_config"):
                self._mode = message.protocol_config.request_body_mode
                self._answer_mode = message.protocol_config.response_body_mode
            self._headers = _read(message.request_headers)
            self.method = self._headers.get(":method", "")
            self.path = self._headers.get(":path", "")
            return self._mode == ProcessingMode.NONE or bool(message.request_headers.end_of_stream)
        return self._ends or message.HasField("request_trailers")

    @property
    def waits_for_replies(self) -> bool:
        """Whether each message of the request wants its reply before the next one comes."""
        return bool(self.is_sent or self._mode != _DUPLEX)

    def sent_on(self) -> dict[str, str]:
        """The headers that decide what a server makes of the request."""
        return {name: said for name, said in self._headers.items() if name.startswith(SENT_ON)}

    def send_to(self, destination: str, kind: str) -> Iterator[Any]:
        """The messages that send the request there, after one of this kind has come; "" is where
        the gateway likes.
        """
        self.is_sent = True
        # What a client says of it has no effect.
        mutation: dict[str, Any] = {"remove_headers": [DESTINATION]}
        metadata = {}
        if destination:
            header = {"key": DESTINATION, "raw_value": destination.encode()}
            overwrite = "OVERWRITE_IF_EXISTS_OR_ADD"
            mutation = {"set_headers": [{"header": header, "append_action": overwrite}]}
            metadata = {METADATA: {DESTINATION: destination}}
        first = "request_headers" if self._mode == _DUPLEX else kind
        reply = {first: {"response": {"header_mutation": mutation}}}
        yield ProcessingResponse(**reply, dynamic_metadata=metadata)
        if self._mode != _DUPLEX:
            return
        for begin in range(0, len(self.body), CHUNK):
            is_last = self._ends and begin + CHUNK >= len(self.body)
            yield _streamed("request_body", bytes(self.body[begin : begin + CHUNK]), is_last)
        if kind == "request_trailers":
            yield ProcessingResponse(request_trailers={})

    def on_answer(self, message: Any) -> tuple[Any, bool]:
        """The reply to a message of the answer, and whether enough of the answer has come. The body
        is asked for where it is one JSON object, which may say how much was cached.
        """
        if message.HasField("response_headers"):
            headers = _read(message.response_headers)
            self._reads_answer = headers.get("content-type", "").startswith("application/json")
            self._reads_answer &= not message.response_headers.end_of_stream
            reply = ProcessingResponse(response_headers={})
            if self._reads_answer and self._answer_mode != _DUPLEX:
                reply.mode_override.response_body_mode = ProcessingMode.BUFFERED_PARTIAL
            return reply, not self._reads_answer
        if message.HasField("response_trailers"):
            return ProcessingResponse(response_trailers={}), True
        part = message.response_body
        if self._reads_answer:
            self._answer += part.body
        if self._answer_mode == _DUPLEX:
            return _streamed("response_body", part.body, part.end_of_stream), part.end_of_stream
        return ProcessingResponse(response_body={}), True

    def cached_tokens(self) -> int | None:
        """How many tokens of the prompt were hit, as far as the answer says it."""
        try:
            answer = msgspec.json.decode(bytes(self._answer), type=_Answer)
        except msgspec.DecodeError:
            return None
        said = answer.meta_info or (answer.usage and answer.usage.prompt_tokens_details)
        return said.cached_tokens if said else None


def _read(headers: Any) -> dict[str, str]:
    """Names, in lower case, and values of the headers in a message."""
    pairs = headers.headers.headers
    return {each.key.lower(): each.value or each.raw_value.decode("latin-1") for each in pairs}


def _streamed(kind: str, body: bytes, is_last: bool) -> Any:
    part = {"body": body, "end_of_stream": is_last}
    mutation = {"body_mutation": {"streamed_response": part}}
    return ProcessingResponse(**{kind: {"response": mutation}})


async def serve(picker: Picker, address: str) -> grpc.aio.Server:
    """Start to answer at `address` (host:port)."""
    server = grpc.aio.server()
    add_ExternalProcessorServicer_to_server(picker, server)
    server.add_insecure_port(address)
    await server.start()
    return server
