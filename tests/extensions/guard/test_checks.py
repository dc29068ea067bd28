"""Media of requests that come over HTTP, and how many answers one may ask for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.utils.common import ImageData

from sglang_hybrid.extensions.guard import checks

OVER_HTTP: Any = object()


def normalized(http: Any = OVER_HTTP, **media: Any) -> None:
    request = GenerateReqInput(text="a", sampling_params={}, **media)
    checks.normalize(request, http, lambda given, _: given.normalize_batch_and_arguments())


@pytest.mark.parametrize(
    ("prompts", "params"),
    [
        ({"text": ["a"] * 16}, {"n": 1_024}),
        ({"input_ids": [[]] * 16}, [{"n": 1}, {"n": 1_024}]),
        ({"input_embeds": [[[0.5]]] * 16_384}, {}),
    ],
)
def test_a_request_asks_for_a_bounded_number_of_answers(
    prompts: dict[str, Any], params: Any
) -> None:
    """Nothing is made of them before they are counted."""

    def taken(*_: Any) -> None:
        raise KeyError("taken")

    def ask(http: Any, prompts: dict[str, Any]) -> None:
        checks.normalize(GenerateReqInput(sampling_params=params, **prompts), http, taken)

    more = {name: [*given, given[0]] for name, given in prompts.items()}
    for http, few in ((OVER_HTTP, prompts), (None, more)):
        with pytest.raises(ValueError, match="taken"):
            ask(http, few)
    with pytest.raises(ValueError, match=r"asks for 1\d,\d{3} answers.* 16,384 at most"):
        ask(OVER_HTTP, more)


@pytest.mark.parametrize("field", ["image_data", "audio_data"])
@pytest.mark.parametrize(
    "path",
    ["/", "file:///", "/no/such/file.png", "/dev/zero", "file:///dev/zero", "/9j/4AAQ", "/" * 5000],
)
def test_a_path_of_no_file_of_the_server_is_refused(field: str, path: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} is '.*it has none there; send the bytes"):
        normalized(**{field: [path]})


def test_of_a_chat_too_and_a_pipe(tmp_path: Path) -> None:
    """A chat's images are objects with a URL."""
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="it has none there"):
        normalized(image_data=[ImageData(url=f"file://{pipe}")])


def test_files_urls_and_base64_are_sglangs_to_read(tmp_path: Path) -> None:
    file = tmp_path / "a picture.png"
    file.write_bytes(b"")
    for medium in (
        str(file),
        f"{tmp_path.as_uri()}/a%20picture.png",
        "https://a/b",
        "data:,",
        "aGk=",
    ):
        normalized(image_data=[medium])
    normalized(audio_data=["data:,"])
    with pytest.raises(ValueError, match=r"^audio_data is 'aGk='"):
        normalized(audio_data=["aGk="])
    normalized(http=None, image_data=["/"])
