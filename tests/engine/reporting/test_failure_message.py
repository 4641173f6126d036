"""A user's mistake ends a process with one sentence; everything else ends it as Python does."""

import gc
import io
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import pytest
import torch

from engine.errors import ConfigError, EngineError
from engine.parallel.grid import Grid
from engine.program.loss import check_scalar
from engine.reporting.failure_message import FailureMessage, torchrun_error

Shown = list[tuple[type[BaseException], BaseException]]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    """What the hook before the engine's has shown."""
    seen: Shown = []

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        seen.append((kind, error))

    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setattr(sys, "excepthook", hook)
    yield seen
    gc.collect()
    assert sys.excepthook is hook, "given back"


def ends_with(error: BaseException) -> None:
    """What the interpreter does with an exception that nobody catches."""
    try:
        raise error
    except BaseException as raised:
        sys.excepthook(type(raised), raised, raised.__traceback__)


def test_a_mistake_is_one_sentence(shown: Shown, capsys: pytest.CaptureFixture[str]) -> None:
    words = FailureMessage()
    try:
        Grid(pp=0)
    except EngineError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    place, sentence = capsys.readouterr().err.splitlines()
    assert place.startswith(f'File "{__file__}", line ') and place.endswith(": Grid(pp=0)")
    assert sentence == "GridError: pipeline size 0 is below 1; give every axis at least one rank."
    assert not shown
    words.close()


def test_the_place_is_the_users_line_also_through_torchs_decorator(
    shown: Shown, capsys: pytest.CaptureFixture[str]
) -> None:
    words, check = FailureMessage(), torch.no_grad()(check_scalar)
    try:
        check(1, "x")
    except EngineError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    place, _ = capsys.readouterr().err.splitlines()
    assert place.startswith(f'File "{__file__}", line ') and place.endswith(': check(1, "x")')
    words.close()


def test_other_errors_are_shown_as_before(shown: Shown, capsys: pytest.CaptureFixture[str]) -> None:
    words, error = FailureMessage(), ValueError("the user's own")
    ends_with(error)
    assert shown == [(ValueError, error)] and not capsys.readouterr().err
    words.close()


def test_debugging_shows_the_traceback_too(
    shown: Shown, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.reporting.failure_message.logger", debugging := logging.Logger("x", logging.DEBUG))
    assert debugging.isEnabledFor(logging.DEBUG)
    words = FailureMessage()
    ends_with(ConfigError("a, b; c."))
    assert len(shown) == 1 and capsys.readouterr().err.endswith("ConfigError: a, b; c.\n")
    words.close()


def test_the_hook_outlives_a_close_that_an_error_has_caused(shown: Shown, capsys: pytest.CaptureFixture[str]) -> None:
    """``with engine.initialize(...)`` closes before the error reaches the interpreter."""
    words = FailureMessage()
    try:
        try:
            raise ConfigError("a, b; c.")
        finally:
            words.close()
    except ConfigError as error:
        assert sys.excepthook is words
        sys.excepthook(ConfigError, error, error.__traceback__)
    assert capsys.readouterr().err.endswith("ConfigError: a, b; c.\n")
    assert sys.excepthook is not words, "the error was caught and is gone"


def test_two_engines_give_the_hook_back_in_any_order(shown: Shown) -> None:
    first, second = FailureMessage(), FailureMessage()
    first.close()
    assert sys.excepthook is second
    ends_with(ValueError("x"))
    assert len(shown) == 1
    second.close()


def test_a_hook_that_others_have_wrapped_passes_everything_on(shown: Shown, capsys: pytest.CaptureFixture[str]) -> None:
    """torch wraps it when the process group starts, and never unwraps it."""
    before, words = sys.excepthook, FailureMessage()
    sys.excepthook = lambda *ended: words(*ended)
    words.close()
    ends_with(ConfigError("a, b; c."))
    assert len(shown) == 1 and not capsys.readouterr().err
    sys.excepthook = before


def attempt(folder: Path, rank: int, monkeypatch: pytest.MonkeyPatch, sentence: str) -> tuple[str, str]:
    """(what a rank under torchrun prints, what torchrun will print)."""
    file = folder / str(rank) / "error.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setattr(sys, "stderr", printed := io.StringIO())
    words = FailureMessage()
    ends_with(EngineError(sentence))
    words.close()
    return printed.getvalue(), json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"]


def test_under_torchrun_one_rank_says_it_and_all_tell_torchrun(
    shown: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, told = attempt(tmp_path, 0, monkeypatch, "the same.")
    second, also_told = attempt(tmp_path, 1, monkeypatch, "the same.")
    third, _ = attempt(tmp_path, 2, monkeypatch, "another.")
    assert first.endswith("EngineError: the same.\n") and not second and third.endswith("EngineError: another.\n")
    assert told == also_told == "EngineError: the same."


def test_an_error_file_that_cannot_be_written_is_said(
    shown: Shown, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "none" / "0" / "error.json"))
    words = FailureMessage()
    ends_with(EngineError("a, b; c."))
    words.close()
    said = capsys.readouterr().err
    assert "EngineError: a, b; c.\n" in said and "torchrun does not get the error, because" in said


def test_a_consequence_is_never_torchruns_root_cause() -> None:
    """Which is the earliest error, by whole seconds."""

    def when(sentence: str) -> int:
        return int(json.loads(torchrun_error(sentence))["message"]["extraInfo"]["timestamp"])

    blames = "EngineError: rank 1 (a) failed in this step; see the error of the rank that failed: ValueError: odd"
    assert when(blames) > when("ValueError: odd input")
