"""The list of figures by age: every figure has a command that renews it, and a renewal runs it once."""

import pytest

from benchmarks.harness.figures import FOLDER, ROOT
from benchmarks.harness.renewal import RENEW, main


def test_every_figure_has_a_command_whose_files_exist() -> None:
    assert set(RENEW) == {file.stem for file in FOLDER.glob("*.json")}
    words = {word for command in RENEW.values() for word in command.split() if word.startswith("tests/")}
    assert not [word for word in sorted(words) if not (ROOT / word).exists()]


def test_figures_are_listed_from_the_oldest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    dates = [line.split()[0] for line in lines if not line.startswith("not recorded")]
    assert len(lines) == len(RENEW) and dates == sorted(dates) and dates


def test_named_figures_are_renewed_by_one_run_of_their_command(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    class Done:
        returncode = 0

    def run(words: list[str], **_: object) -> Done:
        ran.append(words[1:])
        return Done()

    monkeypatch.setattr("benchmarks.harness.renewal.subprocess.run", run)
    assert main(["--renew", "schedules", "schedule-kinds", "first-contact"]) == 0
    assert ran[0] == ["-m", "pytest", "tests/launch/test_schedule_command.py", "--write-figures"]
    assert [words[:3] for words in ran[1:]] == [["-m", "benchmarks", "first_contact"]] * 2
    with pytest.raises(SystemExit):
        main(["--renew", "nothing"])
