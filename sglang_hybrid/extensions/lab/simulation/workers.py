"""Jobs in worker processes: replays, the tuner's candidates, and what scripts compare.

    python -m sglang_hybrid.extensions.lab.simulation.workers  # one worker; started here only

A worker is a process of its own and not of `multiprocessing`, whose children import the server's
main module again and cannot be started by a daemon. It imports what its work needs and nothing
else, so neither torch nor sglang, and ends when the process that started it does.
"""

from __future__ import annotations

import argparse
import math
import mmap
import os
import pickle
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import IO, Any, Generic, TypeVar

Shared = TypeVar("Shared")
Job = TypeVar("Job")
Result = TypeVar("Result")

Work = Callable[[Shared, Job, Callable[[], None]], Result]
"""Does one job with what all jobs share, and calls the function after each step of it. It is a
function of a module, which workers import."""

COMMAND = (sys.executable, "-m", "sglang_hybrid.extensions.lab.simulation.workers")
FAILED = 1
REPORT_EVERY = 0.2
"""Seconds between two reports of steps."""


@dataclass(frozen=True)
class Limits:
    """workers: processes at once. memory: bytes of private memory of each, None without a bound.
    seconds: of each, then it is ended. nice: how much each leaves the processor to others, 0 to 19.
    The defaults are for work beside a running server.
    """

    workers: int = 1
    memory: int | None = 1 << 30
    seconds: float = 600.0
    nice: int = 19


@dataclass
class Done(Generic[Result]):
    """results: by the number of the job. failures: what workers raised or died of."""

    results: dict[int, Result] = field(default_factory=dict)
    failures: list[Exception] = field(default_factory=list)


def run_all(
    work: Work[Shared, Job, Result],
    shared: Shared,
    jobs: Sequence[Job],
    workers: int = 1,
    progress: Callable[[int], None] = lambda steps: None,
) -> list[Result]:
    """Results in the jobs' order; with one worker, all is done in this process.

    Args:
        progress: called with the number of steps since it was called last.

    Raises:
        ChildProcessError: a worker died. Errors of the work are raised here too.
    """
    if workers <= 1 or len(jobs) <= 1:
        return [work(shared, job, lambda: progress(1)) for job in jobs]
    limits = Limits(workers, memory=None, seconds=math.inf, nice=0)
    done = run_jobs(work, shared, jobs, limits, progress, give_up=True)
    for failure in done.failures:
        if isinstance(failure, ChildProcessError):
            raise ChildProcessError("a worker died, perhaps for memory: use fewer") from failure
        raise failure
    return [done.results[number] for number in range(len(jobs))]


def run_jobs(
    work: Work[Shared, Job, Result],
    shared: Shared,
    jobs: Sequence[Job],
    limits: Limits,
    progress: Callable[[int], None] = lambda steps: None,
    *,
    give_up: bool = False,
) -> Done[Result]:
    """Do `jobs`, each in the next worker that is free. A worker that raises, dies, hangs or takes
    too much memory is one failure; what it had done by then counts, and the other workers do what
    is left. give_up: the first failure ends all.
    """
    done: Done[Result] = Done()
    left = iter(enumerate(jobs))
    running: dict[Connection, _Worker] = {}
    with packed((work, shared)) as content:
        try:
            for _ in range(min(limits.workers, len(jobs))):
                worker = _Worker(content, limits)
                running[worker.connection] = worker
                worker.give(next(left))
            while running and not (give_up and done.failures):
                first_end = min(worker.deadline for worker in running.values())
                timeout = None if first_end == math.inf else max(0.0, first_end - time.monotonic())
                ready = wait(list(running), timeout)
                for worker in list(running.values()):
                    try:
                        if worker.connection not in ready:
                            worker.demand_time(limits.seconds)
                            continue
                        number, value = worker.receive()
                        if number is None:
                            progress(value)
                            continue
                        done.results[number] = value
                        following = next(left, None)
                        if following is not None:
                            worker.give(following)
                            continue
                    except Exception as failure:
                        done.failures.append(failure)
                    running.pop(worker.connection).end()
        finally:
            for worker in running.values():
                worker.end()
    return done


class _Worker:
    """One worker process, seen from the process that started it."""

    def __init__(self, content: int, limits: Limits) -> None:
        ours, theirs = socket.socketpair()
        flags = ["--content", content, "--connection", theirs.fileno(), "--nice", limits.nice]
        if limits.memory is not None:
            flags += ["--memory", limits.memory]
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, until `end`
        with theirs:
            self._process = subprocess.Popen(
                [*COMMAND, *map(str, flags)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=(content, theirs.fileno()),
                env=_environment(),
                start_new_session=True,  # a Ctrl-C is for the process that started it
            )
        self.connection = Connection(ours.detach())
        self.deadline = time.monotonic() + limits.seconds

    def give(self, job: tuple[int, Any]) -> None:
        """Send a job with its number; `receive` says so if the worker has died."""
        with suppress(ConnectionError):
            self.connection.send(job)

    def receive(self) -> tuple[int | None, Any]:
        """The number of a job and its result, or None and how many steps were done. Raises what
        the job raised, and ChildProcessError if the worker died.
        """
        try:
            what, value = self.connection.recv()
        except (EOFError, ConnectionError):
            status = self._process.wait()
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
            raise ChildProcessError(
                f"a worker ended with status {status}: {(said or ['it said nothing'])[0]}"
            ) from None
        if isinstance(value, Exception):
            raise value
        return what, value

    def demand_time(self, seconds: float) -> None:
        """Raises ChildProcessError if the worker took longer than it may."""
        if time.monotonic() >= self.deadline:
            raise ChildProcessError(
                f"a worker was not done after {seconds:g} seconds and was ended"
            )

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self.connection.close()
        self._errors.close()


def _environment() -> dict[str, str]:
    """One thread for numpy, and all modules found where they are found here."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    paths = [path or os.getcwd() for path in sys.path]
    return {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(paths)}


@contextmanager
def packed(value: object) -> Iterator[int]:
    """`value` as a file descriptor that is in memory only and leaves nothing behind.

    Arrays in it are written one by one, so that other threads of this process are not held up.
    """
    arrays: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=arrays.append)
    parts: list[bytes | memoryview] = [head, *(array.raw() for array in arrays)]
    sizes = pickle.dumps([len(part) for part in parts])
    descriptor = os.memfd_create("hybrid-jobs")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            for part in (len(sizes).to_bytes(8, "little"), sizes, *parts):
                file.write(part)
        yield descriptor
    finally:
        os.close(descriptor)


def unpack(descriptor: int) -> Any:
    """The object that `packed` wrote; its arrays are not copied."""
    content = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
    start = 8 + int.from_bytes(content[:8], "little")
    parts = []
    for size in pickle.loads(content[8:start]):
        parts.append(content[start : start + size])
        start += size
    return pickle.loads(parts[0], buffers=parts[1:])


def main() -> int:
    """A worker: it does the jobs that come through its connection until that is closed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--content", type=int, required=True, help="descriptor of work and shared")
    parser.add_argument("--connection", type=int, required=True, help="descriptor of a socket")
    parser.add_argument("--memory", type=int, help="bytes of private memory")
    parser.add_argument("--nice", type=int, required=True)
    flags = parser.parse_args()
    os.nice(flags.nice)
    if flags.memory is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (flags.memory, flags.memory))
    connection = Connection(flags.connection)
    jobs: SimpleQueue[tuple[int, Any]] = SimpleQueue()
    threading.Thread(target=_receive, args=(connection, jobs), daemon=True).start()
    try:
        work, shared = unpack(flags.content)
        while True:
            number, job = jobs.get()
            steps = _Steps(connection)
            result = work(shared, job, steps.count)
            steps.report()
            connection.send((number, result))
    except MemoryError:
        most = f"{flags.memory >> 20} MiB of memory" if flags.memory else "all memory"
        print(f"more than {most} were needed", file=sys.stderr)
    except Exception as error:
        connection.send((None, error))
    return FAILED


def _receive(connection: Connection, jobs: SimpleQueue[tuple[int, Any]]) -> None:
    """Queue the jobs that come. The process ends with the one that started it, however that ends,
    even in the middle of a job.
    """
    while True:
        try:
            jobs.put(connection.recv())
        except (EOFError, ConnectionError):
            os._exit(FAILED)


class _Steps:
    """Steps of a job that were done and not reported yet."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._steps = 0
        self._report_at = time.monotonic() + REPORT_EVERY

    def count(self) -> None:
        self._steps += 1
        if time.monotonic() >= self._report_at:
            self.report()

    def report(self) -> None:
        if self._steps:
            self._connection.send((None, self._steps))
        self._steps, self._report_at = 0, time.monotonic() + REPORT_EVERY


if __name__ == "__main__":
    sys.exit(main())
