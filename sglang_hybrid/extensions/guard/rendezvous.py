"""Groups of processes that exchange weights: no scheduler waits long for one that is not there."""

from __future__ import annotations

import asyncio
import socket
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from sglang_hybrid.serving.requests.errors import Refused

SECONDS = 60.0
"""Time until a master must listen, while requests go on, and until all members of a group are here,
while a scheduler does nothing else. Torch's own time is half an hour. An operator whose trainers
come later sets SGLang's --dist-timeout.
"""

STEP = 0.5
PORTS = range(1, 1 << 16)


async def wait_for_master(address: str, ports: str | int, rank: int) -> None:
    """Return once something listens on all ports of `address`; raises `Refused` if nothing does.

    ports: one, or several with commas. rank: of the first member that this server is; rank 0 is the
    master itself.
    """
    if rank == 0:
        return
    for port in str(ports).split(","):
        await _listens(address, port)


def meet_members(init_method: str, world_size: int, rank: int, group_name: str) -> dict[str, Any]:
    """Wait until all members of a group are connected; returns the arguments of SGLang's
    `init_custom_process_group` for it. Raises torch's error if they are not in time (`SECONDS`).
    What the group does later has torch's own limit.
    """
    store, rank, world_size = next(
        rendezvous(init_method, rank, world_size, timeout=timedelta(seconds=_seconds()))
    )
    store.set_timeout(default_pg_timeout)
    return {
        "store": PrefixStore(group_name, store),
        "rank": rank,
        "world_size": world_size,
        "group_name": group_name,
    }


async def _listens(address: str, port: str) -> None:
    if not port.isdecimal() or int(port) not in PORTS:
        raise Refused(f"{address!r}:{port!r} is no address of a master: the port is none.")
    until = asyncio.get_running_loop().time() + _seconds()
    while True:
        left = until - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(max(left, STEP)):
                _, writer = await asyncio.open_connection(address, int(port))
        except (socket.gaierror, ValueError) as error:
            raise Refused(f"{address!r}:{port!r} is no address of a master: {error}.") from None
        except OSError as error:  # TimeoutError is one
            if left <= STEP:
                raise Refused(
                    f"no master listens on {address}:{port} ({error or 'it does not answer'}); a "
                    "server waits longer with --dist-timeout SECONDS."
                ) from None
            await asyncio.sleep(STEP)
        else:
            writer.close()
            return


def _seconds() -> float:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().dist_timeout or SECONDS
