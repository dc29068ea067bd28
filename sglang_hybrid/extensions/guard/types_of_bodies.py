"""Mistakes in the types of a body: one sentence, without names of the server's classes."""

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar

import orjson
from pydantic import BaseModel

from sglang_hybrid.core.sentences import quote
from sglang_hybrid.serving.requests.errors import mistakes_are_value_errors

__all__ = ["is_repeated", "mistakes_are_value_errors", "mistakes_of_types"]

Model = TypeVar("Model", bound=BaseModel)

MOST_FIELDS: Final = 3
"""Fields of a body that the sentence about its types names."""

EXPECTED: Final = "Input should be "
TYPE_NAMES: Final = frozenset(("body", "str", "int", "float", "bool", "bytes", "dict", "list"))


def is_repeated(request: Model) -> Model:
    """Validates a request whose fields, without `input`, its answer repeats. Raises ValueError for
    one that SGLang cannot write as JSON, such as a number of more than 64 bits.
    """
    try:
        orjson.dumps(request.model_dump(mode="json", exclude={"input"}, warnings=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"the answer cannot repeat the request ({error}).") from None
    return request


def mistakes_of_types(errors: Iterable[Mapping[str, Any]]) -> str:
    """One sentence that says which fields of a body are of another type than they should be.

    errors: pydantic's or FastAPI's (`loc`, `type`, `msg` and `input` of each). Left out are classes
    of the server, and the names of types that stand in `loc` where a field may have several.
    """
    expected: dict[str, list[str]] = {}
    values: dict[str, str] = {}
    for error in errors:
        if error["type"] == "json_invalid":
            why = error.get("ctx", {}).get("error", "it cannot be read")
            return f"the body is no JSON: {why} (character {error['loc'][-1]})."
        if error["type"] == "is_instance_of":
            continue
        field = _field(error["loc"])
        said = expected.setdefault(field, [])
        words = error["msg"].partition(", unable to")[0].removeprefix("Value error, ").rstrip(".")
        if words.startswith(EXPECTED):
            values[field] = quote(error.get("input"))
            words = words.removeprefix(EXPECTED)
        if words not in said:
            said.append(words)
    sentences = [
        f"{field} is {values[field]}; it should be {' or '.join(said)}"
        if field in values
        else f"{field}: {', '.join(said)}"
        for field, said in expected.items()
    ]
    more = len(sentences) - MOST_FIELDS
    return "; ".join(sentences[:MOST_FIELDS]) + (f"; and {more} more." if more > 0 else ".")


def _field(loc: Iterable[str | int]) -> str:
    """The name of a field as Python writes it: `messages[0].content`."""
    name = ""
    for part in loc:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part not in TYPE_NAMES and part.replace("-", "_").isidentifier():
            name += f".{part}" if name else part
    return name or "the body"
