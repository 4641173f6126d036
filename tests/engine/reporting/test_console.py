"""What reaches stderr by default, what silences it, and that an application which logs is left alone."""

import logging
import threading
from collections.abc import Iterator

import pytest

from engine.reporting.console import open_console, say_if_slow

LOGGER, APPLICATION = logging.getLogger("trine-console"), logging.Logger("application", logging.WARNING)


@pytest.fixture(autouse=True)
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A logger of an application that has not configured logging; at the real root pytest listens."""
    monkeypatch.setattr("engine.reporting.console.logger", LOGGER)
    monkeypatch.setattr(LOGGER, "parent", APPLICATION)
    monkeypatch.delenv("TRINE_QUIET", raising=False)
    yield
    assert (LOGGER.level, LOGGER.handlers, LOGGER.filters) == (logging.NOTSET, [], []), "everything is given back"


def speak() -> None:
    LOGGER.info("the banner")
    LOGGER.warning("a warning")
    LOGGER.error("an error")


def test_banner_and_warnings_reach_stderr_once(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = open_console(0), open_console(0)
    speak()
    assert capsys.readouterr().err == "the banner\na warning\nan error\n", "two engines share a console"
    first()
    first()
    speak()
    assert capsys.readouterr().err == "the banner\na warning\nan error\n", "the second engine still speaks"
    second()
    LOGGER.info("nobody listens")
    assert not capsys.readouterr().err


def test_other_ranks_say_what_python_says_for_them(capsys: pytest.CaptureFixture[str]) -> None:
    close = open_console(3)
    speak()
    close()
    assert capsys.readouterr().err == "a warning\nan error\n"


@pytest.mark.parametrize("quiet", ["1", "yes"])
def test_quiet_leaves_errors_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quiet: str
) -> None:
    monkeypatch.setenv("TRINE_QUIET", quiet)
    close = open_console(0)
    speak()
    close()
    assert capsys.readouterr().err == "an error\n"


def test_the_level_of_the_logger_silences(capsys: pytest.CaptureFixture[str]) -> None:
    LOGGER.setLevel(logging.WARNING)
    close = open_console(0)
    speak()
    close()
    assert LOGGER.level == logging.WARNING
    LOGGER.setLevel(logging.NOTSET)
    assert capsys.readouterr().err == "a warning\nan error\n"


class Kept(logging.Handler):
    """The application's handler."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.mark.parametrize("early", [True, False])
def test_an_application_that_logs_gets_each_line_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], early: bool
) -> None:
    """At its own level, whether it has configured logging before the engine or after."""
    kept = Kept()
    close = open_console(0) if not early else None
    monkeypatch.setattr(APPLICATION, "handlers", [kept])
    close = close or open_console(0)
    speak()
    close()
    assert kept.lines == ["a warning", "an error"]
    assert not capsys.readouterr().err


class Heard(Kept):
    """Tells when a line has come."""

    def __init__(self) -> None:
        super().__init__()
        self.came = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        self.came.set()


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch, unconfigured: None) -> Iterator[Heard]:
    made = Heard()
    monkeypatch.setattr(APPLICATION, "handlers", [made])
    LOGGER.setLevel(logging.INFO)
    yield made
    LOGGER.setLevel(logging.NOTSET)


def test_what_takes_long_says_so_while_it_lasts_and_in_the_end(heard: Heard) -> None:
    with say_if_slow("planning", 0, seconds=0.01):
        assert heard.came.wait(20)
        assert heard.lines == ["planning ..."]
    assert len(heard.lines) == 2 and heard.lines[1].startswith("planning took ")


def test_what_is_quick_or_on_another_rank_says_nothing(heard: Heard) -> None:
    with say_if_slow("planning", 0, seconds=60.0):
        pass
    with say_if_slow("planning", 1, seconds=0.0):
        pass
    assert not heard.lines
