"""A Prometheus scrapes a server under load: no panel of the dashboard is without data.

Needs the programs of Debian's package `prometheus`; they need not run as a service.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import requests

from sglang_hybrid.serving.server_process import ServerProcess, free_port
from tests.dashboard import DASHBOARD, DOCKER, queries
from tests.server.client import until
from tests.server.soak import Soak
from tests.server.test_soak import FLAGS, RUNNING, SLOTS_PER_REQUEST

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="there is no program prometheus; it comes with Debian's package of that name",
    ),
]

MINUTE = 60
TUNED = ("--hybrid-eviction", "marconi", "--hybrid-tuner-workers", "1")
"""Flags for a policy with an alpha and searches of the tuner; other panels do not need them."""

ONE_MEMORY = ("--hybrid-memory", "one")
"""Flags for the panels with these words."""


def test_no_panel_is_without_data(tmp_path: Path) -> None:
    flags = [*FLAGS, "--max-mamba-cache-size", str(2 * RUNNING), "--enable-metrics"]
    flags += [*ONE_MEMORY, *TUNED, "--hybrid-record", str(tmp_path / "requests.jsonl")]
    variables = {**SLOTS_PER_REQUEST, "SGLANG_HYBRID_TUNER_WINDOW": "64"}
    with ServerProcess(flags, environment=variables) as server:
        config = (DOCKER / "prometheus.yml").read_text()
        assert config.count("server:30000") == 1
        path = tmp_path / "prometheus.yml"
        path.write_text(config.replace("server:30000", f"127.0.0.1:{server.port}"))
        shutil.copy(DOCKER / "alerts.yml", tmp_path)
        with prometheus(path) as url:
            soak = Soak(server.url, seed=0, priorities=False)
            end = time.monotonic() + MINUTE
            while time.monotonic() < end:
                asyncio.run(soak.send(40))
            found = {
                f"{title}: {query}": series(url, query)
                for title, asked in queries().items()
                for query in asked
                if not query_of_others(query)
            }
            instances = label_values(url)
    print(soak.outcomes)
    assert [query for query, data in found.items() if not data] == []
    assert instances == [f"127.0.0.1:{server.port}"]


def query_of_others(query: str) -> bool:
    """True if it asks for what this server has not: a host tier, a router, a shadow."""
    return any(name in query for name in ("hybrid:tier_", "hybrid_router:", "hybrid_shadow:"))


def test_a_prometheus_takes_the_configuration() -> None:
    command = ["promtool", "check", "config", str(DOCKER / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def prometheus(config: Path) -> Iterator[str]:
    """The address of a Prometheus that scrapes what `config` says."""
    address = f"127.0.0.1:{free_port()}"
    command = [
        *("prometheus", f"--config.file={config}", f"--web.listen-address={address}"),
        f"--storage.tsdb.path={config.parent / 'data'}",
    ]
    with (config.parent / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        url = f"http://{address}"

        def is_ready() -> bool:
            assert process.poll() is None, (config.parent / "log").read_text()
            with suppress(requests.RequestException):
                return requests.get(url + "/-/ready", timeout=5).ok
            return False

        until(is_ready, 60)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def ask(url: str, path: str, **parameters: str) -> Any:
    response = requests.get(url + path, params=parameters, timeout=30)
    assert response.ok, response.text
    return response.json()["data"]


def series(url: str, query: str) -> list[dict[str, Any]]:
    """The series that a query finds now, without those that are not a number."""
    found = ask(url, "/api/v1/query", query=query)["result"]
    return [one for one in found if math.isfinite(float(one["value"][1]))]


def label_values(url: str) -> list[str]:
    """The values that Grafana offers for the variable `instance`."""
    (variable,) = (v for v in DASHBOARD["templating"]["list"] if v["name"] == "instance")
    metric, label = variable["query"]["query"].removeprefix("label_values(")[:-1].split(", ")
    found: list[str] = ask(url, f"/api/v1/label/{label}/values", **{"match[]": metric})
    return found
