"""Files that list hosts, as DeepSpeed and as MPI write them.

node0 slots=4      # DeepSpeed, Open MPI
node1:4            # MPICH, Intel MPI
user@node2         # as many ranks as it has GPUs
node3 slots=4 gpu=h100   # further words of other launchers say nothing here
[fe80::1]:4, fe80::2 slots=4   # IPv6; in brackets where a number of ranks follows a colon

A job takes hosts and GPUs of them by ``--include`` and ``--exclude``:

--include node0@node1:0,2    all of node0, and of node1 the GPUs 0 and 2
--exclude node1:1@node2      all but GPU 1 of node1, and node2
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
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


def chosen_hosts(hosts: Sequence[Host], include: str | None, exclude: str | None) -> list[Host]:
    """The hosts that stay, with the GPUs that they may use.

    Raises:
        LaunchError: both are given; one of them names a host that is not listed, or GPUs that it does not have, or
            leaves nothing.
    """
    if include is not None and exclude is not None:
        raise LaunchError("--include and --exclude both choose hosts; give one of them.")
    if include is not None:
        wanted = _parse(include, "--include", hosts)
        return [_with(host, wanted[host.name]) for host in hosts if host.name in wanted]
    if exclude is not None:
        refused = _parse(exclude, "--exclude", hosts)
        left = [kept for host in hosts if (kept := _kept(host, refused.get(host.name))) is not None]
        if not left:
            raise LaunchError(f"--exclude {exclude} leaves no host; name fewer.")
        return left
    return list(hosts)


def _parse(text: str, option: str, hosts: Sequence[Host]) -> dict[str, tuple[int, ...]]:
    """GPUs by the name of the host; empty for all of them."""
    known = {host.name: host for host in hosts}
    found: dict[str, tuple[int, ...]] = {}
    for part in _parts(text, known):
        name, listed = _named(part, known)
        numbers = listed.split(",") if listed is not None else []
        if name not in known:
            raise LaunchError(f"{option} {text}: {name!r} is none of {', '.join(known)}; name hosts of this job.")
        if not all(number.strip().isdecimal() for number in numbers):
            raise LaunchError(f"{option} {text}: {part!r} is no host with GPUs; write NAME or NAME:0,2, joined by @.")
        found[name] = tuple(sorted({int(number) for number in numbers}))
        slots = known[name].slots
        if slots is not None and found[name] and found[name][-1] >= slots:
            raise LaunchError(f"{option} {text}: {name} has {slots} slots, from 0; it has no {found[name][-1]}.")
    return found


def _parts(text: str, known: Collection[str]) -> Iterator[str]:
    """Hosts of a list that ``@`` joins; one that the file names with its user has such a sign of its own."""
    words = text.split("@")
    while words:
        word = words.pop(0).strip()
        joined = f"{word}@{words[0].strip()}" if words and _named(word, known)[0] not in known else word
        if joined != word and _named(joined, known)[0] in known:
            del words[0]
            word = joined
        yield word


def _named(part: str, known: Collection[str]) -> tuple[str, str | None]:
    """The name of a host and its list of GPUs; colons of an IPv6 address belong to the name."""
    if (whole := part.replace("[", "").replace("]", "")) in known or ":" not in whole:
        return whole, None
    name, _, listed = whole.rpartition(":")
    return name, listed


def _with(host: Host, devices: tuple[int, ...]) -> Host:
    return replace(host, slots=len(devices), devices=devices) if devices else host


def _kept(host: Host, refused: tuple[int, ...] | None) -> Host | None:
    """What is left of a host; None for nothing."""
    if refused is None:
        return host
    if not refused:
        return None
    if host.slots is None:
        raise LaunchError(f"--exclude {host.name}:{refused[0]}: nothing tells the slots of {host.name}; write slots=N.")
    left = tuple(number for number in range(host.slots) if number not in refused)
    return _with(host, left) if left else None
