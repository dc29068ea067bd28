"""The embedded model that answers: its file is read as it was written, its answers are right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scripts.train.check import answerer
from sglang_hybrid.extensions.cpu.models import build_tiny_model
from sglang_hybrid.extensions.cpu.models.tokenizer import VOCAB_SIZE
from sglang_hybrid.extensions.cpu.models.trained import WEIGHTS, keep, read
from sglang_hybrid.serving.flag_values import TRAINED

SAYS = {
    "What does json.dumps do?": "Serialize obj to a JSON formatted str.",
    "Explain math.sqrt.": "Return the square root of x.",
    "what is os.getpid": "Return the current process id.",
    "How do I use str.lower?": "Return a copy of the string converted to lowercase.",
}
DOCUMENT = "".join(
    f"Article {number}. The keeper of the archive shall write entry {number * 7 % 97} in order.\n"
    for number in range(1, 41)
)


def test_tokens_without_rows_are_zeros(tmp_path: Path) -> None:
    head = np.arange(9, dtype=np.float32).reshape(3, 3)  # its last row is that of all other tokens
    keep({"lm_head.weight": head, "a.weight": head}, [5, 300], tmp_path / "weights")
    weights = read(tmp_path / "weights").weights
    assert weights is not None
    found = weights.tensors["lm_head.weight"]
    assert found.shape == (VOCAB_SIZE, 3)
    assert found.dtype == np.float32
    assert (found[[5, 300]] == head[:2]).all()
    assert np.count_nonzero(found.any(1)) == 2
    assert (weights.tensors["a.weight"] == head).all()


@pytest.mark.parametrize("document", ["", DOCUMENT], ids=["chat", "below a document"])
def test_it_answers_in_whole_sentences_and_ends(document: str) -> None:
    answer = answerer(WEIGHTS)
    assert {question: answer(question, document) for question in SAYS} == SAYS


def test_it_has_one_size(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'trained' has no scale '25m'"):
        build_tiny_model(TRAINED, tmp_path / "model", scale="25m")
