"""Runs a command in a process and returns its CPU seconds and peak memory."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Spent:
    """Resources that a process used."""

    seconds: float
    """CPU seconds, user and system."""
    peak_bytes: int
    output: str


def spend(arguments: Sequence[str]) -> Spent:
    """Runs ``python -m`` with ``arguments`` on one core; includes the import of torch.

    Raises:
        RuntimeError: the command failed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {process.returncode}: {output[-500:]}")
    return Spent(used.ru_utime + used.ru_stime, used.ru_maxrss << 10, output)
