"""What is promised when something goes wrong, and what was measured: ``python -m tests.reliability [R1 R6 ...]``.

Runs the command of every proof, one after another, and prints the figure that it gives; ``--write-figures`` keeps
the rows of docs/reference/proofs.md. Proofs with long commands and figures of their own are read from those figures.
Exit status 1: a command has failed.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from benchmarks.harness.figures import FOLDER, ROOT, described_commit, record_cells
from tests.reliability.catalogue import PROOFS
from tests.reliability.proof import Proof

NAME, CORNER = "reliability", "goal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What came of a proof."""

    figure: str
    command: str
    date: str
    commit: str
    good: bool = True

    def cells(self) -> dict[str, str]:
        """The columns of its row."""
        return {
            "measured": self.figure, "command": f"`{self.command}`", "date": self.date, "commit": self.commit
        }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    asked = _parser().parse_args(arguments)
    unknown = set(asked.goals) - {proof.goal for proof in PROOFS}
    if unknown:
        print(f"there is no goal {min(unknown)!r}; --list shows them.", file=sys.stderr)
        return 2
    chosen = [proof for proof in PROOFS if not asked.goals or proof.goal in asked.goals]
    if asked.list:
        print("\n".join(f"{proof.row}: {proof.command}" for proof in chosen))
        return 0
    good, commit = True, described_commit()  # before its own figures change files of the tree
    if asked.write_figures:  # all rows, in their order
        record_cells(NAME, CORNER, {(proof.row, "asked"): proof.asked for proof in PROOFS})
    for proof in chosen:
        measured = read_figure(proof) if proof.figure else run(proof, commit)
        print(f"{proof.row}: {measured.figure}", flush=True)
        good = good and measured.good
        if asked.write_figures:
            record_cells(NAME, CORNER, {(proof.row, column): text for column, text in measured.cells().items()})
    return 0 if good else 1


def run(proof: Proof, commit: str = "") -> Measured:
    """Run the command of a proof, with the sources of a commit, and read its figure."""
    words = shlex.split(proof.command)
    command = ["-m", "pytest", "-q", "-rP", *words[1:]] if words[0] == "pytest" else words[1:]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    figure, good = f"FAILED, exit status {done.returncode}", done.returncode == 0
    if good:
        figure = proof.read(said)
    else:
        print(said[-5000:], flush=True)
    today = datetime.now(UTC).date().isoformat()
    return Measured(figure=figure, command=proof.command, date=today, commit=commit, good=good)


def read_figure(proof: Proof) -> Measured:
    """What the command of a proof has kept before."""
    text = (FOLDER / f"{proof.figure}.json").read_text(encoding="utf-8")
    kept = json.loads(text)
    return Measured(figure=proof.read(text), command=proof.command, date=kept["date"], commit=kept["commit"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("goals", nargs="*", metavar="GOAL", help="such as R1; all without")
    parser.add_argument("--list", action="store_true", help="print the proofs with their commands and end")
    parser.add_argument("--write-figures", action="store_true", help="keep the rows in docs/figures and show them")
    return parser


if __name__ == "__main__":
    sys.exit(main())
