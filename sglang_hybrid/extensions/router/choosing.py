"""Several servers that are followed, and which of them should get a prompt."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from sglang_hybrid.core.costs.cost import DISPLACED, SIMILAR
from sglang_hybrid.extensions.router.asking import Asking
from sglang_hybrid.extensions.router.attempts import keep_trying, sentence
from sglang_hybrid.extensions.router.follower import Follower
from sglang_hybrid.extensions.router.index import ReplicaIndex
from sglang_hybrid.extensions.router.reader import OutOfStep
from sglang_hybrid.extensions.router.resumable import Resumable
from sglang_hybrid.extensions.router.tokens import TOKEN_BYTES, Tokens, as_bytes
from sglang_hybrid.extensions.router.wire import KvEvents, Malformed, decode_server_info

DNS: Final = "dns://"


def addresses(name: str) -> set[str]:
    """URLs of the servers at all addresses of dns://HOST:PORT; none where HOST has no address.
    Raises OSError where nobody can say.
    """
    where = urlsplit(name)
    try:
        found = socket.getaddrinfo(where.hostname, where.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
            return set()
        raise
    return {f"http://{host_and_port(str(each[4][0]), each[4][1])}" for each in found}


def host_and_port(host: str, port: object) -> str:
    """HOST:PORT for a URL, in which an address of IPv6 has brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def divided(address: str) -> tuple[str, int]:
    """Host and port of an address that `host_and_port` made."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


class Choice(NamedTuple):
    """The replica for a prompt. position: tokens that its cache holds for the prompt. seconds:
    expected until its first token. number: of this choice. others: the other replicas that can be
    reached, the best first.
    """

    replica: str
    position: int
    seconds: float
    number: int
    others: tuple[str, ...] = ()


class Replicas:
    """Servers that are followed, and what they could do for a prompt.

    Servers that do not answer yet are asked again each second, each by a thread of its own. A
    data-parallel rank of a server has the name URL#RANK, any other server that of its URL.
    dns://HOST:PORT is a server at each address that HOST has; those that come and go are noticed
    within seconds. followers: by name. errors: for each server or name that is not followed, why.
    """

    def __init__(
        self,
        urls: Iterable[str],
        admin_key: str | None = None,
        *,
        pause: float = 1.0,
        patience: float = 5.0,
        resolve: Callable[[str], set[str]] = addresses,
    ) -> None:
        """resolve: the URLs that a dns:// name has now; raises OSError where nobody can say."""
        given = [url.rstrip("/") for url in urls]
        self.index = ReplicaIndex()
        self.followers: dict[str, Follower] = {}
        self.errors = {url: "was not asked yet" for url in given if not url.startswith(DNS)}
        self._resolved: dict[str, set[str]] = {url: set() for url in given if url.startswith(DNS)}
        self._named = frozenset(self.errors)  # servers that are followed whatever a name has
        self._resolve = resolve
        self._admin_key = admin_key
        self._pause = pause
        self._patience = patience
        self._choosing = threading.Lock()
        # Of `errors` and `followers`, each of which is replaced as a whole.
        self._changing = threading.Lock()
        self._choices = 0
        self._closed = threading.Event()
        self._joining: dict[str, threading.Thread] = {}
        self._finder = threading.Thread(target=self._find, name="find replicas", daemon=True)
        self._finder.start()

    def close(self) -> None:
        self._closed.set()
        for thread in (self._finder, *self._joining.values()):
            thread.join()
        for follower in self.followers.values():
            follower.stop()
        for follower in self.followers.values():
            follower.close()

    def resume(self, tokens: Tokens, tenant: str = "") -> list[Resumable]:
        """The positions at which replicas can resume a prompt; tenant: its `tenant_name`."""
        return self.index.resume(tokens, tenant)

    def reachable(self) -> list[Follower]:
        """The replicas that can be asked now."""
        return [one for one in self.followers.values() if one.is_reachable]

    def choose(self, tokens: Tokens, tenant: str = "", reusable: int | None = None) -> Choice:
        """The replica with the least expected seconds to the first token: of the prefills that were
        sent there and are not answered, of loads, and of what is left of this prompt. Tokens that
        this prompt shares with one of those are prefilled once. Of similar ones it is the replica
        that was sent the fewest prompts. A prompt without tokens is one that nobody knows. Tell
        `on_answer` what became of it. Raises LookupError if no replica is reachable.

        reusable: the number of its tokens that can be hit; None for all but the last one.

        A replica that is not in step, or does not say how fast it is, is no faster than the slowest
        of the others. One that is not in step has no room, and comes after those that are as good.
        """
        prompt = as_bytes(tokens)
        last = len(prompt) // TOKEN_BYTES - 1
        most = last if reusable is None else min(last, reusable)
        followers = self.followers  # one that goes meanwhile may be chosen
        with self._choosing:
            rates = [one.load.rate for one in self.reachable() if one.has_known_rate]
            slowest = min(rates, default=math.inf)
            choices = []
            for resumable in self.index.resume(prompt[: (most + 1) * TOKEN_BYTES], tenant):
                name = resumable.replica
                follower = followers.get(name)
                if follower is not None and follower.is_reachable:
                    load = follower.load
                    position, loading = load.way(resumable)
                    found = max(position, min(most, load.on_its_way(tenant, prompt)))
                    left = last + 1 - found if prompt else load.typical or 1.0
                    seconds = loading + load.seconds(left)
                    is_read = follower.is_in_step
                    price = seconds
                    if load.displaces(left) or not is_read:
                        price += DISPLACED * load.prefill_seconds(left)
                    if not follower.has_known_rate:
                        price *= max(1.0, load.rate / slowest)
                    second = (not is_read, resumable.tier, load.sent, name)
                    choices.append((price, second, position, seconds, left))
            if not choices:
                raise LookupError(f"no server can be reached: {self._reasons()}")
            choices.sort()
            alike = [each for each in choices if each[0] <= SIMILAR * choices[0][0]]
            chosen = min(alike, key=lambda each: each[1])
            _, (*_, name), position, seconds, left = chosen
            self._choices += 1
            followers[name].load.on_choice(self._choices, tenant, prompt, left)
            others = tuple(each[1][-1] for each in choices if each is not chosen)
            return Choice(name, position, seconds, self._choices, others)

    def on_answer(self, choice: Choice, cached_tokens: int | None = None) -> None:
        """The first token of what was sent after `choice` has come, or none will come. Where too
        many of the latest predictions of a replica were wrong, its snapshot is read anew.

        cached_tokens: of the answer's usage; None where they are not known.
        """
        follower = self.followers.get(choice.replica)
        if follower is None:  # it has gone
            return
        with self._choosing:
            follower.load.on_answer(choice.number)
            if cached_tokens is None:
                return
            doubtful = follower.load.is_doubtful_after(choice.position, cached_tokens)
        if doubtful:
            follower.resync()

    def put_aside(self, url: str, error: Malformed) -> None:
        """The server at `url` has answered what it should not: it gets nothing for a while."""
        for follower in self.followers.values():
            if follower.url == url:
                follower.put_aside(error)

    def _reasons(self) -> str:
        reasons = self.errors | {one.name: one.error for one in self.followers.values()}
        return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())

    def _find(self) -> None:
        """Look up names, and have each server that is not followed asked where it publishes."""
        while (self.errors or self._resolved) and not self._closed.is_set():
            for name in self._resolved:
                self._look_up(name)
            self._joining = {url: each for url, each in self._joining.items() if each.is_alive()}
            for url in self.errors.keys() - self._resolved.keys():
                if url not in self._joining:
                    thread = threading.Thread(
                        target=self._join, args=(url,), name=f"find {url}", daemon=True
                    )
                    self._joining[url] = thread
                    thread.start()
            self._closed.wait(self._pause)

    def _look_up(self, name: str) -> None:
        """Servers at new addresses are followed from now on, those at others no more."""
        try:
            found = self._resolve(name)
        except Exception as error:  # the servers that were there may be there
            self._note(name, sentence(error))
            return
        others = self._named.union(*(of for at, of in self._resolved.items() if at != name))
        gone = self._resolved[name] - found - others
        new = dict.fromkeys(found - self._resolved[name] - others, "was not asked yet")
        self._resolved[name] = found
        with self._changing:
            kept = {url: why for url, why in self.errors.items() if url not in gone | {name}}
            self.errors = kept | new
            old = [one for one in self.followers.values() if one.url in gone]
            self.followers = {at: one for at, one in self.followers.items() if one not in old}
        for follower in old:
            follower.close()

    def _join(self, url: str) -> None:
        """Follow a server as soon as it says where it publishes, unless it is gone by then."""
        http = Asking(url, self._admin_key, self._patience)

        def ask() -> None:
            if url in self.errors:
                self._follow(url, http)

        def note(said: str, is_away: bool, is_aside: bool) -> None:
            self._note(url, said)

        keep_trying(ask, note, self._closed, self._pause)
        http.close()

    def _note(self, at: str, why: str) -> None:
        """Note the reason why the server or name is not followed."""
        with self._changing:
            if at in self.errors or at in self._resolved:
                self.errors = self.errors | {at: why}

    def _follow(self, url: str, http: Asking) -> None:
        events = decode_server_info(http.get("/server_info")).kv_events
        if events is None:
            raise OutOfStep("publishes no events; start it with --kv-events-config")
        publishers = {
            url if events.dp_size == 1 else f"{url}#{rank}": (
                endpoint_of(url, events, rank),
                events.topic,
                rank,
            )
            for rank in range(events.dp_size)
        }
        self._add(url, publishers)

    def _add(self, url: str, publishers: Mapping[str, tuple[str, str, int]]) -> None:
        """Follow a server: each of its ranks, by name, at an endpoint and under a topic."""
        followers: dict[str, Follower] = {}
        try:
            for name, (endpoint, topic, rank) in publishers.items():
                followers[name] = Follower(
                    url,
                    endpoint,
                    self.index,
                    name,
                    self._admin_key,
                    topic,
                    rank=rank,
                    pause=self._pause,
                    patience=self._patience,
                )
            with self._changing:
                if url in self.errors:
                    self.errors = {each: why for each, why in self.errors.items() if each != url}
                    self.followers = self.followers | followers
                    followers = {}
        finally:
            # Followers of a server that is gone, or of which one could not be made.
            for follower in followers.values():
                follower.close()


def endpoint_of(url: str, events: KvEvents, rank: int) -> str:
    """The address at which a data-parallel rank publishes; for a wildcard host, the URL's host."""
    host = events.endpoint_host
    if host in ("*", "0.0.0.0", "::", "[::]"):
        host = urlsplit(url).hostname or "localhost"
    return f"tcp://{host_and_port(host.strip('[]'), events.endpoint_port_base + rank)}"
