"""Write tiny models to a directory: ``make_tiny_model.py --architecture all --output models``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sglang_hybrid.core.options import integer
from sglang_hybrid.core.programs import Parser, program
from sglang_hybrid.core.sentences import print_line
from sglang_hybrid.extensions.cpu.models import ARCHITECTURES, build_tiny_model
from sglang_hybrid.extensions.cpu.models.tiny import DEFAULT_ARCHITECTURE, MODELS, SCALES
from sglang_hybrid.serving.flag_values import TRAINED


@program
def main(arguments: Sequence[str]) -> int:
    parser = Parser(prog="make_tiny_model.py", description=__doc__)
    parser.add_argument(
        "--architecture",
        default=DEFAULT_ARCHITECTURE,
        help=f"one of {', '.join(MODELS)}; or all, which leaves {TRAINED} out "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="directory of the model; with 'all', the directory that gets one for each",
    )
    parser.add_argument("--seed", type=integer(0), default=0, help="default: %(default)s")
    parser.add_argument(
        "--scale",
        default="tiny",
        help=f"one of {', '.join(SCALES)}; 8b has the sizes of Nemotron-H-8B and no weights, for "
        "--load-format dummy (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    if options.architecture == "all":
        targets = {name: options.output / name for name in ARCHITECTURES}
    else:
        targets = {options.architecture: options.output}
    for name, directory in targets.items():
        print_line(build_tiny_model(name, directory, seed=options.seed, scale=options.scale))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
