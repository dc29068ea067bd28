"""Lets a server of the tests fork its processes, which spares each of them the import of SGLang.

A folder for PYTHONPATH: Python imports this module at the start of each process. SGLang spawns:
each of its processes is a new Python that imports torch, transformers and SGLang again, 13 seconds
of a core for each of three. A forked process has the imports and the hooks of the launcher. How the
launcher itself is forked: tests/server/forked.py. Where they are spawned: tests/conftest.py.
"""

import multiprocessing
import os

start = multiprocessing.set_start_method


def start_method(method: str, force: bool = False) -> None:
    """`fork` where SGLang asks for `spawn` (entrypoints/engine.py, `_set_envs_and_config`)."""
    forks = method == "spawn" and os.environ.get("TEST_SERVERS") != "spawn"
    start("fork" if forks else method, force)


multiprocessing.set_start_method = start_method
