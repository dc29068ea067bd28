"""Asks a trained model about the facts that it was taught and counts the answers that are right.

``python -m scripts.train.check --facts 200`` asks in the chat template;
``--document 1000`` puts so many tokens of another text before each question, without a template.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.train.chats import about, below
from scripts.train.facts import collect
from sglang_hybrid.extensions.cpu.models import ensure_tiny_model
from sglang_hybrid.extensions.cpu.models.tokenizer import build_tokenizer
from sglang_hybrid.extensions.cpu.models.trained import WEIGHTS, read

LINE = "Article {}. The house of the river is a long way from the door.\n"


def questions(count: int) -> list[tuple[str, str]]:
    """Questions about so many facts, and their answers: the same in every call."""
    drawn = random.Random(0)
    return [(about(fact, drawn), fact.says) for fact in drawn.sample(collect(), count)]


def document(tokens: int) -> str:
    """A text of nearly so many tokens that says nothing of any fact."""
    lines = tokens // len(build_tokenizer().encode(LINE.format(1)).ids)
    return "".join(LINE.format(number) for number in range(1, lines + 1))


def answerer(weights: Path) -> Callable[[str, str], str]:
    """A function of a question and of a text above it, which answers greedily with the model of
    this file: in the chat template, or without one below a text that is not empty.
    """
    alike = ensure_tiny_model("nemotron-h")  # but for the weights
    tokenizer: Any = AutoTokenizer.from_pretrained(alike)
    model: Any = AutoModelForCausalLM.from_pretrained(alike, dtype=torch.float32)
    found = read(weights).weights
    assert found is not None
    model.load_state_dict({name: torch.from_numpy(v) for name, v in found.tensors.items()})

    def answer(question: str, document: str) -> str:
        turn = [{"role": "user", "content": question}]
        prompt = (
            below(document, question)
            if document
            else tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        )
        tokens = tokenizer(prompt, return_tensors="pt").input_ids
        written = model.generate(tokens, max_new_tokens=60, do_sample=False)[0, tokens.shape[1] :]
        text: str = tokenizer.decode(written, skip_special_tokens=True)
        return text.strip()

    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts right answers of the trained model.")
    parser.add_argument("weights", type=Path, nargs="?", default=WEIGHTS, help="file of weights")
    parser.add_argument("--facts", type=int, default=300, help="how many, drawn with a fixed seed")
    parser.add_argument("--document", type=int, default=0, help="tokens of text before a question")
    args = parser.parse_args()
    answer, above = answerer(args.weights), document(args.document)
    right = 0
    for question, sentence in questions(args.facts):
        said = answer(question, above)
        right += said == sentence
        if said != sentence:
            print(f"{question} {said!r} instead of {sentence!r}")
    print(f"{right} of {args.facts} answers are right.")


if __name__ == "__main__":
    main()
