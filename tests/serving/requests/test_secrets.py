"""A server tells its keys nowhere, and takes them from a file."""

import logging
import os
from pathlib import Path

import pytest

from sglang_hybrid.serving.requests.secrets import (
    hide_queries,
    read_key,
    with_hidden_keys,
    words_without_keys,
)

KEYS = {"api_key": "sk", "admin_api_key": "adm"}


def test_arguments_are_told_without_keys() -> None:
    told = {"model_path": "/risk/task", "ssl_keyfile_password": None}
    hidden = dict.fromkeys(KEYS, "(hidden)")
    assert with_hidden_keys({**KEYS, **told}) == {**hidden, **told}
    assert with_hidden_keys(told) == told
    assert with_hidden_keys(["sk"]) == ["sk"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--api-key sk --port 3", "--api-key (hidden) --port 3"),
        ("--admin-api-key=adm --port 3", "--admin-api-key=(hidden) --port 3"),
        (
            "--admin-api adm --ssl-keyfile-pass=x",
            "--admin-api (hidden) --ssl-keyfile-pass=(hidden)",
        ),
        ("--api-key --api-key --port 3", "--api-key (hidden) --port 3"),
        ("--host sk --api-key", "--host sk --api-key"),
    ],
)
def test_a_command_line_is_told_without_keys(given: str, told: str) -> None:
    assert words_without_keys(given.split()) == told.split()


def test_a_key_comes_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("the key \n")
    assert read_key(f"@{file}") == "the key"
    assert (read_key("the@key"), read_key(None)) == ("the@key", None)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read .No such"),
        (b" \n", "one line"),
        (b"a\nb", "one line"),
        (b"\xff", "text"),
    ],
)
def test_a_file_without_a_key_is_refused(tmp_path: Path, content: bytes | None, why: str) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=f"the key's file.*key.* .*{why}"):
        read_key(f"@{file}")


def test_no_pipe_is_waited_for_and_no_device_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "key")
    (tmp_path / "long").write_bytes(b"k" * (1 << 17))
    for name, why in ((tmp_path / "key", "pipe"), ("/dev/zero", "device"), (tmp_path / "long", "")):
        with pytest.raises(ValueError, match=f"the key's file: .*{why}"):
            read_key(f"@{name}")


def test_the_access_log_has_no_queries(caplog: pytest.LogCaptureFixture) -> None:
    hide_queries()
    hide_queries()
    log = logging.getLogger("uvicorn.access")
    assert len(log.filters) == 1
    with caplog.at_level(logging.INFO, "uvicorn.access"):
        for path in ("/v1/responses/resp_1?cache%5Fsalt=secret", "/generate"):
            log.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:5", "GET", path, "1.1", 200)
    assert [record.getMessage() for record in caplog.records] == [
        '127.0.0.1:5 - "GET /v1/responses/resp_1 HTTP/1.1" 200',
        '127.0.0.1:5 - "GET /generate HTTP/1.1" 200',
    ]
