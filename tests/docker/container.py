"""A container without a container engine: namespaces and a read-only root."""

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import psutil

_ENTER = """
mount --bind "$1" "$1"
mount --rbind /dev "$1/dev"
mount --rbind /sys "$1/sys"
mount -t tmpfs -o size=64m tmpfs "$1/dev/shm"
mount -t proc proc "$1/proc"
mount -t tmpfs tmpfs "$1/tmp"
mount --bind "$2" "$1/cache"
mount -o remount,bind,ro "$1"
root=$1
user=$3
shift 3
exec chroot --userspec="$user" "$root" "$@"
"""


class Container:
    """An image's entrypoint as process 1, run the way `docker run --read-only --tmpfs /tmp` does.

    The root is read-only and /dev/shm has Docker's 64 MiB. The network is the host's.

    Args:
        root: the image's root directory, mounted.
        config: what the image says about how it is run.
        volume: an empty directory, mounted at /cache.
        arguments: what `docker run` would be given behind the image's name.
        environment: `docker run --env`.
        log: where its output goes.
    """

    def __init__(
        self,
        root: Path,
        config: dict[str, Any],
        volume: Path,
        arguments: Sequence[str],
        environment: dict[str, str],
        log: Path,
    ) -> None:
        self.volume = volume
        self._root = root
        self._log = log
        self._user = config["User"]
        variables = [*config["Env"], *(f"{name}={value}" for name, value in environment.items())]
        self._environment = ["env", "-i", "-C", config["WorkingDir"], *variables]
        self._check = config["Healthcheck"]["Test"]
        volume.mkdir()
        volume.chmod(0o1777)  # a new volume is as the image's directory is
        namespaces = ["unshare", "--mount", "--pid", "--fork"]
        enter = ["sh", "-euc", _ENTER, "sh", str(root), str(volume), self._user]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*namespaces, *enter, *self._environment, *config["Entrypoint"], *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            for process in self.processes()[:1]:
                process.kill()  # all others in its namespace end with it
        self.process.wait()

    def processes(self) -> list[psutil.Process]:
        """Its processes as the host sees them, its process 1 first; none before it has started."""
        found: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return found

    def tail(self, lines: int = 20) -> str:
        """The last lines that it printed."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def wait_until_healthy(self, timeout: float = 300.0) -> None:
        """Return once the image's health check is content; fails after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self.healthy():
            assert self.process.poll() is None, f"it ended:\n{self.tail()}"
            assert time.monotonic() < deadline, f"it is not healthy:\n{self.tail()}"
            time.sleep(1)

    def healthy(self) -> bool:
        """True if the image's health check says so."""
        kind, *command = self._check
        assert kind == "CMD"
        chroot = ["chroot", f"--userspec={self._user}", str(self._root)]
        done = subprocess.run([*chroot, *self._environment, *command], capture_output=True)
        return done.returncode == 0
