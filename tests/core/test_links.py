"""Bandwidths of tiers as text, and how long bytes take."""

from __future__ import annotations

import pytest

from sglang_hybrid.core.tiers.rates import Link, parse_links


def test_a_link_has_a_bandwidth_and_perhaps_a_latency() -> None:
    assert parse_links("") == {}
    assert parse_links("host=25GB/s") == {"host": Link(25e9)}
    both = parse_links("host=1.5MB/s+20us,disk=800B/s+2ms")
    assert both["host"].bandwidth == 1.5e6
    assert both["host"].latency == pytest.approx(20e-6)
    assert both["disk"] == Link(800.0, 2e-3)


def test_bytes_take_latency_and_bandwidth() -> None:
    assert Link(1e9, 0.5).seconds(2e9) == 2.5


@pytest.mark.parametrize(
    "text", ["host", "host=25", "host=25GB", "tape=1GB/s", "host=1GB/s,host=2GB/s", "host=0GB/s"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="bandwidth"):
        parse_links(text)
