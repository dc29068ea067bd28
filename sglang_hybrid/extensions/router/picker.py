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
import re
import time
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlsplit

import grpc
import httpx
import numpy
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import (
    ExternalProcessorServicer,
    add_ExternalProcessorServicer_to_server,
)

from sglang_hybrid.extensions.router.asking import new_client, read
from sglang_hybrid.extensions.router.choosing import Choice, Replicas, host_and_port
from sglang_hybrid.extensions.router.exchange import MOST_BODY, refusal
from sglang_hybrid.extensions.router.exchange import Exchange as _Exchange
from sglang_hybrid.extensions.router.wire import Malformed, Prompt, decode_prompt

logger = logging.getLogger(__name__)

PROMPT_ROUTE: Final = "/hybrid_cache/prompt"
SECONDS: Final = 10.0  # in which a server must have said what a prompt is
SILENCE: Final = 60.0  # for which one that did not is not asked again, while others can be
ADDRESS_SECONDS: Final = 5.0  # for which the address of a host is remembered
BODY_SECONDS: Final = 60.0  # in which the body of a request must have come

SMALL_BODY: Final = 1 << 20
MOST_HELD: Final = 256 << 20
"""Bytes of all bodies of more than SMALL_BODY bytes that are awaited or looked up at a time. What
is beyond them goes on at once, by load alone.
"""

_ENCODED: Final = "%(2[0-9A-Ca-c]|3[A-Fa-f]|40|5[BDEbde]|60|7[B-Db-d]|[89A-Fa-f][0-9A-Fa-f])"
_CHARACTER: Final = f"([A-Za-z0-9_~!$&'()*+,;=:@-]|{_ENCODED})"
PATH: Final = rf"/|(/(\.{{0,2}}{_CHARACTER}|\.{{3}})({_CHARACTER}|\.)*)+/?"
"""A path that stays as it is when it is normalised, for Python and for Envoy (RE2): no segment is
empty, `.` or `..`, and what is encoded is no letter, digit, `-`, `.`, `_` or `~`, no slash, and no
control character. Other paths are refused, since gateways, libraries and servers differ in what
they make of them.
"""

NOT_NORMAL: Final = (
    "the path is not in its normal form: it has an empty segment, '.', '..', a backslash, or an "
    "encoded character that means something else when it is decoded"
)

ENDING: Final = "The router is shutting down."


class Picker(ExternalProcessorServicer):
    """Chooses among `replicas` for each request of a gateway.

    open: requests that have not ended; a gateway ends its call when the last byte of the answer is
    sent. is_ending: set it, and each new request is refused, whatever it asks.

    looked_up, unknown, failed: requests whose prompt was looked up, whose prompt no server could
    tell (they are sent by load alone), and for which no server could be reached.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.open = 0
        self.is_ending = False
        self.looked_up = self.unknown = self.failed = 0
        self.replicas = replicas
        self._http = new_client(SECONDS, {})
        self._turns = itertools.count()
        self._silent: dict[str, float] = {}  # servers that said nothing, and until when
        self._addresses: dict[str, tuple[float, str]] = {}
        self._held = 0

    async def Process(self, stream: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """A request and its answer, message by message."""
        if self.is_ending:
            yield refusal(HTTPStatus.SERVICE_UNAVAILABLE, ENDING, **{"retry-after": "1"})
            return
        exchange = _Exchange()
        choice: Choice | None = None
        held = 0
        latest = asyncio.get_running_loop().time() + BODY_SECONDS
        messages = aiter(stream)
        self.open += 1
        try:
            while True:
                try:
                    async with asyncio.timeout_at(latest if exchange.is_awaited else None):
                        message = await anext(messages)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    why = f"the body did not arrive within {BODY_SECONDS:.0f} seconds"
                    yield refusal(HTTPStatus.REQUEST_TIMEOUT, why)
                    return
                kind = message.WhichOneof("request") or ""
                if kind.startswith("response_"):
                    reply, is_answered = exchange.on_answer(message)
                    if choice is not None and is_answered:
                        self.replicas.on_answer(choice, exchange.cached_tokens())
                        choice = None
                    yield reply
                elif exchange.is_sent and kind:
                    yield exchange.send_on(message, kind)
                elif kind:
                    is_known = exchange.is_known_with(message)
                    if not _is_normal(exchange.path):
                        yield refusal(HTTPStatus.BAD_REQUEST, NOT_NORMAL)
                        return
                    if not is_known and not held and exchange.size > SMALL_BODY:
                        held = exchange.size
                        self._held += held
                    if is_known or exchange.size > MOST_BODY or (held and self._held > MOST_HELD):
                        choice = await self._choose(exchange, is_known)
                        destination = await self._destination(choice) if choice else ""
                        self._held, held = self._held - held, 0
                        for reply in exchange.send_to(destination, kind):
                            yield reply
                    elif exchange.waits_for_replies:
                        yield ProcessingResponse(**{kind: {}})
        finally:
            self.open -= 1
            self._held -= held
            if choice is not None:  # the client or the gateway went away
                self.replicas.on_answer(choice)

    async def _choose(self, exchange: _Exchange, is_known: bool) -> Choice | None:
        """None for a request that generates nothing, or where no server can be reached."""
        if exchange.method != "POST":
            return None
        body = exchange.body if is_known else None
        prompt = Prompt([], "") if body is None else await self._prompt(exchange, body)
        tokens = numpy.asarray(prompt.input_ids, numpy.int64)
        try:
            choice = self.replicas.choose(tokens, prompt.tenant, prompt.reusable)
        except LookupError as error:
            self.failed += 1
            logger.warning("%s", error)
            return None
        self.looked_up += bool(prompt.input_ids)
        self.unknown += not prompt.input_ids
        return choice

    async def _prompt(self, exchange: _Exchange, body: bytes) -> Prompt:
        """The tokens that a server gives for the request's prompt; without tokens where none does,
        as of routes without prompts and of requests that will be refused.
        """
        latest = time.monotonic() + 1.5 * SECONDS
        for url in self._asked():
            try:
                answer = await read(
                    self._http,
                    "POST",
                    url + PROMPT_ROUTE + exchange.path,
                    2 * SECONDS,
                    content=body,
                    headers=exchange.sent_on(),
                )
                if answer.is_success:
                    return decode_prompt(answer.content)
            except Malformed as error:
                self.replicas.put_aside(url, error)
                logger.warning("%s is put aside: %s", url, error)
            except (httpx.InvalidURL, httpx.LocalProtocolError):  # by what the client sent
                break
            except httpx.HTTPError as error:
                self._silent[url] = time.monotonic() + SILENCE
                logger.warning("%s said nothing of a prompt: %s", url, error or type(error))
            else:
                if answer.is_client_error:
                    break
            if time.monotonic() > latest:
                break
        return Prompt([], "")

    def _asked(self) -> list[str]:
        """The servers that are asked what a prompt is, by turns: those that are in step and answer,
        or if there are none, all that are reachable.
        """
        now = time.monotonic()
        self._silent = {url: until for url, until in self._silent.items() if until > now}
        reachable = self.replicas.reachable()
        answering = [one for one in reachable if one.is_in_step and one.url not in self._silent]
        urls = sorted({one.url for one in answering or reachable})
        first = next(self._turns) % max(1, len(urls))
        return urls[first:] + urls[:first]

    async def _destination(self, choice: Choice) -> str:
        """Addresses, as the protocol has them: the chosen server's, then those of the others."""
        names = (choice.replica, *choice.others)
        addresses = [await self._address(name) for name in names]
        return ",".join(dict.fromkeys(filter(None, addresses)))

    async def _address(self, replica: str) -> str:
        """The address of a server, as ip:port; "" if its host has none."""
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


_normal_paths = re.compile(PATH)


def _is_normal(path: str) -> bool:
    return _normal_paths.fullmatch(path.partition("?")[0]) is not None


async def serve(picker: Picker, address: str) -> grpc.aio.Server:
    """Start to answer at `address` (host:port). Raises RuntimeError if it is in use."""
    most = ("grpc.max_receive_message_length", MOST_BODY + (2 << 20))
    alone = ("grpc.so_reuseport", 0)  # else a second picker there gets half of the requests
    server = grpc.aio.server(options=[most, alone])
    add_ExternalProcessorServicer_to_server(picker, server)
    server.add_insecure_port(address)
    await server.start()
    return server
