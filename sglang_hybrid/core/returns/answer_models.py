"""Models of each tenant that predict a return from an answer, within one bound on the memory of all
tenants.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Final

from sglang_hybrid.core.records.shares import Shares, payer_of
from sglang_hybrid.core.returns.answers import AnswerModel, Calibration, LearntAnswers

LEAST_BYTES: Final = 32 << 10
"""The least bytes of a model that has learnt something: below that it forgets nothing more."""

ADMITTED: Final = 64
"""New tenants of which one takes the place of the tenant that was absent longest, when all models
are as small as LEAST_BYTES. If all did, more tenants in rotation than there is room for would leave
each other nothing.
"""


class AnswerModels:
    """A model for each tenant, within `max_bytes` in all.

    If they take more, room is made in this order. 1 Models that have learnt nothing yet go, of the
    tenant that was absent longest first: a flood of tenants that never come back costs others
    nothing. 2 What an earlier server had learnt of tenants that have not come yet. 3 The largest
    model of the payer with most (`core/records/shares.py`) forgets half of what it keeps, while it
    takes more than LEAST_BYTES. 4 A model is dropped, that of the latest new tenant or that of the
    tenant that was absent longest (ADMITTED); one of that payer if it has several.

    counts: halved, dropped: how often 3 and 4 happened, and how often 2.
    """

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self._max_bytes = max_bytes
        self._models: OrderedDict[Hashable, AnswerModel] = OrderedDict()  # absent longest first
        self._blank: OrderedDict[Hashable, None] = OrderedDict()  # those that have learnt nothing
        self._learnt: OrderedDict[Hashable, None] = OrderedDict()  # the others, the newest last
        self._sizes: dict[Hashable, Shares] = {}  # by payer: bytes of each tenant's model
        self._paid = Shares()
        self._saved: OrderedDict[str, LearntAnswers] = OrderedDict()  # of tenants yet to come
        self._saved_bytes = 0
        self._name_of: Callable[[Any], str] = repr
        self.counts: Counter[str] = Counter(halved=0, dropped=0)
        self.calibration = Calibration()

    def __len__(self) -> int:
        return len(self._models)

    @property
    def held_bytes(self) -> int:
        """Memory of all models, and of what is kept of tenants that have not come yet."""
        return self._paid.total + self._saved_bytes

    def of(self, tenant: Hashable) -> AnswerModel | None:
        """The model of `tenant`, which counts as present now; None where no model may be kept. Call
        `on_change` after it has learnt.
        """
        if self._max_bytes < LEAST_BYTES:
            return None
        model = self._models.get(tenant)
        if model is None:
            model = self._models[tenant] = self._new(tenant)
            self._measure(tenant)
            (self._learnt if model.has_learnt else self._blank)[tenant] = None
        self._models.move_to_end(tenant)
        if tenant in self._blank:
            self._blank.move_to_end(tenant)
        return model

    def _new(self, tenant: Hashable) -> AnswerModel:
        model = AnswerModel(self.calibration)
        saved = self._saved.pop(self._name_of(tenant), None) if self._saved else None
        if saved is not None:
            self._saved_bytes -= saved.held_bytes
            model.restore(saved)
        return model

    def on_change(self, tenant: Hashable) -> None:
        """The model of `tenant`, which is present, has changed: make room for what it takes."""
        self._measure(tenant)
        if tenant in self._blank and self._models[tenant].has_learnt:
            del self._blank[tenant]
            self._learnt[tenant] = None
        while self.held_bytes > self._max_bytes:
            self._make_room(tenant)

    def _measure(self, tenant: Hashable) -> None:
        self._charge(tenant, self._models[tenant].held_bytes)

    def _charge(self, tenant: Hashable, held: int) -> None:
        """`tenant` holds so many bytes now."""
        payer = payer_of(tenant)
        sizes = self._sizes.setdefault(payer, Shares())
        by = held - sizes.of(tenant)
        sizes.change(tenant, by)
        self._paid.change(payer, by)
        if not len(sizes):
            del self._sizes[payer]

    def _make_room(self, present: Hashable) -> None:
        blank = next(iter(self._blank), present)
        if blank != present:
            self._drop(blank)
            return
        if self._saved:
            _, saved = self._saved.popitem(last=False)
            self._saved_bytes -= saved.held_bytes
            self.counts["dropped"] += 1
            return
        payer = self._paid.largest()
        sizes = self._sizes[payer]
        largest = sizes.largest()
        if sizes.of(largest) > LEAST_BYTES:
            self._models[largest].forget_half()
            self._measure(largest)
            self.counts["halved"] += 1
            return
        self.counts["dropped"] += 1
        all_pay = len(sizes) == 1
        models = reversed(self._learnt) if self.counts["dropped"] % ADMITTED else iter(self._models)
        self._drop(next((one for one in models if all_pay or payer_of(one) == payer), present))

    def _drop(self, tenant: Hashable) -> None:
        del self._models[tenant]
        self._blank.pop(tenant, None)
        self._learnt.pop(tenant, None)
        self._charge(tenant, 0)

    def export(self, name_of: Callable[[Any], str]) -> Iterator[tuple[str, LearntAnswers]]:
        """The parameters learnt of each tenant, by its name, with those that were restored and not
        used yet; one after the other, while models may change.
        """
        yield from list(self._saved.items())
        for tenant in list(self._models):
            model = self._models.get(tenant)
            if model is not None and model.has_learnt:
                yield name_of(tenant), model.export()

    def restore(self, saved: dict[str, LearntAnswers], name_of: Callable[[Any], str]) -> None:
        """Use these for the models of tenants that have not come yet."""
        self._name_of = name_of
        self._saved = OrderedDict(saved)
        self._saved_bytes = sum(learnt.held_bytes for learnt in saved.values())
        while self._saved and self.held_bytes > self._max_bytes:
            self._make_room(None)
