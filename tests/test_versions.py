"""The table of versions: environments are made once, and a row says what passes in it or why it is not here."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.versions import CHECKS, FIRST_CONTACT, ROOT, ROWS, Environments, cells, main


class Machine:
    """Runs nothing; commands with one of these words fail."""

    def __init__(self, *broken: str) -> None:
        self.broken, self.ran = broken, list[Sequence[str]]()

    def __call__(self, command: Sequence[str], seconds: float) -> tuple[int, str]:
        self.ran.append(command)
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True)
        wrong = any(word in command for word in self.broken)
        return int(wrong), "no such | version" if wrong else "3 passed in 2 s"


def examined(folder: Path, machine: Machine, row: str, *only: str) -> Mapping[str, str]:
    return Environments(folder, {}, machine).examine(row, only)


def test_an_environment_is_made_once_of_the_packages_of_its_row(tmp_path: Path) -> None:
    machine = Machine()
    first, second = (examined(tmp_path, machine, "old Triton") for _ in range(2))
    assert set(first) == set(second) == set(CHECKS) and first["kernels"] == "3 passed, 0 s"
    packages, triton = (command for command in machine.ran if "install" in command)
    assert {"torch==2.13.0", "numpy==2.3.5"} < set(packages) and not any("triton" in word for word in packages)
    assert triton[-2:] == ("--no-deps", "triton==3.6.0")


def test_a_row_says_what_fails_and_why_it_is_not_here(tmp_path: Path) -> None:
    failed = examined(tmp_path / "a", Machine("first_contact"), "device")
    absent = examined(tmp_path / "b", Machine("install"), "newest")
    assert failed[FIRST_CONTACT] == "**failed**: no such / version" and absent == {
        "import": "not here: no such / version"
    }
    shown = cells({"newest": absent})
    assert shown["torch", "newest"] == "2.14.1" and shown["import", "newest"] == absent["import"]


def test_some_checks_are_made_alone_and_the_environment_goes_or_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine()
    monkeypatch.setattr(Environments.__init__, "__defaults__", (machine,))
    assert main([str(tmp_path), "--only", "tested", "--checks", "plan", "--keep"]) == 0
    assert (tmp_path / "tested" / "made").exists() and sum("pytest" in command for command in machine.ran) == 1
    machine.broken = ("pytest",)
    assert main([str(tmp_path), "--only", "tested", "--checks", "plan"]) == 1
    assert not (tmp_path / "tested").exists()


def test_every_check_names_tests_that_exist() -> None:
    named = [word for arguments in CHECKS.values() for word in arguments if word.startswith("tests/")]
    files = [ROOT / name.partition("::")[0] for name in named]
    assert named and all(file.exists() for file in files)
    tests = [
        (file, name.split("::")[1].partition("[")[0]) for file, name in zip(files, named, strict=True) if "::" in name
    ]
    assert all(f"def {test}(" in file.read_text(encoding="utf-8") for file, test in tests)


def test_no_version_is_tried_in_one_environment_alone_but_an_old_torch() -> None:
    parts = "python", "torch", "triton", "transformers", "numpy"
    counts = {(part, version): 0 for part in parts for version in {getattr(row, part) for row in ROWS.values()}}
    for row in ROWS.values():
        for part in parts:
            counts[part, getattr(row, part)] += 1
    assert {one for one, count in counts.items() if count == 1} == {("torch", "2.12.1"), ("transformers", "5.20.0")}
    assert len(ROWS) <= 8
