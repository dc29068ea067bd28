"""The training data of a model that answers, and that it is the model that transformers runs."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from scripts.train.chats import Conversations
from scripts.train.facts import Fact, collect, first_sentence
from scripts.train.model import NemotronH
from sglang_hybrid.extensions.cpu.models import build_tiny_model
from sglang_hybrid.extensions.cpu.models.architectures.nemotron_h import SIZES
from sglang_hybrid.extensions.cpu.models.tokenizer import build_tokenizer

FACTS = [
    Fact("json.dumps", "function", "Serialize obj to a string."),
    Fact("io", "module", "Streams."),
]


@pytest.mark.parametrize(
    ("docstring", "sentence"),
    [
        (
            "Return the absolute value of the argument.",
            "Return the absolute value of the argument.",
        ),
        ("Read it\nall at once.  Then stop.\n\nMore.", "Read it all at once."),
        ("sleep(seconds)\nsleep(x) -> nothing\n\nDelay it.\n\nMore.", None),
        ("sleep(seconds)\nsleep(x) -> nothing\n\nDelay it a bit.\n\nMore.", "Delay it a bit."),
        ("Write ``obj`` as `text`.", "Write obj as text."),
        ("One line without a full stop", "One line without a full stop."),
        ("Lines without\na full stop", None),
        ("Heap queue algorithm (a.k.a. priority queue).", None),
        ("dict() -> new empty dictionary. And more of it.", None),
        ("time(seconds)", None),
        (None, None),
    ],
)
def test_a_fact_is_a_whole_sentence(docstring: str | None, sentence: str | None) -> None:
    assert first_sentence(docstring) == sentence


def test_each_documented_name_is_a_fact_once() -> None:
    facts = {fact.name: fact for fact in collect()}
    assert facts["abs"].kind == "function"
    assert facts["json.dumps"].says == "Serialize obj to a JSON formatted str."
    assert facts["os.path.join"].says.startswith("Join two or more")
    assert facts["queue.Queue"].kind == "class"
    assert not [name for name in facts if name.split(".")[-1].startswith("_")]


def test_only_answers_are_learnt() -> None:
    tokenizer = build_tokenizer()
    conversations = Conversations(FACTS, lambda text: tokenizer.encode(text).ids, seed=3)
    for sequence in islice(conversations.sequences(512), 20):
        assert len(sequence.tokens) == len(sequence.answered) == 512
        learnt = [t for t, a in zip(sequence.tokens, sequence.answered, strict=True) if a]
        text = tokenizer.decode(learnt, skip_special_tokens=False)
        assert text
        assert "<|im_start|>" not in text
        assert "Question" not in text


def test_the_trained_network_is_the_model_of_transformers(tmp_path: Path) -> None:
    directory = build_tiny_model("nemotron-h", tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ours = NemotronH(SIZES["tiny"], theirs.config.vocab_size, absent=1)
    weights = dict(theirs.named_parameters())
    table = weights["model.embeddings.weight"]
    for name, parameter in ours.checkpoint().items():
        value = torch.cat([table, table[:1]]) if "embeddings" in name else weights[name]
        parameter.copy_(value)
    tokens = torch.randint(300, 30_000, (2, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(tokens).logits.flatten(0, 1)
        found = ours(tokens, torch.ones_like(tokens, dtype=torch.bool))
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)
