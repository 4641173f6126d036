"""Trials: the tests of a fault run in a copy of the tree that has the fault, with a time limit."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.faults.fault import ROOT, Fault

LEFT_OUT = ("__pycache__", ".*", "*.egg-info")
"""What a copy of the tree lacks: what is generated, and what belongs to one checkout."""
SECONDS = 240
"""Time limit of the tests of one fault."""
SECONDS_OF_HANGS = 90
"""The same of a fault with which ranks wait forever; far more than its tests take without it."""
_TOO_LATE = re.compile(r"did not end within|Timeout \(>|have not said")
"""What a test says that gives up waiting for a rank."""


class Outcome(Enum):
    """How the tests of a fault have ended."""

    KILLED = "killed"
    SURVIVED = "SURVIVED"
    BROKEN = "BROKEN"
    """The trial proves nothing: the text is not there, a test was not collected, or the time was over unexpectedly."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of one trial."""

    outcome: Outcome
    killer: str
    """The first test that failed; why there is none otherwise."""
    seconds: float
    said: str = ""
    """The last lines of the tests."""
    reason: str = ""
    """The first line of what the failed test says, which should be about the fault."""

    @property
    def cell(self) -> str:
        """The text of a table."""
        if self.outcome is not Outcome.KILLED:
            return f"{self.outcome.value}: {self.killer}"
        return f"`{self.killer}`" if "::" in self.killer else self.killer


@contextmanager
def copied_tree(root: Path = ROOT) -> Iterator[Path]:
    """A copy of ``root`` in a folder of its own, which ends with the context; links inside the tree stay links."""
    with TemporaryDirectory(prefix="trine-fault-") as folder:
        target = Path(folder) / "tree"
        shutil.copytree(root, target, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        yield target


def try_fault(fault: Fault, root: Path = ROOT) -> Verdict:
    """Run the fault's tests in a copy of ``root`` that has it."""
    started = time.monotonic()
    try:
        patched = fault.patched(root)
    except LookupError as error:
        return Verdict(Outcome.BROKEN, str(error), 0.0)
    tests = fault.known_tests(root)
    if not tests:
        return Verdict(Outcome.SURVIVED, "there is no test", 0.0)
    with copied_tree(root) as tree:
        (tree / fault.file).write_text(patched, encoding="utf-8")
        code, said = run_tests(tests, tree, SECONDS_OF_HANGS if fault.hangs else SECONDS)
    return judge(fault, code, said, time.monotonic() - started)


def judge(fault: Fault, code: int | None, said: str, seconds: float) -> Verdict:
    """The verdict on the exit status of pytest (None: the time limit) and its output."""
    tail = "\n".join(said.splitlines()[-30:])
    if code == 0:
        return Verdict(Outcome.SURVIVED, "all of its tests pass", seconds, tail)
    late = code is None or (code == 1 and _TOO_LATE.search(said) is not None)
    if late:
        outcome = Outcome.KILLED if fault.hangs else Outcome.BROKEN
        return Verdict(outcome, "by time limit", seconds, tail)
    failed = re.search(r"^FAILED (\S+?\.py::\w+)(?:\[.*?\])?(?: - (.*))?$", said, flags=re.MULTILINE)
    if code != 1 or failed is None or "error during collection" in said:
        return Verdict(Outcome.BROKEN, f"pytest ended with {code} and no failed test", seconds, tail)
    return Verdict(Outcome.KILLED, failed[1], seconds, tail, failed[2] or "")


def run_tests(tests: Sequence[str], tree: Path, seconds: float) -> tuple[int | None, str]:
    """(exit status of pytest, what it said); the status is None if the time limit has ended it."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", *tests]
    env = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    env["COLUMNS"] = "400"  # pytest leaves a reason out that does not fit the line
    # a session of its own, so that ranks which the tests have started end with them
    with subprocess.Popen(
        command, cwd=tree, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as running:
        try:
            said, _ = running.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            said, _ = running.communicate()
            return None, said
    return running.returncode, said
