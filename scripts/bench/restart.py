"""What a restart keeps: the same documents, asked before and after it."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from statistics import median
from typing import Annotated

import requests

from scripts.bench.commands import Count
from scripts.bench.report import Table
from scripts.bench.servers import events, greedy, random_tokens
from sglang_hybrid.extensions.cpu.models import ensure_tiny_model
from sglang_hybrid.serving.server_process import ServerProcess

PAGE = 16
"""Tokens of a page: with one, each token's KV would be an object of its own on disk."""

QUESTION = 32
"""Tokens behind a document."""


def restart(
    documents: Annotated[Count, "that are asked about"] = 24,
    tokens: Annotated[Count, "of each"] = 1_500,
) -> None:
    """What a server with a disk tier still has after a restart, and what one without it has.

    Each document is asked two questions, then a third one, which is measured; the server ends and
    starts again with the same folder, and each gets another question. The embedded model of random
    weights; one request at a time.
    """
    source = random.Random(0)
    texts = [random_tokens(source, tokens) for _ in range(documents)]

    def ask() -> list[list[int]]:
        return [[*text, *random_tokens(source, QUESTION)] for text in texts]

    table = Table("server", "hit rate", "first token, median")
    common = ["--model-path", str(ensure_tiny_model()), "--page-size", str(PAGE)]
    with tempfile.TemporaryDirectory() as folder:
        disk = [
            *("--enable-hierarchical-cache", "--hicache-storage-backend", "file"),
            *("--hybrid-disk-folder", folder),
        ]
        for flags in (disk, []):
            for started in ("before", "after"):
                with ServerProcess([*common, *flags]) as server:
                    post(server.url, [random_tokens(source, tokens)] * 2)  # kernels, first pages
                    if started == "before":
                        post(server.url, [*ask(), *ask()])
                    row(table, f"{started} the restart", flags, post(server.url, ask()))
                    if flags:
                        time.sleep(3.0)  # copies that are under way reach the disk


def row(table: Table, name: str, disk: Sequence[str], found: list[tuple[int, int, float]]) -> None:
    hits, prompts = sum(each[0] for each in found), sum(each[1] for each in found)
    with_disk = "with a disk tier" if disk else "without"
    first = 1000 * median(each[2] for each in found)
    table.row(f"{name}, {with_disk}", f"{100 * hits / prompts:.1f}%", f"{first:.0f} ms")


def post(url: str, prompts: Sequence[list[int]]) -> list[tuple[int, int, float]]:
    """Of each: tokens that were hit, its tokens, and seconds to the first token."""
    found = []
    for prompt in prompts:
        body = greedy(prompt, 4) | {"stream": True}
        begin, first, last = time.perf_counter(), 0.0, {}
        answer = requests.post(f"{url}/generate", json=body, stream=True, timeout=120)
        for event in events(answer.iter_lines()):
            first = first or time.perf_counter() - begin
            last = event
        found.append((last["meta_info"]["cached_tokens"], len(prompt), first))
    return found
