"""Seeds each fault into a copy of the tree and runs the tests that have to notice it: ``python -m tests.faults``.

First all of these tests have to pass in an unchanged copy. A fault that survives, or that cannot be seeded, ends the
command with 1.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.harness.figures import record_cells
from tests.faults.catalogue import FAULTS
from tests.faults.fault import ROOT, Fault
from tests.faults.trial import SECONDS, Outcome, Verdict, copied_tree, run_tests, try_fault

COLUMN = "killed by"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    asked = _parser().parse_args(arguments)
    unknown = set(asked.names) - {fault.name for fault in FAULTS}
    if unknown:
        print(f"there is no fault {min(unknown)!r}; --list shows the names.", file=sys.stderr)
        return 2
    chosen = [fault for fault in FAULTS if not asked.names or fault.name in asked.names]
    if asked.list:
        print("\n".join(f"{fault.name:36} {fault.file}: {fault.about}" for fault in chosen))
        return 0
    root = asked.root.resolve()
    if asked.column == COLUMN and not passes_unchanged(chosen, root):
        return 1
    verdicts = try_all(chosen, root, asked.jobs)
    _print_table(chosen, verdicts)
    if asked.write_figures:
        cells = {(fault.about, asked.column): verdict.cell for fault, verdict in zip(chosen, verdicts, strict=True)}
        record_cells("faults", "fault", cells)
    return int(any(verdict.outcome is not Outcome.KILLED for verdict in verdicts))


def passes_unchanged(faults: Sequence[Fault], root: Path) -> bool:
    """Whether the tests of all these faults pass without any of them; says which one does not."""
    tests = sorted({test for fault in faults for test in fault.known_tests(root)})
    started = time.monotonic()
    with copied_tree(root) as tree:
        code, said = run_tests(tests, tree, SECONDS * 10)
    print(f"unchanged: {len(tests)} tests end with {code} after {time.monotonic() - started:.0f} s", flush=True)
    if code:
        print(said)
    return code == 0


def try_all(faults: Sequence[Fault], root: Path, jobs: int) -> list[Verdict]:
    """The verdict on each fault, ``jobs`` at a time; prints a line for each as it ends."""

    def one(fault: Fault) -> Verdict:
        verdict = try_fault(fault, root)
        line = f"{verdict.outcome.value:8} {verdict.seconds:5.1f} s  {fault.name}: {verdict.killer}"
        print(f"{line} ({verdict.reason})" if verdict.reason else line, flush=True)
        if verdict.outcome is not Outcome.KILLED and verdict.said:
            print(verdict.said, flush=True)
        return verdict

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, faults))


def _print_table(faults: Sequence[Fault], verdicts: Sequence[Verdict]) -> None:
    print()
    for fault, verdict in zip(faults, verdicts, strict=True):
        print(f"{fault.name:36} {verdict.cell}")
    killed = sum(verdict.outcome is Outcome.KILLED for verdict in verdicts)
    print(f"\n{killed} of {len(faults)} faults are killed, in {sum(v.seconds for v in verdicts):.0f} s of tests")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to try; all without")
    parser.add_argument("--list", action="store_true", help="print the faults and end")
    parser.add_argument("--root", type=Path, default=ROOT, help="another tree, with its own tests")
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time")
    parser.add_argument("--write-figures", action="store_true", help="keep the table in docs/figures and show it")
    parser.add_argument("--column", default=COLUMN, help="column of the table, such as 'before' for an older tree")
    return parser


if __name__ == "__main__":
    sys.exit(main())
