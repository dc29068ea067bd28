"""llama.cpp and this server on the same cores."""

from __future__ import annotations

import random
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import requests

from scripts.bench.report import Table
from scripts.bench.servers import SCRATCH, at_once, events, greedy, large_model, random_tokens
from sglang_hybrid.serving.server_process import ServerProcess

RELEASE = "llama-cpp-python==0.3.36"
FLAGS = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_OPENSSL=OFF"),
    *("-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"),
)

CONVERT = """
import json, runpy, sys
from pathlib import Path
source, *sys.argv[1:] = sys.argv[1:]
sys.path[:0] = [source, source + "/gguf-py"]
from conversion import base
# Its list of tokenizers lacks ours, and transformers' config names experts that there are not.
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
base.ModelBase.load_hparams = staticmethod(
    lambda directory, is_mistral_format: json.loads((Path(directory) / "config.json").read_text())
)
runpy.run_path(source + "/convert_hf_to_gguf.py", run_name="__main__")
"""

CONTEXT = 40_960
"""KV tokens of the peer, which all of its slots share."""

SLOTS = 8
PREFILLS = (512, 4096, 16_384)
BATCHES = (1, 8)
DECODED = 64
DOCUMENT, TURN, ANSWER = 8192, 64, 32
CLIENTS, CLIENT_PROMPT = 4, 1024


@dataclass(frozen=True)
class Answer:
    """An answer's tokens, and the seconds until the first and the last of them."""

    tokens: list[int]
    first: float
    last: float

    @property
    def step(self) -> float:
        return (self.last - self.first) / max(1, len(self.tokens) - 1)


@dataclass(frozen=True)
class Server:
    """How a running server is asked; ``tokens`` reads those so far from a line of its stream."""

    url: str
    body: Callable[[list[int], int], dict[str, Any]]
    tokens: Callable[[dict[str, Any], list[int]], list[int]]

    def ask(self, prompt: list[int], count: int) -> Answer:
        begin, first, last = time.perf_counter(), 0.0, 0.0
        tokens: list[int] = []
        with requests.post(self.url, json=self.body(prompt, count), stream=True) as response:
            response.raise_for_status()
            for event in events(response.iter_lines()):
                found = self.tokens(event, tokens)
                if len(found) > len(tokens):
                    last = time.perf_counter() - begin
                    first = first or last
                    tokens = found
        return Answer(tokens, first, last)

    def ask_together(self, prompts: Sequence[list[int]], count: int) -> list[Answer]:
        return at_once(lambda prompt: self.ask(prompt, count), prompts)


@contextmanager
def ours(model: Path) -> Iterator[Server]:
    def body(prompt: list[int], count: int) -> dict[str, Any]:
        return {**greedy(prompt, count), "stream": True}

    with ServerProcess(["--model-path", str(model)]) as server:
        yield Server(f"{server.url}/generate", body, lambda line, _: line["output_ids"])


@contextmanager
def llama(program: Path, weights: Path) -> Iterator[Server]:
    def body(prompt: list[int], count: int) -> dict[str, Any]:
        sampling = {"n_predict": count, "temperature": 0, "ignore_eos": True}
        return {"prompt": prompt, "stream": True, "return_tokens": True, **sampling}

    cores = str(len(psutil.Process().cpu_affinity()))
    flags = [
        *("--model", str(weights), "--threads", cores),
        *("--ctx-size", str(CONTEXT), "--parallel", str(SLOTS), "--kv-unified"),
        *("--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "on"),
    ]
    with ServerProcess(flags, program=[str(program)], health="/health") as server:
        yield Server(
            f"{server.url}/completion", body, lambda line, so_far: so_far + line.get("tokens", [])
        )


def build(scratch: Path) -> tuple[Path, Path]:
    """The peer's program and its source, made where they are missing."""
    name = RELEASE.replace("-", "_").replace("==", "-")
    source = scratch / name / "vendor" / "llama.cpp"
    program = scratch / "build" / "bin" / "llama-server"
    if not source.exists():
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*pip, "--dest", str(scratch), RELEASE], check=True)
        with tarfile.open(scratch / f"{name}.tar.gz") as archive:
            archive.extractall(scratch, filter="data")
    if not program.exists():
        where = ["-S", str(source), "-B", str(scratch / "build"), "-G", "Ninja"]
        subprocess.run(["cmake", *where, *FLAGS], check=True)
        make = ["cmake", "--build", str(scratch / "build"), "--target", "llama-server"]
        subprocess.run(make, check=True)
    return program, source


def convert(source: Path, model: Path, weights: Path) -> None:
    arguments = [str(source), str(model), "--outfile", str(weights), "--outtype", "f32"]
    subprocess.run([sys.executable, "-c", CONVERT, *arguments], check=True, capture_output=True)


def measure(server: Server, source: random.Random) -> Iterator[tuple[str, float]]:
    """What is compared, in the order of the table."""

    def text(length: int) -> list[int]:
        return random_tokens(source, length)

    for length in PREFILLS:
        yield f"prefill of {length:,}, tokens/s", length / server.ask(text(length), 1).first
    for count in BATCHES:
        answers = server.ask_together([text(64) for _ in range(count)], DECODED)
        yield f"decode, {count} at once, tokens/s", count / median(one.step for one in answers)
    turn = text(DOCUMENT)
    turn += server.ask(turn, ANSWER).tokens + text(TURN)
    yield f"second turn behind {DOCUMENT:,}, ms", 1e3 * server.ask(turn, ANSWER).first
    document = text(DOCUMENT)
    third = [server.ask(document + text(TURN), ANSWER) for _ in range(3)][-1]
    yield f"third question about {DOCUMENT:,}, ms", 1e3 * third.first
    clients = server.ask_together([text(CLIENT_PROMPT) for _ in range(CLIENTS)], ANSWER)
    what = f"{CLIENTS} clients at once with {CLIENT_PROMPT:,}"
    yield f"{what}: median first token, ms", 1e3 * median(one.first for one in clients)
    yield f"{what}: all answered, ms", 1e3 * max(one.last for one in clients)


def compare(servers: Sequence[Server], rounds: int) -> dict[str, list[float]]:
    """Medians of every measure, a value per server. Both do the same work in turn, so what else
    the machine does slows both.
    """
    seen: dict[str, list[list[float]]] = {}
    for nth in range(rounds):
        both = (measure(server, random.Random(nth)) for server in servers)
        for pair in zip(*both, strict=True):
            seen.setdefault(pair[0][0], []).append([value for _, value in pair])
    return {
        what: [median(of_one) for of_one in zip(*values, strict=True)]
        for what, values in seen.items()
    }


def peer(
    scratch: Path = SCRATCH / "cpu-peer",
    rounds: int = 3,
) -> None:
    """llama.cpp and this server on the same cores, in float32: the same weights, the same requests.

    Builds llama.cpp's server from the source that llama-cpp-python's release carries (pip, cmake,
    ninja and a C++ compiler are needed), makes a Nemotron-H of 100 M random weights, converts it
    with llama.cpp's own converter, and asks both servers in turn, over HTTP and with token ids. A
    second run finds what the first one built in the scratch directory.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    program, source = build(scratch)
    model = large_model(scratch)
    weights = model.with_suffix(".gguf")
    if not weights.exists():
        convert(source, model, weights)
    prompt = random_tokens(random.Random(-1), 100)
    with ours(model) as server, llama(program, weights) as other:
        answers = [one.ask(prompt, ANSWER).tokens for one in (server, other)]
        found = compare((server, other), rounds)
    same = sum(a == b for a, b in zip(*answers, strict=True))
    print(f"llama.cpp of {RELEASE}.\n")
    table = Table("float32", "sglang_hybrid", "llama.cpp", "speedup of ours")
    for what, (mine, theirs) in found.items():
        ratio = mine / theirs if what.endswith("tokens/s") else theirs / mine
        table.row(what, f"{mine:,.0f}", f"{theirs:,.0f}", f"{ratio:.2f}")
    print(f"\nOf {ANSWER} tokens of one greedy answer {same} are the same.")
