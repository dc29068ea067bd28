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

from scripts.train.chats import ABOUT, below
from scripts.train.facts import collect
from sglang_hybrid.models import ensure_tiny_model
from sglang_hybrid.models.tokenizer import build_tokenizer
from sglang_hybrid.models.trained import WEIGHTS, trained

LINE = "Article {}. The house of the river is a long way from the door.\n"


def answerer(weights: Path) -> Callable[[str, str], str]:
    """A function of a question and of a text above it, which answers greedily with the model of
    this file: in the chat template, or without one below a text that is not empty.
    """
    alike = ensure_tiny_model("nemotron-h")  # but for the weights
    tokenizer: Any = AutoTokenizer.from_pretrained(alike)
    model: Any = AutoModelForCausalLM.from_pretrained(alike, dtype=torch.float32)
    found = trained(weights).weights
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
    answer = answerer(args.weights)
    length = len(build_tokenizer().encode(LINE.format(1)).ids)
    document = "".join(LINE.format(number) for number in range(1, args.document // length + 1))
    drawn = random.Random(0)
    asked = drawn.sample(collect(), args.facts)
    right = 0
    for fact in asked:
        question = drawn.choice(ABOUT[""] + ABOUT[fact.kind]).format(fact.name)
        said = answer(question, document)
        right += said == fact.says
        if said != fact.says:
            print(f"{question} {said!r} instead of {fact.says!r}")
    print(f"{right} of {len(asked)} answers are right.")


if __name__ == "__main__":
    main()
