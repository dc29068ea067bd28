"""Rules for what a request asks of a model and its answer: sampling parameters, grammars, log
probabilities, positions. Knows nothing of SGLang.

Each function raises ValueError with a sentence that names the field, its value and its range.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from sglang_hybrid.core.sentences import quote
from sglang_hybrid.extensions.guard.patterns import VALUES, check_patterns
from sglang_hybrid.serving.requests.bodies import json_shape
from sglang_hybrid.serving.requests.fields import INT32, INT64, is_int64, token_ids, within

MOST_SAMPLES = 1_024
"""Answers to one prompt (`n`). SGLang copies the prompt that many times before it looks at it."""

MOST_TOP_LOGPROBS = 1_000
"""Alternatives per token."""

MOST_LOGPROBS = 1 << 22
"""Log probabilities in one answer. Each takes about 100 bytes in each of three processes."""

USUAL_TOP_LOGPROBS = 20
"""Alternatives per token that OpenAI's API takes: as many are given for each token of a context."""

LARGEST_BIAS = 10**9
HIGHEST_TEMPERATURE = 10**6
"""Larger ones are not finite in float32 when they meet a logit, and then nothing can be drawn."""

LEAST_PENALTY = 1e-3
"""The least `repetition_penalty`, which logits are divided by: smaller ones make them infinite."""

RANGES: Mapping[str, tuple[float, float]] = {
    "n": (1, MOST_SAMPLES),
    "temperature": (0, HIGHEST_TEMPERATURE),
    "max_new_tokens": (0, INT64 - 1),
    "min_new_tokens": (0, INT32 - 1),
    "top_k": (-1, INT32 - 1),
    "repetition_penalty": (LEAST_PENALTY, 2),
    "stream_interval": (1, INT32 - 1),
}
"""Bounds of sampling parameters, beside what SGLang itself checks (sampling_params.py, `verify`).
"""

MOST_STOPS = 32
"""Texts, and patterns, that end an answer; SGLang has the same bound, behind these checks, which
compile the patterns.
"""

LONGEST_STOP = 1_024
"""Characters of a text that ends an answer: each step looks for each beginning of it."""

LONGEST_PATTERN = 256
"""Characters of a pattern that ends an answer; in SGLang, bytes."""

GRAMMARS = ("json_schema", "structural_tag", "regex", "ebnf")
"""Sampling parameters that are compiled."""

LONGEST_GRAMMAR = 1 << 18
LONGEST_WITH_WORDS = 1 << 19
"""Characters of a grammar: without what one in JSON says to people (`WORDS`), and with it."""

WORDS = ("description", "title", "$comment")
"""Fields of a JSON schema that its compiler passes over."""

MOST_PARTS = 1 << 13
MOST_OPEN = 1_000
MOST_PAIRS = 1_000_000
"""Bounds of a grammar in JSON: its objects and lists; those of its parts that take any value; and
the sum of the squares of its objects' lengths. With a vocabulary of 128,000, on one core of a busy
machine, xgrammar compiles 200 tools of 8 parameters (3,603 objects and lists) in 2.9 seconds, 3,000
optional texts of one object in 4.7, 1,000 optional properties that are `{}` in 4.5, and 1,000 that
are `true` in 15. Of these, 3,000 in one object took gigabytes and minutes.
"""

ADDITIONAL = ("additionalProperties", "unevaluatedProperties", "patternProperties")
"""Fields of a JSON schema by which an object takes members that it does not name."""

WRITTEN = {"$ref", "format"}
"""Fields of a JSON schema that its compiler writes into warnings."""

JSON_TEXTS = ("json_schema", "structural_tag")
"""Sampling parameters that are JSON within a text, which is compiled: the time grows faster than
the depth."""

LONGEST_NAME = 128
"""Characters of what becomes part of a file's name."""

_EXPECTED = re.compile(
    r"Expected `(?P<wanted>[^`]*)`, got `(?P<got>[^`]*)`(?: - at `(?P<where>[^`]*)`)?"
)


def logprobs(
    start: int, top: int, chosen: int, prompt: int, answer: int, vocabulary: int, context: int
) -> None:
    """The log probabilities that a request asks for.

    start: `logprob_start_len`. top: `top_logprobs_num`. chosen: how many `token_ids_logprob`.
    prompt, answer: tokens of the prompt, and of the longest answer. context: of the model.
    """
    within("logprob_start_len", start, -1, prompt)
    within("top_logprobs_num", top, 0, min(MOST_TOP_LOGPROBS, vocabulary))
    positions = answer + (prompt - start if start >= 0 else 0)
    asked = positions * (1 + top + chosen)
    most = max(MOST_LOGPROBS, (1 + USUAL_TOP_LOGPROBS) * context)
    if asked > most and top + chosen:
        raise ValueError(
            f"top_logprobs_num is {top} and token_ids_logprob names {chosen} tokens, which makes "
            f"up to {asked:,} log probabilities for {positions:,} tokens; at most "
            f"{most:,} are given. Ask for fewer, raise logprob_start_len or lower "
            "max_new_tokens."
        )


def sampling_params(
    params: Mapping[str, Any],
    schema: type[msgspec.Struct],
    internal: frozenset[str],
    vocabulary: int,
) -> None:
    """Sampling parameters have the types of `schema`, whose fields are all that a client may set,
    and lie in their ranges.
    """
    for name in params:
        if name in internal:
            raise ValueError(f"sampling_params.{name} is set by the server itself; leave it out.")
    typed("sampling_params", params, schema)
    for name, value in params.items():
        if name in RANGES and value is not None:
            within(f"sampling_params.{name}", value, *RANGES[name])
        elif type(value) is int and not -INT64 <= value < INT64:
            raise ValueError(f"sampling_params.{name} is {quote(value)}; it must fit in 64 bits.")
    token_ids("sampling_params.stop_token_ids", [*(params.get("stop_token_ids") or ())], vocabulary)
    for token, bias in (params.get("logit_bias") or {}).items():
        if not _is_token(token, vocabulary):
            raise ValueError(
                f"sampling_params.logit_bias has the key {quote(token)}; its keys are token ids "
                f"from 0 to {vocabulary - 1}."
            )
        if not abs(bias) <= LARGEST_BIAS:
            within(f"sampling_params.logit_bias[{token!r}]", bias, -LARGEST_BIAS, LARGEST_BIAS)
    stops("sampling_params.stop", params.get("stop"), LONGEST_STOP)
    field = "sampling_params.stop_regex"
    check_patterns(field, stops(field, params.get("stop_regex"), LONGEST_PATTERN))
    for field in GRAMMARS:
        if text := params.get(field):
            grammar(field, text)


def stops(field: str, given: str | Sequence[str] | None, longest: int) -> Sequence[str]:
    """The texts or patterns that end an answer: few, and of `longest` characters at most."""
    listed = (given,) if isinstance(given, str) else given or ()
    if len(listed) > MOST_STOPS:
        raise ValueError(f"{field} has {len(listed):,} items; it may have {MOST_STOPS} at most.")
    for at, one in enumerate(listed):
        if len(one) > longest:
            raise ValueError(
                f"{field}[{at}] has {len(one):,} characters; it may have {longest:,} at most."
            )
    return listed


def typed(field: str, value: object, schema: type[msgspec.Struct]) -> None:
    """Check that `value` is an object with the types of `schema`."""
    try:
        msgspec.convert(value, schema)
    except msgspec.ValidationError as error:
        raise ValueError(of_types(error, field, value)) from None


def grammar(field: str, text: str) -> None:
    """A grammar that is compiled in the scheduler's process is of a bounded size, and what its
    compiler may write to the log is printable. Raises ValueError.
    """
    is_json = field in JSON_TEXTS
    _at_most(field, len(text), LONGEST_WITH_WORDS if is_json else LONGEST_GRAMMAR, "characters")
    if is_json:
        _grammar_in_json(field, text)


@lru_cache(maxsize=32)
def _grammar_in_json(field: str, text: str) -> None:
    """Prompts of a batch have the same one, so that those of late are kept."""
    content = text.encode(errors="replace")
    shape = json_shape(content)
    shape.check(f"sampling_params.{field}")
    _at_most(field, shape.containers, MOST_PARTS, "properties, alternatives and lists")
    try:
        decoded = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):  # what compiles it says so
        _at_most(field, len(text), LONGEST_GRAMMAR, "characters")
        return
    open_parts = pairs = words = 0
    todo = [(decoded, False)]
    while todo:
        part, is_value = todo.pop()
        open_parts += part is True or part == {}
        if isinstance(part, list):
            todo += ((each, is_value) for each in part)
        if not isinstance(part, dict):
            continue
        pairs += len(part) ** 2
        for name, each in part.items():
            todo.append((each, is_value or name in VALUES))
            open_parts += name in ADDITIONAL and isinstance(each, dict) and bool(each)
            if not isinstance(each, str):
                continue
            if name in WORDS and not is_value:
                words += len(each)
            elif name in WRITTEN and not each.isprintable():
                raise ValueError(
                    f"sampling_params.{field} has {name} {quote(each)}; leave out what cannot be "
                    "printed."
                )
    _at_most(field, len(text) - words, LONGEST_GRAMMAR, "characters beside its descriptions")
    _at_most(field, open_parts, MOST_OPEN, "parts that take any value")
    _at_most(field, pairs, MOST_PAIRS, "pairs of members in its objects")


def _at_most(field: str, count: int, most: int, of: str) -> None:
    if count > most:
        raise ValueError(
            f"sampling_params.{field} has {count:,} {of}, which takes too long to compile; it may "
            f"have {most:,} at most."
        )


def positions(field: str, given: Sequence[int], prompt: int) -> None:
    """`given` [n > 0] are rising positions in a prompt of so many tokens."""
    if not given:
        raise ValueError(f"{field} is empty; leave it out, or give positions in the prompt.")
    for at, position in enumerate(given):
        before = given[at - 1] if at else -1
        if not is_int64(position) or not before < position < prompt:
            raise ValueError(
                f"{field}[{at}] is {quote(position)}; positions must rise and be from 0 to "
                f"{prompt - 1}."
            )


def of_types(error: msgspec.ValidationError, where: str, value: Any = None) -> str:
    """A sentence from msgspec's error; `value` is what was converted, at the path `where`."""
    found = _EXPECTED.match(str(error))
    if found is None:
        return f"{where}: {error}."
    path = (found["where"] or "$").removeprefix("$")
    name = re.match(r"\.(\w+)", path)
    shows = ""
    if name is not None and isinstance(value, Mapping) and name[1] in value:
        shows = f" is {quote(value[name[1]])}; it"
    wanted = found["wanted"].replace(" | ", " or ")
    return f"{where}{path}{shows} must be {wanted}, not {found['got']}."


def _is_token(text: str, vocabulary: int) -> bool:
    plain = text.isascii() and text.isdecimal() and len(text) < len(str(INT64))
    return plain and int(text) < vocabulary
