"""Binding of a rank to cores: ``python -m engine.launch.jobs.bound_cores [--cores 0-3,8] PROGRAM ARGUMENTS``.

torchrun starts it instead of the program, which it then becomes. Ranks of a host share its cores, or the cores of
``--cores``, in adjacent parts of equal size:

    8 cores, 2 ranks      rank 0: 0 1 2 3      rank 1: 4 5 6 7
"""

import os
import sys
from collections.abc import Sequence

from engine.errors import LaunchError

MODULE = "engine.launch.jobs.bound_cores"
_MOST_CORES = 1 << 16


def read_cores(text: str) -> tuple[int, ...]:
    """Parses a list of CPU cores such as ``0-3,8``; returns the core numbers, sorted and distinct.

    Raises:
        LaunchError: the text is not a list of cores.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        words = (first, last) if dash else (first,)
        if not all(map(str.isdecimal, words)) or not int(first) <= int(words[-1]) < _MOST_CORES:
            raise LaunchError(
                f"--bind-cores-to {text}: {part!r} is neither a core nor a range; write a list such as 0-3,8."
            )
        found.update(range(int(first), int(words[-1]) + 1))
    return tuple(sorted(found))


def share(cores: Sequence[int], rank: int, ranks: int) -> tuple[int, ...]:
    """Returns the CPU cores for local rank ``rank`` of ``ranks``: a contiguous slice of ``cores``, of equal length on
    all ranks.

    Raises:
        LaunchError: there are fewer cores than ranks.
    """
    each = len(cores) // ranks
    if not each:
        raise LaunchError(
            f"{ranks} ranks on {len(cores)} cores: every bound rank needs its own core; start fewer ranks, or leave "
            "--bind-cores out."
        )
    return tuple(cores[rank * each : (rank + 1) * each])


def main(words: Sequence[str]) -> None:
    """Binds this process to its share of CPU cores, by LOCAL_RANK, sets OMP_NUM_THREADS, and becomes another program.

    ``words``: optionally ``--cores LIST``, then the program and its arguments.

    Raises:
        LaunchError: there are too few cores, or the host lacks a core of LIST.
    """
    allowed = sorted(os.sched_getaffinity(0))
    listed, words = (words[1], words[2:]) if words[0] == "--cores" else ("", words)
    cores = read_cores(listed) if listed else allowed
    if strange := set(cores) - set(allowed):
        raise LaunchError(
            f"core {min(strange)} is not one of this host's cores for the job, {allowed}; choose from these cores."
        )
    own = share(cores, int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    os.sched_setaffinity(0, own)
    os.environ["OMP_NUM_THREADS"] = str(len(own))
    os.execvp(words[0], list(words))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except LaunchError as error:
        sys.exit(f"trine launch: {error}")
