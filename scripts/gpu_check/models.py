"""A server with a tiny model: what it has chosen by itself, and hits against cold prefills.

    python -m scripts.gpu_check.models nemotron-h
    python -m scripts.gpu_check.models nemotron-h --float32    # where a wrong state cannot hide
    python -m scripts.gpu_check.models nemotron-h --cpu        # on a machine without a GPU
    python -m scripts.gpu_check.models nemotron-h --float32 --tiers   # hits from host memory
    python -m scripts.gpu_check.models nemotron-h --float32 --spills  # of states in the place of KV
    python -m scripts.gpu_check.models nemotron-h --float32 --parks   # of KV in slots of states
    python -m scripts.gpu_check.models nemotron-h --stand-ins -- --page-size 16

With --stand-ins the server has torch's functions in place of SGLang's CUDA packages (stand_ins/).
What follows -- are more flags of the server.

A hit is compared by the log probabilities of its own answer: as the server said them, and as a
prefill with an empty cache says them. Each kind of checkpoint is hit once.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from scripts.bench.servers import flush, greedy, post, random_tokens
from scripts.gpu_check import stand_ins
from scripts.gpu_check.findings import tell
from sglang_hybrid.core.returns.hints import PromptHints
from sglang_hybrid.extensions.cpu.models import ARCHITECTURES, build_tiny_model
from sglang_hybrid.serving.requests import kv_hints
from sglang_hybrid.serving.server_process import ServerFailed, ServerProcess

KERNELS = dict.fromkeys(("falcon-mamba", "lfm2", "lfm2-moe", "ling-2.5", "minicpm-sala"), 1)
"""The number of kernels that a start compiles; 2 for the other models. The scan of Mamba1 needs
none, a short convolution has no other state than its window, and lightning attention has no
convolution. ZAYA1 has windows of two lengths.
"""

SMALL = (
    *("--mem-fraction-static", "0.5", "--max-total-tokens", "65536"),
    *("--max-mamba-cache-size", "256"),
)
"""Some 100 MB, since several servers share the GPU; the share is of what is free at the start."""
QUICK = ("--cuda-graph-max-bs-decode", "4", "--cuda-graph-max-bs-prefill", "1024")
FLOAT32 = ("--dtype", "float32", "--attention-backend", "triton")
BFLOAT16 = ("--dtype", "bfloat16")
"""SGLang's convolutions refuse float16, which it takes for weights in float32."""
TIER_PROMPTS, TIER_TOKENS = 24, 600
SMALLER = ("--max-total-tokens", "4800", "--max-mamba-cache-size", "24")
"""A device that holds a third of those prompts."""
TIERS = ("--enable-hierarchical-cache", "--hicache-size", "1", *SMALLER)
LENDS = ("--hybrid-memory", "auto", "--mamba-full-memory-ratio", "0.5")
SPILLS = (*LENDS, "--max-total-tokens", "32000", "--max-mamba-cache-size", "8")
"""Two pools, with room for those prompts, and with slots for a sixth of their states."""
PARKS = (*LENDS, "--max-total-tokens", "4800", "--max-mamba-cache-size", "160")
"""Two pools, with room for a third of those prompts, and slots for three times their states."""
NO_TRITON = {"lfm2", "lfm2-moe"}
"""Models whose attention SGLang does not compute with Triton."""
NEW_TOKENS = 6
CONVERSATIONS, TURNS = 6, 3
CLOSE = {"float32": 0.02, "bfloat16": 0.3}
"""Largest difference of a log probability; products of float32 are in tf32 on a GPU, and 0.012 was
seen there. A state that is one token too early makes 0.03 and more.
"""


Turn = tuple[list[int], dict[str, Any]]
"""A prompt, and what the server said of its answer."""


@dataclass(frozen=True)
class Hit:
    """Prompts sent one after another, the last of which resumes from a checkpoint of this kind."""

    kind: str
    prompts: list[list[int]]
    tokens: int
    """The tokens of the last prompt that should come from the cache."""
    declared: tuple[int, ...] = ()
    """Positions that the first request declares."""


def take_all_experts(model: Path) -> None:
    """Let each token use every expert of a model, if it has some: which of them it uses would hang
    on the rounding of bfloat16, and one other expert moves answers more than a wrong state does.
    """
    file = model / "config.json"
    config = json.loads(file.read_text())
    count = config.get("num_experts") or config.get("n_routed_experts")
    used = {key for key in ("num_experts_per_tok", "num_experts_per_token") if config.get(key)}
    if count and used:
        file.write_text(json.dumps(config | dict.fromkeys(used, count)))


def prompt(length: int, seed: int) -> list[int]:
    return random_tokens(random.Random(seed), length)


def generate(
    url: str, tokens: list[int], declared: tuple[int, ...] = (), **more: str
) -> dict[str, Any]:
    """One greedy answer with its log probabilities."""
    hints = {"kv_hints": kv_hints.write(PromptHints(declared))} if declared else {}
    logprobs = {"return_logprob": True, "logprob_start_len": -1}
    return post(url, "/generate", {**greedy(tokens, NEW_TOKENS), **logprobs, **hints, **more})


def difference(url: str, record: dict[str, Any], tokens: list[int]) -> float:
    """Between what a request said of its answer and what a prefill with an empty cache says."""
    flush(url)
    again = greedy(tokens + record["output_ids"], 1)
    body = {**again, "return_logprob": True, "logprob_start_len": len(tokens) - 1}
    cold = post(url, "/generate", body)["meta_info"]["input_token_logprobs"][-NEW_TOKENS:]
    said = record["meta_info"]["output_token_logprobs"]
    return float(max(abs(a[0] - b[0]) for a, b in zip(said, cold, strict=True)))


def hits(url: str, model: Path) -> Iterator[Hit]:
    """A way to hit each kind of checkpoint that is planned, from an empty cache each."""
    whole, shared = prompt(300, 1), prompt(500, 2)
    yield Hit("prompt_end", [whole, whole], len(whole) - 1)
    siblings = [shared + prompt(200, seed) for seed in (3, 4, 5)]
    yield Hit("branch", siblings, len(shared))
    yield Hit("declared", [whole, whole[:123] + prompt(90, 6)], 123, declared=(123,))
    yield message(model)
    flush(url)
    first = prompt(200, 7)
    turn = first + generate(url, first)["output_ids"]
    # The last token of an answer is not part of any state.
    yield Hit("tail", [first, turn + prompt(50, 8)], len(turn) - 1)


def message(model: Path) -> Hit:
    """Two chats that share all but their last message."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def chat(*texts: str) -> list[int]:
        roles = ("system", "user")
        messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=len(texts) == 2
        )
        return list(tokenizer.encode(text, add_special_tokens=False))

    rules = "Answer with the number of the entry. " * 20
    questions = [f"Which entry is the {nth}?" for nth in ("first", "last")]
    return Hit("message", [chat(rules, question) for question in questions], len(chat(rules)))


def check_hit(url: str, hit: Hit, close: float, page: int) -> None:
    """Report a hit: its length, the kind of checkpoint, and the difference to a cold prefill.

    With pages of several tokens it may be shorter than with pages of one.
    """
    flush(url)
    kinds: dict[tuple[int, ...], str] = {}
    cold: dict[str, Any] = {}
    for i, tokens in enumerate(hit.prompts):
        record = generate(url, tokens, () if i else hit.declared)
        found = record["meta_info"]["cached_tokens"]
        kind = kinds.get(tuple(tokens[:found]), "none")
        taken = record["meta_info"]["hybrid_cache"]["checkpoints"]
        whole = tokens + record["output_ids"]
        kinds |= {tuple(whole[: each["position"]]): each["kind"] for each in taken}
        cold = cold or record
    apart = difference(url, record, hit.prompts[-1])
    noise = difference(url, cold, hit.prompts[0])
    what = f"{found} of {hit.tokens} tokens hit ({kind})"
    tell(
        f"hit: {hit.kind}",
        f"{what}; log probabilities differ by {apart:.4f}, without a hit by {noise:.4f}",
        (found == hit.tokens or (page > 1 and 0 < found < hit.tokens))
        and apart < max(close, 2 * noise),
    )


def check_at_once(url: str, close: float) -> None:
    """Report conversations that go on at the same time: most of each turn is a hit, whose states
    were written while others were read. The same turns are asked at once without a hit, too, since
    what else is in a batch moves log probabilities as well.
    """
    flush(url)
    system = prompt(400, 20)

    def converse(number: int) -> list[Turn]:
        said, tokens = [], system + prompt(60 + 10 * number, 30 + number)
        for turn in range(TURNS):
            said.append((tokens, generate(url, tokens)))
            tokens = tokens + said[-1][1]["output_ids"] + prompt(40, 100 * (turn + 1) + number)
        return said

    def alone(number: int) -> Turn:
        tokens = spoken[number][0]
        return tokens, generate(url, tokens, extra_key=f"tenant {number}")

    with ThreadPoolExecutor(CONVERSATIONS) as pool:
        spoken = [turn for said in pool.map(converse, range(CONVERSATIONS)) for turn in said]
        cold = list(pool.map(alone, range(len(spoken))))
    found = sum(record["meta_info"]["cached_tokens"] for _, record in spoken)
    asked = sum(len(tokens) for tokens, _ in spoken)
    apart, noise = (
        max(difference(url, record, tokens) for tokens, record in turns) for turns in (spoken, cold)
    )
    tell(
        f"{CONVERSATIONS} conversations at once",
        f"{found:,} of {asked:,} tokens hit; log probabilities differ by at most {apart:.4f}, "
        f"without hits by {noise:.4f}",
        found > asked // 2 and apart < max(close, 2 * noise),
    )


def check_in_turn(url: str, what: str, close: float) -> None:
    """Report prompts that are asked in turn. what: where most of their states are by then."""
    flush(url)
    prompts = [prompt(TIER_TOKENS, 300 + number) for number in range(TIER_PROMPTS)]
    for _ in range(2):
        for tokens in prompts:
            generate(url, tokens)
    again = [generate(url, tokens) for tokens in prompts]
    found = sum(record["meta_info"]["cached_tokens"] for record in again)
    asked = TIER_TOKENS * TIER_PROMPTS
    pairs = list(zip(again, prompts, strict=True))
    apart = max(difference(url, record, tokens) for record, tokens in pairs[::4])
    tell(
        f"hits from {what}",
        f"{found:,} of {asked:,} tokens hit; log probabilities differ by at most {apart:.4f}",
        found > asked // 2 and apart < close,
    )


def check_lent(url: str, name: str, what: str) -> None:
    """Report how many states, or tokens of KV, ever lay in the place of the other kind. name: what
    the server calls them.
    """
    lent = server_info(url)["internal_states"][0]["hybrid_cache"][name]
    count = 0 if lent is None else int(lent[name])
    tell(what, f"{count:,} in all", count > 0)


def check_moves(url: str, *, needed: bool) -> None:
    """Report how often rows of SGLang's unified pool were moved. needed: for what was checked."""
    memory = server_info(url)["internal_states"][0]["hybrid_cache"]["memory"]
    moves = int(memory["moves"])
    tell("rows that moved", f"{moves:,} times", moves > 0 if needed else None)


def server_info(url: str) -> dict[str, Any]:
    found: dict[str, Any] = requests.get(url + "/server_info", timeout=30).json()
    return found


def check_choices(name: str, server: ServerProcess, *, gpu: bool) -> int:
    """Report how states are kept, what computes, and whether prefills are split; returns the size
    of a page in tokens.
    """
    info = server_info(server.url)
    log = server.log.read_text(errors="replace")
    overlap = not info["disable_overlap_schedule"]
    strategy, page = info["mamba_radix_cache_strategy"], int(info["page_size"])
    one_slot = strategy == "no_buffer"
    tell(
        "strategy",
        f"{strategy}, overlap {'on' if overlap else 'off'}, pages of {page}",
        overlap and one_slot == (page == 1) if gpu else None,
    )
    linear = re.search(r"Linear attention kernel backend: (.*)", log)
    graph = info["cuda_graph_config"]["prefill"]["backend"]
    attention = [info[f"{phase}attention_backend"] for phase in ("", "prefill_", "decode_")]
    tell(
        "backends",
        f"attention {' / '.join(str(each) for each in attention if each)}; linear "
        f"{linear[1] if linear else 'unknown'}; prefill graphs {graph}",
    )
    why = re.search(r"prefills are split where they leave a state, since (.*)\.", log)
    reason = why[1] if why else None
    tell(
        "prefills",
        f"split, since {reason}" if reason else "leave states in one pass",
        reason is None if gpu else None,
    )
    if gpu and not reason:
        compiled = log.count("sglang_hybrid: compiled in")
        wanted = KERNELS.get(name, 2)
        tell("kernels", f"{compiled} of {wanted} compiled at the start", compiled == wanted)
    for line in info["internal_states"][0]["hybrid_cache"]["advice"]:
        tell("advice", line)
    problems = [line for line in log.splitlines() if "Traceback" in line]
    tell("log", f"{len(problems)} tracebacks; {server.log}", not problems)
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architecture", choices=sorted({*ARCHITECTURES} - {"transformer"}))
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--stand-ins", action="store_true")
    parser.add_argument("--tiers", action="store_true")
    parser.add_argument("--spills", action="store_true")
    parser.add_argument("--parks", action="store_true")
    argv = sys.argv[1:]
    end = argv.index("--") if "--" in argv else len(argv)
    options, more = parser.parse_args(argv[:end]), argv[end + 1 :]
    name: str = options.architecture
    close = CLOSE["float32" if options.float32 or options.cpu else "bfloat16"]
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        model = build_tiny_model(name, Path(scratch) / name)
        take_all_experts(model)
        flags = ["--model-path", str(model), *SMALL, *QUICK]
        flags += ("--device", "cpu") if options.cpu else FLOAT32 if options.float32 else BFLOAT16
        if options.stand_ins:
            flags += stand_ins.FLAGS
            flags += ("--attention-backend", "torch_native") if name in NO_TRITON else ()
        flags += TIERS if options.tiers else SPILLS if options.spills else ()
        flags += PARKS if options.parks else ()
        flags += more
        environment = stand_ins.environment_with(stand_ins=options.stand_ins)
        try:
            with ServerProcess(flags, environment=environment) as server:
                page = check_choices(name, server, gpu=not options.cpu)
                if options.tiers:
                    check_in_turn(server.url, "host memory", close)
                elif options.spills:
                    check_in_turn(server.url, "the place of KV", close)
                    check_lent(server.url, "spilled", "states in the place of KV")
                elif options.parks:
                    check_in_turn(server.url, "slots of states", close)
                    check_lent(server.url, "parked", "tokens of KV in slots")
                else:
                    for hit in hits(server.url, model):
                        check_hit(server.url, hit, close, page)
                    check_at_once(server.url, close)
                if server_info(server.url)["enable_unified_memory"]:
                    check_moves(server.url, needed=options.tiers)
        except ServerFailed as error:
            tell("start", " ".join(str(error).split())[-400:], False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
