"""Exact checkpoints on a real server: what is cached, to the token, and that it answers the same.

Cold answers, against which every hit is compared, come from the same server with an empty cache,
and in slow tests from SGLang's own launcher.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import openai
import pytest
import requests
import sglang as sgl

from sglang_hybrid.extensions.cpu.models import ARCHITECTURES
from sglang_hybrid.extensions.cpu.models.tiny import DEFAULT_ARCHITECTURE
from sglang_hybrid.serving.server_process import ServerFailed
from tests.server.client import (
    Serve,
    ask,
    cached,
    cold,
    flush,
    greedy,
    hybrid_cache,
    random_prompt,
    said,
    same,
    until,
)
from tests.server.expected import agree, conversations_agree, expect
from tests.server.one_memory import TWO_POOLS

NEW_TOKENS = 6
LONG = 5_000
"""Tokens, in forty chunks of 128."""


@dataclass(frozen=True)
class Case:
    """Prompts, sent one after another or as one batch, and what of each should come from the cache
    with pages of one token.
    """

    prompts: list[list[int]]
    cached: list[int]
    together: bool = False


def siblings(shared: int, count: int, seed: int, own: int = 300) -> list[list[int]]:
    """Prompts that share their first `shared` tokens."""
    prefix = random_prompt(shared, seed)
    return [prefix + random_prompt(own + k, seed + 1 + k) for k in range(count)]


def cases() -> dict[str, Case]:
    """Nothing is aligned to any chunk, and what follows a shared prefix is long: a boundary that
    the kernel passes anyway lies behind it.
    """
    found = {
        "siblings in turn": Case(siblings(1000, 3, seed=10), [0, 0, 1000]),
        "siblings together": Case(siblings(1000, 3, seed=20), [0, 1000, 1000], together=True),
    }
    for length in (127, 128, 129, 256, 700):
        prompt = random_prompt(length, seed=length)
        found[f"twice the same {length}"] = Case([prompt, prompt], [0, length - 1])
    document = siblings(800, 3, seed=30)
    found["a branch and an end from one prefill"] = Case(
        [*document[:2], document[2], document[1], document[1] + random_prompt(40, seed=39)],
        [0, 0, 800, len(document[1]) - 1, len(document[1]) - 1],
    )
    ancestor, deep = random_prompt(500, seed=40), random_prompt(300, seed=41)
    found["a deep prefix, then its shallow ancestor"] = Case(
        [ancestor + deep + random_prompt(300, seed=42 + k) for k in range(3)]
        + [ancestor + random_prompt(300, seed=45 + k) for k in range(2)],
        [0, 0, 800, 0, 500],
    )
    return found


def play(url: str, case: Case) -> list[dict]:
    """The records of a case, from an empty cache."""
    flush(url)
    if case.together:
        return ask(url, case.prompts, NEW_TOKENS)
    return [ask(url, prompt, NEW_TOKENS) for prompt in case.prompts]


def wrong_hits(
    case: Case, records: list[dict], page: int, chunk: int, more: int = 0
) -> list[tuple[int, int]]:
    """The right hit, to the page, and the hit that was, which may be `more` tokens more. The end of
    a chunk, where a slot is free, may be hit where nothing else can.
    """
    pairs = list(zip(case.cached, map(cached, records), strict=True))
    return [
        (wanted, found)
        for wanted, found in pairs
        if not (found % page == 0 and wanted - wanted % page <= found <= wanted + more)
        and not (chunk and found % chunk == 0 and found >= wanted)
    ]


def plays_exactly(url: str, cold_url: str, page: int = 1, chunk: int = 0) -> None:
    """Every case hits what it should and answers as without a cache."""
    plays_hits(url, cold_url, *cases(), page=page, chunk=chunk)
    second_turn_is_cached(url, cold_url, page)
    flush(url)


def plays_hits(
    url: str, cold_url: str, *names: str, page: int = 1, chunk: int = 0, more: int = 0
) -> None:
    """`plays_exactly` for the cases of these names. Each prompt is asked for once without a cache;
    where that would be on the same server, the first of those in turn already was.
    """
    for name in names:
        case = cases()[name]
        warm = play(url, case)
        assert not wrong_hits(case, warm, page, chunk, more), name
        was_cold = url == cold_url and not case.together
        right = {tuple(case.prompts[0]): warm[0]} if was_cold else {}
        for record, prompt in zip(warm, case.prompts, strict=True):
            key = tuple(prompt)
            if key not in right:
                right[key] = cold(cold_url, prompt, NEW_TOKENS)
            assert same(record, right[key])


def second_turn_is_cached(
    url: str, cold_url: str, page: int = 1, reply: int = 20, lost: int = 0
) -> None:
    """All of prompt and reply but the last token, which the model may never have read, and `lost`
    tokens before it at most.
    """
    flush(url)
    prompt = random_prompt(332, seed=50)
    first = ask(url, prompt, reply)
    longer = prompt + first["output_ids"] + random_prompt(17, seed=51)
    second = ask(url, longer, NEW_TOKENS)
    known = len(prompt) + reply - 1
    assert (known - lost) // page * page <= cached(second) <= known + 1
    assert same(second, cold(cold_url, longer, NEW_TOKENS))


@pytest.fixture(scope="module")
def sglangs_own(serve: Serve) -> Iterator[str]:
    """The same model under SGLang's own cache at its defaults."""
    with serve(module="sglang.launch_server") as running:
        yield running.url


@pytest.fixture(params=["our own", pytest.param("SGLang's", marks=pytest.mark.slow)])
def cold_url(request: pytest.FixtureRequest, url: str) -> str:
    """A server whose cache is emptied before it is asked."""
    return url if request.param == "our own" else str(request.getfixturevalue("sglangs_own"))


def test_every_case_hits_exactly_and_answers_the_same(url: str, cold_url: str) -> None:
    plays_exactly(url, cold_url)


@pytest.mark.slow
def test_documents_are_never_worse_off_than_under_sglangs_own(url: str, sglangs_own: str) -> None:
    """The third and later prompts hit the whole document."""
    for seed, length in ((60, 1400), (70, 1403), (80, 1437)):
        document = random_prompt(length, seed)
        prompts = [document + random_prompt(10 + 5 * k, seed + k) for k in range(5)]
        flush(sglangs_own)
        theirs = [cached(ask(sglangs_own, prompt, NEW_TOKENS)) for prompt in prompts]
        ours = [cached(ask(url, prompt, NEW_TOKENS)) for prompt in prompts]
        assert all(mine >= other for mine, other in zip(ours, theirs, strict=True)), (ours, theirs)
        assert ours[2:] == [length] * 3


def test_a_chat_has_all_but_its_last_message_cached_the_second_time(url: str) -> None:
    system = " ".join(f"Rule {n} is kept by keeper {n * 7 % 31}." for n in range(90))
    client = openai.OpenAI(base_url=url + "/v1", api_key="none")

    def ask_about(question: str) -> openai.types.CompletionUsage:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        usage = client.chat.completions.create(
            model="default", messages=messages, max_tokens=4, temperature=0
        ).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage

    alone = ask_about("")
    flush(url)
    first, second = ask_about("Who keeps rule 3?"), ask_about("Name the keeper of rule 5, please.")
    assert first.prompt_tokens_details.cached_tokens == 0
    rest = second.prompt_tokens - second.prompt_tokens_details.cached_tokens
    question = second.prompt_tokens - alone.prompt_tokens
    assert question < rest <= question + 12  # the roles' tokens
    assert hybrid_cache(url)["checkpoints_admitted"]["message"] >= 1


def test_a_note_above_the_end_and_a_list_that_grows_are_cached_up_to_there(url: str) -> None:
    """All that a turn shares with the one before is hit, from the third turn on."""
    system, part, chat = (random_prompt(n, seed) for n, seed in ((150, 92), (40, 93), (900, 94)))
    turns = [
        system + chat[:at] + part + chat[at : at + 90] + random_prompt(10, at)
        for at in range(0, 500, 100)
    ]
    hits = [cached(ask(url, turn, 2)) for turn in turns]
    assert hits[2:] == [150 + at for at in range(100, 400, 100)]


def test_answers_that_come_back_shortened_are_cached_nearly_to_there(
    url: str, cold_url: str
) -> None:
    """Less than 128 of 200 tokens are computed again from the third turn on, and hits are exact."""
    prompt, lost = random_prompt(150, seed=95), []
    for turn in range(4):
        record = ask(url, prompt, 200)
        longer = prompt + record["output_ids"][:-4] + random_prompt(20, seed=96 + turn)
        lost.append(len(prompt) - 20 - cached(record))
        prompt = longer
    assert lost[1] >= 190 and all(0 <= tokens < 128 for tokens in lost[2:])
    hit = ask(url, prompt, NEW_TOKENS)
    assert len(prompt) - 20 - 128 < cached(hit) <= len(prompt) - 20
    assert same(hit, cold(cold_url, prompt, NEW_TOKENS))


def test_a_chat_whose_thoughts_are_left_out_is_cached_up_to_its_reply(url: str) -> None:
    """The prompt of the first turn ends in `<think>`, which later turns do not have."""
    document = {"role": "user", "content": " ".join(f"Rule {n} is {n * 7}." for n in range(200))}
    thought = {"role": "assistant", "content": "<think>\n"}
    later = [{"role": "assistant", "content": "It is so."}, {"role": "user", "content": "Is it?"}]

    def usage(*messages: dict[str, str]) -> tuple[int, int]:
        body = {"model": "default", "messages": messages, "max_tokens": 4, "temperature": 0}
        body["continue_final_message"] = True
        found = requests.post(url + "/v1/chat/completions", json=body).json()["usage"]
        return found["prompt_tokens"], found["prompt_tokens_details"]["cached_tokens"]

    asked = {"model": "default", "messages": [document], "add_generation_prompt": False}
    begins = len(requests.post(url + "/v1/tokenize", json=asked).json()["tokens"])
    first, cold = usage(document, thought)
    _, hit = usage(document, *later, thought)
    assert cold == 0
    assert hit == begins < first


def test_old_results_that_are_left_out_one_by_one_are_cached_up_to_there(url: str) -> None:
    """A client shows the last three results of its tools only: from the third prompt that left one
    out on, all that it shares with the one before is hit but for a message's first tokens.
    """
    system = {"role": "system", "content": "Answer in one word. " * 30}
    whole = [" ".join(f"{n} times {turn} is {n * turn}." for n in range(20)) for turn in range(9)]
    reply = {"role": "assistant", "content": "It is so, as far as anybody can tell. " * 5}

    def prompt_and_hit(turn: int) -> tuple[list[int], int]:
        messages = [system]
        for at, result in enumerate(whole[: turn + 1]):
            shown = result if at > turn - 3 else "(left out)"
            messages += [{"role": "user", "content": f"Result: {shown}"}, reply]
        body = {"model": "default", "messages": messages[:-1]}
        tokens = requests.post(url + "/v1/tokenize", json=body).json()["tokens"]
        more = {"max_tokens": 1, "temperature": 0}
        usage = requests.post(url + "/v1/chat/completions", json=body | more).json()["usage"]
        return tokens, usage["prompt_tokens_details"]["cached_tokens"]

    asked = [prompt_and_hit(turn) for turn in range(len(whole))]
    for (before, _), (prompt, hit) in pairwise(asked[4:]):
        both = enumerate(zip(before, prompt, strict=False))
        shared = next(at for at, (old, new) in both if old != new)
        assert shared - 20 < hit <= shared


@pytest.mark.parametrize("end", ["length", "stop token", "abort"])
def test_a_reply_is_cached_to_its_end_however_it_ended(url: str, cold_url: str, end: str) -> None:
    reply_is_cached(url, cold_url, end)


def reply_is_cached(url: str, cold_url: str, end: str, lost: int = 0) -> None:
    """Assert that the reply is cached, but for `lost` tokens at most."""
    prompt = random_prompt(333, seed=90)
    whole = cold(url, prompt, 40)["output_ids"]
    flush(url)
    if end == "length":
        reply = ask(url, prompt, 20)["output_ids"]
    elif end == "stop token":
        stop = next(token for token in whole[5:] if whole.index(token) >= 5)
        stops = {"stop_token_ids": [stop], "ignore_eos": False}
        record = ask(url, prompt, 40, sampling=stops)
        assert record["meta_info"]["finish_reason"]["type"] == "stop"
        reply = whole[: whole.index(stop) + 1]
        assert record["output_ids"] == reply
    else:
        reply = aborted_reply(url, prompt)
    longer = prompt + reply + random_prompt(25, seed=91)
    second = ask(url, longer, NEW_TOKENS)
    known = len(prompt) + len(reply)
    assert known - 1 - lost <= cached(second) <= known
    assert same(second, cold(cold_url, longer, NEW_TOKENS))


def aborted_reply(url: str, prompt: list[int]) -> list[int]:
    """The answer of a request when its client took it back."""
    body = greedy(prompt, 4000, rid="taken-back", stream=True)
    record: dict = {}
    with requests.post(url + "/generate", json=body, stream=True, timeout=300) as response:
        lines = (line for line in response.iter_lines() if line.startswith(b"data: {"))
        for number, line in enumerate(lines):
            record = json.loads(line.removeprefix(b"data: "))
            if number == 7:
                requests.post(url + "/abort_request", json={"rid": "taken-back"}, timeout=30)
    assert record["meta_info"]["finish_reason"]["type"] == "abort"
    assert 5 < len(record["output_ids"]) < 4000
    return record["output_ids"]


def test_samples_of_one_prompt_share_all_of_it(url: str) -> None:
    samples_share(url, 699)


def samples_share(url: str, usable: int) -> None:
    records = ask(url, [random_prompt(700, seed=95)], NEW_TOKENS, sampling={"n": 4})
    assert len(records) == 4
    assert sorted(map(cached, records))[-3:] == [usable] * 3


@sgl.function
def forked(s: sgl.SglFunction, document: str) -> None:
    s += document
    forks = s.fork(4)
    for number, fork in enumerate(forks):
        fork += f" Part {number} says:"
        fork += sgl.gen("part", max_tokens=4, temperature=0)
    forks.join()


def test_the_forks_of_a_program_share_its_prompt(url: str) -> None:
    document = " ".join(f"Entry {n} was kept by keeper {n * 7 % 31}." for n in range(90))
    forked.run(document=document, backend=sgl.RuntimeEndpoint(url))
    before = hybrid_cache(url)
    tokens = len(requests.post(url + "/tokenize", json={"prompt": document}).json()["tokens"])
    assert before["hit_tokens"] >= 3 * (tokens - 1)


@pytest.mark.slow
def test_a_state_that_is_off_by_one_would_be_seen(serve: Serve, sglangs_own: str) -> None:
    """The comparison catches a server that takes every state one token too early."""
    with serve(module="tests.server.off_by_one") as wrong:
        case = cases()["siblings in turn"]
        warm = play(wrong.url, case)
        assert [cached(record) for record in warm] == case.cached
        with pytest.raises(AssertionError):
            same(warm[-1], cold(sglangs_own, case.prompts[-1], NEW_TOKENS))
        assert same(warm[0], cold(sglangs_own, case.prompts[0], NEW_TOKENS))


LAZY = ("--mamba-radix-cache-strategy", "extra_buffer_lazy")
NO_BUFFER = ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule")
SPLIT = "split where states are left"
CHUNKS = "chunks of 128"
CONFIGURATIONS = {
    "default": (),
    "extra buffer": ("--mamba-radix-cache-strategy", "extra_buffer"),
    CHUNKS: ("--chunked-prefill-size", "128"),
    "page 16": ("--page-size", "16"),
    "lazy": LAZY,
    "lazy, page 16": (*LAZY, "--page-size", "16"),
    "no buffer": NO_BUFFER,
    "two ranks": ("--tp-size", "2"),
    "two stages": ("--pp-size", "2"),
    "mixed chunks of 128": ("--enable-mixed-chunk", "--chunked-prefill-size", "128"),
    "no overlap": ("--disable-overlap-schedule",),
    "requests at every fourth step": ("--scheduler-recv-interval", "4"),
    "two tokenizers": ("--tokenizer-worker-num", "2"),
    "without a tokenizer": ("--skip-tokenizer-init",),
    "two pools": TWO_POOLS,
    "two pools, page 16": (*TWO_POOLS, "--page-size", "16"),
    "two pools, two ranks": (*TWO_POOLS, "--tp-size", "2"),
    SPLIT: (),
}
WITHOUT_EXTRA_BUFFER = (
    *("mamba2", "falcon-mamba", "lfm2", "lfm2-moe", "zaya", "gigachat-3.5"),
    "jet-nemotron",
)
"""Models for which SGLang does not have it; pages need it."""
IN_STAGES = ("nemotron-h", "nemotron-3", "kimi-linear", "qwen3.5")
"""Models that SGLang can divide into the stages of a pipeline."""
ON_ONE_RANK = ("jet-nemotron", "minicpm-sala")
"""Models whose layers SGLang cannot divide, or answers wrongly with on several ranks."""
WITHOUT_ONE_MEMORY = ("mamba2", "falcon-mamba", "qwen4-exp", "glm-5-next", "jet-nemotron")
OF_EVERY_KIND = (
    *(CHUNKS, "page 16", "lazy", "no buffer", "two ranks", "two stages"),
    "two pools",
)
MATRIX = [
    (architecture, configuration)
    for architecture in sorted(set(ARCHITECTURES) - {"transformer"})
    for configuration in CONFIGURATIONS
    if (
        configuration in OF_EVERY_KIND
        or architecture == DEFAULT_ARCHITECTURE
        or (architecture, configuration) == ("qwen4-exp", SPLIT)  # a slot holds more than states
    )
    and not (architecture == DEFAULT_ARCHITECTURE and configuration == "default")
    and not (configuration == "two stages" and architecture not in IN_STAGES)
    and not ("two ranks" in configuration and architecture in ON_ONE_RANK)
    and not (configuration == "two pools" and architecture in WITHOUT_ONE_MEMORY)
    and not (
        architecture in WITHOUT_EXTRA_BUFFER
        and any(word in configuration for word in ("page 16", "lazy", "extra buffer"))
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "configuration"), MATRIX)
def test_it_is_exact_everywhere(
    architecture: str, configuration: str, model_directory: Callable[[str], Path], serve: Serve
) -> None:
    page, chunk = page_and_chunk(configuration)
    flags = CONFIGURATIONS[configuration]
    module = {"module": "tests.server.split_prefills"} if configuration == SPLIT else {}
    with serve(*flags, of=architecture, **module) as server:
        plays_exactly(server.url, server.url, page, chunk)
        for end in ("stop token", "abort") if page == 1 else ():
            reply_is_cached(server.url, server.url, end)
        samples_share(server.url, 699 - 699 % page)
        if chunk:
            a_late_sibling_is_exact(server.url)
        if architecture == DEFAULT_ARCHITECTURE or configuration == CHUNKS:
            expected = expect(model_directory(architecture))
            agree(server.url, expected, prompts=True)
            assert cached(agree(server.url, expected)[-1]) > 0
            conversations_agree(server.url, expected)
        assert said(server)


@pytest.mark.slow
def test_stages_that_lose_states_of_routers_are_refused(serve: Serve) -> None:
    server = serve("--pp-size", "2", of="zaya")
    with (
        pytest.raises(ServerFailed, match="stages of a pipeline answer wrongly with ZAYA1"),
        server,
    ):
        pass


@pytest.mark.slow
def test_ranks_that_would_share_jet_blocks_are_refused(serve: Serve) -> None:
    server = serve("--tp-size", "2", of="jet-nemotron")
    with pytest.raises(ServerFailed, match="SGLang cannot divide the layers of Jet-"), server:
        pass


def a_late_sibling_is_exact(url: str) -> None:
    """It comes when the first chunks of a long prompt are computed, long before they differ."""
    flush(url)
    first, late = siblings(LONG, 2, seed=80)
    before = hybrid_cache(url)["requests"]
    with ThreadPoolExecutor() as pool:
        running = pool.submit(ask, url, first, NEW_TOKENS)
        until(lambda: hybrid_cache(url)["requests"] > before)
        record = ask(url, late, NEW_TOKENS)
        assert [cached(running.result()), cached(record)] == [0, LONG]
    assert same(record, cold(url, late, NEW_TOKENS))


def page_and_chunk(configuration: str) -> tuple[int, int]:
    """Tokens of a page, and of a chunk of a prefill, if that is short."""
    return 16 if "page 16" in configuration else 1, 128 if "chunks" in configuration else 0
