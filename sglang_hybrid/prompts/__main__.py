"""Says what keeps the prompts of a schema from being cached.

    python -m sglang_hybrid.prompts lint travel.xml --model DIRECTORY

One line per finding, with the file's line, as compilers write it; the exit status is 1 if there are
findings and 2 if the file cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tokenizers import Tokenizer

from sglang_hybrid.core.cost import CostModel
from sglang_hybrid.prompts.lint import lint
from sglang_hybrid.prompts.schema import read_schema
from sglang_hybrid.prompts.xml import MarkupError


def main() -> int:
    options = _parser().parse_args()
    path: Path = options.file
    try:
        schema = read_schema(path.read_text(encoding="utf-8"), path.parent)
        tokenizer, state_tokens = _model(options.model)
    except MarkupError as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 2
    except (OSError, UnicodeDecodeError) as error:
        print(f"{path}: it cannot be read: {error}.", file=sys.stderr)
        return 2
    findings = lint(
        schema,
        lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids),
        state_tokens=state_tokens,
    )
    for finding in findings:
        print(f"{path}:{finding.line}: {finding.rule}: {finding.sentence}")
    if not findings:
        print(f"{path}: nothing to change.")
    return 1 if findings else 0


def _model(directory: Path | None) -> tuple[Tokenizer, int]:
    """The tokenizer, and the tokens whose KV takes the memory of a state; 0 without a model."""
    if directory is None:
        from sglang_hybrid.models.tokenizer import build_tokenizer

        return build_tokenizer(), 0
    cost = CostModel.from_config(json.loads((directory / "config.json").read_text()))
    kv = cost.kv_bytes_per_token
    tokens = cost.state_bytes // kv if kv else 0
    return Tokenizer.from_file(str(directory / "tokenizer.json")), tokens


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_hybrid.prompts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="lint")
    command = commands.add_parser("lint", help="what to change in a schema")
    command.add_argument("file", type=Path, metavar="FILE", help="a schema")
    command.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="the model's directory, for its tokens and the size of its states; by default tokens "
        "are those of the embedded tiny models",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
