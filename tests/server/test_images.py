"""Prompts with images, on a server of the model that sees: hits behind an image are exact to the
token, answers are those of an empty cache and of transformers, and no image is taken for another.
"""

from __future__ import annotations

import base64
import io
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch
from PIL import Image

from sglang_hybrid.extensions.cpu.images import PillowProcessor
from sglang_hybrid.extensions.cpu.models.tokenizer import VISION_IDS, VOCAB_SIZE
from sglang_hybrid.extensions.router import Replicas
from sglang_hybrid.serving.server_process import ServerProcess, event_flags
from tests.reference import load_reference
from tests.server.client import TOLERANCE, Serve, cached, flush, logprobs, said, same
from tests.server.one_memory import TWO_POOLS

pytestmark = pytest.mark.slow

MODEL = "qwen3.5-vl"
SPOT = "<|vision_start|><|image_pad|><|vision_end|>"
TOKENS = 40
"""Tokens of a picture of 256 by 160 pixels; a token is 32 by 32 of them."""
BEFORE = 20
"""Words before the first image, of two digits each: three tokens with the blank."""
STARTS = 3 * BEFORE
"""The position of the first image's own tokens: behind the words and the token that opens it."""


def picture(seed: int, width: int = 256, height: int = 160) -> Image.Image:
    """Squares of random colours."""
    colours = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    return Image.fromarray(colours).resize((width, height), Image.Resampling.NEAREST)


def plain(width: int, height: int) -> Image.Image:
    """One colour: all its patches have the same values."""
    return Image.new("RGB", (width, height), (200, 10, 60))


def words(count: int, seed: int) -> str:
    source = random.Random(seed)
    return " ".join(str(source.randrange(10, 100)) for _ in range(count))


A, B, C = (picture(seed) for seed in range(3))
LARGE = picture(3, 512, 320)  # 160 tokens
UPRIGHT, ACROSS = plain(160, 256), plain(256, 160)
TEXT = words(BEFORE, 1) + SPOT + words(30, 2)
LENGTH = STARTS + TOKENS + 1 + 89
SCENES: dict[str, tuple[str, list[Image.Image]]] = {
    "one image": (TEXT, [A]),
    "two images": (TEXT + SPOT + words(9, 3), [A, B]),
    "one image twice": (TEXT + SPOT + words(9, 3), [A, A]),
    "an image in two chunks": (words(5, 4) + SPOT + words(9, 3), [LARGE]),
    "images at the beginning and the end": (SPOT + words(9, 3) + SPOT, [LARGE, C]),
}


def as_url(image: Image.Image) -> str:
    held = io.BytesIO()
    image.save(held, "PNG")
    return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()


def look(url: str, text: str, images: list[Image.Image], new_tokens: int = 8, **more: Any) -> Any:
    """The record of a greedy request with images."""
    length = {"max_new_tokens": new_tokens, "ignore_eos": True, "temperature": 0}
    body = {"text": text, "image_data": [as_url(image) for image in images] or None} | more
    body |= {"return_logprob": True, "logprob_start_len": -1, "sampling_params": length}
    response = requests.post(url + "/generate", json=body, timeout=300)
    response.raise_for_status()
    return response.json()


def looked_cold(url: str, text: str, images: list[Image.Image]) -> Any:
    flush(url)
    record = look(url, text, images)
    assert cached(record) == 0
    return record


def length_of(record: Any) -> int:
    return int(record["meta_info"]["prompt_tokens"])


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded") / "requests.jsonl"


@pytest.fixture(scope="module")
def server(serve: Serve, recording: Path) -> Iterator[ServerProcess]:
    flags = ["--chunked-prefill-size", "128", "--enable-cache-report", "--hybrid-ui", "text"]
    flags += ["--hybrid-record", str(recording), *event_flags()]
    with serve(*flags, of=MODEL) as running:
        yield running


@pytest.fixture
def seeing(server: ServerProcess) -> str:
    """The server's address, its cache empty."""
    flush(server.url)
    return server.url


@pytest.fixture(scope="module")
def processor(model_directory: Any) -> Any:
    return PillowProcessor.from_pretrained(str(model_directory(MODEL)))


@pytest.mark.parametrize("scene", SCENES)
def test_transformers_says_the_same(
    seeing: str, model_directory: Any, processor: Any, scene: str
) -> None:
    """Cold, and from the cache, where the position behind an image must be the right one, too."""
    text, images = SCENES[scene]
    first, again = (look(seeing, text, images) for _ in range(2))
    assert (cached(first), cached(again)) == (0, length_of(first) - 1)
    given = dict(processor(text=[text], images=images, return_tensors="pt"))
    prompt = given["input_ids"].shape[1]
    assert length_of(first) == prompt
    answer = torch.tensor([first["output_ids"]])
    given["input_ids"] = torch.cat([given["input_ids"], answer], 1)
    for name, value in (("attention_mask", 1), ("mm_token_type_ids", 0)):
        given[name] = torch.cat([given[name], torch.full_like(answer, value)], 1)
    with torch.no_grad():
        logits = load_reference(model_directory(MODEL)).model(**given, use_cache=False).logits
    scores = logits[0, prompt - 1 : -1].log_softmax(-1).max(-1)
    for record in (first, again):
        assert record["output_ids"] == scores.indices.tolist()
        assert logprobs(record) == pytest.approx(scores.values.tolist(), abs=TOLERANCE)


def test_what_goes_on_behind_an_image_hits_exactly(seeing: str) -> None:
    """A longer prompt, and siblings: the first one leaves a state where the second one parts."""
    shared = words(BEFORE, 1) + SPOT + words(25, 2)
    asked = [TEXT, TEXT + " " + words(9, 5), *(f"{shared} {words(20, seed)}" for seed in (6, 7))]
    warm = [look(seeing, text, [A]) for text in asked]
    parts = STARTS + TOKENS + 1 + 75
    assert [cached(record) for record in warm] == [0, LENGTH - 1, 128, parts]
    for text, record in zip(asked, warm, strict=True):
        assert same(record, looked_cold(seeing, text, [A]))


def test_samples_of_a_prompt_with_an_image_share_it(seeing: str) -> None:
    alone = look(seeing, TEXT, [A])
    flush(seeing)
    body = {"text": TEXT, "image_data": [as_url(A)], "return_logprob": True}
    body |= {"sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True, "n": 2}}
    answers = requests.post(seeing + "/generate", json=body, timeout=300).json()
    assert len(answers) == 2
    assert all(same(answer, alone) and cached(answer) == LENGTH - 1 for answer in answers)


@pytest.mark.parametrize(
    ("one", "other"), [(A, B), (UPRIGHT, ACROSS)], ids=["of other colours", "turned"]
)
def test_another_image_of_as_many_tokens_is_another_prompt(
    seeing: str, one: Image.Image, other: Image.Image
) -> None:
    """A plain image that is turned counts, too: SGLang's hash of it is the same."""
    right = looked_cold(seeing, TEXT, [other])
    flush(seeing)
    look(seeing, TEXT, [one])
    for _ in range(2):
        assert cached(found := look(seeing, TEXT, [other])) in (0, STARTS, LENGTH - 1)
        assert same(found, right)
    assert cached(look(seeing, TEXT, [one])) == LENGTH - 1
    first, second = ([one, image] for image in (one, other))
    both = TEXT + SPOT + words(30, 3)
    right = looked_cold(seeing, both, second)
    flush(seeing)
    look(seeing, both, first)
    found = look(seeing, both, second)
    assert cached(found) <= LENGTH + 1 and same(found, right)
    assert cached(found := look(seeing, both, second)) == length_of(found) - 1


def test_tenants_share_no_image_nor_what_the_encoder_made_of_it(seeing: str) -> None:
    """A client may choose the hash of its image, or send one whose values are another's."""
    right = {id(image): looked_cold(seeing, TEXT, [image]) for image in (A, B, ACROSS)}
    flush(seeing)
    for mine, theirs, more in (
        (A, B, {"mm_hashes": ["ab" * 8]}),
        (UPRIGHT, ACROSS, {}),
        (A, A, {}),
    ):
        look(seeing, TEXT, [mine], extra_key="mine", **more)
        found = look(seeing, TEXT, [theirs], extra_key="theirs", **more)
        assert cached(found) == 0
        assert same(found, right[id(theirs)])
        flush(seeing)


def chat(url: str, path: str = "/v1/chat/completions", **body: Any) -> Any:
    body = {"model": "default", "max_tokens": 8, "temperature": 0} | body
    response = requests.post(url + path, json=body, timeout=300)
    assert response.ok, response.text
    return response.json()


def text_part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text} | more


def image_part(image: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": as_url(image)}}


def from_cache(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_messages_begin_where_they_begin(seeing: str) -> None:
    """A state is left at the start of the last message, behind the image of one before it, and the
    next turn goes on behind the images.
    """
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": [text_part(words(20, 1)), image_part(A)]},
        {"role": "assistant", "content": words(20, 2)},
        {"role": "user", "content": [image_part(B), text_part(words(20, 3))]},
    ]
    answer = chat(seeing, messages=turns)
    told = requests.post(
        seeing + "/hybrid_cache/prompt/v1/chat/completions",
        json={"model": "default", "messages": turns},
        timeout=60,
    ).json()
    tokens = told["input_ids"]
    assert tokens.count(VISION_IDS["image"]) == 2 * TOKENS
    opener = tokens[0]
    start = [at for at, token in enumerate(tokens) if token == opener][2]
    asked = {"request_id": answer["id"]}
    left = requests.post(seeing + "/hybrid_cache/explain", json=asked, timeout=60).json()
    assert [start, "message"] in left["request"]["left"]
    other = [*turns[:2], {"role": "user", "content": [text_part(words(30, 4))]}]
    assert from_cache(chat(seeing, messages=other)) == start
    said = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
    longer = [*turns, said, {"role": "user", "content": words(9, 5)}]
    assert from_cache(chat(seeing, messages=longer)) >= len(tokens) - 1


@pytest.mark.parametrize("images", [[A, LARGE], []], ids=["with images", "of words"])
def test_marked_blocks_of_chats_are_kept(seeing: str, images: list[Image.Image]) -> None:
    """Whatever was rendered before: SGLang keeps the tokens of chats of a model that sees."""
    shown = [part for image in images for part in (image_part(image), text_part(words(9, 1)))]
    mark = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    marked = [*shown, text_part(words(60, 2), **mark)]
    answers = [
        chat(seeing, messages=[{"role": "user", "content": [*marked, text_part(words(30, seed))]}])
        for seed in (3, 4, 4)
    ]
    details = [answer["usage"]["prompt_tokens_details"] for answer in answers]
    written = details[0]["cache_write_tokens"]
    assert written >= 3 * 60 + len(images) * TOKENS
    assert [one["cached_tokens"] for one in details[:2]] == [0, written]
    assert details[2]["cached_tokens"] == answers[2]["usage"]["prompt_tokens"] - 1


def test_marked_blocks_of_messages_are_counted_behind_images(seeing: str) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": as_url(A).partition(",")[2]}
    hour = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    blocks = [{"type": "image", "source": source}, text_part(words(60, 1), **hour)]
    used = [
        chat(
            seeing,
            "/v1/messages",
            messages=[{"role": "user", "content": [*blocks, text_part(words(30, seed))]}],
        )["usage"]
        for seed in (2, 3)
    ]
    written = used[0]["cache_creation_input_tokens"]
    assert written == used[0]["cache_creation"]["ephemeral_1h_input_tokens"] > 3 * 60 + TOKENS - 3
    assert used[1]["cache_read_input_tokens"] == written


def test_a_declared_position_behind_an_image_is_kept(seeing: str) -> None:
    position = STARTS + TOKENS + 10
    action = {"action_id": "1", "action_type": "hybrid.checkpoint", "action_version": "1"}
    hints = {"protocol_version": "1", "message_id": "1", "actions": [action]}
    action["payload"] = {"positions": [position]}  # type: ignore[assignment]
    report = look(seeing, TEXT, [A], kv_hints=hints)["meta_info"]["hybrid_cache"]
    assert report["declared"]["kept"] == [position]


def test_routers_and_the_page_know_words_only(seeing: str) -> None:
    """A router's lookup ends at the first image. Its followers read events with images."""
    look(seeing, words(BEFORE, 1), [])
    look(seeing, TEXT, [A], rid="asked")
    body = {"text": TEXT, "image_data": [as_url(A)]}
    told = requests.post(seeing + "/hybrid_cache/prompt/generate", json=body, timeout=60).json()
    replicas = Replicas([seeing])
    try:
        deadline = time.monotonic() + 20
        while not (found := replicas.resume(told["input_ids"])):
            assert time.monotonic() < deadline, replicas.errors
            time.sleep(0.2)
        assert 0 < found[0].position <= STARTS
        assert not [one.error for one in replicas.followers.values() if one.error]
    finally:
        replicas.close()
    page = seeing + "/hybrid_cache"
    answer = requests.post(page + "/ask", json={"request_id": "asked"}, timeout=60)
    answer.raise_for_status()
    assert len(answer.json()["tokens"]) == LENGTH
    texts = [
        requests.get(f"{page}/nodes/0/{node}", timeout=60).json()["text"]
        for node in answer.json()["path"]
    ]
    told_words = words(BEFORE, 1) + SPOT.replace("<|image_pad|>", "") + words(30, 2)
    assert "".join(texts).startswith(told_words[:-1])


def token_ids(recorded: str) -> list[int]:
    """The tokens of a recorded prompt, which are kept as base64 of 32 bits each."""
    return np.frombuffer(base64.b64decode(recorded), "<i4").tolist()


def test_recorded_images_are_numbers_that_differ(seeing: str, recording: Path) -> None:
    written = recording.read_text().count("\n")
    for image in (A, B, A):
        look(seeing, TEXT, [image])
    deadline = time.monotonic() + 20
    while recording.read_text().count("\n") < written + 3:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    lines = recording.read_text().splitlines()[written:]
    first, other, again = (token_ids(json.loads(line)["input_ids"]) for line in lines)
    assert first == again and len(first) == LENGTH
    assert first[:STARTS] == other[:STARTS]
    seen = slice(STARTS, STARTS + TOKENS)
    assert all(one != two for one, two in zip(first[seen], other[seen], strict=True))
    assert all(VOCAB_SIZE <= token < 1 << 31 for token in first[seen])
    assert first[seen.stop :] == other[seen.stop :]
    assert max(first[: seen.start] + first[seen.stop :]) < VOCAB_SIZE


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"text": TEXT, "video_data": ["data:video/mp4;base64,AAAA"]}, "reads none"),
        ({"input_ids": [300, -1], "image_data": [as_url(A)]}, "token id"),
        ({"input_ids": [300, 1 << 60], "image_data": [as_url(A)]}, "token id"),
        ({"text": TEXT + SPOT, "image_data": [as_url(A)]}, "2 image placeholders but 1 image"),
    ],
)
def test_what_cannot_be_read_is_refused_in_a_sentence(
    server: ServerProcess, body: dict[str, Any], why: str
) -> None:
    response = requests.post(server.url + "/generate", json=body, timeout=60)
    assert (response.status_code, why in response.text) == (400, True)


@pytest.mark.parametrize(
    ("flags", "page"),
    [
        (("--tp-size", "2"), 1),
        (("--pp-size", "2"), 1),
        (("--page-size", "16"), 16),
        (("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"), 1),
        (("--enable-mixed-chunk", "--chunked-prefill-size", "128"), 1),
        (TWO_POOLS, 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_hits_are_exact_under(serve: Serve, flags: tuple[str, ...], page: int) -> None:
    """A prompt again, longer, and siblings that part behind its image; another image."""
    shared = words(BEFORE, 1) + SPOT + words(25, 2)
    siblings = [f"{shared} {words(20, seed)}" for seed in (6, 7)]
    asked = [TEXT, TEXT, f"{TEXT} {words(9, 5)}", *siblings]
    parts = STARTS + TOKENS + 1 + 75
    with serve(*flags, of=MODEL) as server:
        warm = [look(server.url, text, [A]) for text in asked]
        other = look(server.url, TEXT, [B])
        hits = [cached(record) for record in warm]
        whole, part = (position - position % page for position in (LENGTH - 1, parts))
        assert [*hits[:3], hits[4]] == [0, whole, whole, part]
        assert cached(other) <= STARTS
        for text, record in zip(asked, warm, strict=True):
            assert same(record, looked_cold(server.url, text, [A]))
        assert same(other, looked_cold(server.url, TEXT, [B]))
        assert said(server)


def test_images_come_back_from_host_memory(serve: Serve) -> None:
    """Eight prompts, of which the device holds four at most: the first four are on the host."""
    flags = ("--max-total-tokens", "2000", "--max-mamba-cache-size", "10")
    flags += ("--enable-hierarchical-cache", "--hicache-ratio", "3", "--enable-cache-report")
    asked = [(words(150, seed) + SPOT + words(30, 2), [picture(seed)]) for seed in range(8)]
    with serve(*flags, of=MODEL) as small:
        first = [look(small.url, *scene) for scene in asked]
        assert not any(map(cached, first))
        again = [look(small.url, *scene) for scene in asked]
        hosts = [found["meta_info"]["cached_tokens_details"]["host"] for found in again]
        assert all(hosts[:4]), hosts
        for found, right in zip(again, first, strict=True):
            assert cached(found) == length_of(found) - 1
            assert same(found, right)
