"""A picture of the page after the traffic, for the documents. It takes a browser."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
SIZE = {"width": 1_280, "height": 1_010}  # pixels


def browser() -> str | None:
    """The program of a browser that there is; None without one."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


@contextmanager
def picture(url: str, file: Path | None) -> Iterator[None]:
    """The page at `url` is open while the block runs, and `file` gets a picture of it at its end;
    nothing without a file.
    """
    if file is None:
        yield
        return
    ends = threading.Event()
    opened = threading.Thread(target=_watch, args=(url, file, ends))
    opened.start()
    try:
        yield
    finally:
        ends.set()
        opened.join()


def _watch(url: str, file: Path, ends: threading.Event) -> None:
    """Playwright's browser belongs to one thread."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        shell = playwright.chromium.launch(executable_path=browser(), args=["--no-sandbox"])
        page = shell.new_page(viewport=SIZE)  # type: ignore[arg-type]
        page.goto(url)
        while not ends.is_set():
            page.wait_for_timeout(200)
        page.focus("#tree")
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        page.wait_for_timeout(1_000)
        page.screenshot(path=file)
        shell.close()
