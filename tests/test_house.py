"""The rooms of the package: which imports there may be, and that their page is up to date."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grimp
import pytest

from scripts import house
from tests.documented import ROOT


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return house.build_graph()


def test_no_import_is_against_the_contracts() -> None:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_has_the_rooms_that_there_are(graph: grimp.ImportGraph) -> None:
    before = house.PAGE.read_text()
    assert house.page(before, house.table(graph)) == before, (
        "docs/architecture.md is out of date; write its table again: python scripts/house.py"
    )


def test_the_house_is_no_larger_than_planned(graph: grimp.ImportGraph) -> None:
    """Entries of users (`launch_server.py`, `plugin.py`) are no rooms."""
    rooms = [room for floor in house.floors() for room in floor]
    assert sum((ROOT / house.PACKAGE / room).is_dir() for room in rooms) <= 12
    assert len(house.floors()) <= 9
    assert house.circles(graph) == 0


def test_an_import_that_closes_a_circle_is_counted(graph: grimp.ImportGraph) -> None:
    below, above = "sglang_hybrid.core.costs.cost", "sglang_hybrid.core.specs"
    graph.add_import(importer=below, imported=above)
    try:
        assert house.circles(graph) == 1
    finally:
        graph.remove_import(importer=below, imported=above)


def test_a_page_without_a_place_for_the_table_is_an_error() -> None:
    with pytest.raises(house.HouseFailed, match="has 0 places"):
        house.page("# Architecture\n", "")
