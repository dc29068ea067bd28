"""A prompt of a schema answers as the same tokens without a cache, on each architecture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hybrid.extensions.cpu.models import ARCHITECTURES
from sglang_hybrid.serving.server_process import ServerProcess
from tests.extensions.schemas import schemas
from tests.server.client import TOLERANCE, flush, logprobs
from tests.server.test_schemas import pupil, register, send

CHOSEN = ("high", "novice", "yesterday", "seeing", "essay", "curious")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_selection_answers_as_its_tokens_do_without_a_cache(
    model_directory: Callable[[str], Path], architecture: str
) -> None:
    flags = ["--model-path", str(model_directory(architecture)), "--enable-cache-report"]
    with ServerProcess(flags, timeout=600) as running:
        url = running.url
        register(url, schemas.pupil()).raise_for_status()
        first = send(url, pml=pupil(*CHOSEN)).json()["meta_info"]["prompt"]
        ends = {end["module"]: end["position"] for end in first["ends"]}
        for shared in (5, 2):
            others = [*CHOSEN[:shared], *("doing", "quiz", "playful")[max(0, shared - 3) :]]
            warm = send(url, pml=pupil(*others)).json()
            hit, end = warm["meta_info"]["cached_tokens"], ends[CHOSEN[shared - 1]]
            assert hit == end or (hit > end and architecture == "transformer")  # it needs no state
            flush(url)
            cold = send(url, input_ids=warm["prompt_token_ids"]).json()
            assert cold["meta_info"]["cached_tokens"] == 0
            assert warm["output_ids"] == cold["output_ids"]
            assert logprobs(warm) == pytest.approx(logprobs(cold), abs=TOLERANCE)
            send(url, pml=pupil(*CHOSEN)).raise_for_status()
