"""Files that list hosts, as DeepSpeed and as MPI write them.

node0 slots=4      # DeepSpeed, Open MPI
node1:4            # MPICH, Intel MPI
user@node2         # as many ranks as it has GPUs
node3 slots=4 gpu=h100   # further words of other launchers say nothing here
[fe80::1]:4, fe80::2 slots=4   # IPv6; in brackets where a number of ranks follows a colon
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.errors import LaunchError
from engine.launch.jobs.request import refuse_all

_SLOTS = r"\s+slots\s*=\s*(?P<slots>\d+)"
_FURTHER = r"(?:\s+(?!slots\b)[\w-]+\s*=\s*[^\s=]+)*"
_USER = r"(?:[\w.-]+@)?"
_SIX = r"(?:[0-9A-Fa-f]*:){2,}[0-9A-Fa-f.]*(?:%[\w.-]+)?"
_NAME = rf"(?P<name>[\w.@-]+|{_USER}\[{_SIX}\])(?::(?P<count>\d+)|{_SLOTS})?"
_LINE = re.compile(rf"(?:{_NAME}|(?P<six>{_USER}{_SIX})(?:{_SLOTS.replace('slots>', 'sixes>')})?){_FURTHER}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A line of the file."""

    name: str
    """As ssh takes it, maybe ``user@node0``."""
    slots: int | None
    """Ranks that it is to have."""
    devices: tuple[int, ...] = ()
    """GPUs that its ranks may use; empty: all."""

    @property
    def address(self) -> str:
        """As the other hosts resolve it."""
        return self.name.rpartition("@")[2]


def read_hostfile(path: Path) -> list[Host]:
    """All hosts, in the order of the file.

    Raises:
        LaunchError: it cannot be read, names no host, or some of its lines are wrong; all of them are told.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"--hostfile {path} cannot be read ({error}); give a text file, a host a line.") from error
    hosts: list[Host] = []
    problems: list[LaunchError] = []
    for number, line in _lines(text):
        match = _LINE.fullmatch(line)
        if match is None:
            form = "NAME, NAME slots=N or NAME:N"
            problems.append(LaunchError(f"{path}:{number}: {line!r} names no host; write {form}."))
            continue
        count = match["count"] or match["slots"] or match["sixes"]
        name = (match["name"] or match["six"]).replace("[", "").replace("]", "")
        host = Host(name=name, slots=int(count) if count else None)
        problems += _problems_of(host, hosts, f"{path}:{number}")
        hosts.append(host)
    refuse_all(problems)
    if not hosts:
        raise LaunchError(f"--hostfile {path} names no host; write one a line, such as node0 slots=4.")
    return hosts


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines that say something, with their numbers."""
    for number, line in enumerate(text.splitlines(), 1):
        if told := line.partition("#")[0].strip():
            yield number, told


def _problems_of(host: Host, before: list[Host], place: str) -> Iterator[LaunchError]:
    if host.slots == 0:
        yield LaunchError(f"{place}: {host.name} has 0 slots; a host has 1 rank or more, so take the line out.")
    if any(host.address == other.address for other in before):
        yield LaunchError(f"{place}: {host.name} is listed twice; write it once, with all of its slots.")
