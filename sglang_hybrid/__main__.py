"""`python -m sglang_hybrid` and the command `sglang-hybrid`: every program of this package by name.

Neither a name nor the overview imports torch or SGLang; a program is run as `python -m` runs its
module, so that processes which it spawns find the same main module.
"""

import runpy
import sys
from collections.abc import Sequence

from sglang_hybrid import __doc__ as about
from sglang_hybrid.core.programs import USAGE_ERROR, versions
from sglang_hybrid.core.sentences import escape, print_line, quote, suggest

PROGRAM = "sglang-hybrid"

COMMANDS = {
    "serve": ("launch_server", "start a server; without --model-path, of an embedded tiny model"),
    "replay": ("replay", "what each policy would have been worth on a trace of requests"),
    "explain": ("explain", "which checkpoint a prompt would resume from, and why no later one"),
    "prompts": ("prompts", "what to change in prompts or in a schema so that more of them is hit"),
    "replicas": ("replicas", "several servers: what they hold, and a router in front of them"),
    "kernels": ("kernels.compare", "our Mamba2 states beside mamba-ssm's, on a GPU"),
}
"""Programs by name: the module that is run, and what it does."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program that is named first; without a name, say which there are. Returns the exit
    status.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    name, *rest = given
    if name == "--version":
        print(versions())
        return 0
    if name not in COMMANDS:
        print_line(f"error: {_wrong(name)}; {PROGRAM} --help lists all commands", sys.stderr)
        return USAGE_ERROR
    sys.argv[1:] = rest
    runpy.run_module(f"sglang_hybrid.{COMMANDS[name][0]}", run_name="__main__", alter_sys=True)
    return 0


def overview() -> str:
    """The commands, one line each."""
    lines = [f"  {name:10}{what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(
        [
            f"{versions()}: {about}",
            "",
            f"usage: {PROGRAM} COMMAND ...    (or python -m sglang_hybrid COMMAND ...)",
            "",
            *lines,
            "",
            "  COMMAND --help   its options",
            "  --version        the versions of this package and of SGLang",
        ]
    )


def _wrong(name: str) -> str:
    """The error message for a first argument that names no command."""
    if name.startswith("-"):
        flag = escape(name.partition("=")[0])
        return f"a command comes before flags; to start a server, write {PROGRAM} serve {flag} ..."
    modules = {module: command for command, (module, _) in COMMANDS.items()}
    known = modules.get(name.replace("-", "_"))
    near = f" (did you mean {known}?)" if known else suggest(name.lower(), COMMANDS)
    return f"{quote(name)} is no command{near}"


if __name__ == "__main__":
    sys.exit(main())
