"""The dashboard and what is provisioned around it; tests/server/test_dashboard.py asks for data."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import CollectorRegistry

from tests.dashboard import DASHBOARD, DOCKER, metrics
from tests.docker.exported import exported
from tests.serving.telemetry.test_metrics import registry as registry  # a fixture


def test_grafanas_library_reads_every_field() -> None:
    """It drops what it does not know, and adds defaults."""
    register_default_plugins()
    kept = json.loads(json.dumps(Dashboard.from_json(DASHBOARD), cls=JSONEncoder))
    assert lost(DASHBOARD, kept) == []
    assert lost({**DASHBOARD, "titel": "misspelt"}, kept) == ["/titel"]


def lost(given: Any, kept: Any, path: str = "") -> list[str]:
    """Paths of `given` that are not in `kept`, or differ."""
    if isinstance(given, dict) and isinstance(kept, dict):
        pairs = [(value, kept.get(key), f"{path}/{key}") for key, value in given.items()]
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        pairs = [(*pair, f"{path}/{at}") for at, pair in enumerate(zip(given, kept, strict=True))]
    else:
        return [] if given == kept else [path]
    return [found for pair in pairs for found in lost(*pair)]


def test_our_metrics_are_there(registry: CollectorRegistry) -> None:
    """Metrics of SGLang are looked for on a server, in tests/server/test_hybrid_cache.py."""
    ours = {name for name in metrics() if name.startswith("sglang_hybrid")}
    assert {name.partition(":")[0] for name in ours} == {
        *("sglang_hybrid", "sglang_hybrid_router", "sglang_hybrid_shadow")
    }
    assert ours <= exported(registry)


def provisioned(name: str) -> Any:
    return yaml.safe_load((DOCKER / name).read_text())


COMPOSE, PROMETHEUS = provisioned("compose.yaml"), provisioned("prometheus.yml")
SERVICES = COMPOSE["services"]
(JOB,) = PROMETHEUS["scrape_configs"]
(SOURCE,) = provisioned("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
(PROVIDER,) = provisioned("grafana/provisioning/dashboards/dashboards.yaml")["providers"]
MOUNTS = {
    place: source
    for service in SERVICES.values()
    for source, place, *_ in (volume.split(":") for volume in service["volumes"])
}


def test_services_find_one_another() -> None:
    assert SERVICES.keys() == {"server", "prometheus", "grafana"}
    assert JOB["static_configs"] == [{"targets": ["server:30000"]}]
    assert "--enable-metrics" in SERVICES["server"]["command"]
    assert SOURCE["url"] == "http://prometheus:9090"
    assert SOURCE["jsonData"]["timeInterval"] == PROMETHEUS["global"]["scrape_interval"]


@pytest.mark.parametrize("source", MOUNTS.values())
def test_what_is_mounted_is_there(source: str) -> None:
    assert source in COMPOSE["volumes"] or (DOCKER / source).exists()


def test_a_prometheus_finds_the_alerts() -> None:
    folder = str(Path(MOUNTS["/etc/prometheus/prometheus.yml"]).parent)
    for name in PROMETHEUS["rule_files"]:
        assert MOUNTS[f"/etc/prometheus/{name}"] == f"{folder}/{name}"


@pytest.mark.parametrize("name", ["sglang_hybrid", "sglang_hybrid_router", "sglang"])
def test_names_of_an_older_prometheus_become_ours(name: str) -> None:
    """It gets `_` for `:`; names that are right stay."""
    wanted = f"{name}:in_step"
    for found in (wanted, wanted.replace(":", "_")):
        for rule in JOB["metric_relabel_configs"]:
            to = re.sub(r"\$(\d)", r"\\\1", rule["replacement"])
            matched = re.fullmatch(rule["regex"], found)
            found = found if matched is None else matched.expand(to)
        assert found == wanted


def test_the_dashboard_and_the_image_are_found() -> None:
    folder = DOCKER / MOUNTS[PROVIDER["options"]["path"]]
    assert [path.name for path in folder.iterdir()] == ["prefix-cache.json"]
    environment = SERVICES["grafana"]["environment"]
    home = Path(environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (folder / home.name).exists() and str(home.parent) == PROVIDER["options"]["path"]
    build = SERVICES["server"]["build"]
    assert (DOCKER / build["context"] / build["dockerfile"]).exists()
