"""Hostfiles, in the formats of DeepSpeed and of MPI.

node0 slots=4      # DeepSpeed, Open MPI
node1:4            # MPICH, Intel MPI
user@node2         # as many ranks as it has GPUs
node3 slots=4 gpu=h100   # further words of other launchers are ignored
[fe80::1]:4, fe80::2 slots=4   # IPv6; in brackets if a number of ranks follows a colon

Options ``--include`` and ``--exclude`` select hosts and their GPUs:

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
    """Host of a job, as a line of a hostfile describes it."""

    name: str
    """Name for ssh, such as ``node0`` or ``user@node0``."""
    slots: int | None
    """Number of ranks on the host; None: one per GPU."""
    devices: tuple[int, ...] = ()
    """Indices of the GPUs for its ranks; empty: all."""

    @property
    def address(self) -> str:
        """Host name or IP address, without the user name for ssh."""
        return self.name.rpartition("@")[2]


def read_hostfile(path: Path) -> list[Host]:
    """Reads the hosts of a hostfile in the formats of DeepSpeed and MPI.

    Raises:
        LaunchError: the file cannot be read, names no host, or has malformed lines.
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
            problems.append(LaunchError(f"{path}:{number}: {line!r} is not a host; write {form}."))
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
    """Yields the lines with content, with their numbers."""
    for number, line in enumerate(text.splitlines(), 1):
        if content := line.partition("#")[0].strip():
            yield number, content


def _problems_of(host: Host, before: list[Host], place: str) -> Iterator[LaunchError]:
    if host.slots == 0:
        yield LaunchError(f"{place}: {host.name} has 0 slots; a host has at least 1 rank, so remove the line.")
    if any(host.address == other.address for other in before):
        yield LaunchError(f"{place}: {host.name} is listed twice; write it once, with all of its slots.")


def chosen_hosts(hosts: Sequence[Host], include: str | None, exclude: str | None) -> list[Host]:
    """Returns the hosts and GPUs that the option ``--include`` names, or all except the ones that ``--exclude`` names.

    Raises:
        LaunchError: both options are given, an option names an unlisted host or missing GPUs, or no host remains.
    """
    if include is not None and exclude is not None:
        raise LaunchError("--include and --exclude both select hosts; give one of them.")
    if include is not None:
        wanted = _parse(include, "--include", hosts)
        return [_with(host, wanted[host.name]) for host in hosts if host.name in wanted]
    if exclude is not None:
        refused = _parse(exclude, "--exclude", hosts)
        left = [rest for host in hosts if (rest := _kept(host, refused.get(host.name))) is not None]
        if not left:
            raise LaunchError(f"--exclude {exclude} leaves no host; name fewer.")
        return left
    return list(hosts)


def _parse(text: str, option: str, hosts: Sequence[Host]) -> dict[str, tuple[int, ...]]:
    """Returns the GPUs by host name; empty for all GPUs."""
    known = {host.name: host for host in hosts}
    found: dict[str, tuple[int, ...]] = {}
    for part in _parts(text, known):
        name, listed = _named(part, known)
        numbers = listed.split(",") if listed is not None else []
        if name not in known:
            raise LaunchError(f"{option} {text}: {name!r} is not one of {', '.join(known)}; name hosts of this job.")
        if not all(number.strip().isdecimal() for number in numbers):
            raise LaunchError(
                f"{option} {text}: {part!r} is not a host with GPUs; write NAME or NAME:0,2, joined by @."
            )
        whole = listed is None or found.get(name) == ()
        found[name] = () if whole else tuple(sorted({*found.get(name, ()), *map(int, numbers)}))
        slots = known[name].slots
        if slots is not None and found[name] and found[name][-1] >= slots:
            raise LaunchError(
                f"{option} {text}: {name} has {slots} slots, counted from 0, and no slot {found[name][-1]}; name "
                "slots that it has."
            )
    return found


def _parts(text: str, known: Collection[str]) -> Iterator[str]:
    """Splits a list of hosts at ``@``; a host that the file names with its user contains such a sign itself."""
    words = text.split("@")
    while words:
        word = words.pop(0).strip()
        joined = f"{word}@{words[0].strip()}" if words and _named(word, known)[0] not in known else word
        if joined != word and _named(joined, known)[0] in known:
            del words[0]
            word = joined
        yield word


def _named(part: str, known: Collection[str]) -> tuple[str, str | None]:
    """Splits a host into its name and its list of GPUs; colons of an IPv6 address belong to the name."""
    if (whole := part.replace("[", "").replace("]", "")) in known or ":" not in whole:
        return whole, None
    name, _, listed = whole.rpartition(":")
    return name, listed


def _with(host: Host, devices: tuple[int, ...]) -> Host:
    return replace(host, slots=len(devices), devices=devices) if devices else host


def _kept(host: Host, refused: tuple[int, ...] | None) -> Host | None:
    """Returns the rest of a host after an exclusion; None for nothing."""
    if refused is None:
        return host
    if not refused:
        return None
    if host.slots is None:
        raise LaunchError(
            f"--exclude {host.name}:{refused[0]} names a GPU, but the number of GPUs of {host.name} is unknown; write "
            f'it as "{host.name} slots=N" in the file of --hostfile.'
        )
    left = tuple(number for number in range(host.slots) if number not in refused)
    return _with(host, left) if left else None
