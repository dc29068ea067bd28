"""Fits the replay's model of prefill time to a running server.

Sends random prompts of several lengths, with and without a hit before them, one at a time, and
writes what a prefill costs (base, per token, per attended pair, per token of the hit) and what a
decoded token does, as JSON for `python -m sglang_hybrid.replay --prefill`. The server should be
idle; its cache fills with the prompts.

    python scripts/fit_prefill.py --url http://127.0.0.1:30000 --out prefill.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from sglang_hybrid.core.options import integer, server_url
from sglang_hybrid.core.programs import Parser, program
from sglang_hybrid.core.sentences import escape, print_line
from sglang_hybrid.extensions.lab.measure import Measured, Server, fit, measure
from sglang_hybrid.extensions.lab.simulation.prefill_time import PrefillTime

MOST_TOKENS = 1 << 20


@program
def main(arguments: Sequence[str]) -> int:
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", type=server_url, default="http://127.0.0.1:30000")
    parser.add_argument("--out", type=Path, required=True)
    lengths, hits = _numbers(1), _numbers(0)
    parser.add_argument("--lengths", type=lengths, default=[64, 256, 1_024, 4_096, 8_192])
    parser.add_argument("--hits", type=hits, default=[0, 2_048, 8_192])
    parser.add_argument("--repeats", type=integer(1, 1_000), default=3)
    parser.add_argument("--seed", type=integer(0), default=0)
    parser.add_argument("--device", default="", help="what it ran on, for the record")
    options = parser.parse_args(arguments)
    server = Server(options.url)
    cells = len(options.lengths) * len(options.hits)
    steps = iter(track(range(cells), "measuring", transient=True))
    measured = measure(
        server.ask,
        options.lengths,
        options.hits,
        repeats=options.repeats,
        seed=options.seed,
        done=lambda: next(steps, None),
    )
    about = escape(f"fit_prefill.py on {Path(server.model).name}")
    about += f", {options.device}" if options.device else ""
    fitted = fit(server.ask, measured, about, options.seed)
    fitted.write(options.out)
    _show(measured, fitted)
    print_line(f"written to {options.out}")
    return 0


def _show(measured: Measured, fitted: PrefillTime) -> None:
    table = Table("hit", "new", "measured ms", "fitted ms", title=fitted.about)
    for hit, new, seconds in measured:
        model = fitted.seconds(hit, new) + fitted.decode
        table.add_row(f"{hit:,}", f"{new:,}", f"{1000 * seconds:.1f}", f"{1000 * model:.1f}")
    console = Console(markup=False, emoji=False)
    console.print(table)
    console.print(
        f"{1000 * fitted.base:.2f} ms + {1e6 * fitted.per_token:.2f} us a token "
        f"+ {1e9 * fitted.per_pair:.3f} ns a pair + {1e6 * fitted.per_hit:.2f} us a token of the "
        f"hit; {1000 * fitted.decode:.2f} ms a decoded token; relative error "
        f"{100 * fitted.error:.0f} %"
    )


def _numbers(least: int) -> Callable[[str], list[int]]:
    """Reads lengths in tokens with commas between them."""
    read = integer(least, MOST_TOKENS)
    return lambda text: [read(number) for number in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
