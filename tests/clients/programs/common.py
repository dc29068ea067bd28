"""The questions of the programs, and their output. They run in the clients' environment and import
nothing of this package: each does what a user of its client would write.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel

RULES = " ".join(f"Rule {n} is kept by keeper {n * 7 % 31}." for n in range(60))
QUESTIONS = [f"Question {n}: in which room is lantern {n * 3}?" for n in range(6)]
ROOMS = ["north", "south", "east", "west"]
ROOM = {
    "type": "object",
    "properties": {"room": {"type": "string", "enum": ROOMS}},
    "required": ["room"],
    "additionalProperties": False,
}
NAMES = ["find", "count", "move"]
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": f"To {name} lanterns.", "parameters": ROOM},
    }
    for name in NAMES
]


class Lantern(BaseModel):
    """A lantern of the archive."""

    room: Literal["north", "south", "east", "west"]
    lit: bool


def main(package: str, run: Callable[[str], dict[str, Any]]) -> None:
    """Call `run` with the server's address, the program's argument, on an empty cache and once
    more. Print what both saw as one line of JSON, with the version of `package`.

    run: gives `answers`, in the order of the requests; `prompts`, the tokens of their prompts as
        the client reports them; `cached`, how many of these came from the cache, as it reports
        them; and `logprobs`, if it asks for some.
    """
    url = sys.argv[1]
    flush = urllib.request.Request(url + "/flush_cache?timeout=30", method="POST")
    urllib.request.urlopen(flush).close()
    print(json.dumps({"version": version(package), "runs": [run(url), run(url)]}))


def tokenizer(url: str) -> str:
    """The folder of the served model's tokenizer."""
    with urllib.request.urlopen(url + "/model_info") as answer:
        return str(json.load(answer)["tokenizer_path"])
