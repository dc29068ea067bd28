"""Several servers in containers: what can be said without starting them."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from sglang_hybrid.replicas.__main__ import parser

ROOT = Path(__file__).parents[2]
COMPOSE, CLUSTER = ROOT / "docker" / "fleet.yaml", ROOT / "docker" / "kubernetes.yaml"
LOCKS = ROOT / "requirements"
RELEASES = ("1.29", "1.37")


def pins(name: str) -> list[str]:
    lines = (LOCKS / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def resources() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(CLUSTER.read_text()))


def containers() -> Iterator[dict[str, Any]]:
    """Of the cluster and of compose, with the arguments of each as `args`."""
    for each in resources():
        if "template" in each["spec"]:
            yield from each["spec"]["template"]["spec"]["containers"]
    for each in yaml.safe_load(COMPOSE.read_text())["services"].values():
        yield {"args": each["command"], "image": each["image"]}


def test_versions_are_those_of_the_other_locks() -> None:
    assert set(pins("router.lock")) <= {*pins("cpu.lock"), *pins("test.lock")}


def test_a_router_imports_nothing_but_what_its_lock_has() -> None:
    kept = {pin.partition("==")[0].lower().replace("_", "-") for pin in pins("router.lock")}
    found = importlib.metadata.packages_distributions()
    others = {
        name
        for name, owners in found.items()
        if not {each.lower().replace("_", "-") for each in owners} & {*kept, "sglang-hybrid"}
    }
    code = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {others!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import sglang_hybrid.replicas.__main__, sglang_hybrid.replicas.fleet
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert {"torch", "sglang", "fastapi"} <= others


@pytest.mark.parametrize("release", RELEASES)
def test_kubernetes_takes_the_manifest(release: str) -> None:
    for each in resources():
        kubernetes_validate.validate(each, release, strict=True)
    wrong = resources()[1]
    wrong["spec"]["replica"] = 2
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, release, strict=True)


def test_a_router_knows_each_server_and_the_key() -> None:
    (servers,) = [each for each in resources() if each["kind"] == "StatefulSet"]
    routers = [each["args"] for each in containers() if "router" in each["image"]]
    cluster, compose = (parser().parse_args(arguments) for arguments in routers)
    headless = servers["spec"]["serviceName"]
    named = [each for each in resources() if each["metadata"]["name"] == headless]
    (service,) = [each for each in named if each["kind"] == "Service"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == servers["spec"]["selector"]["matchLabels"]
    assert cluster.urls == [f"dns://{headless}:30000"]
    assert cluster.admin_api_key == "@/run/keys/admin-key"
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    assert compose.urls == ["dns://server:30000"] and services["server"]["deploy"]["replicas"] == 2


def test_servers_publish_where_a_router_reads() -> None:
    servers = [each["args"] for each in containers() if "router" not in each["image"]]
    assert len(servers) == 2
    for arguments in servers:
        config = json.loads(arguments[arguments.index("--kv-events-config") + 1])
        assert config == {"publisher": "zmq", "endpoint": "tcp://*:5557"}
