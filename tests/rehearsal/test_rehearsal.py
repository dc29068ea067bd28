"""Servers on an H100, A100 and B200, by default and with flags that people set."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sglang_hybrid.checkpoints.support import WITHOUT_PAGES
from sglang_hybrid.core.costs.cost import CostModel
from tests.rehearsal.models import MODELS
from tests.rehearsal.models import WINDOWED as WINDOWED_MODELS
from tests.rehearsal.run import Case, Rehearsed, rehearsed
from tests.rehearsal.start import Start
from tests.tables import table

pytestmark = pytest.mark.timeout(300)

BESIDE = 294_912
"""Bytes of a slot of Qwen4-Exp in pools of its own, beside the one that a start tells of."""

REPLACED = {
    *("cuda", "cutlass", "deep_gemm", "flash_attn", "flashinfer", "pynvml", "quack", "sgl_kernel"),
    "torch_memory_saver",
}
"""Packages that a start imports and that are not here: what they would do was not rehearsed."""


QUICK = ("Nemotron-H-8B", "Qwen3.5-9B", "LFM2-2.6B")
"""Models that the quick suite tries on an H100: small ones, which are made in no time."""


@cache
def defaults(machine: str, quick: bool) -> Rehearsed:
    """Starts of the models in `QUICK`, or of all others."""
    return rehearsed(machine, [Case(model) for model in MODELS if (model in QUICK) is quick])


def check_any(start: Start) -> None:
    """Facts about every server, whatever its flags."""
    assert start.stopped is None
    assert start.cache == "hybrid"
    assert start.strategy != "no_buffer" or start.page == 1
    drafts = "--speculative-algorithm" in start.flags
    one_slot = start.page == 1 and set(start.attention) <= set(WITHOUT_PAGES) and not drafts
    if start.planned and one_slot:
        assert start.strategy == "no_buffer" and start.held == 1
    assert start.why_split is not None or not start.captured or start.breaks
    assert start.planned == ("hybrid_hits" in (start.warmups or "").split(","))
    assert start.slots and start.tokens and start.running
    assert start.pool_bytes <= start.free_bytes


def advised(start: Start) -> list[tuple[int, int]]:
    """Slots and KV tokens of each advice with numbers."""
    lines = [line for line in start.lines if "--max-mamba-cache-size" in line]
    found = [
        re.search(r"--max-mamba-cache-size (?:to )?([\d,]+).*? ([\d,]+)(?: KV|, which)", line)
        for line in lines
    ]
    assert all(found), lines
    sizes = [[int(it.replace(",", "")) for it in match.groups()] for match in found if match]
    return [(slots, tokens) for slots, tokens in sizes]


KEPT_APART = ("Qwen4-Exp",)
"""Models whose states stay in their pool."""


MACHINES = [
    "H100",
    pytest.param("A100", marks=pytest.mark.slow),
    pytest.param("B200", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    "model",
    [model if model in QUICK else pytest.param(model, marks=pytest.mark.slow) for model in MODELS],
)
def test_a_default_server(machine: str, model: str) -> None:
    """One slot for a running request, overlap scheduling, and states that a prefill leaves in one
    pass; where attention needs pages, the line that says what they cost and what mends it.
    """
    starts = defaults(machine, model in QUICK).starts
    (start,) = (it for it in starts if it.model == model)
    check_any(start)
    assert start.planned and start.overlap
    assert start.why_split is None
    cost = CostModel.from_config(MODELS[model])
    assert not cost.assumed
    measured = start.state_bytes + (BESIDE if model == "Qwen4-Exp" else 0)
    assert (measured, start.kv_bytes) == (cost.state_bytes, cost.kv_bytes_per_token)
    paged = not set(start.attention) <= set(WITHOUT_PAGES)
    assert start.page == (64 if paged else 1)
    small = start.state_bytes < 50 * start.kv_bytes or not start.kv_bytes
    assert start.spills == (not small and model not in KEPT_APART)
    lines = [line for line in start.lines if "pages of 64 tokens" in line]
    assert len(lines) == paged
    for line in lines:
        assert "holds 3 state slots instead of 1" in line
        assert "--page-size 1 and an --attention-backend without pages" in line
    for slots, tokens in advised(start):
        assert slots * start.state_bytes + tokens * start.kv_bytes <= start.pool_bytes


@pytest.mark.parametrize("machine", MACHINES)
def test_what_was_not_rehearsed(machine: str) -> None:
    assert defaults(machine, True).replaced == REPLACED


def test_machines_differ() -> None:
    """The pretence tells of the machine that was asked for."""
    (start,) = (it for it in defaults("H100", True).starts if it.model == "Nemotron-H-8B")
    assert start.attention == ["fa3", "fa3"] and 60e9 < start.free_bytes < 80e9


@dataclass(frozen=True)
class Flagged:
    """A case, what the start then is, and what a line of its log says; "" for no line at all."""

    machine: str
    case: Case
    found: dict[str, Any]
    line: str = ""


SPILL = {"spills": True}
ONE_SLOT = {"strategy": "no_buffer", "held": 1, "overlap": True, "why_split": None}
TRACKED = {"planned": False, "strategy": "extra_buffer", "held": 3}
NEMOTRON, QWEN = "Nemotron-H-8B", "Qwen3-Next-80B"
KEEPS_KV = "--disaggregation-mode decode --disaggregation-decode-enable-radix-cache"
TOO_FEW_SLOTS = "slots run out while most of the KV is unused; use --max-mamba-cache-size"
FLASHINFER = {"prefill_kernel": "FlashInferGDNKernel"}
SPARSE = {
    **{"block_size": 64, "dense_len": 8_192, "init_blocks": 1, "kernel_size": 32},
    **{"kernel_stride": 16, "topk": 64, "window_size": 2_048},
}
"""Attention of MiniCPM-SALA as released."""
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def flagged(
    machine: str, model: str, flags: str, found: dict[str, Any], line: str = "", **config: Any
) -> Flagged:
    return Flagged(machine, Case(model, tuple(flags.split()), config), found, line)


FLAGGED = [
    flagged("H100", NEMOTRON, "--tp-size 8", ONE_SLOT | {"state_bytes": 12_767_232}),
    flagged("H100", QWEN, "--tp-size 8", ONE_SLOT | {"prefill_kernel": "TritonGDNKernel"}),
    flagged("H100", QWEN, "--tp-size 8 --dp-size 8 --enable-dp-attention", ONE_SLOT),
    flagged("H100", NEMOTRON, "--kv-cache-dtype fp8_e4m3", ONE_SLOT | {"kv_bytes": 8_192, **SPILL}),
    flagged("H100", NEMOTRON, "--quantization fp8", ONE_SLOT),
    flagged("H100", QWEN, "", ONE_SLOT, quantization_config=FP8),
    flagged(
        *("H100", QWEN, "--speculative-algorithm NGRAM"),
        {"planned": True, "strategy": "extra_buffer", "held": 3, "overlap": True},
        TOO_FEW_SLOTS,
    ),
    flagged(
        *("H100", QWEN, "--enable-linear-replayssm --disable-overlap-schedule"),
        {"planned": False, "strategy": "no_buffer", "held": 1},
        "with SGLang's strategy no_buffer no state is kept where prompts branch",
    ),
    flagged(
        *("H100", "MiniCPM-SALA", "", {"planned": False, "attention": ["minicpm_flashattn"] * 2}),
        "and a hit would lack them, so nothing is cached; SGLANG_MINICPM_FORCE_DENSE=1",
        sparse_config=SPARSE,
    ),
    flagged("H100", NEMOTRON, "--disaggregation-mode prefill", ONE_SLOT),
    flagged("H100", NEMOTRON, KEEPS_KV, {"planned": False, "held": 1}),
    flagged("H100", NEMOTRON, "--chunked-prefill-size 2048", ONE_SLOT),
    flagged("H100", NEMOTRON, "--chunked-prefill-size -1", ONE_SLOT),
    flagged("H100", NEMOTRON, "--mamba-ssm-dtype bfloat16", ONE_SLOT | {"state_dtype": "bfloat16"}),
    flagged(
        *("B200", QWEN, "--mamba-ssm-dtype bfloat16"),
        ONE_SLOT | {"state_dtype": "bfloat16", "prefill_kernel": "TritonGDNKernel"},
    ),
    flagged(
        *("H100", NEMOTRON, "--page-size 16"),
        {"strategy": "extra_buffer", "held": 3, "page": 16, "why_split": None, **SPILL},
        "up to 15 of which are computed again each time, and a running request holds 3 state "
        "slots instead of 1; use --page-size 1.",
    ),
    flagged("B200", NEMOTRON, "--attention-backend triton", ONE_SLOT | {"page": 1}),
    flagged(
        *("B200", NEMOTRON, "--prefill-attention-backend triton"),
        {"strategy": "extra_buffer", "held": 3, "page": 64, **SPILL},
        "use --page-size 1 and an --attention-backend without pages",
    ),
    # What somebody asks for stays.
    flagged(
        *("H100", NEMOTRON, "--mamba-radix-cache-strategy extra_buffer"),
        {"strategy": "extra_buffer", "held": 3, "planned": True},
        TOO_FEW_SLOTS,
    ),
    flagged("H100", NEMOTRON, "--mamba-radix-cache-strategy no_buffer", ONE_SLOT),
    flagged("H100", QWEN, "--linear-attn-prefill-backend flashinfer", ONE_SLOT | FLASHINFER),
    flagged("H100", NEMOTRON, "--disable-overlap-schedule", ONE_SLOT | {"overlap": False}),
    flagged("H100", NEMOTRON, "--warmups voice_chat", {"warmups": "voice_chat,hybrid_hits"}),
    *(
        flagged(
            *("H100", model, "--disable-overlap-schedule"),
            {"held": 1, "overlap": False, "why_split": None},
        )
        for model in ("LFM2-2.6B", "Qwen4-Exp")
    ),
    flagged(
        *("H100", "Falcon-H1-7B", "--cuda-graph-backend-prefill breakable"),
        {"captured": True, "breaks": False, "held": 1},
        "inside a prefill's CUDA graph (--disable-prefill-cuda-graph leaves it out)",
    ),
    flagged(
        *("H100", NEMOTRON, "--max-running-requests 256", {"running": 120}),
        "let 120 requests run at once instead of 256, since each counts for 1.25; raise "
        "--max-mamba-cache-size to 320, which leaves room for",
    ),
]


NEXTN = (
    "--speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4"
)
WITH_HEADS = {"strategy": "extra_buffer", "held": 3, "planned": True, "why_split": None}
SPREAD = "--tp-size 8 --dp-size 8 --enable-dp-attention"
LORA = "--enable-lora --max-lora-rank 64 --lora-target-modules q_proj k_proj v_proj o_proj"
KIMI, NANO, GRANITE = "Kimi-Linear-48B", "Nemotron-3-Nano", "Granite-4-H-Small"
ON_THE_GRID = "states are taken where SGLang tracks them, on a grid of 64 tokens"
HOST = "--enable-hierarchical-cache --hicache-size 1"

FLAGGED += [
    *(
        flagged("H100", QWEN, flags, ONE_SLOT | found)
        for flags, found in {
            "--disaggregation-mode prefill": {},
            "--cpu-offload-gb 10": {},
            "--mem-fraction-static 0.95": {},
            "--max-running-requests 512 --tp-size 8": {"running": 512},
            "--context-length 262144 --tp-size 8": {},
            "--kv-cache-dtype fp8_e4m3 --mamba-ssm-dtype bfloat16 --quantization fp8": {
                "state_dtype": "bfloat16",
                "kv_dtype": "uint8",
            },
            "--hybrid-memory one --kv-cache-dtype fp8_e4m3": {},
            f"--hybrid-memory one {SPREAD}": {},
            f"--hybrid-memory one {HOST}": {},
            f"{HOST} --hicache-io-backend kernel --hicache-mem-layout page_first": {},
            f"{HOST} --hicache-io-backend direct --hicache-mem-layout page_first_direct": {},
            f"{SPREAD} --moe-a2a-backend deepep --enable-single-batch-overlap": {},
            "--enable-mixed-chunk": {},
            "--enable-memory-saver": {},
            "--attention-backend flashinfer": {"attention": ["flashinfer", "flashinfer"]},
            "--mamba-full-memory-ratio 0.9": {},
            "--nnodes 2 --node-rank 0 --dist-init-addr 127.0.0.1:41311 --tp-size 16": {},
            LORA: {},
        }.items()
    ),
    *(
        flagged("H100", model, flags, ONE_SLOT)
        for model, flags in (
            (NEMOTRON, LORA),
            (NEMOTRON, SPREAD),
            (KIMI, "--tp-size 8"),
            (KIMI, SPREAD),
            (KIMI, "--mamba-ssm-dtype bfloat16"),
            (KIMI, "--disaggregation-mode prefill"),
            (NANO, "--tp-size 8"),
            (GRANITE, "--tp-size 8"),
            ("Falcon-H1-7B", "--tp-size 4 --context-length 262144"),
        )
    ),
    flagged("H100", KIMI, "--kv-cache-dtype fp8_e4m3", ONE_SLOT | SPILL),
    flagged("H100", KIMI, "--hybrid-memory split", ONE_SLOT | {"spills": False}),
    flagged(
        *("H100", NANO, "--max-running-requests 512 --context-length 262144", ONE_SLOT),
        "let 95 requests run at once instead of 512, since each counts for 1.2",
    ),
    flagged(
        *("H100", GRANITE, "--max-running-requests 512", ONE_SLOT),
        "let 29 requests run at once instead of 512, since each counts for 1.2",
    ),
    flagged(
        *("H100", QWEN, "--page-size 64", {"strategy": "extra_buffer", "held": 3, "page": 64}),
        "a running request holds 3 state slots instead of 1; use --page-size 1.",
    ),
    flagged(
        *("H100", QWEN, "--cuda-graph-backend-prefill full", {"captured": True, "held": 1}),
        "inside a prefill's CUDA graph (--disable-prefill-cuda-graph leaves it out)",
    ),
    flagged(
        *("H100", QWEN, f"{SPREAD} --enable-two-batch-overlap --moe-a2a-backend deepep", TRACKED),
        f"with two-batch overlap {ON_THE_GRID}",
    ),
    flagged(
        *("H100", QWEN, "--enable-deterministic-inference", TRACKED),
        f"with deterministic inference {ON_THE_GRID}",
    ),
    flagged("H100", QWEN, f"--tp-size 4 {NEXTN}", WITH_HEADS),
    flagged("H100", QWEN, f"--hybrid-memory one --tp-size 4 {NEXTN}", WITH_HEADS),
    flagged(
        *("H100", NANO, NEXTN, WITH_HEADS),
        "let 25 requests run at once instead of 48, since each counts for 5",
    ),
    flagged(
        *("H100", "Qwen3.5-35B", NEXTN, WITH_HEADS),
        "let 10 requests run at once instead of 48, since each counts for 5",
    ),
    flagged("H100", QWEN, "--tp-size 8 --ep-size 8", ONE_SLOT | SPILL),
    flagged(
        *("H100", KIMI, "--tp-size 4 --attention-backend flashmla"),
        {"strategy": "extra_buffer", "held": 3, "page": 64, "why_split": None, **SPILL},
        "use --page-size 1 and an --attention-backend without pages, such as triton, if that is as",
    ),
    flagged(
        *("B200", QWEN, "--tp-size 4 --attention-backend trtllm_mha --kv-cache-dtype fp8_e4m3"),
        {"strategy": "extra_buffer", "held": 3, "page": 64, "kv_dtype": "uint8", **SPILL},
        "use --page-size 1 and an --attention-backend without pages",
    ),
    flagged("H200", QWEN, "", ONE_SLOT),
    flagged("H200", "Qwen3.5-35B", NEXTN, WITH_HEADS | {"running": 40}, TOO_FEW_SLOTS),
]


WINDOWED = {
    (): "inside a prefill's CUDA graph",
    ("--disable-prefill-cuda-graph",): None,
    ("--disable-prefill-cuda-graph", "--tp-size", "2"): "sums of several ranks",
}
"""Flags of an Inkling server, and why its prefills are split."""

NOT_WITH_WINDOWS = {
    ("--hybrid-memory", "one"): "this model: KV of its sliding windows would be a third kind",
    ("--enable-hierarchical-cache",): "leave out --enable-hierarchical-cache.",
}


@pytest.mark.slow
def test_windows_beside_states() -> None:
    """One tree holds both. Inkling pins two more slots for a running request."""
    flags = [*WINDOWED, *NOT_WITH_WINDOWS]
    starts = rehearsed("H100", [Case("Inkling", each) for each in flags]).starts
    served = len(WINDOWED)
    for start, why_split in zip(starts[:served], WINDOWED.values(), strict=True):
        check_any(start)
        assert start.components == ["FULL", "SWA", "MAMBA"]
        assert start.planned and start.overlap and start.held == 3
        assert start.why_split is None if why_split is None else why_split in start.why_split
        shards = 2 if "--tp-size" in start.flags else 1
        assert start.kv_bytes == 2 * 2 * 2 * 4 * 128 // shards  # of the two layers without a window
    cost = CostModel.from_config(WINDOWED_MODELS["Inkling"])
    assert starts[0].state_bytes == cost.state_bytes and not cost.assumed
    for start, sentence in zip(starts[served:], NOT_WITH_WINDOWS.values(), strict=True):
        assert sentence in (start.stopped or ""), start.stopped


IN_ONE_MEMORY = (
    *(NEMOTRON, "Nemotron-3-Nano", "Granite-4-H-Small", "Falcon-H1-7B", "LFM2-2.6B"),
    *("Kimi-Linear-48B", "Ling-3", "Ling-2.5", "GigaChat-3.5", QWEN, "Qwen3.5-9B"),
)


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["H100", "B200"])
def test_one_memory(machine: str) -> None:
    """SGLang's unified pool, as large as both pools would be, with all of ours on it."""
    cases = [Case(model, ("--hybrid-memory", "one")) for model in IN_ONE_MEMORY]
    for start in rehearsed(machine, cases).starts:
        check_any(start)
        assert start.planned and start.overlap and start.why_split is None
        assert start.budget <= start.free_bytes
        both = start.pool_bytes
        assert both - 2 * start.state_bytes <= start.budget <= both + start.state_bytes
        assert [line for line in start.lines if "max-mamba-cache-size" in line] == []


def taken(start: Start) -> str:
    """The way in which a server's prefills leave states, as docs/models.md says it."""
    if start.stopped is not None:
        return "does not start"
    if not start.planned:
        return "on SGLang's grid"
    where = "to the token" if start.page == 1 else f"to a page of {start.page}"
    return f"{'in one pass' if start.why_split is None else 'split'}, {where}"


@pytest.mark.slow
@pytest.mark.timeout(1_200)
def test_the_page_says_how_states_are_taken() -> None:
    """The page has the table; if it differs the test writes it anew, and fails once."""
    machines = ("H100", "A100", "B200")
    found = {
        machine: {it.model: it for quick in (True, False) for it in defaults(machine, quick).starts}
        for machine in machines
    }
    page = Path(__file__).parents[2] / "docs" / "models.md"
    before = page.read_text()
    with table(page, "taken", ("model", *machines), list(MODELS)) as rows:
        rows.update({it: [it, *(taken(found[on][it]) for on in machines)] for it in MODELS})
    assert page.read_text() == before


@cache
def with_flags(machine: str) -> list[Start]:
    return rehearsed(machine, [it.case for it in FLAGGED if it.machine == machine]).starts


@pytest.mark.slow
@pytest.mark.parametrize(
    "expected", FLAGGED, ids=lambda it: f"{it.machine} {it.case.model} {' '.join(it.case.flags)}"
)
def test_flags_that_people_set(expected: Flagged) -> None:
    index = [it for it in FLAGGED if it.machine == expected.machine].index(expected)
    start = with_flags(expected.machine)[index]
    check_asked = "extra_buffer" in expected.case.flags
    if not check_asked:
        check_any(start)
    assert start.stopped is None
    for name, value in expected.found.items():
        assert getattr(start, name) == value, name
    if expected.line:
        assert any(expected.line in line for line in start.lines), start.lines
    else:
        assert start.lines == []
    replicas = 8 if SPREAD in " ".join(start.flags) else 1
    for slots, tokens in advised(start):
        own = slots // replicas  # the flag is of all replicas together
        assert own * start.state_bytes + tokens * start.kv_bytes <= start.pool_bytes


REFUSED = {
    Case("Qwen3.5-9B", ("--mamba-radix-cache-strategy", "no_buffer")): (
        "attention by trtllm_mha has pages of 64; add --attention-backend triton, or leave --mamba"
    ),
    Case("Mamba-Codestral-7B", ("--page-size", "64")): (
        "needs pages of one token; leave out --page-size 64."
    ),
    Case("GLM-5-Next", ("--hybrid-memory", "one")): (
        "cannot share SGLang's unified pool with this model: its latent keys have no positions"
    ),
    Case("Mamba-Codestral-7B", ("--hybrid-memory", "one")): "with this model: it has no KV",
    Case("Falcon-H1-7B", ("--tp-size", "8")): "cannot share the 12 heads of the model's attention",
    Case(QWEN, ("--hybrid-memory", "one", "--disaggregation-mode", "prefill")): (
        "other servers reach rows where they lie; leave out --disaggregation-mode, or use --hybrid"
    ),
    Case(QWEN, (*HOST.split(), "--hicache-mem-layout", "layer_first")): (
        "--hicache-mem-layout layer_first has no room for states; leave it out, or give page_first"
    ),
    Case(NEMOTRON, (*KEEPS_KV.split(), "--enable-hierarchical-cache")): (
        "keeps KV on the device only; leave out --enable-hierarchical-cache there, or"
    ),
}


@pytest.mark.slow
def test_what_cannot_be_is_refused() -> None:
    """SGLang starts a server with one buffer if a default brings the pages, and ends at an
    assertion later.
    """
    starts = rehearsed("B200", list(REFUSED)).starts
    for start, sentence in zip(starts, REFUSED.values(), strict=True):
        assert sentence in (start.stopped or ""), start.stopped


@pytest.mark.slow
def test_what_is_advised_is_possible() -> None:
    """A server with the advised flags has the advised pools, and no such advice."""
    first = Case(NEMOTRON, ("--mamba-radix-cache-strategy", "extra_buffer"))
    (before,) = rehearsed("H100", [first]).starts
    ((slots, tokens),) = advised(before)
    sizes = ("--max-mamba-cache-size", str(slots), "--max-total-tokens", str(tokens))
    (after,) = rehearsed("H100", [Case(NEMOTRON, (*first.flags, *sizes))]).starts
    assert (after.slots, after.tokens) == (slots, tokens)
    assert after.pool_bytes <= after.free_bytes and after.lines == []
