"""The message of the first process about a start that failed."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from sglang_hybrid import launcher
from sglang_hybrid.serving.startup import (
    REPORT,
    STARTUP_ERROR,
    StartupError,
    cannot_start,
    one_line,
    private_files,
    remove_private_files,
)


def failed(work: object) -> str:
    """The message about the error that `work` ends with."""
    try:
        assert callable(work)
        work()
    except Exception as error:
        return one_line(error)
    raise RuntimeError("it did not fail")


def without_words() -> None:
    raise AssertionError


def test_an_error_without_words_says_where_it_was_raised() -> None:
    said = failed(without_words)
    assert said.startswith("AssertionError in without_words (test_startup.py, line ")
    assert said.endswith("): raise AssertionError")
    assert one_line(KeyError()) == "KeyError"  # never raised


def test_an_error_with_words_is_one_line_of_them() -> None:
    assert one_line(ValueError("first\n  second")) == "first second"
    assert failed(lambda: json.loads("{}")["a"]) == "KeyError: 'a'"
    assert one_line(OSError("x" * 600)).endswith("x ...")
    assert cannot_start("the port is in use") == "the server cannot start: the port is in use"


def test_a_sentence_of_ours_is_told_as_it_is() -> None:
    assert (
        one_line(StartupError("--hybrid-memory one cannot be")) == "--hybrid-memory one cannot be"
    )


def test_a_path_that_this_user_may_not_read_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare(argv: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/srv/models/config.json")

    monkeypatch.setattr(launcher, "prepare", prepare)
    assert launcher.main([]) == STARTUP_ERROR
    said = capsys.readouterr().err
    assert said.startswith("sglang_hybrid: the server cannot start: ") and said.count("\n") == 1
    assert "/srv/models/config.json" in said


def test_only_a_directory_of_its_own_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine may find the variable in its environment: a server's child has it."""
    monkeypatch.setenv(REPORT, str(tmp_path / "failure"))
    (tmp_path / "notes").write_text("notes")
    remove_private_files()
    assert (tmp_path / "notes").exists() and os.environ[REPORT]
    with private_files():
        made = Path(os.environ[REPORT]).parent
        assert made.is_dir()
    assert not made.exists() and REPORT not in os.environ


def test_a_file_of_flags_is_left_to_sglang(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="does not exist"):
        launcher._check_early(["--model-pa", "/nowhere"])
    flags = tmp_path / "flags.yaml"
    flags.write_text("model-path: /nowhere\n")
    launcher._check_early(["--config", str(flags)])


@pytest.mark.parametrize("word", ["--config=", "--conf=", "--confi"])
def test_a_file_of_flags_that_sglang_would_not_read(word: str, tmp_path: Path) -> None:
    """A server whose key is in that file would start without one."""
    flags = tmp_path / "flags.yaml"
    flags.write_text("api-key: secret\n")
    given = [f"{word}{flags}"] if "=" in word else [word, str(flags)]
    for before in ([], ["--config", str(flags)]):
        with pytest.raises(
            StartupError, match=r"^--conf\S*: SGLang reads no file .* --config FILE"
        ):
            launcher._check_early([*before, *given])


@pytest.mark.parametrize("content", [None, "a: [1,\n", "\0", "[" * 50_000, "9" * 5_000])
def test_a_file_of_flags_that_cannot_be_read(content: str | None, tmp_path: Path) -> None:
    flags = tmp_path / "flags.yaml"
    if content is None:
        os.mkfifo(flags)
    else:
        flags.write_text(content)
    with pytest.raises(StartupError, match=r"^--config cannot be read: .*\.$"):
        launcher._check_early(["--config", str(flags)])
