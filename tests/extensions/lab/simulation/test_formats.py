"""Trace formats: each is recognised and read, tokens survive a conversion, and bad input is one
sentence.
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.named_files import FileError
from sglang_hybrid.core.records.edges import common_prefix
from sglang_hybrid.core.returns.hints import Hint
from sglang_hybrid.core.server_settings import Serving
from sglang_hybrid.core.specs import Spec
from sglang_hybrid.core.traffic import requests
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.lab.runner import Job, Runner
from sglang_hybrid.extensions.lab.simulation.traces import line_formats
from sglang_hybrid.extensions.lab.simulation.traces.arrivals import Azure, Draw
from sglang_hybrid.extensions.lab.simulation.traces.formats import (
    FORMATS,
    read_trace,
    recognise,
    write_trace,
)
from sglang_hybrid.extensions.lab.simulation.traces.lines import Reading, Room, Skipped, TraceError
from tests.traces import TRACES

WRITABLE = [known.name for known in FORMATS.values() if known.write]
MARCONI = {"session_id": 3, "turn_id": 1, "ts": 0.5, "input_tokens": [1, 2], "output_tokens": [7]}
COMPACT = {"session": 0, "turn": 0, "t": 0.5, "base": None, "new": [1, 2, 3], "out": [4, 5]}
RECORDED = {"t": 1, "input_ids": [5, 6, 7], "output_ids": [8], "message_starts": [0, 2]}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def same(one: list[Request], other: list[Request]) -> bool:
    return all(
        (a.session, a.turn, a.arrival, a.input_len) == (b.session, b.turn, b.arrival, b.input_len)
        and np.array_equal(a.tokens, b.tokens)
        for a, b in zip(one, other, strict=True)
    )


def test_marconi(tmp_path: Path) -> None:
    (request,) = read_trace(write(tmp_path / "trace.jsonl", MARCONI))
    assert (request.session, request.turn, request.arrival, request.input_len) == (3, 1, 0.5, 2)
    assert request.tokens.tolist() == [1, 2, 7]


def test_recorded(tmp_path: Path) -> None:
    more = {"t": 2, "reply_start": 2, "model": "any"}
    path = write(tmp_path / "trace.jsonl", RECORDED, {**RECORDED, **more})
    first, second = read_trace(path)
    assert first.tokens.tolist() == [5, 6, 7, 8]
    assert first.message_starts == (0, 2)
    assert (first.reply_start, second.reply_start) == (0, 2)
    assert (first.session, second.session) == (0, 1)


def test_compact(tmp_path: Path) -> None:
    later = {**COMPACT, "turn": 1, "t": 2, "base": [0, 4], "new": [9], "out": []}
    first, second = read_trace(write(tmp_path / "trace.jsonl", COMPACT, later))
    assert (first.tokens.tolist(), first.input_len, first.arrival) == ([1, 2, 3, 4, 5], 3, 0.5)
    assert (second.tokens.tolist(), second.input_len, second.turn) == ([1, 2, 3, 4, 9], 5, 1)


def test_mooncake(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl",
        {"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [0, 7]},
        {"timestamp": 5, "input_length": 40000, "output_length": 2, "hash_ids": [0] * 79},
        {"timestamp": 1500, "input_length": 520, "output_length": 1, "hash_ids": [0, 8]},
    )
    assert len(read_trace(path)) == 3
    first, second = read_trace(path, Reading(max_input=32_768))
    assert (len(first.tokens), first.input_len, second.arrival) == (602, 600, 1.5)
    assert (first.tokens[:512] == second.tokens[:512]).all()
    assert first.tokens[512] != second.tokens[512]
    assert len({*first.tokens[600:].tolist(), *second.tokens[520:].tolist()}) == 3


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = read_trace(path)
    assert (first.input_len, len(first.tokens), first.arrival) == (374, 418, 0.0)
    assert second.arrival == pytest.approx(4.314579)
    assert not set(first.tokens.tolist()) & set(second.tokens.tolist())


def test_azures_own_file() -> None:
    path = TRACES / "AzureLLMInferenceTrace_conv.csv.gz"
    if not path.exists():
        pytest.skip(f"../shared/traces/{path.name} is not here")
    azure = Azure.read(path)
    assert len(azure.arrivals) == 19_366
    assert azure.prompts[0] == 374


def test_mooncakes_blocks_have_numbers_of_long_traces(tmp_path: Path) -> None:
    first = 2**31 // 512
    lines = [
        {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [0, block]}
        for block in (first, first + 1, first)
    ]
    one, other, again = read_trace(write(tmp_path / "trace.jsonl", *lines))
    assert np.array_equal(one.tokens[:1024], again.tokens[:1024])
    assert common_prefix(one.tokens, other.tokens) == 512


def conversation(**more: object) -> dict[str, object]:
    def request(t: float, length: int, out: int, blocks: list[int]) -> dict[str, object]:
        return {"t": t, "type": "s", "in": length, "out": out, "hash_ids": blocks, "stop": ""}

    return {
        "block_size": 4,
        "tool_tokens": 5,
        "system_tokens": 3,
        "requests": [request(0, 14, 3, [1, 2, 3]), request(9.5, 21, 2, [1, 2, 3, 4, 5])],
        **more,
    }


def test_blocks_are_stitched_to_what_continues_them(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps(conversation()))
    first, second = read_trace(path)
    assert (first.input_len, len(first.tokens), second.input_len) == (14, 17, 21)
    assert np.array_equal(first.tokens, second.tokens[:17])
    assert second.tokens[20] < 0 <= second.tokens[19]
    assert (first.arrival, second.arrival) == (0.0, 9.5)


def test_conversations_share_tools_and_system_prompt_only(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(conversation()))
    (tmp_path / "b.json").write_text(json.dumps(conversation()))
    requests = read_trace(tmp_path, Reading(session_rate=10))
    one, other = (r for r in requests if r.turn == 0)
    assert np.array_equal(one.tokens[:8], other.tokens[:8])
    assert not set(one.tokens[8:].tolist()) & set(other.tokens[8:].tolist())
    assert [r.arrival for r in requests] == sorted(r.arrival for r in requests)


def test_global_blocks_are_shared(tmp_path: Path) -> None:
    for name in "ab":
        text = json.dumps(conversation(hash_id_scope="global"))
        (tmp_path / f"{name}.json").write_text(text)
    one, other = (r for r in read_trace(tmp_path) if r.turn == 0)
    assert np.array_equal(one.tokens[:12], other.tokens[:12])


@pytest.mark.parametrize("policy", ["vllm+", "sglang", "lru", "reuse", "clairvoyant"])
@pytest.mark.parametrize("serving", [None, Serving()], ids=["paper", "served"])
def test_blocks_and_their_tokens_replay_alike(
    tmp_path: Path, policy: str, serving: Serving | None
) -> None:
    rng = np.random.default_rng(0)
    turns = [0] * 8
    lines = []
    for second in range(60):
        who = int(rng.integers(8))
        turns[who] += 1
        blocks = [0, *(1_000 * (who + 1) + turn for turn in range(turns[who]))]
        length = 512 * len(blocks) - int(rng.integers(512))
        lines.append(
            {
                "timestamp": 1000 * second,
                "input_length": length,
                "output_length": 9,
                "hash_ids": blocks,
            }
        )
    kept = read_trace(write(tmp_path / "trace.jsonl", *lines))
    assert sum(request.kept_bytes for request in kept) < 40 * len(kept)
    plain = [dataclasses.replace(request, kept=request.tokens.copy()) for request in kept]
    found = []
    for requests_ in (kept, plain):
        job = Job(Spec(policy), "t", CostModel.paper_7b(), 10**9, serving=serving)
        found.append(Runner({"t": requests_}).run(job).hit_len.tolist())
    assert found[0] == found[1] and sum(found[0])


def test_an_agent_of_a_conversation_is_a_session_of_its_own(tmp_path: Path) -> None:
    inner = {"type": "subagent", "requests": conversation()["requests"]}
    outer = [*conversation()["requests"], inner]  # type: ignore[misc]
    path = tmp_path / "one.json"
    path.write_text(json.dumps(conversation(requests=outer)))
    requests = read_trace(path)
    assert sorted((r.session, r.turn) for r in requests) == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    from sglang_hybrid.extensions.cpu.models.tokenizer import write_tokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, 4_096)
    return str(directory)


TALK = [("user", "one two three"), ("assistant", "four"), ("user", "five"), ("assistant", "six")]


def test_conversations_of_both_kinds_are_the_same_requests(tmp_path: Path, tokenizer: str) -> None:
    openai = {"messages": [{"role": role, "content": text} for role, text in TALK]}
    names = {"user": "human", "assistant": "gpt"}
    sharegpt = {"id": "a", "conversations": [{"from": names[r], "value": v} for r, v in TALK]}
    array = tmp_path / "share.json"
    array.write_text(json.dumps([sharegpt, sharegpt], indent=1))
    reading = Reading(tokenizer=tokenizer, session_rate=0.01)
    lines = read_trace(write(tmp_path / "open.jsonl", openai), reading)
    both = read_trace(array, reading, "sharegpt")
    first, second = lines
    assert same(lines, [r for r in both if r.session == 0])
    assert len({r.session for r in both}) == 2
    assert np.array_equal(second.tokens[: len(first.tokens)], first.tokens)
    assert first.message_starts == ()
    assert second.message_starts[-1] == len(first.tokens)
    assert second.arrival - first.arrival == pytest.approx(2 / 1.5)


@pytest.mark.parametrize("name", WRITABLE)
@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_what_is_written_is_read_again(tmp_path: Path, name: str, suffix: str) -> None:
    tokens = np.arange(200, dtype=np.int32)
    requests = [
        Request(0, 0, 0.0, tokens[:100], 90),
        Request(1, 0, 0.5, np.concatenate([tokens[:50], tokens[120:]]), 80),
        Request(0, 1, 2.25, tokens[:150], 140),
        Request(0, 2, 2.25, np.array([-5, 2**31 - 1, -(2**31)], dtype=np.int32), 3),
    ]
    path = tmp_path / f"trace.{suffix}"
    write_trace(path, requests, name)
    assert recognise(path).name == name
    assert same(read_trace(path), requests)
    assert len(read_trace(path, Reading(limit=2))) == 2
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("name", ["recorded", "openai"])
def test_the_first_requests_are_those_that_arrive_first(
    tmp_path: Path, name: str, tokenizer: str
) -> None:
    """A recording has them as they ended, and conversations need no order. The others take no
    room.
    """
    talk = {"messages": [{"role": role, "content": text} for role, text in TALK]}
    line = {"recorded": RECORDED, "openai": talk}[name]
    path = write(tmp_path / "trace.jsonl", *({**line, "t": t} for t in (9, 7, 8, 5, 6, 1, 4, 0, 3)))
    room = Room()
    read = read_trace(path, Reading(2, tokenizer=tokenizer, room=room), name)
    assert [request.arrival for request in read] == [0, 1]
    if name == "recorded":
        left = Room()
        for request in read:
            left.take(request)
        assert room == left


def test_tenants_are_recorded_and_in_no_other_format(tmp_path: Path) -> None:
    tokens = np.arange(50, dtype=np.int32)
    requests = [
        Request(k, 0, float(k), tokens, 40, tenant=tenant) for k, tenant in enumerate("aab")
    ]
    write_trace(tmp_path / "t.jsonl", requests, "recorded")
    read = read_trace(tmp_path / "t.jsonl")
    assert [request.tenant for request in read] == ["a", "a", "b"]
    for name in set(WRITABLE) - {"recorded"}:
        with pytest.raises(ValueError, match="write them as 'recorded'"):
            write_trace(tmp_path / "other.jsonl", requests, name)
        assert not (tmp_path / "other.jsonl").exists()


def test_hints_are_recorded(tmp_path: Path) -> None:
    tokens = np.arange(50, dtype=np.int32)
    hints = [None, Hint.ENDS, Hint.RETURNS, Hint.after(2.5)]
    requests = [Request(k, 0, float(k), tokens, 40, hint=hint) for k, hint in enumerate(hints)]
    write_trace(tmp_path / "t.jsonl", requests, "recorded")
    read = read_trace(tmp_path / "t.jsonl")
    assert [request.hint for request in read] == hints


def test_recorded_ids_are_packed(tmp_path: Path) -> None:
    """A list of numbers is a string in base64; both are the same request."""
    ids = [0, 1, -1, 2**31 - 1, -(2**31), 150_000]
    numbers = {"t": 0, "session": 0, "input_ids": ids[:4], "output_ids": ids[4:]}
    read = read_trace(write(tmp_path / "numbers.jsonl", numbers))
    assert read[0].tokens.tolist() == ids
    write_trace(tmp_path / "packed.jsonl", read, "recorded")
    line = json.loads((tmp_path / "packed.jsonl").read_text())
    assert line["input_ids"] == base64.b64encode(np.array(ids[:4], "<i4").tobytes()).decode()
    assert same(read_trace(tmp_path / "packed.jsonl"), read)


def test_compact_says_a_prefix_once(tmp_path: Path) -> None:
    tokens = np.arange(10_000, dtype=np.int32)
    ends = [5_000 + 500 * i for i in range(10)]
    requests = [Request(0, i, float(i), tokens[:end], end - 10) for i, end in enumerate(ends)]
    write_trace(tmp_path / "t.jsonl", requests, "compact")
    sizes = [len(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert max(sizes[1:]) < sizes[0] / 5


def test_half_a_file_is_not_left_behind(tmp_path: Path) -> None:
    def requests() -> object:
        yield Request(0, 0, 0.0, np.arange(5, dtype=np.int32), 3)
        raise RuntimeError("the reader failed")

    with pytest.raises(RuntimeError):
        write_trace(tmp_path / "t.jsonl", requests(), "marconi")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


BAD = [
    ("marconi", {**MARCONI, "ts": -1}, r":2: not a line of a Marconi trace \(Expected.*>= 0"),
    ("marconi", {**MARCONI, "ts": 0.25}, r":2: .*before the line above \(0.5 s\)"),
    ("marconi", {**MARCONI, "input_tokens": []}, r":2: .*its prompt is empty"),
    ("marconi", {"session_id": 3}, r":2: .*missing required field `turn_id`"),
    ("marconi", {**MARCONI, "output_tokens": [2**31]}, r":2: .*output_tokens"),
    ("compact", {**COMPACT, "base": [5, 4]}, r":2: not a line of a compact trace .*line 6"),
    ("compact", {**COMPACT, "base": [0, 9]}, r":2: .*its base has 5 tokens, not 9"),
    ("recorded", {**RECORDED, "message_starts": [3]}, r":2: .*message_starts do not rise"),
    ("recorded", {**RECORDED, "reply_start": 3}, r":2: .*reply_start is not within"),
    ("recorded", {**RECORDED, "first": 0.5}, r":2: .*older than its arrival"),
    ("recorded", {**RECORDED, "output_ids": "AAAA"}, r":2: .*packed ids have 3 bytes, not 4"),
    ("recorded", {**RECORDED, "output_ids": "AA"}, r":2: .*base64"),
]


@pytest.mark.parametrize(("name", "line", "message"), BAD)
def test_a_bad_line_is_named_or_skipped(
    tmp_path: Path, name: str, line: dict[str, object], message: str
) -> None:
    good = {"marconi": MARCONI, "compact": COMPACT, "recorded": RECORDED}[name]
    path = write(tmp_path / "trace.jsonl", good, line, {**good})
    with pytest.raises(TraceError, match=message) as raised:
        read_trace(path, name=name)
    assert "\n" not in str(raised.value)
    reading = Reading(skipped=Skipped(allow=True))
    assert len(read_trace(path, reading, name)) == 2
    assert reading.skipped.count == 1


def test_a_truncated_line_and_a_truncated_archive(tmp_path: Path) -> None:
    text = (json.dumps(MARCONI) + "\n") * 3000
    path = tmp_path / "trace.jsonl"
    path.write_text(text[:-20])
    with pytest.raises(TraceError, match=r"trace.jsonl:3000: not JSON \(Input data was truncated"):
        read_trace(path)
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(text.encode())[:-30])
    with pytest.raises(TraceError, match=r"trace.jsonl.gz:\d+: the gzip file is damaged"):
        read_trace(packed, name="marconi")
    reading = Reading(skipped=Skipped(allow=True))
    assert 0 < len(read_trace(packed, reading, "marconi")) <= 3000
    assert reading.skipped.count == 1


def test_the_torn_last_line_of_a_recording_is_counted(tmp_path: Path) -> None:
    """Other formats are not ours to forgive, nor is a bad line before the last one."""
    path = tmp_path / "trace.jsonl"
    text = (json.dumps(RECORDED) + "\n") * 3
    path.write_text(text[:-20])
    reading = Reading()
    assert len(read_trace(path, reading)) == 2
    assert reading.skipped.count == 1
    path.write_text(text[:-20] + "\n" + text)
    with pytest.raises(TraceError, match=r":3: not JSON .*; --skip-bad leaves such lines out"):
        read_trace(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no request"),
        ('{"a": 1}\n', ":1: like none of the formats recorded, compact"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    with pytest.raises(TraceError, match=message):
        read_trace(path)


def test_other_errors_are_sentences(tmp_path: Path, tokenizer: str) -> None:
    path = write(tmp_path / "t.jsonl", MARCONI)
    with pytest.raises(FileError, match="missing cannot be read"):
        read_trace(tmp_path / "missing")
    with pytest.raises(ValueError, match="unknown trace format 'x'; known are recorded"):
        read_trace(path, name="x")
    with pytest.raises(ValueError, match="cannot be written; recorded, compact, marconi can"):
        write_trace(path, [], "mooncake")
    with pytest.raises(ValueError, match="give the model's directory as --tokenizer"):
        read_trace(path, name="openai")
    with pytest.raises(ValueError, match=r"there is no tokenizer .*tokenizer\.json"):
        read_trace(path, Reading(tokenizer=str(tmp_path)), "openai")
    with pytest.raises(TraceError, match=":1: not a conversation"):
        read_trace(path, Reading(tokenizer=tokenizer), "sharegpt")
    path.write_text('{"requests": [\n{"t": 0}, 1\n')
    with pytest.raises(TraceError, match=r"t.jsonl:3: no JSON"):
        read_trace(path, name="blocks")
    path.write_text(json.dumps(conversation(requests=[{"t": 0}])))
    with pytest.raises(TraceError, match=r"request 1: Object missing required field `in`"):
        read_trace(path, name="blocks")


@pytest.mark.parametrize("text", ["normal:1:2", "const", "exp:-1", "uniform:5:2", "lognormal:a:1"])
def test_a_distribution_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Draw.parse(text)


@pytest.mark.parametrize(
    ("text", "mean"),
    [
        ("const:7", 7),
        ("uniform:2:6", 4),
        ("exp:9", 9),
        ("poisson:5", 5),
        ("lognormal:50:0.5", 56.7),
    ],
)
def test_distributions(text: str, mean: float) -> None:
    values = Draw.parse(text).draw(np.random.default_rng(0), 20_000)
    assert values.mean() == pytest.approx(mean, rel=0.03)
    assert min(Draw.parse(text).lengths(np.random.default_rng(0), 100)) >= 1


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("mooncake", {"input_length": 2**24 + 1}, "input_length"),
        ("mooncake", {"output_length": 10**18}, "output_length"),
        ("marconi", {"ts": 1e300}, "ts"),
        ("compact", {"base": [2**63, 0]}, "is not an earlier good line"),
    ],
)
def test_what_no_model_could_have_read_is_refused_before_it_is_made(
    tmp_path: Path, name: str, line: dict[str, object], message: str
) -> None:
    mooncake = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [0]}
    good = {"mooncake": mooncake, "marconi": MARCONI, "compact": COMPACT}[name]
    path = write(tmp_path / "trace.jsonl", {**good, **line})
    with pytest.raises(TraceError, match=f":1: not a line of .*{message}"):
        read_trace(path, name=name)


def test_a_request_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MOST_TOKENS", 5)
    assert len(requests.make_request(0, 0, 0.0, [1, 2, 3], [4, 5]).tokens) == 5
    with pytest.raises(ValueError, match="it has 6 tokens; 5 are the most"):
        requests.make_request(0, 0, 0.0, [1, 2, 3], [4, 5, 6])


def test_blocks_behind_a_prompts_end_take_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[int]] = []

    def block_tokens(blocks: list[int], size: int) -> requests.TokenArray:
        made.append(blocks)
        return requests.block_tokens(blocks, size)

    monkeypatch.setattr(line_formats, "block_tokens", block_tokens)
    line = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [3] * 10**4}
    (request,) = read_trace(write(tmp_path / "trace.jsonl", line))
    assert len(request.tokens) == 601 and made == [[3, 3]]
    path = tmp_path / "one.json"
    blocks = {"t": 0, "in": 9, "out": 1, "hash_ids": [0] * 10}
    path.write_text(json.dumps(conversation(requests=[blocks])))
    with pytest.raises(TraceError, match="request 1: it has 10 blocks, which its tokens do not"):
        read_trace(path)


def test_agents_are_nested_sixteen_deep_at_most(tmp_path: Path) -> None:
    nested: object = conversation()["requests"]
    for _ in range(16):
        nested = [{"requests": nested}]
    path = tmp_path / "one.json"
    path.write_text(json.dumps(conversation(requests=nested)))
    assert len(read_trace(path)) == 2
    path.write_text(json.dumps(conversation(requests=[{"requests": nested}])))
    with pytest.raises(TraceError, match="agents are nested more than 16 deep"):
        read_trace(path)


@pytest.mark.parametrize(
    "row",
    [
        "x" * 200_000,
        "2023-11-16 18:15:46+00:00,3,4",
        f"2023-11-16 18:15:46,{2**24},1",
        f"2023-11-16 18:15:46,{'9' * 5_000},1",
    ],
)
def test_a_row_that_is_none_of_azures(tmp_path: Path, row: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"TIMESTAMP,a,b\n2023-11-16 18:15:46,374,44\n{row}\n")
    with pytest.raises(TraceError, match=":3: not a line of Azure's trace"):
        read_trace(path)


@pytest.mark.parametrize("name", ["recorded", "blocks", "openai", "azure"])
def test_all_requests_together_have_a_bound(tmp_path: Path, name: str, tokenizer: str) -> None:
    path = tmp_path / "trace"
    openai = {"messages": [{"role": role, "content": text} for role, text in TALK]}
    path.write_text(
        {
            "recorded": json.dumps(RECORDED),
            "blocks": json.dumps(conversation()),
            "openai": json.dumps(openai),
            "azure": "2023-11-16 18:15:46,374,44",
        }[name]
    )
    for allow in (False, True):
        reading = Reading(tokenizer=tokenizer, room=Room(100), skipped=Skipped(allow))
        with pytest.raises(TraceError, match="the requests take more than"):
            read_trace(path, reading, name)
    assert read_trace(path, Reading(tokenizer=tokenizer), name)


def test_a_conversation_has_a_bound(tmp_path: Path, tokenizer: str) -> None:
    messages = [{"role": role, "content": "a"} for role in ("user", "assistant")] * 501
    path = write(tmp_path / "open.jsonl", {"messages": messages})
    with pytest.raises(TraceError, match="it has more than 1,000 messages"):
        read_trace(path, Reading(tokenizer=tokenizer))


def test_a_template_that_fails_is_a_sentence(tmp_path: Path, tokenizer: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tokenizer, folder)
    (folder / "chat_template.jinja").write_text("{{ range(10**9) }}")
    openai = {"messages": [{"role": role, "content": text} for role, text in TALK]}
    path = write(tmp_path / "open.jsonl", openai)
    with pytest.raises(TraceError, match="the chat template refuses it"):
        read_trace(path, Reading(tokenizer=str(folder)))


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match="is a pipe, which is read once; name its format"):
        read_trace(tmp_path / "pipe")
    with pytest.raises(FileError, match="is a pipe, not a regular file"):
        read_trace(tmp_path / "pipe", name="recorded")


def test_only_a_file_is_replaced(tmp_path: Path) -> None:
    """A link in the place of the file that is written first is not followed, either."""
    requests = [Request(0, 0, 0.0, np.arange(5, dtype=np.int32), 3)]
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/null")):
        with pytest.raises(ValueError, match="is no regular file"):
            write_trace(path, requests, "recorded")
    victim, path = tmp_path / "victim", tmp_path / "t.jsonl"
    victim.write_text("precious")
    (tmp_path / ".t.jsonl.part").symlink_to(victim)
    write_trace(path, requests, "recorded")
    assert victim.read_text() == "precious" and len(read_trace(path)) == 1
