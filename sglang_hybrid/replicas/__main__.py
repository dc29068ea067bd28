"""Several servers: what their caches hold, and a router in front of them."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import time
from collections.abc import Sequence
from contextlib import closing, suppress

from rich.live import Live
from rich.table import Table

from sglang_hybrid.replicas import Replicas
from sglang_hybrid.serving.server_process import ServerFailed


def table(replicas: Replicas) -> Table:
    """What each replica holds; for a server that is not followed, why."""
    columns = ["replica", "in step", "nodes", "tokens", "on device", "on host", "on disk"]
    found = Table(*columns, "waiting", "predicted right")
    for name, follower in sorted(replicas.followers.items()):
        held, load = replicas.index.holdings(name), follower.load
        step = "yes" if follower.is_in_step else follower.error or "reads"
        numbers = [held.nodes, held.tokens, *held.positions, load.waiting]
        share = f"{load.right:,} of {load.right + load.wrong:,}"
        found.add_row(name, step, *(f"{number:,}" for number in numbers), share)
    for name, error in sorted(replicas.errors.items()):
        found.add_row(name, error)
    return found


def watch(replicas: Replicas) -> None:
    """Show the table, anew each second."""
    with Live(table(replicas), auto_refresh=False) as live:
        while True:
            time.sleep(1)
            live.update(table(replicas), refresh=True)


async def pick(replicas: Replicas, listen: str) -> None:
    """Answer gateways at `listen`, host:port."""
    from sglang_hybrid.replicas.picker import Picker, serve

    server = await serve(Picker(replicas), listen)
    await server.wait_for_termination()


def parser() -> argparse.ArgumentParser:
    main = argparse.ArgumentParser(
        "python -m sglang_hybrid.replicas",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = main.add_subparsers(dest="command", required=True)
    of = {
        "watch": "what the cache of each server holds, each second",
        "route": "send requests on to servers, through Envoy",
        "pick": "answer a gateway which server gets a request (endpoint picker protocol)",
        "serve": "start servers on this machine and send requests on to them",
    }
    made = {
        name: commands.add_parser(name, help=what, allow_abbrev=False) for name, what in of.items()
    }
    listens = {"route": "127.0.0.1:30000", "pick": "127.0.0.1:9002"}
    for name in ("watch", *listens):
        made[name].add_argument("urls", nargs="+", metavar="URL", help="of a server")
        made[name].add_argument("--admin-key", help="the servers' --admin-api-key")
    for name, address in listens.items():
        made[name].add_argument("--listen", default=address, help=f"host:port ({address})")
    fleet = made["serve"]
    fleet.description = "All other flags are those of each server (sglang_hybrid.launch_server)."
    fleet.add_argument("--n", type=int, default=2, help="servers (2)")
    fleet.add_argument("--host", default="127.0.0.1", help="of the router (127.0.0.1)")
    fleet.add_argument("--port", type=int, default=30000, help="of the router (30000)")
    fleet.add_argument("--admin-api-key", help="of each server")
    return main


def main(arguments: Sequence[str] | None = None) -> None:
    reader = parser()
    given, flags = reader.parse_known_args(arguments)
    if flags and given.command != "serve":
        reader.error(f"unrecognized arguments: {' '.join(flags)}")
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        try:
            run(given, flags)
        except ImportError as error:
            raise SystemExit(f"{error}: pip install 'sglang_hybrid[router]'") from None
        except (FileNotFoundError, ServerFailed) as error:
            raise SystemExit(str(error)) from None


def run(given: argparse.Namespace, flags: Sequence[str]) -> None:
    if given.command == "serve":
        from sglang_hybrid.replicas import fleet

        key = given.admin_api_key
        flags = [*flags, "--admin-api-key", key] if key else flags
        fleet.run(given.n, flags, f"{given.host}:{given.port}", key)
    elif given.command == "route":
        from sglang_hybrid.replicas import fleet

        fleet.route(given.urls, given.listen, given.admin_key)
    else:
        with closing(Replicas(given.urls, given.admin_key)) as replicas:
            if given.command == "watch":
                watch(replicas)
            else:
                asyncio.run(pick(replicas, given.listen))


if __name__ == "__main__":
    main()
