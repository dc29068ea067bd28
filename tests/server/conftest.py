"""Tiny models, built once per run, and the tests' order."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hybrid.models import build_tiny_model


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from an architecture's name to the directory of its tiny model."""
    root = tmp_path_factory.mktemp("models")

    def directory(architecture: str) -> Path:
        path = root / architecture
        return path if path.exists() else build_tiny_model(architecture, path)

    return directory


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.server)
