"""The codecs that this process uses. Where all that it keeps is exact, none of them is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_hybrid.storage.codecs.coded_rows import CodecPlan

_chosen: CodecPlan | None = None
_on_device: CodecPlan | None = None


def set_codecs(plan: CodecPlan | None = None, device_codecs: CodecPlan | None = None) -> None:
    """Choose the codecs of the host pools that this process builds from now on, and those of
    entries which the device keeps coded; None is exact.
    """
    global _chosen, _on_device
    _chosen, _on_device = _unless_exact(plan), _unless_exact(device_codecs)


def host_codecs() -> CodecPlan | None:
    """The codecs of host pools; None: they are exact."""
    return _chosen


def device_codecs() -> CodecPlan | None:
    """The codecs of entries that the device keeps coded, one for KV and one for states; None where
    it keeps none.
    """
    return _on_device


def keeps_exact() -> bool:
    """True if all that this process keeps, anywhere, is what was computed."""
    return _chosen is None and _on_device is None


def _unless_exact(plan: CodecPlan | None) -> CodecPlan | None:
    return None if plan is None or plan.exact else plan
