"""The dashboard and what is provisioned around it; tests/server/test_dashboard.py asks for data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import CollectorRegistry

from sglang_hybrid.core.memory.account import Account
from sglang_hybrid.serving.telemetry.metric import Metrics
from sglang_hybrid.serving.telemetry.metrics import cache_metrics, memory_metrics
from tests.dashboard import DASHBOARD, DOCKER, metrics, panels
from tests.serving.telemetry.test_metrics import Cache, shown
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


def test_panels_have_their_own_number_and_place() -> None:
    assert len({panel["id"] for panel in panels()}) == len(panels())
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_our_metrics_are_there(registry: CollectorRegistry) -> None:
    """Those of SGLang are looked for on a server, in tests/server/test_hybrid_cache.py."""
    cache = Cache("marconi", 1.0, runs=1, failures=0, seconds=0.5, switches=0)
    counted = cache_metrics(cache)
    stats = cache.stats
    stats.admitted["branch"] = stats.skipped["no_slot"] = stats.evicted["leaf"] = 1
    counted.update()
    Metrics(memory_metrics(Account(1)))
    exported = {"sglang_hybrid:" + name.split("[")[0] for name in shown(registry)}
    ours = {name for name in metrics() if name.startswith("sglang_hybrid:")}
    assert len(ours) == 18
    assert ours <= exported


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


def test_the_dashboard_and_the_image_are_found() -> None:
    folder = DOCKER / MOUNTS[PROVIDER["options"]["path"]]
    assert [path.name for path in folder.iterdir()] == ["prefix-cache.json"]
    environment = SERVICES["grafana"]["environment"]
    home = Path(environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (folder / home.name).exists() and str(home.parent) == PROVIDER["options"]["path"]
    build = SERVICES["server"]["build"]
    assert (DOCKER / build["context"] / build["dockerfile"]).exists()
