"""An application with an `sglang.Engine`: python -m tests.server.engine_ends MODEL WAY

WAY: `shutdown`, `exit` (without it), or the title of a process to kill before the next request.
Prints the inodes of the engine's shared memory; after a shutdown no child process is left.
"""

from __future__ import annotations

import json
import os
import sys

import psutil


def main(model: str, way: str) -> None:
    import sglang

    engine = sglang.Engine(model_path=model, radix_cache_backend="hybrid", device="cpu")
    sampling = {"max_new_tokens": 3, "temperature": 0}
    (answer,) = engine.generate(input_ids=[[5, 6, 7]], sampling_params=sampling)
    assert len(answer["output_ids"]) == 3
    children = psutil.Process().children(recursive=True)
    memory = []
    for pid in (os.getpid(), *(child.pid for child in children)):
        with open(f"/proc/{pid}/maps") as maps:
            memory += [int(line.split()[4]) for line in maps if " /dev/shm/" in line]
    print(json.dumps(sorted(set(memory))), flush=True)
    if way == "shutdown":
        engine.shutdown()
        left = [
            one
            for one in psutil.Process().children()
            if "resource_tracker" not in str(one.cmdline())
        ]
        assert not left, left
    elif way != "exit":
        (victim,) = [child for child in children if way in child.cmdline()[0]]
        victim.kill()
        engine.generate(input_ids=[[5, 6, 7]], sampling_params={"max_new_tokens": 4_000})
        raise SystemExit("it went on")


if __name__ == "__main__":
    main(*sys.argv[1:])
