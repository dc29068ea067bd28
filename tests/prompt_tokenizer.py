"""The tokenizer of the tiny models, with its chat template."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from sglang_hybrid.extensions.cpu.models.tokenizer import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, max_length=100_000)
    return PreTrainedTokenizerFast.from_pretrained(directory)
