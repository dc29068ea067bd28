"""One store for several servers: Mooncake's, in the memory that they lend it.

Every object has its checksum at its end, so that what another server left half or wrong is not
used. Names are hashes with a secret that the servers share. A master that cannot be reached costs
hits, never an answer: for some seconds nothing is asked of it.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import urlsplit

import numpy as np

from sglang_hybrid.core.own_files import identity_of
from sglang_hybrid.extensions.disk.folder import KEY_VARIABLE
from sglang_hybrid.extensions.disk.object_file import Bytes, checksum
from sglang_hybrid.serving.flag_values import SHARED

logger = logging.getLogger(__name__)

SUM_BYTES: Final = 16
RETRY_SECONDS: Final = 10.0
"""Time between two questions to a master that cannot be reached."""

START_SECONDS: Final = 30.0
"""Time between two attempts to join the store."""

AT_ONCE: Final = 64 << 20
"""Bytes that are written or read by one call of Mooncake's: its buffer's size."""


class Client(Protocol):
    """The part of `mooncake.store.MooncakeDistributedStore` that is used; a negative number is an
    error.
    """

    def is_exist(self, name: str) -> int: ...

    def batch_is_exist(self, names: list[str]) -> list[int]: ...

    def put_batch(self, names: list[str], values: list[bytes], config: Any) -> int: ...

    def get_batch(self, names: list[str]) -> list[bytes]: ...

    def close(self) -> Any: ...


class Joined(NamedTuple):
    """A client of the store, and where it puts objects."""

    client: Client
    config: Any


class Unreachable(Exception):
    """The store was not joined; the sentence says why."""


@dataclass(slots=True)
class SharedCounts:
    """Counts of objects since the start, by what became of them."""

    written: int = 0
    read: int = 0
    objects_damaged: int = 0
    not_written: int = 0


class SharedStore:
    """The objects of one rank in Mooncake's store.

    Args:
        join: joins the store; raises Unreachable, or what Mooncake raises. It is called in a thread
            of its own, again and again until it returns.
        facts: what the content of an object depends on.
        rank: which part of a model the objects are of.
        secret: of the servers that share them.
        now: seconds.
    """

    budget = 0  # Mooncake evicts by itself
    folder = None

    def __init__(
        self,
        join: Callable[[], Joined],
        facts: Mapping[str, Any],
        rank: str,
        secret: str,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.identity = identity_of(facts)
        self.counts = SharedCounts()
        self.off = ""  # why the store is not used any more
        self.refused = "it has not been joined yet"  # why it is not used now
        self._rank = rank
        self._secret = blake2b(secret.encode(), digest_size=32).digest()
        self._join = join
        self._now = now
        self._client: Client | None = None
        self._config: Any = None
        self._retry_at = 0.0
        self._closed = threading.Event()
        self._joiner = threading.Thread(target=self._start, name="hybrid-store", daemon=True)
        self._joiner.start()

    @property
    def in_use(self) -> bool:
        return not (self.off or self._closed.is_set())

    def put(self, kind: str, keys: Sequence[str], contents: Sequence[Bytes]) -> bool:
        names = self._names(kind, keys)
        there = self._exist(names)
        pairs = [
            pair
            for pair, known in zip(zip(names, contents, strict=True), there, strict=True)
            if not known
        ]
        written = 0
        client = self._reachable() if pairs else None
        for name, content in pairs:
            if client is None:
                break
            value = content.tobytes() + self._sum(kind, name, content)
            if client.put_batch([name], [value], self._config) < 0:
                break
            written += 1
        self.counts.written += written
        self.counts.not_written += len(pairs) - written
        return written == len(pairs)

    def get(self, kind: str, keys: Sequence[str], buffers: Sequence[Bytes]) -> list[bool]:
        names = self._names(kind, keys)
        found = [False] * len(names)
        size = max((buffer.nbytes for buffer in buffers), default=0) + SUM_BYTES
        step = max(1, AT_ONCE // size)
        for begin in range(0, len(names), step):
            part = names[begin : begin + step]
            client = self._reachable()
            values = client.get_batch(part) if client is not None else [b""] * len(part)
            for at, (name, value) in enumerate(zip(part, values, strict=True), start=begin):
                found[at] = self._take(kind, name, value, buffers[at])
        self.counts.read += sum(found)
        return found

    def contains(self, kind: str, keys: Sequence[str]) -> list[bool]:
        return self._exist(self._names(kind, keys))

    def knows(self, kind: str, keys: Sequence[str]) -> list[bool]:
        return self.contains(kind, keys)

    def clear(self) -> None:
        """Do nothing: the objects are those of other servers, too."""

    def turn_off(self, why: str) -> None:
        if self.in_use:
            self.off = why
            logger.warning("sglang_hybrid: the shared store is off: %s.", why)

    def close(self) -> None:
        self._closed.set()
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def info(self) -> dict[str, Any]:
        return {**asdict(self.counts), "off": self.off, "refused": self.refused}

    def _start(self) -> None:
        while not self._closed.is_set() and self._client is None:
            try:
                client, self._config = self._join()
            except Exception as error:  # Mooncake's own are of any kind, as of a wrong setting
                self._refuse(str(error) or type(error).__name__)
                self._closed.wait(START_SECONDS)
            else:
                self.refused = ""
                self._client = client

    def _refuse(self, why: str) -> None:
        if self.refused != why:
            logger.warning("sglang_hybrid: the shared store is not used for now: %s.", why)
        self.refused = why

    def _reachable(self) -> Client | None:
        """The client, unless its master cannot be reached."""
        client = self._client
        if client is None or not self.in_use:
            return None
        if self.refused and self._now() < self._retry_at:
            return None
        if client.is_exist("-") < 0:  # a call for one object fails at once, one for many does not
            self._retry_at = self._now() + RETRY_SECONDS
            self._refuse("its master does not answer")
            return None
        self.refused = ""
        return client

    def _names(self, kind: str, keys: Sequence[str]) -> list[str]:
        """Names of objects, from which nobody without the secret can tell their keys."""
        return [self._name(f"{self.identity}\0{self._rank}\0{kind}\0{key}") for key in keys]

    def _name(self, content: str) -> str:
        return blake2b(content.encode(), key=self._secret, digest_size=16).hexdigest()

    def _exist(self, names: list[str]) -> list[bool]:
        client = self._reachable() if names else None
        if client is None:
            return [False] * len(names)
        return [one == 1 for one in client.batch_is_exist(names)]

    def _sum(self, kind: str, name: str, content: Bytes) -> bytes:
        return checksum(self.identity, kind, name.encode(), content)

    def _take(self, kind: str, name: str, value: bytes, buffer: Bytes) -> bool:
        """True if `value` is a whole object; it is in the buffer then."""
        if not value:
            return False
        content = np.frombuffer(value, np.uint8)[:-SUM_BYTES]
        whole = (
            len(value) == buffer.nbytes + SUM_BYTES
            and self._sum(kind, name, content) == value[-SUM_BYTES:]
        )
        if whole:
            buffer[:] = content
        self.counts.objects_damaged += not whole
        return whole


def open_shared(
    address: str, settings: Mapping[str, Any], facts: Mapping[str, Any], rank: str
) -> SharedStore:
    """The store whose master is at `address` (mooncake://HOST:PORT). settings: SGLang's for
    Mooncake (`--hicache-storage-backend-extra-config`). Raises ValueError.
    """
    secret = os.environ.get(KEY_VARIABLE)
    if not secret:
        raise ValueError(f"{KEY_VARIABLE} is not set; give all servers of the store the same")
    where = urlsplit(address)
    if not where.hostname or not where.port:
        raise ValueError(f"{address} is not {SHARED}HOST:PORT")
    master = f"{where.hostname}:{where.port}"
    wanted = {"protocol": os.environ.get("MOONCAKE_PROTOCOL", "tcp"), **settings}
    return SharedStore(lambda: _join(master, wanted), facts, rank, secret)


def _join(master: str, settings: Mapping[str, Any]) -> Joined:
    """Objects lie in this server's own part of the memory while there is room. So they are written
    at the speed of memory, and who ends takes nobody else's along.
    """
    from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStoreConfig

    os.environ.setdefault("GLOG_minloglevel", "2")
    try:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig
    except ImportError as error:
        raise Unreachable(f"{error}; pip install mooncake-transfer-engine") from error
    try:
        config = MooncakeStoreConfig.load_from_extra_config(
            {**settings, "master_server_address": master}
        )
    except (TypeError, ValueError) as error:
        raise Unreachable(str(error)) from error
    own = config.local_hostname
    if own == "localhost":
        own = _address_towards(master)
    client = MooncakeDistributedStore()
    status = client.setup(
        own,
        config.metadata_server,
        config.global_segment_size,
        AT_ONCE + (16 << 20),
        config.protocol,
        config.device_name,
        master,
    )
    if status:
        raise Unreachable(f"Mooncake's master at {master} was not reached (error {status})")
    where = ReplicateConfig()
    where.preferred_segment = client.get_hostname()
    return Joined(client, where)


def _address_towards(master: str) -> str:
    """The address of this machine in the network of the master."""
    host, _, port = master.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, int(port)))
        except OSError as error:
            raise Unreachable(f"{master}: {error}") from error
        return str(probe.getsockname()[0])
