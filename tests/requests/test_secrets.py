"""What /server_info tells of the keys that the server was started with: nothing."""

from sglang_hybrid.requests.secrets import without_keys

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
