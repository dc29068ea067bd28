"""The rules of docker/alerts.yml: on metrics that there are, and each fires at its fault."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry

from tests.dashboard import DOCKER, selected
from tests.docker.exported import exported
from tests.serving.telemetry.test_metrics import registry as registry  # a fixture

FILE = DOCKER / "alerts.yml"
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(FILE.read_text())["groups"] for rule in group["rules"]
]


def test_all_rules_are_on_metrics_that_there_are(registry: CollectorRegistry) -> None:
    known = exported(registry) | {"up"}
    for rule in RULES:
        asked = selected(promql_parser.parse(rule["expr"]))
        assert asked and asked <= known, rule["alert"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_each_rule_says_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert rule["annotations"].keys() == {"summary", "runbook"}
    for text in rule["annotations"].values():
        assert text.endswith(".") and "\n" not in text
    for page, title in re.findall(
        r"(docs/\w+\.md)(?:, ([A-Z][^.]+))?", rule["annotations"]["runbook"]
    ):
        lines = (DOCKER.parent / page).read_text()
        assert not title or title in lines, (page, title)


SERVER = 'instance="a:30000",job="sglang_hybrid"'
COUNTS = {
    "sglang_hybrid:requests_total": "0+100x330",
    "sglang_hybrid:prompt_tokens_total": "0+100000x330",
    "sglang_hybrid:hit_tokens_total": "0+60000x330",
    'sglang_hybrid:missed_tokens_total{reason="changing_text"}': "0+100x330",
    'sglang_hybrid:missed_requests_total{reason="no_slot"}': "0x330",
    "sglang_hybrid:schedule_waited_seconds_total": "0+50x330",
    "sglang_hybrid:schedule_started_total": "0+100x330",
    'sglang_hybrid:recorded_requests_total{outcome="left_out"}': "0x330",
    'sglang_hybrid:pin_events_total{event="refused"}': "0x330",
    "sglang_hybrid:tuner_failures_total": "0x330",
    "sglang_hybrid:tier_failed_loads_total": "0x330",
    'sglang_hybrid_router:requests_total{outcome="failed"}': "0x330",
    "sglang_hybrid_router:lost_servers": "0x330",
    'sglang_hybrid_router:reachable{server="http://a"}': "1x330",
    'sglang_hybrid_router:in_step{server="http://a"}': "1x330",
    'sglang_hybrid_router:right_predictions_total{server="http://a"}': "0+100x330",
    'sglang_hybrid_router:wrong_predictions_total{server="http://a"}': "0+1x330",
    "up": "1x330",
}
"""Samples of a healthy server and router, every five minutes, as promtool writes them."""

FAULTS: dict[str, tuple[set[str], dict[str, str]]] = {
    "nothing": (set(), {}),
    "a server is away": ({"ServerDoesNotAnswer"}, {"up": "0x330"}),
    "nothing is hit": (
        {"NothingIsHit"},
        {"sglang_hybrid:hit_tokens_total": "7x330"},
    ),
    "half is hit": (
        {"HitRateHasHalved"},
        {"sglang_hybrid:hit_tokens_total": "0+60000x300 18000000+20000x30"},
    ),
    "a clock at the top": (
        {"TextChangesAtTheTop"},
        {'sglang_hybrid:missed_tokens_total{reason="changing_text"}': "0+20000x330"},
    ),
    "no slots": (
        {"OutOfStateSlots"},
        {'sglang_hybrid:missed_requests_total{reason="no_slot"}': "0+2x330"},
    ),
    "long waits": (
        {"RequestsWaitLong"},
        {"sglang_hybrid:schedule_waited_seconds_total": "0+2000x330"},
    ),
    "a full disk": (
        {"RecordingIsIncomplete"},
        {'sglang_hybrid:recorded_requests_total{outcome="left_out"}': "0+1x330"},
    ),
    "many pins": (
        {"PinsAreLost"},
        {'sglang_hybrid:pin_events_total{event="refused"}': "0+1x330"},
    ),
    "workers that end": ({"TunerFails"}, {"sglang_hybrid:tuner_failures_total": "0+1x330"}),
    "loads that fail": (
        {"LoadsFromTheHostFail"},
        {"sglang_hybrid:tier_failed_loads_total": "0+1x330"},
    ),
    "no server is reached": (
        {"RouterWithoutServers", "RouterHasLostAServer"},
        {'sglang_hybrid_router:reachable{server="http://a"}': "0x330"},
    ),
    "no server is known": (
        {"RouterWithoutServers", "RouterHasLostAServer"},
        {
            'sglang_hybrid_router:reachable{server="http://a"}': "_x330",
            "sglang_hybrid_router:lost_servers": "1x330",
        },
    ),
    "requests without a server": (
        {"RouterFindsNoServer"},
        {'sglang_hybrid_router:requests_total{outcome="failed"}': "0+1x330"},
    ),
    "no events": (
        {"RouterIsOutOfStep"},
        {'sglang_hybrid_router:in_step{server="http://a"}': "0x330"},
    ),
    "wrong predictions": (
        {"RouterExpectsTooMuch"},
        {'sglang_hybrid_router:wrong_predictions_total{server="http://a"}': "0+30x330"},
    ),
}
"""Faults: for each the alerts that fire, and the samples that differ."""


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="there is no program promtool; it comes with Debian's package prometheus",
)
def test_each_rule_fires_at_its_fault_and_no_other_does(tmp_path: Path) -> None:
    def series(name: str) -> str:
        metric, _, labels = name.partition("{")
        return f"{metric}{{{SERVER}{',' if labels else ''}{labels or '}'}"

    tests = [
        {
            "name": fault,
            "interval": "5m",
            "input_series": [
                {"series": series(name), "values": values}
                for name, values in (COUNTS | samples).items()
            ],
            "promql_expr_test": [
                {
                    "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                    "eval_time": "27h",
                    "exp_samples": [
                        {"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(fires)
                    ],
                }
            ],
        }
        for fault, (fires, samples) in FAULTS.items()
    ]
    path = tmp_path / "tests.yml"
    path.write_text(
        yaml.safe_dump({"rule_files": [str(FILE)], "evaluation_interval": "5m", "tests": tests})
    )
    done = subprocess.run(
        ["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    fired = set[str]().union(*(fires for fires, _ in FAULTS.values()))
    assert fired == {rule["alert"] for rule in RULES}
