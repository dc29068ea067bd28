"""Patterns and grammars of a client cost the others little."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import xgrammar

from sglang_hybrid.extensions.guard import checks, grammars, parameters
from sglang_hybrid.extensions.guard.grammars import Grammars
from sglang_hybrid.extensions.guard.patterns import (
    check_patterns,
    is_found,
    schema_with_escaped_ends,
    with_escaped_ends,
)


@pytest.mark.parametrize(
    "pattern", ["(?:" * 50 + "a+" + ")+" * 50 + "b", "(a|a|aa)+b{1,50}c", "(a*)*" * 20 + "$x"]
)
def test_no_pattern_goes_back_and_forth(pattern: str) -> None:
    """Each would take Python's `re` hours."""
    check_patterns("stop_regex", [pattern])
    assert not is_found(pattern, "a" * 10_000)


def test_a_pattern_is_found_anywhere() -> None:
    assert is_found(r"[0-9]{2}\s?€", "it costs 15 € \ud83d")
    assert not is_found(r"^x", "yx")


@pytest.mark.parametrize(
    "pattern", ["(", r"(a)\1", "(?=a)", "a{1,5000}", "\ud83d", "[" * 200, r"\z", r"\pN+"]
)
def test_a_pattern_that_cannot_be_matched_so_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"^stop_regex is .*, which is no regular expression"):
        check_patterns("stop_regex", [pattern])


def properties(count: int, each: Any = None) -> str:
    each = {} if each is None else each
    return json.dumps({"type": "object", "properties": {f"p{at}": each for at in range(count)}})


def tools(count: int, words: int) -> str:
    """The schema by which SGLang has a model call one of so many tools."""
    parameter = {"type": "string", "enum": ["a", "b"], "description": "w" * words}
    parameters = {"type": "object", "properties": {f"p{at}": parameter for at in range(8)}}
    calls = [
        {"properties": {"name": {"enum": [f"t{at}"]}, "parameters": parameters}}
        for at in range(count)
    ]
    return json.dumps({"type": "array", "items": {"type": "object", "anyOf": calls}})


@pytest.mark.parametrize(
    ("field", "text", "said"),
    [
        ("json_schema", properties(9_000), "9,002 properties, alternatives and lists"),
        ("json_schema", properties(1_200), "1,200 parts that take any value"),
        ("json_schema", properties(1_200, True), "1,200 parts that take any value"),
        (
            "json_schema",
            properties(600, {"additionalProperties": {"type": "null"}})[:-1]
            + ", "
            + properties(600, {"patternProperties": {"a": False}})[1:].replace('"properties', '"x'),
            "1,200 parts that take any value",
        ),
        ("json_schema", properties(1_200, {"type": "null"}), "pairs of members in its objects"),
        ("json_schema", json.dumps({"enum": ["a" * 300_000]}), "characters beside its desc"),
        ("json_schema", json.dumps({"const": {"title": "a" * 300_000}}), "characters beside its"),
        ("json_schema", "a" * 300_000, "300,000 characters"),
        ("json_schema", json.dumps({"title": "a" * 600_000}), "600,013 characters"),
        ("ebnf", "root ::= " + "a" * 300_000, "has 300,009 characters"),
        ("json_schema", json.dumps({"anyOf": [{"$ref": "x\n[log] forged"}]}), r"\$ref 'x\\n"),
        ("structural_tag", json.dumps({"format": "\x1b[2J"}), "format"),
    ],
)
def test_a_grammar_is_of_a_bounded_size_and_can_be_printed(
    field: str, text: str, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        parameters.grammar(field, text)


def test_patterns_that_take_long_are_refused() -> None:
    """RE2 falls back to a slow matcher where it would have too many states at once."""
    check_patterns("stop_regex", [".{0,100}User:", r"\n\s*(User|Human):"])
    with pytest.raises(ValueError, match=r"^stop_regex takes too long to match: RE2 has 3,005 "):
        check_patterns("stop_regex", ["(a|b){1000}c"])
    check_patterns("stop_regex", ["(a|b){500}c"])
    with pytest.raises(ValueError, match="too long"):
        check_patterns("stop_regex", ["(a|b){500}c", "(a|b){500}d"])


def test_usual_grammars_are_taken() -> None:
    parameters.grammar("json_schema", properties(990))
    parameters.grammar("json_schema", tools(200, words=150))
    parameters.grammar("json_schema", json.dumps({"description": "two\nlines", "enum": ["a\tb"]}))
    parameters.grammar("json_schema", "no JSON")
    parameters.grammar("ebnf", 'root ::= "a"\n')


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("a\nb", "a\nb"),
        ("[^\n\r]+\n", "ab\n"),
        ("a\\\nb", "a\nb"),
        ("\\\\\nb", "\\\nb"),
        (r"\n[\n]b", "\n\nb"),
        ("[a\u2028]b", "\u2028b"),
    ],
)
def test_a_pattern_may_have_line_ends(pattern: str, text: str) -> None:
    """They match as in Python's `re`; the compiler of grammars takes none between brackets."""
    assert re.fullmatch(pattern, text)
    parameters.grammar("regex", pattern)
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(["a"]))
    escaped = with_escaped_ends(pattern)
    compiled = compiler.compile_regex(escaped)
    matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
    assert matcher.accept_string(text) and matcher.is_terminated()
    assert with_escaped_ends(escaped) == escaped


def test_patterns_of_schemas_may_have_line_ends() -> None:
    value = {"pattern": "a\nb"}
    schema = {
        "properties": {"x": {"type": "string", "pattern": "[^\n]*", "default": value}},
        "patternProperties": {"[^\n]": {"const": value}},
        "required": [12345678901234567890123],
    }
    text = json.dumps(schema)
    parameters.grammar("json_schema", text)
    escaped = schema_with_escaped_ends(text)
    assert json.loads(escaped) == {
        **schema,
        "properties": {"x": {"type": "string", "pattern": r"[^\n]*", "default": value}},
        "patternProperties": {r"[^\n]": {"const": value}},
    }
    assert schema_with_escaped_ends(escaped) is escaped
    assert schema_with_escaped_ends("no JSON\n") == "no JSON\n"


def test_a_schema_of_many_prompts_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 prompts of a batch with one of 16 KB took 12 seconds, in which nothing was served."""
    text = json.dumps({"type": "string", "pattern": r"\d", "title": "of this test"})
    read = [Mock(wraps=json.loads), Mock(wraps=msgspec.json.decode)]
    monkeypatch.setattr(json, "loads", read[0])
    monkeypatch.setattr(msgspec.json, "decode", read[1])
    for _ in range(3):
        parameters.grammar("json_schema", text)
        assert schema_with_escaped_ends(text) is text
    assert [each.call_count for each in read] == [1, 1]


def test_a_scheduler_is_sent_patterns_with_escapes() -> None:
    tag = json.dumps({"format": {"type": "regex", "pattern": "[^\n]"}})
    params: Any = SimpleNamespace(regex="[\r\n]", json_schema=None, structural_tag=tag)
    checks._escape_line_ends(params)
    assert params.regex == r"[\r\n]" and params.json_schema is None
    assert json.loads(params.structural_tag)["format"]["pattern"] == r"[^\n]"


def test_the_oldest_grammars_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MOST_BYTES", 100)
    monkeypatch.setattr(grammars, "MOST", 4)

    def of(size: int) -> Any:
        return SimpleNamespace(ctx=SimpleNamespace(memory_size_bytes=size))

    cache = Grammars()
    cache.update({"a": of(50), "b": of(40), "c": of(30)})
    assert list(cache) == ["b", "c"]
    cache["d"] = of(1_000)
    assert list(cache) == ["d"]
    cache.update({name: SimpleNamespace() for name in "efghi"})
    assert list(cache) == ["f", "g", "h", "i"]
    cache["f"] = of(60)
    assert list(cache) == ["g", "h", "i", "f"]
    cache.clear()
    cache.update({"j": of(59), ("json", "k"): of(35)})
    assert list(cache) == ["j", ("json", "k")] and cache.get("f") is None
