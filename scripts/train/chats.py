"""The text of the model's training: conversations about facts, with answers marked."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from scripts.train.facts import Fact
from sglang_hybrid.extensions.cpu.models import lexicon
from sglang_hybrid.extensions.cpu.models.tokenizer import BOS, EOS, TURN_END, TURN_START

Encode = Callable[[str], list[int]]

ABOUT = {
    "": (
        "What does {} do?", "What is {}?", "What does {} mean?", "Explain {}.", "What is {} for?",
        "Tell me about {}.", "How does {} work?", "Describe {}.", "{}?", "{}", "what does {} do",
        "what is {}", "When do I use {}?", "Can you explain what {} does?", "And {}?",
        "Please tell me what {} does.", "What do I need {} for?", "Which purpose does {} have?",
    ),
    "module": (
        "What does the module {} do?", "What is in the module {}?", "What is the {} module for?",
    ),
    "class": ("What is the class {}?", "What is a {}?", "What is the class {} for?"),
    "function": (
        "What does the function {} do?", "What does {}() do?", "What happens when I call {}?",
        "What does `{}` do?", "How do I use {}?",
    ),
}  # fmt: skip
"""Questions by the kind of what they ask about; those of "" fit each."""

SMALL_TALK = {
    "Hello! I am a very small model. Ask me what a name of Python's standard library means.": (
        "Hello", "Hi", "Hello!", "Hi!", "Hey", "Good morning", "Good evening!", "hello there",
        "hi there!", "Hello, how are you?", "How are you?", "Are you there?",
    ),
    "I am a very small hybrid model. I know one sentence about most names of Python's standard "
    "library.": (
        "Who are you?", "What are you?", "What is your name?", "Tell me about yourself.",
        "Which model are you?", "Introduce yourself.", "who are you", "What do you know?",
        "What can you do?", "What can I ask you?", "Help", "help me", "How can you help me?",
        "Are you a language model?", "What should I ask?",
    ),
    "You are welcome.": ("Thanks", "Thank you!", "Thank you very much.", "thanks a lot"),
    "Goodbye.": ("Bye", "Goodbye!", "Good night", "See you later.", "bye bye"),
}  # fmt: skip

UNKNOWN = (
    "I do not know that. I only know one sentence about most names of Python's standard library."
)

SUBJECTS = (
    "What is the {} of the {}?", "Who {} the {}?", "Where is the {}?", "When was the {} {}?",
    "Why is {} {}?", "Which {} comes first?", "How many {} are there?", "Write a {} about the {}.",
    "Do you know the {}?", "How do I {} a {}?", "Who keeps the {}?", "What is {}?",
    "Tell me about {}.", "Is the {} {}?", "What does the {} say about {}?", "Give me a {} of {}.",
    "Translate {} to {}.", "What happened to the {} in the {}?", "Say {}.", "{} {} {}",
    "Which {} is the {} {}?", "Sum up the {}.",
)  # fmt: skip
"""Questions about what the model cannot know; their gaps are filled with words."""


def about(fact: Fact, drawn: random.Random) -> str:
    """A question whose answer is the fact's sentence, in a form that is drawn at random."""
    return drawn.choice(ABOUT[""] + ABOUT[fact.kind]).format(fact.name)


def below(text: str, question: str) -> str:
    """A prompt without the chat template: a text, which ends its last line, and a question."""
    return f"{text}Question: {question}\nAnswer:"


@dataclass(frozen=True)
class Sequence:
    """Tokens, and which of them are answers (the only ones that the model learns to write)."""

    tokens: list[int]
    answered: list[bool]


class Conversations:
    """An endless stream of conversations, the same for the same seed.

    With ``rare``, texts and questions also hold words of `lexicon.derived_words`, whose tokens need
    not have a row in the model (`scripts.train.training.Vocabulary`).
    """

    def __init__(self, facts: list[Fact], encode: Encode, seed: int, rare: bool = True) -> None:
        self._random = random.Random(seed)
        self._encode = encode
        self._facts = facts
        self._words = list(lexicon.common_words())
        if rare:
            self._words += self._random.sample(list(lexicon.derived_words()), len(self._words) // 3)
        self._left: list[Fact] = []

    def sequences(self, length: int) -> Iterator[Sequence]:
        """Sequences of exactly ``length`` tokens: conversations one after another, the last cut."""
        tokens: list[int] = []
        answered: list[bool] = []
        while True:
            while len(tokens) < length:
                for text, learnt in self._conversation(length):
                    ids = self._encode(text)
                    tokens += ids
                    answered += [learnt] * len(ids)
            yield Sequence(tokens[:length], answered[:length])
            tokens, answered = [], []

    def _conversation(self, length: int) -> Iterator[tuple[str, bool]]:
        """Texts in order, and whether each is an answer."""
        if self._random.random() < 0.3:
            yield from self._document(length)
            return
        if self._random.random() < 0.3:
            yield TURN_START + "system\n" + self._text(length) + TURN_END + "\n", False
        for _ in range(self._random.randint(1, 12)):
            question, answer = self._exchange()
            yield f"{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n", False
            yield answer + TURN_END, True
            yield "\n", False

    def _document(self, length: int) -> Iterator[tuple[str, bool]]:
        """A text, questions below it and their answers, without a template."""
        text = self._text(length) + "\n" if self._random.random() < 0.7 else ""
        begin = BOS if self._random.random() < 0.3 else ""
        for _ in range(self._random.randint(1, 8)):
            question, answer = self._exchange()
            yield begin + below(text, question), False
            yield f" {answer}{EOS}", True
            begin, text = "", "\n"

    def _exchange(self) -> tuple[str, str]:
        """A question and its answer."""
        kind = self._random.random()
        if kind < 0.04:
            answer = self._random.choice(list(SMALL_TALK))
            return self._random.choice(SMALL_TALK[answer]), answer
        if kind < 0.09:
            question = self._random.choice(SUBJECTS)
            blanks = question.count("{}")
            return question.format(*self._random.choices(self._words, k=blanks)), UNKNOWN
        if kind < 0.11:  # a name that nothing has
            other = self._random.choice(self._facts)
            name = f"{other.name.split('.')[0]}.{self._random.choice(self._words)}"
            return about(Fact(name, "function", ""), self._random), UNKNOWN
        if not self._left:
            self._left = self._random.sample(self._facts, len(self._facts))
        fact = self._left.pop()
        return about(fact, self._random), fact.says

    def _text(self, length: int) -> str:
        """A text that says nothing of what is asked below it."""
        kind = self._random.random()
        if kind < 0.2:  # a docstring
            name = self._random.choice(self._facts).name.split(".")[0]
            text = sys.modules.get(name, sys).__doc__ or ""
            return text[: self._random.randint(20, 3 * length)]
        lines: list[str] = []
        line = self._line()
        for number in range(1, self._random.randint(1, max(2, length // 24))):
            if kind < 0.85:  # else the same line again and again
                line = self._line()
            lines.append(f"Article {number}. {line}" if self._random.random() < 0.3 else line)
        return self._random.choice(("\n", " ", "\n\n")).join(lines)

    def _line(self) -> str:
        if self._random.random() < 0.3:
            return self._random.choice(self._facts).says
        words = self._random.choices(self._words, k=self._random.randint(4, 16))
        for place in range(len(words)):
            if self._random.random() < 0.1:
                words[place] += self._random.choice(
                    (",", ";", ":", f" {self._random.random():.2f}")
                )
        return " ".join(words).capitalize() + self._random.choice((".", ".", "?", "!"))
