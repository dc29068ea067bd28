"""Questions to a server by HTTP: answers have bounded sizes, and come within bounded times."""

from __future__ import annotations

import asyncio
import ssl
import threading
from functools import cache
from typing import Any, Final

import httpx

from sglang_hybrid.extensions.router.wire import Malformed

MOST_ANSWER: Final = 64 << 20
"""Bytes of an answer: pages of a snapshot with a prompt of a million tokens in one event."""


async def read(
    client: httpx.AsyncClient, method: str, url: str, seconds: float, **asked: Any
) -> httpx.Response:
    """The answer of `url`, whose body is in `content`; asked: as of `httpx.AsyncClient.request`.

    Raises httpx.HTTPError where the server cannot be asked, and Malformed for an answer that is too
    long, that is a redirection, or that has not come after so many seconds though its parts come.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(seconds), client.stream(method, url, **asked) as answer:
            async for part in answer.aiter_raw():  # what was compressed may be of any size
                body += part
                if len(body) > MOST_ANSWER:
                    raise Malformed(f"an answer has more than {MOST_ANSWER:,} bytes")
    except TimeoutError:
        raise Malformed(f"an answer was not whole after {seconds:g} seconds") from None
    if answer.is_redirect:
        raise Malformed("an answer is a redirection")
    return httpx.Response(answer.status_code, content=bytes(body), request=answer.request)


_load_certificates = cache(httpx.create_ssl_context)
_loading = threading.Lock()


def _certificates() -> ssl.SSLContext:
    """The certificates that httpx trusts, which take 50 ms: loaded once, however many threads want
    them.
    """
    with _loading:
        return _load_certificates()


def new_client(patience: float, headers: dict[str, str]) -> httpx.AsyncClient:
    """Each question has a new connection, which a server that has ended or is about to end does not
    take. patience: seconds until an answer begins, or goes on.
    """
    return httpx.AsyncClient(
        timeout=patience,
        headers={"Accept-Encoding": "identity"} | headers,
        verify=_certificates(),
        limits=httpx.Limits(max_keepalive_connections=0),
    )


class Asking:
    """Asks one server from one thread. patience: as of `new_client`."""

    def __init__(self, url: str, admin_key: str | None, patience: float) -> None:
        headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        self._url = url
        self._seconds = 2 * patience
        self._loop = asyncio.new_event_loop()
        self._client = new_client(patience, headers)

    def get(self, path: str, **query: str) -> bytes:
        """The answer of GET `path`. Raises what `read` raises, and httpx.HTTPStatusError for an
        answer that is an error.
        """
        asked = read(self._client, "GET", self._url + path, self._seconds, params=query)
        answer = self._loop.run_until_complete(asked)
        answer.raise_for_status()
        return answer.content

    def close(self) -> None:
        self._loop.run_until_complete(self._client.aclose())
        self._loop.close()
