"""A browser for tests of pages, and what a checker of accessibility says of a page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

from scripts.demo import picture


@contextmanager
def opened() -> Iterator[Browser]:
    """The browser that there is; without one the test is skipped. It keeps an event loop running in
    this thread until it is closed.
    """
    program = picture.browser()
    if program is None:
        pytest.skip(f"no browser: install one of {', '.join(picture.BROWSERS)}")
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])


def violations(page: Page) -> list[tuple[str, str]]:
    """Violated rules of accessibility: their names, and what they ask for."""
    found = Axe().run(page).response["violations"]
    return [(each["id"], each["help"]) for each in found]
