"""`scripts/bench.py ab` without a server: requests, forced tokens, checks and tables."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from scripts.bench import ab, measured, traffic
from scripts.bench.forced import ForcedAnswer
from scripts.bench.measured import Configuration, Memory, Result
from scripts.bench.pairs import against_the_first
from scripts.bench.report import BenchFailed
from scripts.bench.traffic import Outcome
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.cpu.sizing import Sizes


def request(session: int) -> Request:
    return Request(session, 0, 0.0, np.arange(4, dtype=np.int32), 3)


def logits_after(prompt: int, committed: int, answer: list[int]) -> torch.Tensor:
    req = SimpleNamespace(
        origin_input_ids=[0] * prompt, kv=SimpleNamespace(kv_committed_len=committed)
    )
    params = {"__req__": req, "answer": answer}
    return ForcedAnswer()(torch.zeros(1, 100), [params])


@pytest.mark.parametrize(("committed", "token"), [(10, 7), (11, 8), (12, 9)])
def test_the_token_that_is_due_is_the_greedy_one(committed: int, token: int) -> None:
    assert logits_after(10, committed, [7, 8, 9]).argmax().item() == token


@pytest.mark.parametrize("committed", [4, 13])
def test_steps_that_nobody_reads_are_left_alone(committed: int) -> None:
    """A chunk before the prompt's last, and the step after the answer's end."""
    assert logits_after(10, committed, [7, 8, 9]).eq(0).all()


def test_a_session_waits_for_its_own_answer_only() -> None:
    trace = [request(session) for session in (0, 0, 1, 2)]
    assert traffic.next_ready([1, 2, 3], {0}, trace) == 2
    assert traffic.next_ready([1, 2, 3], set(), trace) == 1
    assert traffic.next_ready([1], {0}, trace) is None


def test_an_answer_that_is_not_the_traces_fails() -> None:
    meta = {"prompt_tokens": 5, "cached_tokens": 2, "finish_reason": {"type": "length"}}
    good = traffic.read_outcome({"meta_info": meta, "output_ids": [1, 2]}, 5, [1, 2], 0.1, 0.5)
    assert good == Outcome(5, 2, 0.1, 0.5)
    bad = traffic.read_outcome({"meta_info": meta, "output_ids": [1, 3]}, 5, [1, 2], 0.1, 0.5)
    assert "another answer" in bad.error
    assert "no answer" in traffic.read_outcome({"error": "too long"}, 5, [1, 2], 0.1, 0.5).error


def result(name: str, cached: int, ttft: float, *, ours: bool = False) -> Result:
    outcomes = [Outcome(100, cached, ttft), Outcome(error="timed out")]
    return Result(Configuration(name, (), ours), outcomes, seconds=2.0)


def test_rates_count_what_was_served() -> None:
    one = result("SGLang", cached=25, ttft=0.2)
    assert one.hit_rate == 0.25 and one.prefilled == 75 and one.ttft[1] == pytest.approx(200)


def test_the_table_compares_with_the_default_and_names_sglangs_best(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failed = Result(Configuration("SGLang, `--x`", ("--x",), ours=False), error="no\nmemory")
    measured.show(
        [
            result("SGLang, default", cached=25, ttft=0.2),
            result("SGLang, `--y`", cached=40, ttft=0.2),
            failed,
            result("ours, default", cached=50, ttft=0.1, ours=True),
        ]
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].startswith("| SGLang, `--y` (SGLang's best) | 40.0% (1.60x) |")
    assert "| failed: no memory |" in lines[4]
    assert lines[5] == (
        "| ours, default | 50.0% (2.00x) | 50 (0.67x) | 100 / 100 / 100 (0.50x / 0.50x / 0.50x) "
        "| 2 (1.00x) | 1 / 1 |"
    )
    assert len({line.count("|") for line in lines}) == 1


def test_a_server_that_failed_is_reported_without_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    own, ours = (Result(Configuration(name, (), ours=False)) for name in ("SGLang", "ours"))
    own.error = "no memory"
    assert measured.report([own, ours])
    assert "failed: no memory" in capsys.readouterr().out


def test_configurations_begin_with_sglangs_default_and_differ_in_the_launcher() -> None:
    default, own, ours, variant = ab.configurations(
        ["--mamba-max-states-per-path 2"], ["--hybrid-eviction sglang-lru"]
    )
    assert default.flags == () and own.flags == ("--mamba-max-states-per-path", "2")
    assert ours.flags == ("--radix-cache-backend", "hybrid")
    assert variant.flags == (*ours.flags, "--hybrid-eviction", "sglang-lru")
    assert [c.ours for c in (default, own, ours, variant)] == [False, False, True, True]


LOG = (
    "[2026] Mamba Cache is allocated. max_mamba_cache_size: 48, ssm_state size: 0.10GB \n"
    "[2026] KV Cache is allocated. dtype: torch.float32, #tokens: 16384, K size: 0.02 GB\n"
)


def test_two_pools_have_the_bytes_of_their_tokens_and_states() -> None:
    memory = measured.memory_of_pools(LOG, Sizes(weights=1, kv_token=10, state=1_000))
    assert memory == Memory(16_384 * 10 + 48 * 1_000, "16,384 tokens of KV and 48 states")
    with pytest.raises(BenchFailed, match="does not say how large its pools are"):
        measured.memory_of_pools(LOG.splitlines()[0], Sizes(1, 10, 1_000))


def test_servers_with_other_bytes_are_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    own, ours = result("SGLang", cached=25, ttft=0.2), result("ours", cached=25, ttft=0.2)
    own.memory, ours.memory = Memory(2_000, "1 token and 1 state"), Memory(2_000, "one memory")
    measured.check_budgets([own, ours])
    assert capsys.readouterr().out.splitlines() == [
        "Memory of SGLang: 2,000 bytes (1 token and 1 state).",
        "Memory of ours: 2,000 bytes (one memory).",
    ]
    ours.memory = Memory(2_001, "one memory")
    with pytest.raises(BenchFailed, match="they have SGLang 2,000, ours 2,001"):
        measured.check_budgets([own, ours])


def test_pairs_are_compared_by_what_each_request_prefills(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Requests that prefill half as many tokens, and one that prefills more, apart. The first
    configuration takes 0.1 s per request and 0.01 s per new token.
    """
    first = [Outcome(90, 0, 1.0), Outcome(190, 0, 2.0), Outcome(50, 30, 0.3)]
    first += [Outcome(40, 0, 0.5), Outcome(9, 0, 0.19)]
    ours = [Outcome(90, 50, 0.5), Outcome(190, 100, 1.3), Outcome(50, 10, 0.6)]
    ours += [Outcome(error="timed out"), Outcome(9, 0, 0.19)]
    against_the_first([("SGLang", first), ("ours", ours)])
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| ours | at most half as many | 2 | 130 / 280 (0.46x) | 1.8 / 3.0 s (0.60x) | 0.50x "
        "| 0.57x |",
        "| ours | as many | 1 | 9 / 9 (1.00x) | 0.2 / 0.2 s (1.00x) | 1.00x | 1.00x |",
        "| ours | more | 1 | 40 / 20 (2.00x) | 0.6 / 0.3 s (2.00x) | 1.67x | 2.00x |",
        "| ours | all | 4 | 179 / 309 (0.58x) | 2.6 / 3.5 s (0.74x) | 0.63x | 0.82x |",
    ]
