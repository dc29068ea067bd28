"""Documents that a small hybrid computes apart, and what is composed of them."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import product

import pytest
import torch

from scripts.bench.modular import LEARNT, REACHES, SEAMS, measure, smallest_seam
from scripts.bench.report import ROOT
from scripts.train.documents import COUNTS, DOCUMENT, TASKS, WORDS, Task, draw
from scripts.train.hybrids import Cache, Hybrid, Kind
from scripts.train.recall import BOTH, NOTHING, STATES, Answers, Reach, prefill
from scripts.train.segments import append, composed, encode
from sglang_hybrid.extensions.schemas.composition.losses import LOSSES, MOST_POINTS, Loss
from sglang_hybrid.kernels.composition import Segment

KINDS: tuple[Kind, ...] = ("mamba2", "gdn", "kda")
COUNT, LENGTH = 3, 20


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> Hybrid:
    torch.manual_seed(0)
    return Hybrid(request.param, WORDS).eval()


@pytest.fixture(scope="module")
def documents() -> torch.Tensor:
    asked = draw("pair", COUNT, LENGTH, 6, 2, random.Random(0), 2)
    return asked.before.unflatten(1, (COUNT, LENGTH))


def assert_close(found: Cache, expected: Cache) -> None:
    for layer, other in zip(found, expected, strict=True):
        for one, two in zip(layer, other, strict=True):
            torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("count", [2, 4])
def test_answers_stand_in_as_many_documents_as_the_task_says(task: Task, count: int) -> None:
    asked = draw(task, count, LENGTH, 8, 6, random.Random(0), 24)
    for row, place in (asked.target != NOTHING).nonzero().tolist():
        texts = asked.before[row].view(count, LENGTH).tolist()
        assert all(text[0] == DOCUMENT for text in texts)
        told = [
            (number, text[at + 1])
            for number, text in enumerate(texts)
            for at, token in enumerate(text)
            if token == asked.after[row, place]
        ]
        if task == "chain":
            ((first, name),) = told
            (value,) = [
                text[text.index(name) + 1]
                for number, text in enumerate(texts)
                if name in text and number != first
            ]
        else:
            assert len({number for number, _ in told}) == (2 if task == "later" else 1)
            _, value = told[-1]
        assert value == asked.target[row, place]


@pytest.mark.parametrize("reach", [BOTH, STATES], ids=lambda reach: reach.name)
def test_a_first_document_is_exact(model: Hybrid, documents: torch.Tensor, reach: Reach) -> None:
    whole = prefill(model, documents[:, 0], reach)
    for seam in (0, 3, 16, LENGTH - 1):
        with torch.no_grad():
            assert_close(composed(model, documents[:, :1], seam, reach.window), whole)


def test_a_longer_seam_comes_nearer_to_the_whole_prompt(
    model: Hybrid, documents: torch.Tensor
) -> None:
    whole = prefill(model, documents.flatten(1), BOTH)[-1][0]

    def off(seam: int) -> float:
        with torch.no_grad():
            return (composed(model, documents, seam)[-1][0] - whole).norm().item()

    assert off(LENGTH - 2) < off(8) < off(0)


def test_of_the_first_layer_only_the_convolution_differs(
    model: Hybrid, documents: torch.Tensor
) -> None:
    """A layer that reads tokens alone leaves the whole prompt's state once the three tokens at each
    seam that its convolution mixes with those in front are computed."""
    whole = prefill(model, documents.flatten(1), BOTH)[0]
    with torch.no_grad():
        repaired, apart = (composed(model, documents, seam)[0] for seam in (3, 0))
    torch.testing.assert_close(repaired[0], whole[0], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(apart[0], whole[0], atol=1e-4)


def test_planted_errors_in_a_model_are_seen(model: Hybrid, documents: torch.Tensor) -> None:
    """Against documents under a mask: no token sees another document, and states pass through."""
    first, second = (encode(model, documents[:, number], 3) for number in (0, 1))
    kept, window = second.layers[0]
    assert isinstance(kept, Segment)
    wrong = replace(kept, transition=0.9 * kept.transition)
    planted = replace(second, layers=[(wrong, window), *second.layers[1:]])
    whole = prefill(model, documents[:, :2].flatten(1), BOTH)[0][0]
    with torch.no_grad():

        def state(*parts: object) -> torch.Tensor:
            cache = model.empty(len(documents))
            for part in parts:
                cache = append(model, cache, part)  # type: ignore[arg-type]
            return cache[0][0]

        torch.testing.assert_close(state(first, second), whole, atol=1e-5, rtol=1e-4)
        for error in ((first, planted), (second, first)):
            assert not torch.allclose(state(*error), whole, atol=1e-4)


def test_a_transition_of_a_delta_rule_takes_a_states_bytes(
    model: Hybrid, documents: torch.Tensor
) -> None:
    kept = encode(model, documents[:1, 0], 0).bytes
    numbers = sum(letter != "*" for letter in model.sizes.pattern) * model.sizes.heads
    assert kept.states == numbers * 64 * 64 * 4
    assert kept.transitions == (numbers * 4 if model.layers[0].kind == "mamba2" else kept.states)
    assert kept.kv == 2 * LENGTH * model.sizes.inner * 4


def test_the_smallest_seam_is_one_with_which_no_row_loses_much() -> None:
    def answers(right: int) -> Answers:
        scores = torch.eye(2)[[0] * right + [1] * (100 - right)].log_softmax(-1)
        return Answers(scores, torch.zeros(100, dtype=torch.int64), torch.zeros(100))

    def row(exact: int, *composed: int) -> list[Answers]:
        return [answers(exact), *(answers(right) for right in composed)]

    assert len(SEAMS) == 4
    good, late, never = row(97, 96, 97, 97, 97), row(97, 90, 93, 94, 97), row(90, 80, 81, 82, 83)
    assert smallest_seam([good]) == "0 (-1.0)"
    assert smallest_seam([good, late]) == "16 (-3.0)"
    assert smallest_seam([good, never]) == "none (-7.0)"
    assert smallest_seam([good, row(40, 40, 40, 40, 40)]) == "not learnt (40.0 %)"


@pytest.mark.parametrize("loss", list(dict.fromkeys(LOSSES.values())), ids=lambda loss: loss.layers)
def test_losses_that_the_server_goes_by_are_those_of_the_page(loss: Loss) -> None:
    """The losses are those of seam windows of 0 tokens and of the smallest seam that is enough, of
    tasks that a model has learnt; the page has both for each kind of layer."""
    name = loss.layers[0].upper() + loss.layers[1:]
    _, _, text = (ROOT / "docs/results/modular.md").read_text().partition(f"### {name}\n")
    text = text.partition("\n### ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    cells = [row for row in rows if len(row) == 4 + len(SEAMS) and row[2].isdigit()]
    assert len(cells) == len(REACHES) * len(TASKS) * len(COUNTS)
    lost = {seam: -100.0 for seam in SEAMS}
    for reach, task in {(row[0], row[1]) for row in cells}:
        of_task = [row for row in cells if row[:2] == [reach, task]]
        if min(float(row[3]) for row in of_task) < 100 * LEARNT:
            continue
        for row, (at, seam) in product(of_task, enumerate(SEAMS)):
            points = float(row[3]) - float(row[4 + at].split(" / ")[0])
            lost[seam] = max(lost[seam], points)
    assert loss.points == pytest.approx(lost[0], abs=0.11)  # cells are rounded
    *_, smallest = text.partition("The smallest seam")
    found = re.findall(r"\| (none|\d+) \(([+-][\d.]+)\)", smallest)
    seams = [int(seam) for seam, _ in found if seam != "none"]
    assert found and loss.seam == (max(seams) if len(seams) == len(found) else None)
    if loss.seam == 0:
        assert loss.points == -min(float(points) for _, points in found) <= MOST_POINTS


@pytest.mark.slow
def test_a_page_has_both_tables_of_a_model_of_documents() -> None:
    text = measure("mamba2", steps=3, sequences=1)
    assert text.startswith("### Mamba-2\n")
    assert text.count("\n|---") == 2
