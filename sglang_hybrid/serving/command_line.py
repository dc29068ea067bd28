"""Finds mistakes of a command line before SGLang is imported.

Importing SGLang takes ten seconds and more. The names of its flags are read from its sources, so
that a misspelt one is found at once. Those flags that are checked beforehand (`preflight.py`) are
declared here as SGLang declares them; what is not exactly one of them is left to SGLang's parser.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from sglang_hybrid.core.named_files import decode_json
from sglang_hybrid.core.sentences import suggest

_NAME = re.compile(r"--[a-z0-9][a-z0-9-]*")
_FIELD = re.compile(r"^    ([a-z0-9_]+):", re.MULTILINE)
_READABLE = re.compile(r"\d+$")

LIKE = 0.75
"""The least likeness, of 1, of a misspelt flag and the one that it may mean, of which there are
hundreds.
"""

RENAMED = {
    "--mamba-scheduler-strategy": "--mamba-radix-cache-strategy",
    "--disable-piecewise-cuda-graph": "--disable-prefill-cuda-graph",
}
"""Names that flags of SGLang had in earlier releases, by which recipes still call them."""


def sglang_flags() -> set[str]:
    """Names that the sources of the installed SGLang's parser mention as flags: all of its flags,
    but for `--no-` before a switch, and some more.
    """
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0], "srt")
    names: set[str] = set()
    for file in (root / "server_args.py", *(root / "arg_groups").rglob("*.py")):
        source = file.read_text(encoding="utf-8")
        names.update(_NAME.findall(source))
        if file.parent.name == "fields" or file.name == "server_args.py":
            names.update("--" + name.replace("_", "-") for name in _FIELD.findall(source))
    return names


def misspelt(argv: Iterable[str], ours: Collection[str], theirs: Collection[str]) -> str | None:
    """The first word of a command line that looks like a flag and is none, with what it may mean;
    None if there is none.

    theirs: SGLang's, which may be cut short (`--tp 2`), as its documentation does. Ours may not.
    """
    names = sorted({*ours, *theirs})
    for text in argv:
        name = text.partition("=")[0]
        if not name.startswith("--") or name == "--" or " " in name or name in ours:
            continue
        if not any(each.startswith((name, name.replace("--no-", "--", 1))) for each in theirs):
            now = RENAMED.get(name)
            return f"{name} (it is {now} now)" if now else name + suggest(name, names, LIKE)
    return None


def _number(text: str) -> int | None:
    """A whole number; None for one with a unit, as 64k, which SGLang reads."""
    return int(text) if _READABLE.match(text) else None


def _adapter(text: str) -> Any:
    return decode_json(text) if text.startswith("{") else text


Read = Callable[[str], Any]

CHECKED: dict[Read, dict[str, Any]] = {
    int: {
        **{"--tp-size --tensor-parallel-size": 1, "--pp-size --pipeline-parallel-size": 1},
        **{"--dp-size --data-parallel-size": 1, "--nnodes": 1, "--port": 30_000},
        **{"--stream-interval": 1, "--tokenizer-worker-num": 1, "--detokenizer-worker-num": 1},
        **{"--page-size": None, "--max-running-requests": None, "--max-mamba-cache-size": None},
        **{"--hicache-size": 0, "--grpc-port": None, "--speculative-eagle-topk": None},
    },
    _number: {"--context-length": None, "--max-prefill-tokens": 16_384, "--max-total-tokens": None},
    float: {
        **{"--mem-fraction-static": None, "--mamba-full-memory-ratio": None},
        "--hicache-ratio": None,
    },
    str: {
        **{"--model-path --model": None, "--tokenizer-path": None, "--load-format": "auto"},
        **{"--json-model-override-args": "{}", "--host": "127.0.0.1", "--device": None},
        **{"--attention-backend": None, "--prefill-attention-backend": None},
        **{"--decode-attention-backend": None, "--sampling-backend": None, "--dtype": "auto"},
        **{"--speculative-algorithm": None, "--lora-backend": "csgmv", "--chat-template": None},
        **{"--api-key": None, "--admin-api-key": None, "--ssl-keyfile": None},
        "--ssl-keyfile-password": None,
        "--speculative-draft-model-path --speculative-draft-model": None,
    },
}
"""SGLang's flags that take one value: what reads it, their names and their default."""

SWITCHES = (
    *("--skip-tokenizer-init", "--disable-radix-cache", "--enable-dp-attention", "--enable-trace"),
    *("--enable-unified-memory", "--enable-page-major-kv-layout", "--is-embedding"),
    *("--grpc-mode", "--smg-grpc-mode"),
    "--enable-hierarchical-cache --enable-hicache",
)
"""SGLang's flags without a value."""


def add_checked_flags(parser: argparse.ArgumentParser) -> None:
    """Add those flags of SGLang that are checked before it is imported."""
    for read, flags in CHECKED.items():
        for names, default in flags.items():
            parser.add_argument(*names.split(), type=read, default=default)
    for names in SWITCHES:
        parser.add_argument(*names.split(), action="store_true")
    parser.add_argument("--lora-paths", nargs="*", type=_adapter)


def add_sglang_flags(parser: argparse.ArgumentParser) -> None:
    """Add all of SGLang's flags, for `--help all`: where SGLang is not imported yet, without
    running its package's own file, which imports much that its parser does not need. The process
    has to end after that.
    """
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    sys.modules.setdefault("sglang", importlib.util.module_from_spec(spec))
    from sglang.srt.server_args import ServerArgs

    ServerArgs.add_cli_args(parser)
