"""A request of a gateway and its answer, in the messages of Envoy's external processing."""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus
from typing import Any, Final

import msgspec
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse

from sglang_hybrid.extensions.router.wire import Count, Malformed, decoded

DESTINATION: Final = "x-gateway-destination-endpoint"
METADATA: Final = "envoy.lb"  # where the protocol wants the destination once more
SENT_ON: Final = ("authorization", "content-type", "x-api-key", "x-hybrid-", "x-request-id-hybrid-")
"""The beginnings of headers in which a request names its key, its tenant or its actions."""

CHUNK: Final = 62 << 10  # bytes of a body in a message; the protocol allows 64 KiB
MOST_BODY: Final = 8 << 20
"""Bytes of the longest body whose prompt is looked up: a million tokens as text, or as ids."""

MOST_READ: Final = 8 << 20
"""Bytes of the longest answer that is read for what was hit."""

_DUPLEX: Final = ProcessingMode.FULL_DUPLEX_STREAMED


class _CachedTokens(msgspec.Struct):
    cached_tokens: Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _CachedTokens | None = None


class _Answer(msgspec.Struct):
    """The parts of answers of /generate and of OpenAI's routes about cached tokens."""

    meta_info: _CachedTokens | None = None
    usage: _Usage | None = None


_answers = msgspec.json.Decoder(_Answer).decode


class Exchange:
    """A request, as far as it is known, and its answer. method, path: the request's. is_sent:
    whether the gateway was told where it goes.

    A gateway sends the body in parts and takes parts back, in between or later (`_DUPLEX`); or it
    keeps the body, of which it sends all or the first part after the headers were replied to; or it
    sends none.
    """

    def __init__(self) -> None:
        self.method = self.path = ""
        self.is_sent = False
        self._headers: dict[str, str] = {}
        self._mode = self._answer_mode = _DUPLEX
        self._parts: list[bytes] = []
        self._received = 0
        self._announced: int | None = None
        self._ends = False  # whether the body was followed by nothing
        self._answer = bytearray()
        self._reads_answer = False

    def is_known_with(self, message: Any) -> bool:
        """True if all is known that the gateway tells of the request, now that this message of it
        has come.
        """
        if message.HasField("request_headers"):
            self._on_headers(message)
            self._ends = bool(message.request_headers.end_of_stream)
            return self._ends or self._mode == ProcessingMode.NONE
        if message.HasField("request_body"):
            self._parts.append(message.request_body.body)
            self._received += len(message.request_body.body)
            self._ends = message.request_body.end_of_stream
            return self._ends or self._mode != _DUPLEX
        return True

    def _on_headers(self, message: Any) -> None:
        if message.HasField("protocol_config"):
            self._mode = message.protocol_config.request_body_mode
            self._answer_mode = message.protocol_config.response_body_mode
        self._headers = _read(message.request_headers)
        self.method = self._headers.get(":method", "")
        self.path = self._headers.get(":path", "")
        announced = self._headers.get("content-length", "")
        if announced.isdecimal() and len(announced) < 20:
            self._announced = int(announced)

    @property
    def size(self) -> int:
        """Bytes of the body, as far as that is known; those of the longest, if it is not."""
        announced = MOST_BODY if self._announced is None else self._announced
        return max(announced, self._received)

    @property
    def body(self) -> bytes | None:
        """The body, once all of the request is known; None where the gateway does not send it, or
        only its first part.
        """
        is_cut = not self._ends and self._received >= MOST_BODY
        if is_cut or self._mode == ProcessingMode.NONE:
            return None
        return b"".join(self._parts)

    @property
    def is_awaited(self) -> bool:
        """True if parts of the body are kept here until the others come."""
        return bool(self._mode == _DUPLEX and not self.is_sent)

    @property
    def waits_for_replies(self) -> bool:
        """True if each message of the request wants its reply before the next one comes."""
        return bool(self._mode != _DUPLEX)

    def sent_on(self) -> list[tuple[bytes, bytes]]:
        """The headers that decide what a server makes of the request."""
        return [
            (name.encode(), said.encode("latin-1"))
            for name, said in self._headers.items()
            if name.startswith(SENT_ON) and name.isascii()
        ]

    def send_to(self, destination: str, kind: str) -> Iterator[Any]:
        """The messages that send the request there, after one of this kind has come; "" is where
        the gateway likes.
        """
        self.is_sent = True
        parts, self._parts = self._parts, []
        # A client's value has no effect.
        mutation: dict[str, Any] = {"remove_headers": [DESTINATION]}
        metadata = {}
        if destination:
            header = {"key": DESTINATION, "raw_value": destination.encode()}
            overwrite = "OVERWRITE_IF_EXISTS_OR_ADD"
            mutation = {"set_headers": [{"header": header, "append_action": overwrite}]}
            metadata = {METADATA: {DESTINATION: destination}}
        first = "request_headers" if self._mode == _DUPLEX else kind
        reply = ProcessingResponse(
            **{first: {"response": {"header_mutation": mutation}}}, dynamic_metadata=metadata
        )
        if self._mode != _DUPLEX:
            if kind == "request_headers" and not self._ends:  # the gateway need not keep the body
                reply.mode_override.request_body_mode = ProcessingMode.NONE
                reply.mode_override.response_body_mode = self._answer_mode
            yield reply
            return
        yield reply
        body = b"".join(parts)
        for begin in range(0, len(body), CHUNK):
            is_last = self._ends and begin + CHUNK >= len(body)
            yield _streamed("request_body", body[begin : begin + CHUNK], is_last)
        if kind == "request_trailers":
            yield ProcessingResponse(request_trailers={})

    def send_on(self, message: Any, kind: str) -> Any:
        """The reply to a message of a request that was sent."""
        if self._mode == _DUPLEX and kind == "request_body":
            return _streamed(kind, message.request_body.body, message.request_body.end_of_stream)
        return ProcessingResponse(**{kind: {}})

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
        if len(self._answer) > MOST_READ:
            self._reads_answer = False
            self._answer.clear()
        if self._answer_mode == _DUPLEX:
            is_enough = part.end_of_stream or not self._reads_answer
            return _streamed("response_body", part.body, part.end_of_stream), is_enough
        return ProcessingResponse(response_body={}), True

    def cached_tokens(self) -> int | None:
        """The number of tokens of the prompt that were hit, as far as the answer says it."""
        try:
            answer = decoded(_answers, bytes(self._answer), "answer")
        except Malformed:
            return None
        said = answer.meta_info or (answer.usage and answer.usage.prompt_tokens_details)
        return said.cached_tokens if said else None


def refusal(status: HTTPStatus, why: str, **headers: str) -> Any:
    """The message that has a gateway answer the request itself. headers: more of them, by name."""
    said = msgspec.json.encode({"error": {"message": why, "code": status.value}})
    headers = {"content-type": "application/json"} | headers
    told = [{"header": {"key": name, "raw_value": of.encode()}} for name, of in headers.items()]
    answer = {"status": {"code": status.value}, "body": said, "headers": {"set_headers": told}}
    return ProcessingResponse(immediate_response=answer)


def _read(headers: Any) -> dict[str, str]:
    """Names, in lower case, and values of the headers in a message."""
    return {
        each.key.lower(): (each.raw_value or each.value.encode()).decode("latin-1")
        for each in headers.headers.headers
    }


def _streamed(kind: str, body: bytes, is_last: bool) -> Any:
    part = {"body": body, "end_of_stream": is_last}
    mutation = {"body_mutation": {"streamed_response": part}}
    return ProcessingResponse(**{kind: {"response": mutation}})
