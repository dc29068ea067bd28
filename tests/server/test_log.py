"""The output of a server: none of its keys, and nothing that looks like a line of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from sglang_hybrid.serving.server_process import ServerProcess
from tests.server.client import Serve

pytestmark = [pytest.mark.slow]

API, ADMIN = "sk-in-no-line", "adm-in-no-line"
EVIL = "of\n[2026-11-28 00:00:00] all is well\x1b[2J\r"


@pytest.fixture(scope="module")
def running(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    file = tmp_path_factory.mktemp("keys") / "admin"
    file.write_text(ADMIN + "\n")
    keys = ["--api-key", API, "--admin-api-key", f"@{file}"]
    with serve(*keys, "--log-requests", "--log-level", "debug", "--hybrid-ui", "text") as process:
        yield process


def asked(running: ServerProcess, path: str, key: str, **body: object) -> requests.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return requests.post(running.url + path, json=body, headers=headers, timeout=60)


def test_no_line_has_a_key(running: ServerProcess) -> None:
    """Keys given in a file or on the command line; both open what they open."""
    question = {"input_ids": [1, 2, 3]}
    keys = ("", API, ADMIN)
    status = [asked(running, "/hybrid_cache/explain", key, **question).status_code for key in keys]
    assert status == [401, 401, 200]
    headers = {"Authorization": f"Bearer {API}"}
    told = requests.get(running.url + "/server_info", headers=headers, timeout=60)
    assert told.json()["admin_api_key"] == told.json()["api_key"] == "(hidden)"
    lines = Path(running.log).read_text()
    assert "'admin_api_key': '(hidden)'" in lines and "--api-key (hidden)" in told.text
    assert "in-no-line" not in lines + told.text


def test_a_client_writes_no_lines(running: ServerProcess) -> None:
    for number in range(2):  # the second is refused, and the log says so
        asked(running, "/open_session", API, capacity_of_str_len=100, session_id=EVIL)
        few = {"sampling_params": {"max_new_tokens": 1}, "rid": EVIL + str(number)}
        asked(running, "/generate", API, text="Hi", **few, extra_key=EVIL, cache_salt=EVIL)
        asked(running, "/generate", API, text="Hi", **few, lora_path=EVIL)
    asked(running, "/close_session", API, session_id=EVIL)
    asked(running, "/start_profile", ADMIN, output_dir=EVIL, num_steps=1)
    asked(running, "/update_weights_from_disk", ADMIN, model_path=EVIL)
    asked(running, "/load_lora_adapter", ADMIN, lora_name=EVIL, lora_path=EVIL)
    asked(running, f"/{EVIL}", API)
    lines = Path(running.log).read_bytes().decode().split("\n")
    sent = [line for line in lines if "all is well" in line]
    assert sent and not [line for line in sent if line.startswith("[2026-11-28 00:00:00]")]
    assert not [line for line in sent if {"\x1b", "\r"} & set(line)]
