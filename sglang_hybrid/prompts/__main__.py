"""Says what keeps prompts from being cached: those of a schema, or those that were recorded.

    python -m sglang_hybrid.prompts lint travel.xml --model DIRECTORY
    python -m sglang_hybrid.prompts lint --recorded TRACE --model DIRECTORY

One line per finding, with the schema's line, as compilers write it, or with the tenant's name in
the trace; the exit status is 1 if there are findings and 2 if the file cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.named_files import MOST_BYTES, FileError, read_bytes, read_json, read_text
from sglang_hybrid.core.options import integer
from sglang_hybrid.core.programs import Parser, UsageError, program
from sglang_hybrid.core.sentences import print_line, quote
from sglang_hybrid.extensions.lab.simulation.prefill_time import PAPER, PrefillTime
from sglang_hybrid.extensions.lab.simulation.traces.formats import FORMATS, read_trace
from sglang_hybrid.extensions.lab.simulation.traces.lines import Reading, Skipped
from sglang_hybrid.extensions.schemas.declared.schema import read_schema
from sglang_hybrid.extensions.schemas.declared.xml import MOST_BYTES as MOST_MARKUP
from sglang_hybrid.extensions.schemas.declared.xml import MarkupError
from sglang_hybrid.extensions.schemas.linter.lint import lint
from sglang_hybrid.extensions.schemas.linter.recorded import TenantReport, analyse, sentences

FINDINGS: Final = 1
UNREADABLE: Final = 2
"""Exit statuses."""


@program
def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    for name in ("format", "limit", "prefill"):
        if options.recorded is None and getattr(options, name) is not None:
            raise UsageError(f"--{name} is for --recorded only")
    try:
        model = _model(options.model)
    except FileError as error:
        print_line(f"{error}.", sys.stderr)
        return UNREADABLE
    except Exception as error:  # tokenizers has no class of its own
        print_line(f"--model {options.model}: it cannot be read: {error}.", sys.stderr)
        return UNREADABLE
    return _recorded(options, *model) if options.recorded else _schema(options, *model)


def _schema(options: argparse.Namespace, tokenizer: Tokenizer, state_tokens: int) -> int:
    path: Path = options.file
    try:
        schema = read_schema(read_text(path, MOST_MARKUP), path.parent)
    except ValueError as error:
        print_line(f"{path}: {error}" if isinstance(error, MarkupError) else error, sys.stderr)
        return UNREADABLE
    findings = lint(
        schema,
        lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids),
        state_tokens=state_tokens,
    )
    for finding in findings:
        print_line(f"{path}:{finding.line}: {finding.rule}: {finding.sentence}")
    if not findings:
        print_line(f"{path}: nothing to change.")
    return FINDINGS if findings else 0


def _recorded(options: argparse.Namespace, tokenizer: Tokenizer, state_tokens: int) -> int:
    path: Path = options.recorded
    model = "" if options.model is None else str(options.model)
    try:
        prefill = PAPER if options.prefill is None else PrefillTime.read(options.prefill)
        skipped = Skipped(advice="")
        reading = Reading(limit=options.limit, tokenizer=model or None, skipped=skipped)
        requests = read_trace(path, reading, options.format)
    except ValueError as error:
        print_line(f"{error}.", sys.stderr)
        return UNREADABLE

    def decode(ids: Sequence[int]) -> str:
        known = [each for each in ids if each >= 0]  # unknown tokens are negative
        return str(tokenizer.decode(known, skip_special_tokens=False))

    known = decode if model else None
    reports = analyse(requests, prefill, known, state_tokens)
    print_line(f"{path}: times of a prefill: {prefill.about}.")
    for report in reports:
        print_line(f"{path}: {_summary(report)}")
        for sentence in sentences(report, known, state_tokens):
            print_line(f"{path}: {sentence}")
    return FINDINGS if any(report.changes or report.short[0] for report in reports) else 0


def _summary(report: TenantReport) -> str:
    tokens = report.prompt_tokens
    saved = sum(change.tokens for change in report.changes)
    who = f"tenant {quote(report.tenant)}" if report.tenant else "no tenant's name"
    text = (
        f"{who}: {report.requests:,} requests, {tokens:,} prompt tokens; without a bound of memory "
        f"{report.hit_tokens / tokens:.1%} could be hit"
    )
    if not report.changes:
        return text + ", and nothing is to be changed."
    return text + (
        f", and up to {(report.hit_tokens + saved) / tokens:.1%} with all changes below; what "
        "saves most comes first."
    )


def _model(directory: Path | None) -> tuple[Tokenizer, int]:
    """The tokenizer, and the tokens whose KV takes the memory of a state; 0 without a model."""
    if directory is None:
        from sglang_hybrid.extensions.cpu.models.tokenizer import build_tokenizer

        return build_tokenizer(), 0
    config = read_json(directory / "config.json", dict[str, Any], "model's config")
    cost = CostModel.from_config(config)
    kv = cost.kv_bytes_per_token
    tokens = cost.state_bytes // kv if kv else 0
    return Tokenizer.from_buffer(read_bytes(directory / "tokenizer.json", MOST_BYTES)), tokens


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m sglang_hybrid.prompts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="lint")
    command = commands.add_parser("lint", help="what to change in a schema or in prompts")
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("file", nargs="?", type=Path, metavar="FILE", help="a schema")
    what.add_argument(
        "--recorded",
        type=Path,
        metavar="TRACE",
        help="requests that a server recorded (--hybrid-record), or another trace of the replay",
    )
    command.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="the model's directory, for its tokens and the size of its states; by default tokens "
        "of a schema are those of the embedded tiny models, and no text of a trace is shown",
    )
    about = f"of TRACE: {', '.join(FORMATS)}"
    command.add_argument("--format", metavar="NAME", choices=FORMATS, help=about)
    command.add_argument("--limit", type=integer(1), metavar="N", help="only the first N requests")
    command.add_argument(
        "--prefill",
        type=Path,
        metavar="JSON",
        help="times that scripts/fit_prefill.py measured; by default those of Marconi's paper",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
