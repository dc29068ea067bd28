"""What /server_info tells of the keys that the server was started with: nothing."""

import logging

import pytest

from sglang_hybrid.serving.requests.secrets import hide_queries, without_keys

KEYS = {"api_key": "sk", "admin_api_key": "adm"}


def test_keys_are_told_nowhere() -> None:
    told = without_keys(
        {
            **KEYS,
            "model_path": "/risk/task",
            "launch_command": "--api-key sk --admin-api-key=adm --port 3 --served-model-name 'a b'",
            "internal_states": [{**KEYS, "nested": [{"api_key": "sk"}]}],
        }
    )
    assert told["api_key"] == told["admin_api_key"] == "(hidden)"
    assert told["model_path"] == "/risk/task"
    assert told["launch_command"] == (
        "--api-key '(hidden)' '--admin-api-key=(hidden)' --port 3 --served-model-name 'a b'"
    )
    assert told["internal_states"][0]["nested"] == [{"api_key": "(hidden)"}]


def test_a_server_without_keys_says_so() -> None:
    told = without_keys({"api_key": None, "admin_api_key": None, "launch_command": "--port 3"})
    assert told == {"api_key": None, "admin_api_key": None, "launch_command": "--port 3"}


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
