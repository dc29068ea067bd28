"""What the caches of several servers hold, each second."""

from __future__ import annotations

import argparse
import time

from rich.live import Live
from rich.table import Table

from sglang_hybrid.replicas import Replicas


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


def main() -> None:
    parser = argparse.ArgumentParser(description="What the caches of several servers hold.")
    parser.add_argument("urls", nargs="+", metavar="URL")
    parser.add_argument("--admin-key", help="the servers' --admin-api-key")
    given = parser.parse_args()
    replicas = Replicas(given.urls, given.admin_key)
    try:
        with Live(table(replicas), auto_refresh=False) as live:
            while True:
                time.sleep(1)
                live.update(table(replicas), refresh=True)
    except KeyboardInterrupt:
        replicas.close()


if __name__ == "__main__":
    main()
