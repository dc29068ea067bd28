"""Several servers: what their caches hold, and a router in front of them."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sglang_hybrid.core.options import host, integer, port, server_url
from sglang_hybrid.core.programs import FAILED, Parser, program
from sglang_hybrid.core.sentences import escape, print_line
from sglang_hybrid.extensions.router import Replicas
from sglang_hybrid.serving.requests.secrets import read_key

MOST_SERVERS: Final = 64
"""The most servers that one machine starts."""


def table(replicas: Replicas) -> Table:
    """The content of each replica; for a server that is not followed, the reason."""
    columns = ["replica", "in step", "nodes", "tokens", "on device", "on host", "on disk"]
    found = Table(*columns, "waiting", "predicted right")
    for name, follower in sorted(replicas.followers.items()):
        held, load = replicas.index.holdings(name), follower.load
        step = "yes" if follower.is_in_step else follower.error or "reads"
        numbers = [held.nodes, held.tokens, *held.positions, load.waiting]
        share = f"{load.right:,} of {load.right + load.wrong:,}"
        row = [name, escape(step), *(f"{number:,}" for number in numbers), share]
        found.add_row(*map(Text, row))  # no markup
    for name, error in sorted(replicas.errors.items()):
        found.add_row(Text(name), Text(escape(error)))
    return found


def watch(replicas: Replicas) -> None:
    """Show the table, anew each second."""
    console = Console(markup=False, emoji=False)
    with Live(table(replicas), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(1)
            live.update(table(replicas), refresh=True)


async def pick(replicas: Replicas, listen: str, metrics_port: int | None) -> None:
    """Answer gateways at `listen`, host:port. metrics_port: as of `fleet.route`."""
    from sglang_hybrid.extensions.router.metrics import shown
    from sglang_hybrid.extensions.router.picker import Picker, serve

    picker = Picker(replicas)
    with shown(picker, listen, metrics_port):
        server = await serve(picker, listen)
        await server.wait_for_termination()


def parser() -> argparse.ArgumentParser:
    main = Parser(
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
    url = partial(server_url, schemes=("http", "https", "dns"))
    for name in ("watch", "route", "pick"):
        made[name].add_argument("urls", type=url, nargs="+", metavar="URL", help="of a server")
    for name, usual in {"route": 30_000, "pick": 9_002, "serve": 30_000}.items():
        add = made[name].add_argument
        add("--host", type=host, default="127.0.0.1", help="to listen on (127.0.0.1)")
        add("--port", type=port, default=usual, help=f"to listen on ({usual})")
        add("--metrics-port", type=port, help="of /metrics for Prometheus (none)")
    made["serve"].description = "All other flags are those of each server (launch_server)."
    made["serve"].add_argument("--n", type=integer(1, MOST_SERVERS), default=2, help="servers (2)")
    for name, command in made.items():
        names = ["--admin-api-key"] if name == "serve" else ["--admin-api-key", "--admin-key"]
        command.add_argument(*names, help="of each server; @FILE reads it from a file")
    return main


@program
def main(arguments: Sequence[str]) -> int:
    flags: list[str] = []
    if arguments[:1] == ["serve"]:
        given, flags = parser().parse_known_args(arguments)
    else:
        given = parser().parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        try:
            run(given, flags)
        except ImportError as error:
            raise ValueError(f"{error}: install the extra 'router' (pyproject.toml)") from None
        except RuntimeError as error:  # gRPC's, where it cannot listen; ServerFailed, with a log
            for line in f"error: {error}".splitlines():
                print_line(line, sys.stderr)
            return FAILED
    return 0


def run(given: argparse.Namespace, flags: Sequence[str]) -> None:
    listen = "" if given.command == "watch" else f"{given.host}:{given.port}"
    try:
        key = read_key(given.admin_api_key)
    except ValueError as error:
        raise ValueError(f"--admin-api-key: {error}") from None
    if given.command == "serve":
        from sglang_hybrid.extensions.router import fleet

        flags = [*flags, "--admin-api-key", given.admin_api_key] if key else flags
        fleet.run(given.n, flags, listen, key, given.metrics_port)
    elif given.command == "route":
        from sglang_hybrid.extensions.router import fleet

        fleet.route(given.urls, listen, key, given.metrics_port)
    else:
        with closing(Replicas(given.urls, key)) as replicas:
            if given.command == "watch":
                watch(replicas)
            else:
                asyncio.run(pick(replicas, listen, given.metrics_port))
