"""Models of all tenants within one bound: who loses what where there is no room for all."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import pytest

from sglang_hybrid.core.returns.answer_models import LEAST_BYTES, AnswerModels
from sglang_hybrid.core.returns.answers import Answer, AnswerModel

TOOL, GOODBYE = 5, 9


class Tenants:
    """Tenants with sessions of two answers: a return follows the first, none the second."""

    def __init__(self, models: AnswerModels) -> None:
        self.models = models
        self.now = 0.0
        self.waiting: dict[Hashable, Answer] = {}
        self._random = random.Random(1)

    def turn(self, tenant: Hashable) -> AnswerModel:
        self.now += 1.0
        model = self.models.of(tenant)
        assert model is not None
        first = self.waiting.pop(tenant, None)
        if first is not None:
            model.on_return(first, self.now)
        model.give_up(self.now)
        words = [self._random.randrange(10, 30_000) for _ in range(12)]
        answer = model.on_answer_end([*words, TOOL if first is None else GOODBYE], self.now)
        if first is None:
            self.waiting[tenant] = answer
        self.models.on_change(tenant)
        return model

    def rotate(self, tenants: Iterable[Hashable], times: int) -> None:
        names = list(tenants)
        for _ in range(times):
            for name in names:
                self.turn(name)

    @property
    def can_predict(self) -> int:
        """Tenants of whose answers something is expected."""
        return sum(model.can_predict for model in self.models._models.values())


def held(models: AnswerModels) -> int:
    """The bytes of all models, counted anew."""
    return sum(model.held_bytes for model in models._models.values())


def test_a_tenant_keeps_its_model_and_none_is_kept_without_memory() -> None:
    models = AnswerModels(3 * LEAST_BYTES)
    first = models.of("a")
    models.of("b")
    assert models.of("a") is first and first is not None
    assert AnswerModels(0).of("a") is None


def test_more_tenants_in_rotation_learn_with_less_each() -> None:
    """Each gives up examples of its own, and none is dropped."""
    models = AnswerModels(40 * LEAST_BYTES)
    tenants = Tenants(models)
    tenants.rotate(range(30), 80)
    assert tenants.can_predict == 30
    assert models.counts["halved"] and not models.counts["dropped"]
    assert held(models) == models.held_bytes <= 40 * LEAST_BYTES


@pytest.mark.parametrize("tenants", [12, 40])
def test_with_far_more_tenants_than_there_is_room_for_some_learn(tenants: int) -> None:
    """Room for about ten: it is not lost by one tenant too many, or by four times as many."""
    models = AnswerModels(10 * LEAST_BYTES)
    rotation = Tenants(models)
    rotation.rotate(range(tenants), 80)
    assert rotation.can_predict >= 5
    assert models.counts["dropped"]
    assert held(models) == models.held_bytes <= 10 * LEAST_BYTES


def test_a_flood_of_tenants_that_never_come_back_costs_others_nothing() -> None:
    models = AnswerModels(10 * LEAST_BYTES)
    tenants = Tenants(models)
    tenants.rotate("ab", 40)
    known, counts = models._models["a"], dict(models.counts)
    tenants.rotate((f"once {number}" for number in range(300)), 1)
    assert models.of("a") is known and known.can_predict
    assert models.counts == counts == {"halved": 0, "dropped": 0}
    assert held(models) == models.held_bytes <= 10 * LEAST_BYTES


@dataclass(frozen=True)
class Salted:
    """A tenant that a client makes of a salt."""

    payer: str
    salt: int


def test_the_models_of_a_payer_with_many_tenants_give_way_to_each_other() -> None:
    """However many a client makes, and though each comes back."""
    models = AnswerModels(16 * LEAST_BYTES)
    tenants = Tenants(models)
    tenants.rotate(["quiet"], 200)
    before = tenants.turn("quiet").held_bytes
    assert before > 2 * LEAST_BYTES
    for first in range(0, 200, 20):
        tenants.rotate([Salted("busy", first + more) for more in range(20)], 40)
    assert models.counts["dropped"] and models.counts["halved"]
    assert models._models["quiet"].held_bytes == before
    assert held(models) == models.held_bytes <= 16 * LEAST_BYTES


def test_the_largest_tenant_gives_way_first() -> None:
    models = AnswerModels(6 * LEAST_BYTES)
    tenants = Tenants(models)
    tenants.rotate("a", 60)
    small = models._models["a"].held_bytes
    tenants.rotate("b", 2_000)
    assert models.counts["halved"] and models._models["a"].held_bytes == small
    assert all(model.can_predict for model in models._models.values())


def test_tenants_that_are_gone_are_forgotten_for_new_ones() -> None:
    models = AnswerModels(4 * LEAST_BYTES)
    tenants = Tenants(models)
    tenants.rotate("abcdef", 60)
    tenants.rotate("uvwxyz", 400)
    assert sum(name in models._models for name in "uvwxyz") >= 3
    assert tenants.can_predict >= 3


def test_ranks_agree() -> None:
    found = []
    for _ in range(2):
        models = AnswerModels(5 * LEAST_BYTES)
        tenants = Tenants(models)
        tenants.rotate(range(12), 30)
        found.append([(name, it.labels, it.held_bytes) for name, it in models._models.items()])
    assert found[0] == found[1]
