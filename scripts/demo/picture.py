"""Pictures of the page before and after the traffic, for the documents. They take a browser."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urljoin

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
SIZE = {"width": 1_280, "height": 1_010}  # pixels


def browser() -> str | None:
    """The program of a browser that there is; None without one."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


PHONE = {"width": 390, "height": 844}

EMPTY, DARK, ON_A_PHONE = "empty", "dark", "phone"
"""A suffix of the file's name: `page-empty.png` beside `page.png`."""


@contextmanager
def picture(url: str, file: Path | None) -> Iterator[None]:
    """The page at `url` is open while the block runs. `file` gets a picture of it at its end, and
    files beside it one of the empty page, a dark one, and one of a phone; nothing without a file.
    """
    if file is None:
        yield
        return
    begun, ends = threading.Event(), threading.Event()
    opened = threading.Thread(target=_watch, args=(url, file, begun, ends))
    opened.start()
    begun.wait()
    try:
        yield
    finally:
        ends.set()
        opened.join()


def _watch(url: str, file: Path, begun: threading.Event, ends: threading.Event) -> None:
    """Playwright's browser belongs to one thread."""
    from playwright.sync_api import sync_playwright

    def beside(what: str) -> Path:
        return file.with_stem(f"{file.stem}-{what}")

    try:
        with sync_playwright() as playwright:
            shell = playwright.chromium.launch(executable_path=browser(), args=["--no-sandbox"])
            page = shell.new_page(viewport=SIZE)  # type: ignore[arg-type]
            page.request.post(urljoin(url, "/flush_cache"))  # what a start warms up with
            page.goto(url)
            page.wait_for_timeout(3_000)
            page.screenshot(path=beside(EMPTY))
            phone = shell.new_page(viewport=PHONE, device_scale_factor=2)  # type: ignore[arg-type]
            phone.goto(url)
            begun.set()
            while not ends.is_set():
                page.wait_for_timeout(200)
            page.click("#what")
            page.wait_for_timeout(20_000)  # for the replay
            page.focus("#tree")
            for _ in range(3):
                page.keyboard.press("ArrowRight")
            page.wait_for_timeout(1_000)
            page.evaluate("scrollTo(0, 0)")
            page.screenshot(path=file)
            page.emulate_media(color_scheme="dark")
            page.reload()
            page.wait_for_timeout(5_000)
            page.evaluate("scrollTo(0, 0)")
            page.screenshot(path=beside(DARK))
            phone.wait_for_timeout(1_000)
            phone.locator("#requests").scroll_into_view_if_needed()
            phone.screenshot(path=beside(ON_A_PHONE))
            shell.close()
    finally:
        begun.set()
