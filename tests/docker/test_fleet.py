"""Several servers in containers: what can be said without starting them."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from sglang_hybrid.extensions.router.program import parser
from sglang_hybrid.serving.config import HybridConfig

ROOT = Path(__file__).parents[2]
COMPOSE, CLUSTER = ROOT / "docker" / "fleet.yaml", ROOT / "docker" / "kubernetes.yaml"
LOCKS = ROOT / "requirements"
RELEASES = ("1.29", "1.37")


def pins(name: str) -> list[str]:
    """`name==version`, with their hashes."""
    lines = (LOCKS / name).read_text().replace(" \\\n", "").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def resources() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(CLUSTER.read_text()))


def containers() -> Iterator[dict[str, Any]]:
    """Containers of the cluster and of compose, with the arguments of each as `args`."""
    for each in resources():
        if "template" in each["spec"]:
            yield from each["spec"]["template"]["spec"]["containers"]
    for each in yaml.safe_load(COMPOSE.read_text())["services"].values():
        yield {"args": each["command"], "image": each["image"]}


@pytest.mark.parametrize("lock", sorted(LOCKS.glob("*.lock")), ids=lambda lock: lock.stem)
def test_each_version_has_the_hashes_of_its_files(lock: Path) -> None:
    for pin in pins(lock.name):
        assert re.fullmatch(r"\S+==\S+( +--hash=sha256:[0-9a-f]{64})+", pin), pin


def test_versions_are_those_of_the_other_locks() -> None:
    assert set(pins("router.lock")) <= {*pins("cpu.lock"), *pins("test.lock")}


def test_a_router_imports_nothing_but_what_its_lock_has() -> None:
    kept = {pin.partition("==")[0] for pin in pins("router.lock")}
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
import sglang_hybrid.extensions.router.program, sglang_hybrid.extensions.router.fleet
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


def test_no_key_is_an_argument_or_a_port_open_to_all() -> None:
    """Whoever may list processes or pods could read the one, and anybody use the other."""
    for each in containers():
        for flag, value in pairwise(each["args"]):
            assert not re.fullmatch("--.*-key", flag) or value.startswith("@"), each["args"]
    for file in (COMPOSE, COMPOSE.with_name("compose.yaml")):
        for service in yaml.safe_load(file.read_text())["services"].values():
            assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_only_the_router_reaches_a_server() -> None:
    (policy,) = [each["spec"] for each in resources() if each["kind"] == "NetworkPolicy"]
    (servers,) = [each["spec"] for each in resources() if each["kind"] == "StatefulSet"]
    (router,) = [each["spec"] for each in resources() if each["kind"] == "Deployment"]
    assert policy["podSelector"] == servers["selector"]
    (rule,) = policy["ingress"]
    assert rule["from"] == [{"podSelector": router["selector"]}]
    (container,) = servers["template"]["spec"]["containers"]
    opened = {port["containerPort"] for port in container["ports"]}
    assert {port["port"] for port in rule["ports"]} == opened


CLOSE_SECONDS = 7
"""Seconds that the end of a server takes itself, at most (docs/flags.md)."""


def pods() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each pod of the cluster, and its one container."""
    specs = [each["spec"]["template"]["spec"] for each in resources() if "template" in each["spec"]]
    return [(pod, container) for pod in specs for container in pod["containers"]]


def test_kubernetes_and_compose_wait_for_the_requests_of_what_they_end() -> None:
    for pod, container in pods():
        variables = {each["name"]: each.get("value") for each in container["env"]}
        (sleep, seconds) = container["lifecycle"]["preStop"]["exec"]["command"]
        drain = float(variables["SGLANG_HYBRID_DRAIN_SECONDS"])
        assert sleep == "sleep" and int(seconds) > 0
        least = int(seconds) + drain + CLOSE_SECONDS
        assert pod["terminationGracePeriodSeconds"] >= least
    usual = HybridConfig().hybrid_drain_seconds + CLOSE_SECONDS
    assert usual < 30, "Kubernetes' default, beside a short preStop"
    for file in (COMPOSE, COMPOSE.with_name("compose.yaml")):
        services = yaml.safe_load(file.read_text())["services"].items()
        for name, service in services:
            if name in ("server", "router"):
                assert int(service["stop_grace_period"].removesuffix("s")) >= usual


def test_docker_waits_for_the_requests_of_a_server_as_the_pages_start_it() -> None:
    least = HybridConfig().hybrid_drain_seconds + CLOSE_SECONDS
    for page, starts in (("README.md", 1), ("docker/README.md", 2)):
        found = re.findall(r"docker run (.*?)-p 30000:30000", (ROOT / page).read_text())
        assert len(found) == starts
        for options in found:
            assert float(options.partition("--stop-timeout ")[2].split()[0]) >= least


def test_probes_outlast_the_answer_of_a_healthy_server() -> None:
    """`/health` generates a token, which SGLang looks for after a second, and for 20."""
    for _, container in pods():
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container[kind]
            if "httpGet" in probe:
                assert probe["httpGet"] == {"path": "/health", "port": 30000}
                assert probe["timeoutSeconds"] > 20
            else:
                assert probe["tcpSocket"] == {"port": 30000}
        assert "httpGet" in container["readinessProbe"]


def test_pods_are_not_root_and_say_what_they_need() -> None:
    for pod, container in pods():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 10001
        assert pod["automountServiceAccountToken"] is False
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        mounted = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        volumes = {each["name"]: each for each in pod["volumes"]}
        assert "emptyDir" in volumes[mounted["/tmp"]]
        assert volumes[mounted["/run/keys"]]["secret"]["secretName"] == "sglang-hybrid"
        if "router" not in container["image"]:
            assert volumes[mounted["/dev/shm"]]["emptyDir"]["medium"] == "Memory"


def test_servers_publish_where_a_router_reads() -> None:
    servers = [each["args"] for each in containers() if "router" not in each["image"]]
    assert len(servers) == 2
    for arguments in servers:
        config = json.loads(arguments[arguments.index("--kv-events-config") + 1])
        assert config == {"publisher": "zmq", "endpoint": "tcp://*:5557"}
        assert "--enable-metrics" in arguments


def test_a_model_of_the_hub_may_want_a_token() -> None:
    (server,) = [one for pod, one in pods() if "router" not in one["image"]]
    (token,) = [each["valueFrom"] for each in server["env"] if each["name"] == "HF_TOKEN"]
    assert token["secretKeyRef"] == {"name": "sglang-hybrid", "key": "hf-token", "optional": True}


def test_a_node_that_is_drained_ends_one_of_each_at_a_time() -> None:
    budgets = [each["spec"] for each in resources() if each["kind"] == "PodDisruptionBudget"]
    replicated = [each["spec"] for each in resources() if "template" in each["spec"]]
    assert [each["selector"] for each in budgets] == [each["selector"] for each in replicated]
    assert all(each["maxUnavailable"] == 1 for each in budgets)
    assert all(each["replicas"] == 2 for each in replicated)


def test_a_gpu_is_added_to_the_server_of_both_compose_files() -> None:
    (name, added), *others = yaml.safe_load(COMPOSE.with_name("gpu.yaml").read_text())[
        "services"
    ].items()
    assert others == [] and (ROOT / added["build"]["dockerfile"]).exists()
    (device,) = added["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    for file in (COMPOSE, COMPOSE.with_name("compose.yaml")):
        server = yaml.safe_load(file.read_text())["services"][name]
        assert server["build"]["context"] == ".." and "shm_size" in added


def test_caches_of_the_base_are_found_beside_what_is_compiled_later(tmp_path: Path) -> None:
    base, home = tmp_path / "root" / ".cache", tmp_path / "volume"
    old, new = base / "kernels" / "old", base / "kernels" / "new"
    old.parent.mkdir(parents=True)
    old.write_text("of an older image")
    home.mkdir()
    script = COMPOSE.with_name("with_caches.sh")

    def start() -> str:
        command = [
            "sh",
            script,
            base,
            "sh",
            "-c",
            "ls $HOME/.cache/kernels $XDG_CACHE_HOME/kernels",
        ]
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(home), "XDG_CACHE_HOME": f"{home}/xdg"}
        return subprocess.run(command, capture_output=True, text=True, env=environment).stdout

    assert start().split().count("old") == 2
    (home / ".cache" / "kernels" / "ours").write_text("compiled here")
    old.rename(new)
    assert start().split()[1:3] == ["new", "ours"] and (home / "xdg/kernels/new").samefile(new)
