"""Groups of processes that exchange weights: no scheduler waits long for one that is not there."""

from __future__ import annotations

import asyncio
import socket
from datetime import timedelta

from sglang_hybrid.requests.errors import Refused

MASTER_SECONDS = 60.0
"""How long a master may take until it listens; requests go on meanwhile."""

MEMBERS = timedelta(seconds=60)
"""How long a scheduler waits for the members of a group, and does nothing else. Torch's own is
half an hour."""

STEP = 0.5


async def master_listens(address: str, ports: str | int, rank: int) -> None:
    """Return once something listens on all ports of `address`; raises `Refused` if nothing does.

    ports: one, or several with commas. rank: of the first member that this server is; rank 0 is the
    master itself.
    """
    if rank == 0:
        return
    for port in str(ports).split(","):
        await _listens(address, port)


def limited(timeout: timedelta) -> timedelta:
    """Of a rendezvous; what the group does later has all of `timeout`."""
    return min(timeout, MEMBERS)


async def _listens(address: str, port: str) -> None:
    until = asyncio.get_running_loop().time() + MASTER_SECONDS
    while True:
        left = until - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(max(left, STEP)):
                _, writer = await asyncio.open_connection(address, int(port))
        except (socket.gaierror, ValueError, OverflowError, UnicodeError) as error:
            raise Refused(f"{address!r}:{port!r} is no address of a master: {error}.") from None
        except OSError as error:  # TimeoutError is one
            if left <= STEP:
                raise Refused(
                    f"no master listens on {address}:{port} ({error or 'it does not answer'})."
                ) from None
            await asyncio.sleep(STEP)
        else:
            writer.close()
            return
