"""What the user of ``trine launch`` asked for, apart from where it runs."""

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from engine.errors import LaunchError

ScriptForm = Literal["script", "module", "program"]
"""A file for Python, a module for ``python -m``, or a program that needs no Python."""
PASSED_ON = ("PYTHONPATH", "OMP_NUM_THREADS", "NCCL_*", "GLOO_*", "TRINE_*")
"""Variables that a host is given where the launcher has them; a glob stands for all that it matches."""


def refuse_all(problems: Sequence[LaunchError]) -> None:
    """Raise all problems as one error, a line each; nothing where there is none.

    Raises:
        LaunchError: there is one or more.
    """
    if problems:
        raise LaunchError("\n".join(map(str, problems)))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCount:
    """How many nodes a job has: a number, or for an elastic job the fewest and the most."""

    least: int
    most: int
    elastic: bool = False

    @classmethod
    def parse(cls, text: str, option: str, elastic: bool = False) -> Self:
        """Read ``4`` or ``2:4``; ``elastic``: a range is asked for.

        Raises:
            LaunchError: it is none.
        """
        least, colon, most = text.partition(":")
        if not (least.isdecimal() and (most.isdecimal() if colon else not elastic)):
            form = "MIN:MAX, such as 2:4" if elastic else "a number of nodes, such as 4, or MIN:MAX, such as 2:4"
            raise LaunchError(f"{option} {text}: give {form}.")
        if not 1 <= int(least) <= int(most or least):
            raise LaunchError(f"{option} {text}: a job has 1 node or more, and MAX is no less than MIN.")
        return cls(least=int(least), most=int(most or least), elastic=bool(colon))

    def __str__(self) -> str:
        return f"{self.least}:{self.most}" if self.elastic else str(self.most)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """The part of a command that every place understands."""

    script: str
    """A file, a module or a program, as ``form`` tells."""
    arguments: tuple[str, ...]
    python: str
    ranks_per_node: int | None
    nodes: NodeCount | None
    export: Mapping[str, str]
    """Variables of the ranks: those of ``--export``, and over ssh those that are passed on anyway."""
    folder: Path
    """Where the launcher was started."""
    name: str
    port: int | None
    join_seconds: int
    """In which all nodes have to meet."""
    form: ScriptForm = "script"
    cores: str | None = None
    """Cores that the ranks of a host share, such as 0-3,8; empty: all of its cores; None: nothing binds ranks."""
    grace_seconds: int
    """Which ranks have between SIGTERM and SIGKILL, to write a checkpoint."""

    @property
    def elastic(self) -> bool:
        """Whether nodes may come and go."""
        return self.nodes is not None and self.nodes.elastic

    def ranks(self, why: str) -> int:
        """Ranks of a node, where nobody can count its GPUs.

        Raises:
            LaunchError: the number was not given.
        """
        if self.ranks_per_node is None:
            raise LaunchError(f"{why} needs --ranks-per-node N: nobody can count the GPUs of its nodes from here.")
        return self.ranks_per_node


def exported(wishes: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that ``--export NAME`` or ``NAME=VALUE`` ask for.

    Raises:
        LaunchError: a name that is no name, or that the launcher's environment lacks.
    """
    found: dict[str, str] = {}
    for wish in wishes:
        name, given, value = wish.partition("=")
        if not name.isidentifier():
            raise LaunchError(f"--export {wish}: {name!r} is no name of a variable; give NAME or NAME=VALUE.")
        if not given and name not in environment:
            raise LaunchError(f"--export {name}: the launcher has no such variable; set it, or give {name}=VALUE.")
        found[name] = value if given else environment[name]
    return found


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that every host is given without being asked for."""
    return {
        name: value
        for name, value in environment.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in PASSED_ON)
    }
