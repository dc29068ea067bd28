"""`python -m sglang_hybrid.replay`, from its arguments to its table, JSON and report; every mistake
is one sentence.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.server_settings import Serving, Split
from sglang_hybrid.core.specs import Spec
from sglang_hybrid.core.victims.eviction import Lru
from sglang_hybrid.extensions.lab.program import main
from sglang_hybrid.extensions.lab.reports import plots
from sglang_hybrid.extensions.lab.reports.figures import cached_bytes, flop_efficiency
from sglang_hybrid.extensions.lab.reports.report import MARK, leads
from sglang_hybrid.extensions.lab.reports.study import Study, paper_model
from sglang_hybrid.extensions.lab.runner import Job, Result, Runner
from sglang_hybrid.extensions.lab.simulation.device_codec import coded_in, left_of
from sglang_hybrid.extensions.lab.simulation.prefill_time import PAPER
from sglang_hybrid.extensions.lab.simulation.simulator import Simulator, hit_rate
from sglang_hybrid.extensions.lab.simulation.sizes import parse_bytes
from sglang_hybrid.extensions.lab.simulation.system_names import ALPHAS, ORACLES
from sglang_hybrid.extensions.lab.simulation.tiers.tier_budgets import CopyCodec
from sglang_hybrid.extensions.lab.simulation.traces.formats import read_trace, recognise
from sglang_hybrid.extensions.lab.simulation.traces.generators import generate, traffic
from sglang_hybrid.extensions.lab.simulation.traces.lines import Reading
from tests.browser import violations

COST = CostModel.paper_7b()
CHAT = ["--generate", "chat", "--sessions", "12"]
PLOTS = {
    *("hit_rate", "ttft", "ttft_p95", "by_length", "contention", "layers", "state_size"),
    *("arrivals", "flop_efficiency", "blocks", "lengths"),
}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "chat.jsonl.gz"
    assert main([*CHAT, "--record", str(path)]) == 0
    return path


def summary(*arguments: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    capsys.readouterr()
    assert main([*arguments, "--json", "-"]) == 0
    results: list[dict[str, object]] = json.loads(capsys.readouterr().out)["results"]
    return results


def test_a_trace_is_converted(trace: Path, tmp_path: Path) -> None:
    assert recognise(trace).name == "recorded"
    compact = tmp_path / "chat.jsonl"
    assert main([str(trace), "--record", str(compact), "--to", "compact"]) == 0
    assert recognise(compact).name == "compact"
    one, other = read_trace(trace, Reading()), read_trace(compact, Reading())
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(one, other, strict=True))
    assert one[1].message_starts


def test_the_summary_is_the_simulators(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(trace), "--cache", "300MB,1GB", "--policy", "lru,none", "--instant"]
    results = summary(*arguments, capsys=capsys)
    assert [(r["policy"], r["budget_bytes"]) for r in results] == [
        *[("lru", 300_000_000), ("none", 300_000_000)],
        *[("lru", 10**9), ("none", 10**9)],
    ]
    requests = read_trace(trace, Reading())
    expected = hit_rate(Simulator(COST, 10**9, Lru()).run(requests))
    assert results[2]["hit_rate"] == expected > 0
    assert results[3]["hit_rate"] == 0
    assert results[0]["ttft_p95_s"] is None


def test_the_table_names_every_policy(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(trace), "--cache", "1GB", "--policy", "marconi-best,marconi:2,sglang"]) == 0
    shown = capsys.readouterr().out
    for word in ("marconi-best (", "marconi 2", "sglang", "1 GB", "TTFT", "paper"):
        assert word in shown


def test_pools_and_a_models_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "model_type": "falcon_h1",
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 1024,
        "mamba_d_ssm": 1024,
        "mamba_n_heads": 16,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = [*CHAT, "--pools", "2000:3,9000:40", "--model", str(tmp_path)]
    small, large = summary(*arguments, "--policy", "reuse", capsys=capsys)
    assert (small["kv_tokens"], small["slots"]) == (2000, 3)
    assert float(str(small["hit_rate"])) < float(str(large["hit_rate"]))


def test_the_servers_own_rules(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*CHAT, "--pools", "20000:30", "--policy", "reuse"]
    paper = summary(*arguments, capsys=capsys)[0]
    served = summary(*arguments, "--rules", "served", "--chunk", "512", capsys=capsys)[0]
    assert paper["hit_rate"] != served["hit_rate"]
    assert main([*arguments, "--rules", "served"]) == 0
    assert "as served" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--chunk", "--grid"])
def test_sglang_serves_in_the_same_steps(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*CHAT, "--pools", "20000:30", "--policy", "sglang", "--rules", "served"]
    usual = summary(*arguments, capsys=capsys)[0]
    told = summary(*arguments, option, "16", capsys=capsys)[0]
    assert told["hit_tokens"] != usual["hit_tokens"]


def test_entries_that_are_kept_coded(capsys: pytest.CaptureFixture[str]) -> None:
    """Our policies once more, with more hits of which some are not exact."""
    served = ("--rules", "served", "--pools", "one", "--cache", "500MB", "--instant")
    options = (*CHAT, *served, "--policy", "sglang,reuse", "--device-codec", "int8")
    found = {result["policy"]: result for result in summary(*options, capsys=capsys)}
    assert list(found) == ["sglang", "reuse", "reuse, int8"]
    exact, coded = found["reuse"], found["reuse, int8"]
    assert exact["exact_hit_tokens"] == exact["hit_tokens"]
    assert int(str(coded["exact_hit_tokens"])) < int(str(coded["hit_tokens"]))
    assert int(str(coded["hit_tokens"])) > int(str(exact["hit_tokens"]))
    assert main([*CHAT, "--cache", "500MB", "--device-codec", "int8"]) == 2
    assert "--device-codec is for --rules served only" in capsys.readouterr().err


def test_what_lies_beside_coded_entries_is_taken_off_each_pool() -> None:
    """Scales lie beside KV, scales and windows beside states; one memory has room for both."""
    cost = coded_in(COST, CopyCodec.INT8)
    two, one = Serving(), Serving(one_memory=True)
    pools = left_of(Split(10_000, 100), CopyCodec.INT8, cost, two)
    assert pools == Split(9_840, 95)
    assert left_of(10**9, CopyCodec.INT8, cost, one) == 934_000_000
    divided, whole = left_of(10**9, CopyCodec.INT8, cost, two), Split.of(10**9, cost)
    assert isinstance(divided, Split)
    assert divided == Split(int(whole.kv_tokens * 0.984), int(whole.slots * 0.95))
    assert left_of(10**9, CopyCodec.EXACT, COST, two) == 10**9


def test_workers_find_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    traces = {"chat": generate("chat", traffic("chat", sessions=6), 0)}
    specs = [Spec("lru"), Spec("reuse"), Spec("clairvoyant"), Spec("sglang"), Spec("vllm+")]
    jobs = [Job(spec, "chat", COST, 3 * 10**8, PAPER) for spec in specs]
    results: list[list[Result]] = []
    for workers in (1, 2):
        steps: list[int] = []
        found = Runner(dict(traces)).run_all(jobs, workers, steps.append)
        assert sum(steps) == len(jobs) * len(traces["chat"])
        assert max(steps) < sum(steps), "progress within the jobs"
        results.append(found)
    apart, alone = results
    for one, other in zip(apart, alone, strict=True):
        assert one.job == other.job
        assert np.array_equal(one.hit_len, other.hit_len)
        assert np.array_equal(one.ttft, other.ttft)


def die(*_: object) -> Result:
    os._exit(9)


def test_a_worker_that_dies_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Runner, "run", die)
    arguments = [*CHAT, "--cache", "1GB", "--policy", "lru,reuse", "--workers", "2", "--instant"]
    assert main([*arguments, "--json", str(tmp_path / "out.json")]) != 0
    assert capsys.readouterr().err == "error: a worker died, perhaps for memory: use fewer\n"
    assert not list(tmp_path.iterdir())


def test_the_best_in_hindsight_is_the_best_of_its_grid() -> None:
    runs = Runner({"x": generate("few-shot", traffic("few-shot", sessions=60), 0)})
    job = Job(Spec("marconi-best"), "x", COST, 6 * 10**8)
    best = runs.run(job)
    single = [runs.run(replace(job, spec=Spec("marconi", (("alpha", alpha),)))) for alpha in ALPHAS]
    assert best.hit_tokens == max(result.hit_tokens for result in single)
    assert best.chosen is not None and best.chosen.name == "marconi"
    assert best.job.spec.name == "marconi-best"


@pytest.mark.parametrize("serving", [None, Serving(one_memory=True)])
def test_the_oracle_is_the_best_of_those_that_know_the_future(serving: Serving | None) -> None:
    """The best one differs from row to row, and it is named."""
    runs = Runner({"x": generate("chat", traffic("chat", sessions=60), 0)})
    named = set()
    for size in (2, 4):
        job = Job(Spec("oracle"), "x", COST, size * 10**9, serving=serving)
        best = runs.run(job)
        alone = {name: runs.run(replace(job, spec=Spec(name))).hit_tokens for name in ORACLES}
        assert best.hit_tokens == max(alone.values())
        assert alone[best.chosen_words] == best.hit_tokens
        named.add(best.chosen_words)
    assert named == {"clairvoyant", "whether"}


class Page(HTMLParser):
    """Ids of figures, links, and whether every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.figures: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.drawings = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "figure":
            self.figures.append(values["id"] or "")
        if tag == "a":
            self.links.append(values["href"] or "")
        self.drawings += tag == "svg"
        if tag not in ("meta", "use", "path", "image", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None: ...


@pytest.fixture(scope="module")
def report(trace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("report") / "chat"
    policies = "none,vllm+,sglang+,lru,marconi:1,reuse,oracle"
    arguments = ["--cache", "300MB,600MB", "--policy", policies, "--report", str(directory)]
    assert main([str(trace), *arguments]) == 0
    return directory


def test_a_report_has_every_plot_on_the_page_and_as_png(report: Path) -> None:
    page = Page((report / "index.html").read_text())
    assert set(page.figures) == PLOTS
    assert page.drawings == len(PLOTS)
    assert not page.open
    assert {file.name for file in report.iterdir()} == {"index.html", *page.links}
    for link in page.links:
        with Image.open(report / link) as image:
            assert image.width > 800
    assert not list(report.parent.glob(".*"))


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_a_checker_of_accessibility_finds_nothing_in_a_report(
    report: Path, scheme: str, browser: Any
) -> None:
    page = browser.new_page(color_scheme=scheme, viewport={"width": 390, "height": 800})
    page.goto((report / "index.html").as_uri())
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.close()


def test_a_report_says_what_was_run(report: Path) -> None:
    text = (report / "index.html").read_text()
    for words in (
        "python -m sglang_hybrid.replay",
        "--policy none,vllm+,sglang+,lru,marconi:1,reuse,oracle",
        "seed 0",
        "26,787,840 bytes",
        "One run each",
        "running requests compute is not in it, for any policy",
        "oracle is the one of clairvoyant, whether and when that finds most",
        "They are greedy, so none is a bound",
    ):
        assert words in " ".join(text.split())


@pytest.mark.slow
def test_a_report_of_one_size_looks_at_others(trace: Path, tmp_path: Path) -> None:
    """It replaces an earlier report, but nothing else."""
    directory = tmp_path / "report"
    arguments = [str(trace), "--cache", "400MB", "--policy", "lru,reuse", "--instant"]
    directory.mkdir()
    (directory / "index.html").write_text(f'<!-- {MARK} --> <a href="old.png">')
    (directory / "old.png").write_text("")
    assert main([*arguments, "--report", str(directory)]) == 0
    assert not (directory / "old.png").exists()
    page = Page((directory / "index.html").read_text())
    assert set(page.figures) == PLOTS - {"ttft_p95"}
    assert "hit rate in other words" in (directory / "index.html").read_text()


@pytest.mark.slow
def test_a_report_as_served_says_what_its_budgets_hold(trace: Path, tmp_path: Path) -> None:
    """And has a curve of what keeps entries coded."""
    arguments = [str(trace), "--cache", "400MB", "--policy", "lru,sglang", "--rules", "served"]
    arguments += ["--device-codec", "int8"]
    assert main([*arguments, "--instant", "--report", str(tmp_path / "report")]) == 0
    text = " ".join((tmp_path / "report" / "index.html").read_text().split())
    assert "As served: every budget also holds what running requests compute" in text
    assert "(3 with sglang, one per block with vllm+)" in text and "lru, int8" in text


def test_a_report_compares_where_policies_differ_most() -> None:
    """Policies hit alike if nothing fits, and if everything does; bounds do not count."""
    sizes = [COST.state_bytes + 10 * COST.kv_bytes_per_token, 3 * 10**8, 10**12, 10**13]
    policies = [Spec(name) for name in ("lru", "reuse", "none", "unbounded")]
    jobs = [Job(spec, "chat", COST, size) for size in sizes for spec in policies]
    runner = Runner({"chat": generate("chat", traffic("chat", sessions=12), 0)})
    study = Study(runner, jobs)
    study.take([runner.run(job) for job in jobs])
    assert (study.compared, study.middle) == (3 * 10**8, 10**12)
    assert study.where == "0.3 GB" and list(study.at_compared()) == list(map(str, policies))


def test_the_clairvoyant_is_shown_as_a_ceiling_only_where_it_is_one() -> None:
    runner = Runner({"chat": generate("chat", traffic("chat", sessions=6), 0)})
    found = {
        name: runner.run(Job(Spec(name), "chat", COST, 3 * 10**8))
        for name in ("none", "lru", "unbounded")
    }
    assert not leads("none", found)
    assert leads("lru", found)  # what has no bound does not count
    assert not leads("clairvoyant", found)


@pytest.mark.slow
def test_a_report_on_split_pools(trace: Path, tmp_path: Path) -> None:
    arguments = [str(trace), "--pools", "3000:5,6000:20", "--policy", "lru,sglang"]
    assert main([*arguments, "--report", str(tmp_path / "report")]) == 0
    page = Page((tmp_path / "report" / "index.html").read_text())
    assert set(page.figures) == PLOTS - {"ttft_p95", "layers", "state_size", "by_length"}


def test_a_report_in_tiers_says_where_hits_come_from_and_are_lost(
    trace: Path, tmp_path: Path
) -> None:
    arguments = [str(trace), "--tiers", "device=100MB,host=200MB,disk=300MB", "--instant"]
    policies = "hicache,lru,unbounded"
    directory = tmp_path / "report"
    assert main([*arguments, "--policy", policies, "--report", str(directory)]) == 0
    text = (directory / "index.html").read_text()
    page = Page(text)
    left_out = {"contention", "layers", "state_size", "blocks", "ttft_p95"}
    assert set(page.figures) == (PLOTS - left_out) | {"tiers", "losses"}
    table = " ".join(text[text.index("tier_table") :].split())
    for words in ("from the device", "from the host", "from the disk", "dropped from the disk"):
        assert words in table
    assert "0.1 + 0.2 + 0.3 GB" in text


MISTAKES = [
    ([], "give a trace or --generate KIND, one of them"),
    (
        ["missing.jsonl", "--cache", "1GB"],
        "missing.jsonl cannot be read (No such file or directory)",
    ),
    (CHAT, "give --cache or --pools, one of them"),
    ([*CHAT, "--pools", "one", "--rules", "served"], "--pools one shares the bytes of --cache"),
    ([*CHAT, "--pools", "one", "--cache", "1GB"], "--pools one is for --rules served"),
    ([*CHAT, "--cache", "1GB", "--pools", "1:1"], "give --cache or --pools, one of them"),
    ([*CHAT, "--cache", "20MB"], "a cache of 20,000,000 bytes holds no state"),
    ([*CHAT, "--cache", "much"], "--cache: 'much' is no size; write 5GB"),
    ([*CHAT, "--pools", "5"], "--pools: pools are written as TOKENS:SLOTS, not '5'"),
    ([*CHAT, "--pools", "500:0"], "pools without slots hold no state"),
    ([*CHAT, "--cache", "1GB", "--policy", "opt"], "--policy: unknown policy 'opt'; known are"),
    ([*CHAT, "--cache", "1GB", "--chunk", "512"], "--chunk is for --rules served only"),
    ([*CHAT, "--pools", "9:9", "--rules", "served", "--grid", "0"], "--grid: '0' is not a whole"),
    ([*CHAT, "--cache", "1GB", "--policy", ","], "--policy: it is empty"),
    (
        [*CHAT, "--cache", "1GB", "--policy", "clairvoyant:remember=0", "--rules", "served"],
        "--rules served has no clairvoyant:remember=0",
    ),
    ([*CHAT, "--cache", "1GB", "--workers", "0"], "--workers: '0' is not a whole"),
    ([*CHAT, "--cache", "1GB", "--limit", "0"], "--limit: '0' is not a whole number from 1"),
    ([*CHAT, "--cache", "1GB", "--model", "nowhere"], "nowhere cannot be read"),
    ([*CHAT, "--cache", "1GB", "--prefill", "nowhere"], "nowhere cannot be read"),
    ([*CHAT, "--cache", "1GB", "--think", "soon"], "--think: 'soon' is no distribution; write"),
    ([*CHAT, "--record", "x", "--to", "mooncake"], "--to: invalid choice: 'mooncake'"),
    (["--generate", "talk", "--cache", "1GB"], "--generate: invalid choice: 'talk'"),
    ([*CHAT, "--cache", "1GB", "--json", "no/where.json"], "no/where.json cannot be written"),
    ([*CHAT[:2], "--sessions", str(10**12)], "--sessions: '1000000000000' is not a whole number"),
    ([*CHAT, "--max-input", "2", "--cache", "1GB"], "no request was generated"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_a_mistake_is_one_sentence(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) != 0
    said = capsys.readouterr().err
    assert said.startswith(f"error: {message}")
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


VALUES = {
    **{f"--{name}": "const:5" for name in ("shared", "turns", "question", "answer", "think")},
    **{f"--{name}": "3" for name in ("sessions", "session-rate", "templates", "seed", "limit")},
    **{f"--{name}": "3" for name in ("chunk", "grid", "replicas", "late", "workers", "max-input")},
    **{f"--{name}": "FILE" for name in ("azure", "tokenizer", "record", "model", "prefill")},
    **{f"--{name}": "FILE" for name in ("json", "report")},
    **{"--format": "marconi", "--hints": "true", "--to": "compact", "--generate": "chat"},
    **{"--cache": "1GB", "--pools": "9:9", "--tiers": "device=1GB,host=2GB", "--rules": "served"},
    **{"--policy": "lru", "--min-branch-tokens": "7", "--device-codec": "int8"},
    **{"--profile": "paper-7b", "--routing": "sticky", "--store": "1GB@1GB/s"},
    "--metrics-port": "9",
}
"""A value of each option that has one."""

OF_GENERATED = "--sessions --templates --shared --turns --question --answer --think --azure"
OF_SERVED = "--chunk --grid --device-codec"
OF_REPLICAS = "--routing --late --store"
OF_A_REPLAY = (
    f"--pools --tiers --model --profile --policy --min-branch-tokens --rules {OF_SERVED} "
    f"--replicas {OF_REPLICAS} --instant --prefill --json --report --workers --follow --cache "
    "--metrics-port"
)
NO_USE = {
    "TRACE --cache 1GB": f"{OF_GENERATED} --session-rate --max-input --stitch --tokenizer --seed "
    f"{OF_SERVED} {OF_REPLICAS} --to --metrics-port",
    "TRACE --cache 1GB --hints true": "--seed",
    "TRACE --cache 1GB --follow": f"{OF_GENERATED} --session-rate --max-input --stitch --tokenizer "
    "--seed --format --limit --hints --skip-bad --to --prefill --json --report --workers",
    "TRACE --record x": f"{OF_A_REPLAY} {OF_GENERATED} --session-rate --seed",
    "TRACE --record x --to compact": "--hints",
    "--generate chat --cache 1GB": "--format --stitch --tokenizer --skip-bad --metrics-port --to",
    "--generate chat --azure x --cache 1GB": "--session-rate --question --answer",
    "--generate chat --record x": f"{OF_A_REPLAY} --skip-bad --format",
    "TRACE --tiers device=1GB,host=2GB": "--cache --pools",
    "TRACE --cache 1GB --instant": "--prefill",
    "TRACE --cache 1GB --rules served --policy none": "--device-codec",
    "TRACE --cache 1GB --replicas 2 --routing sticky": "--late",
}
"""Command lines, and the options that would do nothing there."""


@pytest.mark.parametrize("line", NO_USE)
def test_an_option_that_would_do_nothing_is_refused(
    line: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(trace) if word == "TRACE" else word for word in line.split()]
    for option in NO_USE[line].split():
        file = str(tmp_path / "file")
        values = [VALUES[option].replace("FILE", file)] if option in VALUES else []
        assert main([*words, option, *values]) == 2, option
        said = capsys.readouterr().err
        assert said.startswith("error: ") and f"{option} " in said.replace(",", " "), said
        assert said.count("\n") == 1 and not list(tmp_path.iterdir())


def test_the_seed_is_that_of_what_is_drawn(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = ["--hints", "random", "--seed", "3"]
    assert main([str(trace), *drawn, "--record", str(tmp_path / "a")]) == 0
    assert main([*CHAT, "--seed", "3", "--record", str(tmp_path / "b")]) == 0


def test_bad_lines_stop_it_or_are_counted(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.jsonl"
    good = '{"t": 1, "input_ids": [1, 2, 3], "output_ids": [4]}\n'
    bad.write_text(good + '{"t": -1, "input_ids": [1], "output_ids": []}\n' + good)
    arguments = [str(bad), "--cache", "1GB", "--policy", "lru"]
    assert main(arguments) != 0
    assert f"error: {bad}:2: not a line of a recorded trace" in capsys.readouterr().err
    assert main([*arguments, "--skip-bad"]) == 0
    assert "bad lines skipped: 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "where", ["file", "full", "below", "noted", "pictured", "folder", "link", "pipe"]
)
def test_a_report_that_cannot_be_leaves_everything_as_it_was(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "there"
    if where in ("file", "below"):
        target.write_text("mine")
    elif where == "link":
        (tmp_path / "elsewhere").mkdir()
        target.symlink_to("elsewhere")
    elif where == "pipe":
        target.mkdir()
        os.mkfifo(target / "index.html")
    else:
        target.mkdir()
        names = {"full": "thesis.txt", "noted": "notes", "pictured": "me.png", "folder": "x/y"}
        mine = target / names[where]
        mine.parent.mkdir(exist_ok=True)
        mine.write_text("mine")
        if where != "full":  # beside an earlier report
            (target / "index.html").write_text(f'<!-- {MARK} --> <a href="old.png">')
    directory = target / "report" if where == "below" else target
    before = sorted(tmp_path.rglob("*"))
    assert main([*CHAT, "--cache", "1GB", "--policy", "lru", "--report", str(directory)]) != 0
    assert capsys.readouterr().err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_report_that_fails_half_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plots, "save", fail)
    report = str(tmp_path / "report")
    arguments = [*CHAT, "--cache", "1GB", "--policy", "lru", "--instant", "--report", report]
    assert main(arguments) != 0
    assert "No space left on device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5GiB", 3 * 2**29), ("800 mb", 8 * 10**8), ("7", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


# The paper's closed forms (marconi-notes.md 1.1).


def test_closed_forms() -> None:
    assert COST.state_bytes == 26_787_840
    fine = cached_bytes(COST, 10_000, 16)
    assert fine / 1e9 == pytest.approx(17.4, abs=0.05)
    transformer = cached_bytes(paper_model(0, 32), 10_000, 16)
    assert fine / transformer == pytest.approx(3.3, abs=0.05)
    for length, efficiency in ((1_000, 1.43e5), (8_000, 1.98e5), (32_000, 2.30e5)):
        assert flop_efficiency(COST, length) == pytest.approx(efficiency, rel=0.01)
    assert paper_model(24, 4) == COST


def test_tiers_are_replayed_and_shown(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiers = ["--tiers", "device=0.3GB,host=1GB@25GB/s,disk=3GB@3GB/s"]
    assert main([str(trace), *tiers]) == 0
    shown = capsys.readouterr().out
    for text in (
        "hicache",
        "oracle",
        "unbounded",
        "0.3 + 1 + 3 GB",
        "bytes written per hit token",
    ):
        assert text in shown
    results = summary(str(trace), *tiers, "--policy", "reuse", capsys=capsys)
    counted = results[0]["tiers"]
    assert isinstance(counted, dict)
    assert sum(counted["hit_tokens"].values()) == results[0]["hit_tokens"]
    assert counted["loads"]["host"]
    assert results[0]["tier_bytes"] == [3 * 10**8, 10**9, 3 * 10**9]


@pytest.mark.parametrize(
    ("more", "wrong"),
    [
        (["--cache", "5GB"], "--tiers does not go with --cache"),
        (["--rules", "served"], "leave out --rules served"),
        (["--policy", "sglang"], "policy 'sglang' is not replayed in tiers"),
    ],
)
def test_what_tiers_do_not_go_with(
    more: list[str], wrong: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(trace), "--tiers", "device=1GB,host=10GB", *more]) != 0
    assert wrong in capsys.readouterr().err


def test_a_device_without_room_for_a_state_is_refused(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(trace), "--tiers", "device=1MB,host=10GB"]) == 2
    assert "a device of 1,000,000 bytes holds no state" in capsys.readouterr().err
