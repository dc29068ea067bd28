"""Attempts at what a replica can make fail: whatever it sends, the cost is its own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Final

import httpx

from sglang_hybrid.extensions.router.index import LostMessages
from sglang_hybrid.extensions.router.reader import OutOfStep

LONGEST_PAUSE: Final = 60.0  # seconds for which a replica is put aside, at most
MOST_SAID: Final = 300  # characters of an error


def keep_trying(
    attempt: Callable[[], None],
    on_error: Callable[[str, bool, bool], None],
    closed: threading.Event,
    pause: float,
) -> None:
    """Run `attempt` until it returns or `closed` is set, whatever it raises.

    A replica that cannot be asked, or whose messages were lost, is tried again `pause` seconds
    after the last attempt began. One that sends what it should not, or that finds a fault of ours,
    is put aside: for `pause` seconds, and twice as long each time, until an attempt has lasted for
    LONGEST_PAUSE.

    on_error: called with one sentence, whether the replica could not be asked (one that has not
    answered in time may be busy), and whether it is put aside.
    """
    aside = pause
    while not closed.is_set():
        began = time.monotonic()
        try:
            attempt()
            return
        except (OutOfStep, LostMessages, httpx.HTTPError) as error:
            is_busy = isinstance(error, httpx.ReadTimeout)
            is_away = isinstance(error, httpx.HTTPError) and not is_busy
            on_error(sentence(error), is_away, False)
            wait = began + pause - time.monotonic()
        except Exception as error:
            on_error(sentence(error), False, True)
            if time.monotonic() > began + LONGEST_PAUSE:
                aside = pause
            wait, aside = aside, min(2 * aside, max(pause, LONGEST_PAUSE))
        closed.wait(wait)


def sentence(error: BaseException) -> str:
    """The text of an error, in one line that any terminal can show."""
    said = str(error) or type(error).__name__
    if isinstance(error, httpx.ConnectError):
        cause: BaseException | None = error
        while cause is not None:  # httpx says only that all attempts failed
            if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
                said = os.strerror(cause.errno)
            cause = cause.__cause__ or cause.__context__
    return "".join(each if each.isprintable() else "?" for each in said[:MOST_SAID])
