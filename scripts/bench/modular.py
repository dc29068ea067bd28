"""Modules of prompts that are computed apart."""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import requests

from scripts.bench.commands import Count
from scripts.bench.report import Table
from scripts.bench.servers import SCRATCH, post
from sglang_hybrid.extensions.cpu.models import build_tiny_model
from sglang_hybrid.extensions.cpu.models.architectures.base import Scale
from sglang_hybrid.serving.config import BACKEND
from sglang_hybrid.serving.server_process import ServerProcess

FILES = ("unit", "map", "player", "game", "database")
SCALES: tuple[Scale, ...] = ("tiny", "100m")


def modular(
    words: Annotated[Count, "of each file"] = 400,
    selections: Count = 3,
    scratch: Annotated[Path, "where models are kept"] = SCRATCH,
) -> None:
    """Modular mode: time to first token and error of modules that are computed apart, on a
    Transformer.

    A schema of five files of code, of which each prompt imports some in a selection that was not
    sent before, and a question. "whole": the prompt without a cache. "put together": the modules
    were computed apart, before. "again": the same selection with another question. The error is
    that of the log probability of the token that is likeliest after the whole prompt; the weights
    are random.
    """
    heads = ("prompt tokens", "whole, ms", "put together, ms", "again, ms", "faster")
    table = Table("Transformer", *heads, "error, median", "largest")
    for scale in SCALES:
        table.row(scale, *_measured(_model(scratch, scale), words, selections))


def _measured(model: Path, words: int, selections: int) -> Iterator[str]:
    flags = ["--model-path", str(model), "--radix-cache-backend", BACKEND]
    with ServerProcess([*flags, "--context-length", "16384"], timeout=600) as running:
        url = running.url
        post(url, "/v1/prompt_schemas", {"pml": _schema(words)})
        found = [_selection(url, at, names) for at, names in enumerate(_selections(selections))]
    tokens, whole, put_together, again, errors = zip(*found, strict=True)
    yield f"{median(tokens):,.0f}"
    times = [median(each) for each in (whole, put_together, again)]
    yield from (f"{1000 * each:.0f}" for each in times)
    yield f"{median(a / b for a, b in zip(whole, put_together, strict=True)):.1f}"
    yield from (f"{median(errors):.3f}", f"{max(errors):.3f}")


def _selection(url: str, at: int, names: tuple[str, ...]) -> tuple[int, float, float, float, float]:
    """Prompt tokens, three times in seconds, and the error."""
    while not requests.post(url + "/flush_cache", timeout=60).ok:  # modules are being computed
        time.sleep(0.1)
    exact = _ask(url, _prompt(names, at, "exact"), {"top_logprobs_num": 1})
    post(url, "/v1/prompt_schemas/files/prewarm", {"mode": "modular"})
    _until_composed(url, _prompt((FILES[-1],), at, "modular"))  # what the chat template writes
    ((likeliest, token, _),) = exact["output_top_logprobs"][0]
    asked = {"token_ids_logprob": [token]}
    apart = _ask(url, _prompt(names, at, "modular"), asked)
    assert apart["hybrid_cache"]["composed_tokens"], apart
    again = _ask(url, _prompt(names, at + 1_000, "modular"), asked)
    ((found, _, _),) = apart["output_token_ids_logprobs"][0]
    times = (each["e2e_latency"] for each in (exact, apart, again))
    return (exact["prompt_tokens"], *times, abs(found - likeliest))


def _until_composed(url: str, prompt: str) -> None:
    for _ in range(100):
        if _ask(url, prompt, {})["hybrid_cache"]["composed_tokens"]:
            return
    raise AssertionError("modules are never there")


def _selections(count: int) -> list[tuple[str, ...]]:
    several = [names for size in (4, 3) for names in itertools.combinations(FILES, size)]
    return [several[at % len(several)] for at in range(count)]


def _ask(url: str, prompt: str, more: dict[str, Any]) -> dict[str, Any]:
    """`meta_info` of an answer of one token."""
    body = {"pml": prompt, "return_logprob": True, **more}
    sampling = {"max_new_tokens": 1, "temperature": 0}
    answer = post(url, "/generate", {**body, "sampling_params": sampling})
    meta: dict[str, Any] = answer["meta_info"]
    return meta


def _prompt(names: tuple[str, ...], number: int, mode: str) -> str:
    imports = "".join(f"<{name}/>" for name in names)
    question = f"<user>Question {number}: what does {names[0]} do?</user>"
    return f'<prompt schema="files" mode="{mode}">{imports}{question}</prompt>'


def _schema(words: int) -> str:
    source = random.Random(0)
    modules = "".join(
        f'<module name="{name}">'
        + " ".join(f"{name}_{source.randrange(100)}" for _ in range(words))
        + "</module>"
        for name in FILES
    )
    return f'<schema name="files"><system>You write Python.</system><user>{modules}</user></schema>'


def _model(scratch: Path, scale: Scale) -> Path:
    folder = scratch if scale != "tiny" else Path(tempfile.mkdtemp())
    directory = folder / f"transformer-{scale}"
    if not directory.exists():
        build_tiny_model("transformer", directory, scale=scale)
    return directory
