"""Whether long prompts come in company: several within milliseconds, as where an agent fans out.

Learnt for each tenant from the times at which its long prompts reached the server. A tenant whose
prompts come alone is not kept waiting for others.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from sglang_hybrid.serving.tenants import Tenant

FADE = 0.75
"""Weight of the past beside the latest group of prompts."""

GAP_FADE = 0.9
"""The longest gap, times this with each later group. It fades slowly: too long a gap costs a wait,
too short a one costs computing again what the group shares.
"""

OFTEN = 0.2
"""Share of groups with company from which on company is expected."""

UNKNOWN = 0.5
"""That share for a tenant of whom nothing is known: its first few prompts are waited for."""

LONGER = 3.0
"""The wait for a further prompt of a group, as a multiple of the longest gap in groups so far."""

TENANTS = 1024
"""Tenants that are remembered; those longest unseen are forgotten first."""


@dataclass
class _Groups:
    """share: of groups with company, the latest ones counting most. gap: the longest between two
    prompts of one group, in seconds; it fades with each group. last: when the latest prompt came,
    in seconds. has_company: whether the latest group has more than one prompt.
    """

    share: float = UNKNOWN
    gap: float = 0.0
    last: float | None = None
    has_company: bool = False


class Company:
    """Groups of prompts, a tenant at a time.

    Args:
        least: seconds between two prompts of one group that are waited for at least.
    """

    def __init__(self, least: float) -> None:
        self._least = least
        self._tenants: OrderedDict[Tenant, _Groups] = OrderedDict()

    def on_arrival(self, tenant: Tenant, at: float, most: float) -> None:
        """A long prompt of `tenant` reached the server at `at` seconds. Prompts of several
        processes may come in another order than they arrived.

        most: seconds between two prompts of one group at most.
        """
        groups = self._tenants.setdefault(tenant, _Groups())
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > TENANTS:
            self._tenants.popitem(last=False)
        gap = None if groups.last is None else abs(at - groups.last)
        if gap is not None and gap <= most:
            if not groups.has_company:
                groups.share += (1 - FADE) * (1 - groups.share)
            groups.gap, groups.has_company = max(groups.gap, gap), True
        elif gap is not None:
            if not groups.has_company:
                groups.share *= FADE
            groups.gap, groups.has_company = groups.gap * GAP_FADE, False
        groups.last = at

    def patience(self, tenant: Tenant, most: float) -> float:
        """Seconds without a prompt, at most `most`, after which a group of `tenant` is taken to be
        complete; 0 if its prompts come alone.
        """
        groups = self._tenants.get(tenant)
        if groups is None:
            return min(most, self._least)
        if groups.share < OFTEN:
            return 0.0
        return min(most, max(self._least, LONGER * groups.gap))
