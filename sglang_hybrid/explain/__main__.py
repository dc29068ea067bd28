"""Says why a prompt, or a recent request, was not hit further in the server's prefix cache.

    python -m sglang_hybrid.explain --prompt "Once upon a time"
    python -m sglang_hybrid.explain --messages chat.json
    python -m sglang_hybrid.explain --request-id 5f0c...

The server must have been started with sglang_hybrid.launch_server. Asking changes nothing in its
cache. A request's id is `meta_info.id` of a /generate response and `id` of an OpenAI one. A prompt
that is sent with an extra key, a cache salt or an adapter is explained with them only. Times count
back from the newest request of the same tenant.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import requests

from sglang_hybrid.core.named_files import read_json, read_text
from sglang_hybrid.core.options import read_by, server_url
from sglang_hybrid.core.programs import Parser, program
from sglang_hybrid.core.sentences import print_line
from sglang_hybrid.core.traffic.requests import MOST_TOKENS
from sglang_hybrid.explain.miss_report import MissReport
from sglang_hybrid.explain.render import render
from sglang_hybrid.serving.answers import read_answer
from sglang_hybrid.serving.requests.secrets import read_key

PROMPT_FIELDS = (
    *("messages", "tools", "tool_choice", "reasoning_effort", "chat_template_kwargs"),
    *("continue_final_message", "response_format", "task", "thinking"),
)
"""Fields of a chat completion that its prompt is made of."""

TIMEOUT = 60.0  # seconds; a busy server answers between two steps
LONGEST = 500
"""Characters of a server's sentence that are printed."""


class Failed(ValueError):
    """The reason why there is no report, in one sentence."""


@program
def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    report = explain(options)
    if options.json:
        print(json.dumps(msgspec.to_builtins(report), indent=2), flush=True)
        return 0
    for line in render(report):
        print_line(line)
    return 0


def explain(options: argparse.Namespace) -> MissReport:
    """Ask the server. Raises `Failed`, and FileError for a prompt that cannot be read."""
    server = Connection(options.url, options.api_key)
    chat = {} if options.messages is None else _chat(options.messages)
    flags = {name: getattr(options, name) for name in ("extra_key", "cache_salt", "lora_path")}
    body = {name: chat.get(name) if flag is None else flag for name, flag in flags.items()}
    if options.lora_path is None and "model" in chat:
        body["model"] = chat["model"]
    if options.request_id is not None:
        body["request_id"] = options.request_id
    else:
        body["input_ids"] = _tokens(server, options, chat)
    answer = server.post("/hybrid_cache/explain", body)
    try:
        return msgspec.convert(answer, MissReport)
    except msgspec.ValidationError as error:
        raise Failed(f"{server.url} runs another version of sglang_hybrid ({error}).") from None


def _chat(file: Path) -> dict[str, Any]:
    """A request's body, of which `messages` may be all that there is."""
    chat = read_json(file, object, "JSON")
    body = chat if isinstance(chat, dict) else {"messages": chat}
    if not isinstance(body.get("messages"), list):
        raise Failed(f"{file} is neither a list of messages nor an object that has one.")
    return body


def _tokens(server: Connection, options: argparse.Namespace, chat: dict[str, Any]) -> list[int]:
    """The prompt's token ids; text and messages are tokenized by the server."""
    if options.input_ids is not None:
        return _numbers(options.input_ids)
    if chat:
        body = {name: chat[name] for name in PROMPT_FIELDS if name in chat}
    elif options.prompt_file is not None:
        body = {"prompt": read_text(options.prompt_file)}
    else:
        body = {"prompt": options.prompt}
    try:
        return msgspec.convert(server.post("/tokenize", body), _Tokens).tokens
    except msgspec.ValidationError as error:
        raise Failed(f"{server.url} answered no tokens ({error}).") from None


class _Tokens(msgspec.Struct):
    tokens: list[int]


class Connection:
    """A running server."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON that it answers. Raises `Failed`."""
        try:
            response = requests.post(
                self.url + path, json=body, headers=self._headers, timeout=TIMEOUT, stream=True
            )
            answer = read_answer(response)
        except requests.Timeout:
            raise Failed(f"{self.url} did not answer within {TIMEOUT:.0f} s.") from None
        except requests.RequestException:
            raise Failed(f"no server answers at {self.url}.") from None
        if response.ok:
            return answer
        why = answer.get("error") or answer.get("message") if isinstance(answer, dict) else None
        if response.status_code in (401, 403):
            raise Failed(f"{self.url} wants its API key; give it with --api-key.")
        if response.status_code == 404 and why in (None, "Not Found"):
            raise Failed(
                f"{self.url} has no {path}; was it started with sglang_hybrid.launch_server?"
            )
        raise Failed(_sentence(why) if why else f"{path} answered {response.status_code}.")


def _sentence(why: Any) -> str:
    if isinstance(why, dict):  # OpenAI's shape
        why = why.get("message", why)
    return str(why)[:LONGEST]


def _numbers(text: str) -> list[int]:
    """Ids as `1,2,3` or as a JSON list, or from a file that holds either (`@FILE`)."""
    if text.startswith("@"):
        text = read_text(Path(text[1:]))
    if text.count(",") >= MOST_TOKENS:
        raise Failed(f"--input-ids takes {MOST_TOKENS:,} tokens at most.")
    try:
        numbers = [int(number) for number in text.strip().strip("[]").split(",")]
    except ValueError:
        raise Failed("--input-ids wants numbers with commas between them.") from None
    if not all(0 <= number < 1 << 31 for number in numbers):
        raise Failed("--input-ids wants token ids: numbers from 0 on, below 2**31.")
    return numbers


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m sglang_hybrid.explain", description=__doc__.split("\n")[0])
    parser.add_argument("--url", type=server_url, default="http://127.0.0.1:30000")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", help="text, tokenized as for /generate")
    what.add_argument("--prompt-file", type=Path, help="the same from a file")
    what.add_argument(
        "--messages",
        type=Path,
        help="JSON: messages, or the body of a chat completion, whose extra_key, cache_salt and "
        "lora_path (or the adapter in its model's name) count where no flag gives them; the "
        "server's template is applied",
    )
    what.add_argument("--input-ids", help="token ids, 1,2,3 or @FILE")
    what.add_argument("--request-id", help="one of the recent requests")
    parser.add_argument("--extra-key", help="the extra_key that the prompt is sent with, if any")
    parser.add_argument("--cache-salt", help="the cache_salt that it is sent with, if any")
    parser.add_argument("--lora-path", help="the adapter's name that it is sent with, if any")
    parser.add_argument(
        "--api-key", type=read_by(read_key), help="of the server, if it wants one; @FILE reads it"
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
