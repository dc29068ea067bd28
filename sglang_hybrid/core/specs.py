"""Names of policies with their options, as `marconi alpha=0.3`, and the decision for one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_hybrid.core.returns.history import History
from sglang_hybrid.core.victims.eviction import Policy, Reuse, make_policy


@dataclass(frozen=True)
class Spec:
    """The name of a policy, or in a replay of another system (extensions/lab), and its options."""

    name: str
    options: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        shown = (
            f"{value:g}" if name == "alpha" else f"{name}={value:g}" for name, value in self.options
        )
        return " ".join([self.name, *shown])


@dataclass(frozen=True)
class PolicySwitch:
    """A decision of the tuner: from the scheduler step with which it arrives, `spec` chooses the
    victims on every rank.
    """

    number: int
    spec: Spec
    reason: str


def make_policies(spec: Spec, history: History | None = None) -> tuple[Policy, Policy]:
    """One policy object for KV and one for states; those that learn share `history`."""
    options: dict[str, Any] = dict(spec.options)
    if spec.name == Reuse.name:
        options["history"] = history or History()
    return make_policy(spec.name, **options), make_policy(spec.name, **options)
