"""Schemas written as functions: what they come to, and what a function cannot say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest

from sglang_hybrid.extensions.schemas.declared.resolve import read_prompt, resolve
from sglang_hybrid.extensions.schemas.declared.schema import read_schema
from sglang_hybrid.prompts.python import PythonSchema, schema


@schema(role="system")
def rules(add: Callable[[str], None], brief: bool, language: Literal["en", "fr"]) -> None:
    """Instructions of an archive's keeper."""
    add("You keep an archive. ")
    if brief:
        add("Answer in < 10 words. ")
    match language:
        case "en":
            add("Write English.")
        case "fr":
            add("Write French.")
            if brief:
                add(" Soon.")


def said(found: PythonSchema, user: str = "Who & when?", **chosen: Any) -> str:
    prompt = read_prompt(found(**chosen).pml(user))
    return "".join(piece.text for piece in resolve(read_schema(found.pml), prompt).pieces)


def test_a_function_is_a_schema_and_its_call_a_selection() -> None:
    assert said(rules) == "You keep an archive. Who & when?"
    assert said(rules, brief=True) == "You keep an archive. Answer in < 10 words. Who & when?"
    assert said(rules, language="fr") == "You keep an archive. Write French.Who & when?"
    assert said(rules, brief=True, language="fr") == (
        "You keep an archive. Answer in < 10 words. Write French. Soon.Who & when?"
    )
    assert [module.name for module in read_schema(rules.pml).modules()] == [
        "brief",
        "en",
        "fr",
        "brief",
    ]


@pytest.mark.parametrize("user", ["def f():\n    return 1\n\n", " a\r\nb\r", "\n", "", "\t<&>"])
def test_a_users_message_stays_as_it_is(user: str) -> None:
    assert said(rules, user) == f"You keep an archive. {user}"


def test_what_is_not_an_argument_or_a_case_is_named() -> None:
    with pytest.raises(ValueError, match=r"rules\(\) has no argument 'short'"):
        rules(short=True)
    with pytest.raises(ValueError, match=r"language of rules\(\) is 'de'; it can be en, fr"):
        rules(language="de")


def unknown_statement(add: Any, a: bool) -> None:
    print("text")


def other_condition(add: Any, a: bool) -> None:
    if not a:
        add("text")


def with_else(add: Any, a: bool) -> None:
    if a:
        add("text")
    else:
        add("other")


def open_case(add: Any, a: str) -> None:
    match a:
        case _:
            add("text")


def computed_text(add: Any, a: str) -> None:
    add("text" + a)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (unknown_statement, "line 2: a statement is add"),
        (other_condition, "line 2: a choice is made by one argument"),
        (with_else, "line 2: an `if` has no `else`"),
        (open_case, "line 2: each `case` is a text"),
        (computed_text, "line 2: a statement is add"),
    ],
)
def test_what_a_schema_cannot_express_is_named(
    function: Callable[..., None], sentence: str
) -> None:
    with pytest.raises(ValueError) as error:
        schema()(function)
    assert f"{function.__name__}(), {sentence}" in str(error.value)
