"""The table of versions: environments are made once, and a row says what passes in it or why it is not here."""

from collections.abc import Sequence
from pathlib import Path

from tests.versions import CHECKS, ROOT, ROWS, examine, table


class Machine:
    """Runs nothing; commands with one of these words fail."""

    def __init__(self, *broken: str) -> None:
        self.broken, self.ran = broken, list[Sequence[str]]()

    def __call__(self, command: Sequence[str], seconds: float) -> tuple[int, str]:
        self.ran.append(command)
        if "venv" in command:
            Path(command[-1]).mkdir()
        wrong = any(word in command for word in self.broken)
        return int(wrong), "no such version" if wrong else "3 passed"


def test_an_environment_is_made_once_of_the_packages_of_its_row(tmp_path: Path) -> None:
    machine = Machine()
    first, second = (examine(ROWS["tested"], tmp_path / "tested", machine) for _ in range(2))
    assert set(first) == set(second) == set(CHECKS) and "ok, 0 s: 3 passed" in first["kernels"]
    installs = [command for command in machine.ran if "install" in command]
    assert len(installs) == 1 and set(ROWS["tested"].packages) < set(installs[0])


def test_a_row_says_what_fails_and_why_it_is_not_here(tmp_path: Path) -> None:
    failed = examine(ROWS["tested"], tmp_path / "a", Machine("first_contact"))
    absent = examine(ROWS["newest"], tmp_path / "b", Machine("install"))
    text = table({"tested": failed, "newest": absent})
    assert "**failed**, 0 s: no such version" in text and "not here: no such version" in text
    assert "| newest: Python 3.12, torch 2.14.1+cpu, triton 3.8.0" in text


def test_every_check_names_tests_that_exist() -> None:
    named = [word for arguments in CHECKS.values() for word in arguments if word.startswith("tests/")]
    assert named and all((ROOT / name).exists() for name in named)
