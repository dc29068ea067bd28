"""The tokenizer of the tiny models."""

from tests.prompt_tokenizer import tokenizer

__all__ = ["tokenizer"]
