"""Two servers without a model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.extensions.router.server import Server


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.close()


@pytest.fixture
def other() -> Iterator[Server]:
    one = Server()
    yield one
    one.close()
