"""A rank on cores of its own: ``python -m engine.launch.jobs.bound_cores [--cores 0-3,8] PROGRAM ARGUMENTS``.

torchrun starts it in the place of the program, which it becomes. Ranks of a host share its cores, or those of
``--cores``, in neighbouring parts of one size:

    8 cores, 2 ranks      rank 0: 0 1 2 3      rank 1: 4 5 6 7
"""

import os
import sys
from collections.abc import Sequence

from engine.errors import LaunchError

MODULE = "engine.launch.jobs.bound_cores"


def read_cores(text: str) -> tuple[int, ...]:
    """The cores of ``0-3,8``.

    Raises:
        LaunchError: it is no such list.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise LaunchError(f"--bind-cores-to {text}: {part!r} is no core and no range; write a list such as 0-3,8.")
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


def share(cores: Sequence[int], rank: int, ranks: int) -> tuple[int, ...]:
    """The cores of one of ``ranks`` ranks.

    Raises:
        LaunchError: there are fewer cores than ranks.
    """
    each = len(cores) // ranks
    if not each:
        raise LaunchError(
            f"{ranks} ranks on {len(cores)} cores: every bound rank has a core of its own; start fewer ranks, or leave "
            "--bind-cores out."
        )
    return tuple(cores[rank * each : (rank + 1) * each])


def main(words: Sequence[str]) -> None:
    """Binds this process, and becomes the program.

    Raises:
        LaunchError: the cores do not suffice, or the host does not have them.
    """
    allowed = sorted(os.sched_getaffinity(0))
    listed, words = (words[1], words[2:]) if words[0] == "--cores" else ("", words)
    cores = read_cores(listed) if listed else allowed
    if strange := set(cores) - set(allowed):
        raise LaunchError(f"core {min(strange)} is none of this host's for the job, {allowed}; give others of them.")
    own = share(cores, int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    os.sched_setaffinity(0, own)
    os.environ["OMP_NUM_THREADS"] = str(len(own))
    os.execvp(words[0], list(words))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except LaunchError as error:
        sys.exit(f"trine launch: {error}")
