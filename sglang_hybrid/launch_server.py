"""`python -m sglang_hybrid.launch_server`: `sglang.launch_server` with what this package adds.

Takes every flag of SGLang. Without --model-path it serves the embedded default model; without an
accelerator it serves on the CPU.

SGLang's processes are spawned, import this file again and must have the import hook before they
import SGLang. The first one's work is in launcher.py, which they do not load.
"""

import os
import signal
import warnings
from collections.abc import Sequence
from typing import Never

if __name__ == "__mp_main__":  # a process of the server; it ends with the first one, at Ctrl-C, too
    signal.signal(signal.SIGINT, signal.SIG_IGN)
elif __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # While modules are imported there is nothing to tidy up; launcher.command hears it otherwise.
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))

from sglang_hybrid.hooks import patching

patching.install()
for message in ("Only CUDA", "Triton is not supported"):  # what a CPU lacks, at every import
    warnings.filterwarnings("ignore", message=message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server until it is stopped; returns the process's exit status."""
    from sglang_hybrid import launcher

    return launcher.main(argv)


def command() -> Never:
    """`main` as a program."""
    from sglang_hybrid import launcher

    launcher.command()


if __name__ == "__main__":
    command()
