"""The table of reliability: every goal has proofs, their commands name what exists, and figures are read as meant."""

import json
import shlex

import pytest

from benchmarks.harness.figures import FOLDER, ROOT, read
from tests.faults.fault import Fault
from tests.reliability import __main__ as command
from tests.reliability.catalogue import PROOFS
from tests.reliability.proof import Proof, both, counted, found, largest, passed


def test_every_goal_has_a_row() -> None:
    assert list(dict.fromkeys(proof.goal for proof in PROOFS)) == [f"R{number}" for number in range(1, 17)]
    assert len({proof.row for proof in PROOFS}) == len(PROOFS)
    assert not [proof.row for proof in PROOFS if "|" in f"{proof.row} {proof.asked} {proof.command}"]


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.row[:40])
def test_the_command_of_a_proof_names_what_exists(proof: Proof) -> None:
    program, *words = shlex.split(proof.command)
    assert program in ("pytest", "python")
    named = tuple(word for word in words if word.startswith("tests/"))
    assert named if program == "pytest" else words[0] == "-m"
    anything = Fault(name="", about="", file="", old="", new="", tests=named)
    assert anything.known_tests() == named or all((ROOT / word).is_dir() for word in named)


def test_the_table_is_that_of_the_catalogue() -> None:
    kept = read(command.NAME)
    assert {row: cells["asked"] for row, cells in kept["rows"].items()} == {proof.row: proof.asked for proof in PROOFS}
    assert all(cells.get("measured") and cells.get("commit") for cells in kept["rows"].values()), "all were measured"
    assert not [row for row, cells in kept["rows"].items() if "FAILED" in cells["measured"]]


@pytest.mark.parametrize("proof", [proof for proof in PROOFS if proof.figure], ids=lambda proof: proof.row[:40])
def test_what_a_figure_of_its_own_says_is_shown(proof: Proof) -> None:
    """Whoever measures that figure anew brings the row up to date: ``python -m tests.reliability R12 ..``."""
    shown, kept = read(command.NAME)["rows"][proof.row], command.read_figure(proof)
    assert {"asked": proof.asked, **kept.cells()} == shown
    measured_by = json.loads((FOLDER / f"{proof.figure}.json").read_text())["command"].removeprefix("python -m ")
    assert proof.command.removeprefix("python -m ").startswith(measured_by.split()[0])


def test_figures_are_read_from_what_commands_print() -> None:
    said = "7 kills on dp2\n1200 kills on dp4\nlargest deviation of a loss 2e-07\nlargest deviation of a loss 1.0e-08\n"
    assert counted(r"(\d+) kills on ", "{} kills")(said) == "1,207 kills"
    assert largest(r"loss (\S+)", "{} pairs, {:.0e}")(said) == "2 pairs, 2e-07"
    assert found(r"(\d+) kills on (dp4)", "{} {}")(said) == "1200 dp4"
    assert both(passed("{} tests"), counted(r"(\d+) kills", "{}"))("3 passed in 2 s, 4 kills") == "3 tests, 4"
    for reader in (counted(r"(\d+) flips", "{}"), largest(r"loss of (\S+)", "{}"), found("none"), passed("{}")):
        with pytest.raises(LookupError, match="nothing in the output is like"):
            reader(said)


def test_a_command_that_fails_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    bad = Proof(goal="R0", about="", asked="", command="pytest tests/none.py", read=passed("{}"))
    measured = command.run(bad)
    assert not measured.good and measured.figure == "FAILED, exit status 4" and "none.py" in capsys.readouterr().out
    good = Proof(goal="R0", about="", asked="", command="python -c 'print(12)'", read=found(r"(12)"))
    measured = command.run(good)
    assert measured.good and measured.figure == "12" and measured.cells()["command"] == "`python -c 'print(12)'`"


def test_mistakes_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["R99"]) == 2 and "there is no goal 'R99'" in capsys.readouterr().err
    assert command.main(["--list", "R15"]) == 0 and "test_sigterm.py" in capsys.readouterr().out
