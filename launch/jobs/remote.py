"""Programs on other hosts, over ssh, and the questions that all hosts answer before anything is started.

Source and question of a program travel as two lines of input. So the command that ssh is given is the same for all, the
remote shell has nothing to misread, and neither variables nor their values stand in the list of processes.
"""

import json
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.errors import LaunchError
from engine.launch.jobs import guard, probe
from engine.launch.jobs.hostfile import Host
from engine.launch.jobs.request import JobRequest, refuse_all

LOST = 255
"""Status of ssh when the connection failed; the guard never ends with it."""
ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
"""A host that is silent for 15 s is lost."""
_FIRST = "import sys,json;exec(json.loads(sys.stdin.readline()))"


@dataclass(frozen=True, slots=True, kw_only=True)
class SshRequest:
    """How hosts are reached."""

    hostfile: Path
    hosts: tuple[Host, ...]
    ssh: tuple[str, ...]
    """The command, with options of the user; they come first, so they win over ours."""
    seconds: float
    """In which a host has to answer."""
    python: str

    def command(self, host: Host) -> list[str]:
        """What is started here for a program there."""
        connect = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, int(self.seconds))}")
        return [*self.ssh, *connect, *ALIVE, "-T", host.name, f"exec {shlex.quote(self.python)} -u -c '{_FIRST}'"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a host said to the question of the probe."""

    facts: Mapping[str, Any] | None
    """None: it did not answer."""
    lost: bool = False
    """Whether ssh failed, and not the program there."""
    reason: str = ""
    """Why it did not answer, in the words of ssh or of the remote shell."""


def input_of(program: Path, question: Mapping[str, Any]) -> bytes:
    """The two lines."""
    return f"{json.dumps(program.read_text(encoding='utf-8'))}\n{json.dumps(dict(question))}\n".encode()


def guard_input(wish: Mapping[str, Any]) -> bytes:
    """Input of a host that is to run torchrun."""
    return input_of(Path(guard.__file__), wish)


def ask(request: SshRequest, host: Host, question: Mapping[str, Any]) -> Answer:
    """Runs the probe on a host, for as long as it may take."""
    given = input_of(Path(probe.__file__), question)
    try:
        told = subprocess.run(
            request.command(host), input=given, capture_output=True, timeout=request.seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return Answer(facts=None, lost=True, reason="no answer")
    except OSError as error:
        return Answer(facts=None, lost=True, reason=f"{request.ssh[0]} cannot be started: {error.strerror}")
    lines = told.stdout.decode(errors="replace").splitlines()
    marked = [line for line in lines if line.startswith(probe.MARK)]
    if marked:
        return Answer(facts=json.loads(marked[-1].removeprefix(probe.MARK)))
    last = failure_message(told.stderr.decode(errors="replace").splitlines())
    return Answer(facts=None, lost=told.returncode == LOST, reason=last or f"exit status {told.returncode}")


def failure_message(lines: Sequence[str]) -> str:
    """The reason in what ssh printed last, without its own name, the host and the port."""
    told = [line.strip() for line in lines if line.strip()]
    if not told:
        return ""
    line = told[-1]
    return line.rpartition(": ")[2].rstrip(".") if line.startswith("ssh: ") else line.rstrip(".")


AT_ONCE = 64
"""Hosts that are asked at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReply:
    """A host that answered."""

    host: Host
    folder: bool
    """Whether it has the launcher's folder."""
    python: str
    torch: str
    trine: str
    """Versions, empty where it is not installed; Trine may run from its sources."""
    script: str
    engine: str
    """Digests, empty where there is none."""
    engine_folder: str
    gpus: Sequence[str]
    port: int
    """A free one on the first host, 0 where the wish is taken."""
    unknown: Sequence[str]
    """Names of hosts that it cannot resolve."""

    @property
    def gpu_text(self) -> str:
        """``2 x NVIDIA H100`` or ``no GPU``."""
        return ", ".join(f"{count} x {name}" for name, count in Counter(self.gpus).items()) or "no GPU"


def question_for(request: JobRequest, ssh: SshRequest, port: int | None) -> dict[str, Any]:
    """What a host is asked; ``port``: of the store, 0 for any, on the host that is to have it."""
    names = [host.address for host in ssh.hosts] if len(ssh.hosts) > 1 else []
    return {
        "folder": str(request.folder),
        "script": request.script if request.form == "script" else "",
        "environment": dict(request.export),
        "names": names,
        "port": port,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweringHosts:
    """Hosts that a job starts on, in the order of the file, and those that an elastic one starts without."""

    found: tuple[HostReply, ...]
    absent: Mapping[Host, str]
    """Hosts that do not answer, and why."""


def examine(request: JobRequest, ssh: SshRequest) -> AnsweringHosts:
    """Asks all hosts and compares them. An elastic job starts on those that answer, if they are enough.

    Raises:
        LaunchError: every problem of every host.
    """
    wish = request.port or 0
    with ThreadPoolExecutor(min(AT_ONCE, len(ssh.hosts))) as pool:
        questions = [question_for(request, ssh, wish if index == 0 else None) for index in range(len(ssh.hosts))]
        answers = list(pool.map(lambda host, question: ask(ssh, host, question), ssh.hosts, questions))
    problems: list[LaunchError] = []
    found: list[HostReply] = []
    absent: dict[Host, str] = {}
    least = request.nodes.least if request.nodes is not None and request.elastic else len(ssh.hosts)
    enough = sum(answer.facts is not None for answer in answers) >= least
    for host, answer in zip(ssh.hosts, answers, strict=True):
        if answer.facts is None and answer.lost and enough:
            absent[host] = answer.reason
        elif answer.facts is None:
            problems.append(unanswered(ssh, host, answer))
        else:
            found.append(HostReply(host=host, **answer.facts))
    gone = {host.address for host in absent}
    found = [replace(facts, unknown=[name for name in facts.unknown if name not in gone]) for facts in found]
    for facts in found:
        problems += [*_own_problems(request, ssh, facts), *differences(facts, found[0], request.script)]
        problems += _port_problem(request, facts) if facts.host == ssh.hosts[0] else []
    refuse_all(problems)
    if found[0].host != ssh.hosts[0]:  # only the first one was asked for a port
        found[0] = replace(found[0], port=request.port or free_port(request, ssh, found[0].host))
    return AnsweringHosts(found=tuple(found), absent=absent)


def unanswered(ssh: SshRequest, host: Host, answer: Answer) -> LaunchError:
    """Why a host did not say what it is."""
    if not answer.lost:
        return LaunchError(
            f"{host.name}: {ssh.python} does not run there ({answer.reason}); give --python PATH of one that all have."
        )
    return LaunchError(
        f"{host.name}: cannot be reached by ssh within {ssh.seconds:g} s ({answer.reason}); "
        f"`{' '.join(ssh.ssh)} {host.name}` has to work without a password; else take it out of {ssh.hostfile}."
    )


def _own_problems(request: JobRequest, ssh: SshRequest, facts: HostReply) -> Iterator[LaunchError]:
    """What is wrong with a host by itself."""
    name, ranks = facts.host.name, ranks_on(request, facts)
    if not facts.folder:
        yield LaunchError(
            f"{name} has no folder {request.folder}; every host runs in the launcher's folder: share or copy it."
        )
    elif not facts.script and request.form == "script":
        yield LaunchError(f"{name} has no {request.script} in {request.folder}; share the folder or copy the script.")
    if not facts.torch:
        yield LaunchError(f"{name} has no torch for {ssh.python}; give --python PATH, or install it there.")
    if facts.gpus and ranks > len(facts.gpus):
        yield LaunchError(
            f"{name} has {facts.gpu_text} and is to run {ranks} ranks; each needs a GPU of its own: "
            f"give --ranks-per-node {len(facts.gpus)}."
        )
    if facts.unknown:
        yield LaunchError(
            f"{name} cannot resolve {', '.join(facts.unknown)}; ranks meet by the names of {ssh.hostfile}: "
            "write names or addresses there that all hosts know."
        )


def differences(facts: HostReply, other: HostReply, script: str) -> Iterator[LaunchError]:
    """How a host differs from another one in what must be the same."""
    name, than = facts.host.name, other.host.name
    if facts.python != other.python:
        yield LaunchError(
            f"{name} has Python {facts.python} and {than} has {other.python}; all ranks need the same: give --python."
        )
    for package, mine, theirs in (("torch", facts.torch, other.torch), ("trine", facts.trine, other.trine)):
        if mine != theirs and (mine or package == "trine"):
            yield LaunchError(
                f"{name} has {_version(package, mine)} and {than} has {_version('', theirs)}; install the same "
                "version on all hosts."
            )
    if facts.script and other.script and facts.script != other.script:
        yield LaunchError(f"{name} has another {script} than {than}; copy the same one to all hosts.")
    if facts.engine != other.engine:
        yield LaunchError(
            f"{name} has another code of Trine ({facts.engine_folder or 'none'}) than {than} "
            f"({other.engine_folder or 'none'}); copy the same sources to all hosts, or install the same wheel."
        )
    if sorted(facts.gpus) != sorted(other.gpus):
        yield LaunchError(
            f"{name} has {facts.gpu_text} and {than} has {other.gpu_text}; a job needs the same GPUs on all hosts: "
            "leave one of them out."
        )


def _version(package: str, version: str) -> str:
    return f"{package} {version}".strip() if version else f"no {package} installed".replace("  ", " ")


def _port_problem(request: JobRequest, facts: HostReply) -> list[LaunchError]:
    if facts.port:
        return []
    return [
        LaunchError(
            f"{facts.host.name}: port {request.port} is taken, and the ranks are to meet there; give another --port, "
            "or none: then a free one is asked for."
        )
    ]


def ranks_on(request: JobRequest, facts: HostReply) -> int:
    """Ranks of a host: as asked for, as the hostfile has it, one for each GPU, or one."""
    return request.ranks_per_node or facts.host.slots or len(facts.gpus) or 1


def free_port(request: JobRequest, ssh: SshRequest, host: Host) -> int:
    """A port for the store on a host that takes it over; 0 if it does not answer."""
    answer = ask(ssh, host, question_for(request, ssh, 0))
    return int(answer.facts["port"]) if answer.facts is not None else 0
