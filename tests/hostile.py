"""Files and numbers that no program expects, and a run of a program in a process of its own."""

from __future__ import annotations

import gzip
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

GOOD = b'{"t": 1.0, "input_ids": [1, 2, 3], "output_ids": [4]}\n'
CONTROL = "\x1b[31mred\x07\n/etc/shadow: forged\u202e[bold]x[/nothing]"

NUMBERS = ("0", "-1", "nan", "inf", "1e308", str(10**12), str(10**30), "", "many", "9" * 5_000)


def make_files(folder: Path, *, large: bool = False) -> dict[str, Path]:
    """Hostile files by what is wrong with them. large: those, too, that take seconds to make."""
    contents = {
        "empty": b"",
        "blank": b"\n" * 1_000,
        "binary": bytes(range(256)) * 40,
        "NUL": b"\0" * 5_000 + b"\n",
        "Latin-1": GOOD.replace(b'"t"', b'"\xff"'),
        "deep": b'{"t": 1, "input_ids": [1], "output_ids": [], "x": ' + b"[" * 10**5 + b"]" * 10**5,
        "braces": b'{"requests":[' * 10**5,
        "no JSON": b'{"t": 1, "input_ids": [1,\n',
        "a list": b"[1, 2, 3]\n",
        "a number": b"1" * 5_000 + b"\n",
        "huge numbers": b'{"t": 1e308, "input_ids": [' + b"9" * 30 + b'], "output_ids": []}\n',
        "types": b'{"t": "1", "input_ids": {"a": 1}, "output_ids": null}\n',
        "torn.gz": gzip.compress(GOOD * 1_000)[:-40],
        "text.gz": b"no archive",
    }
    if large:
        contents["one line"] = b'{"t": 1, "input_ids": [' + b"1," * (100 << 20) + b"1]}\n"
        contents["bomb.gz"] = gzip.compress(b"a" * (3 << 30), compresslevel=1)
        contents["lines.gz"] = gzip.compress((GOOD[:-1] + b" " * 10**6 + b"\n") * 3_000)
    made = {name: folder / name.replace(" ", "_") for name in contents}
    for name, content in contents.items():
        made[name].write_bytes(content)
    links = {"zero": "/dev/zero", "null": "/dev/null", "loop": "loop"}
    made |= {name: folder / name for name in (*links, "pipe", "folder", "hole")}
    for name, target in links.items():
        (folder / name).symlink_to(target)
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    (folder / "hole").write_bytes(b"")
    os.truncate(folder / "hole", 1 << 40)
    made["missing"] = folder / "missing"
    made["no name"] = folder / CONTROL.replace("/", "_")
    made["named"] = folder / f"{CONTROL.replace('/', '_')}.jsonl"
    made["named"].write_bytes(GOOD.replace(b"}", b', "tenant": "\\u001b[31m\\u202e\\nx"}') * 3)
    return made


@dataclass(frozen=True)
class Ended:
    """The end of a program; status is None where it was ended for its time."""

    status: int | None
    out: str
    err: str

    def check(self) -> None:
        """It ended by itself, in words for a person, and nothing in them steers a terminal."""
        assert self.status in (0, 1, 2), (self.status, self.err[-2_000:])
        assert "Traceback" not in self.out + self.err, self.err[-2_000:]
        lines = (self.out + self.err).split("\n")
        assert all(line.isprintable() for line in lines), repr(self.out + self.err)[:2_000]
        if self.status and not self.out:
            assert self.err.count("\n") == 1, self.err[:2_000]


def run_apart(
    main: Callable[[Sequence[str]], int],
    arguments: Sequence[str],
    gib: float = 4,
    seconds: int = 20,
) -> Ended:
    """Run a program's `main` in a fork of this process, which may take `gib` GiB of memory more
    than this one has, and so many seconds of a processor.
    """
    files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
    child = os.fork()
    if not child:
        status = 99
        try:
            for file, descriptor in zip(files, (1, 2), strict=True):
                os.dup2(file.fileno(), descriptor)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * resource.getpagesize() + int(gib * 2**30)
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(3 * seconds)
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            status = main(arguments)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    _, waited = os.waitpid(child, 0)
    texts = []
    for file in files:
        with file:
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Ended(os.WEXITSTATUS(waited) if os.WIFEXITED(waited) else None, *texts)
