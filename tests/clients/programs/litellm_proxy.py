"""litellm's proxy: what openai's client asks, through it."""

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai_agent
import requests
from common import main

KEY = "sk-clients"


@contextlib.contextmanager
def running(command: list[str], port: int, health: str) -> Iterator[str]:
    """A server of this command, once it is healthy; its address."""
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline and process.poll() is None:
                with contextlib.suppress(requests.RequestException):
                    if requests.get(url + health, timeout=2).ok:
                        break
                time.sleep(0.3)
            else:
                log.seek(0)
                raise RuntimeError(log.read()[-4000:].decode(errors="replace"))
            yield url
        finally:
            process.terminate()
            process.wait(30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask_through_proxy(url: str) -> dict[str, Any]:
    port = free_port()
    models = [
        {
            "model_name": "default",
            "litellm_params": {
                "model": "openai/default",
                "api_base": url + "/v1",
                "api_key": "none",
            },
        }
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        settings = {"master_key": KEY}
        config.write_text(json.dumps({"model_list": models, "general_settings": settings}))
        program = str(Path(sys.executable).parent / "litellm")
        command = [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        with running(command, port, "/health/liveliness") as proxy:
            return openai_agent.run(proxy, api_key=KEY)


if __name__ == "__main__":
    main("litellm", ask_through_proxy)
