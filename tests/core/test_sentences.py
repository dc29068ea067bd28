"""Text of others on a line of ours."""

from __future__ import annotations

import pytest

from sglang_hybrid.core.sentences import escape, print_line, quote, suggest


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Grüße, 世界: [bold]", "Grüße, 世界: [bold]"),
        ("\x1b]0;title\x07\x1b[31m", r"\x1b]0;title\x07\x1b[31m"),
        ("a\n/etc/shadow: forged\r", r"a\n/etc/shadow: forged\r"),
        ("\u202efdp\u2028\x9b31m", r"\u202efdp\u2028\x9b31m"),
        ("\udcff", r"\udcff"),  # a file's name that is no UTF-8
    ],
)
def test_what_does_not_print_is_written_out(
    text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert escape(text) == said
    print_line(text)
    assert capsys.readouterr().out == f"{said}\n"


def test_long_values_are_shortened() -> None:
    assert len(quote("x" * 10**6)) < 100
    assert quote(10**30_000) == "a number of 99,658 bits"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen3-nxt", " (did you mean qwen3-next?)"),
        ("lur", " (did you mean lru?)"),
        ("qwen", " (did you mean qwen3-next or qwen3.5?)"),
        ("", ""),
        ("zebra", ""),
    ],
)
def test_what_an_unknown_name_may_mean(name: str, said: str) -> None:
    names = ["qwen3-next", "qwen3.5", "lru", "marconi"]
    assert suggest(name, names) == suggest(name, iter(names)) == said
