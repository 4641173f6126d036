"""Remote programs over ssh, and the questions that all hosts answer before anything is started.

Source and question of a program are sent as two lines of input. The command of ssh is then the same for all, the remote
shell has nothing to misread, and neither variables nor their values are in the list of processes.
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
"""Exit code of ssh for a failed connection, which the guard never uses."""
ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
"""Options of ssh that drop a host after 15 s of silence."""
_FIRST = "import sys,json;exec(json.loads(sys.stdin.readline()))"


@dataclass(frozen=True, slots=True, kw_only=True)
class SshRequest:
    """Hosts of a job, with their ssh command and Python interpreter."""

    hostfile: Path
    hosts: tuple[Host, ...]
    ssh: tuple[str, ...]
    """ssh command with the user's options, which precede and override Trine's."""
    seconds: float
    """Timeout of a host's answer."""
    python: str

    def command(self, host: Host) -> list[str]:
        """Returns the ssh command, as a list of words, that runs a Python program from stdin on ``host``."""
        connect = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, int(self.seconds))}")
        return [*self.ssh, *connect, *ALIVE, "-T", host.name, f"exec {shlex.quote(self.python)} -u -c '{_FIRST}'"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Facts that a host has reported over ssh, or the reason why there are none."""

    facts: Mapping[str, Any] | None
    """Facts about the host; None: no answer."""
    lost: bool = False
    """True if ssh itself failed, not the remote program."""
    reason: str = ""
    """Error message of ssh or of the remote shell."""


def input_of(program: Path, question: Mapping[str, Any]) -> bytes:
    """Returns the stdin of a remote program: the source code of ``program`` and its input ``question``, a line of JSON
    each.
    """
    return f"{json.dumps(program.read_text(encoding='utf-8'))}\n{json.dumps(dict(question))}\n".encode()


def guard_input(wish: Mapping[str, Any]) -> bytes:
    """Returns the stdin that starts the guard, the program that runs torchrun on a host.

    ``wish``: command, environment and other settings for torchrun, from :meth:`SshPlan.wish`.
    """
    return input_of(Path(guard.__file__), wish)


def ask(request: SshRequest, host: Host, question: Mapping[str, Any]) -> Answer:
    """Asks ``host`` over ssh for facts about itself; returns them, or the reason why there are none.

    ``question``: input of the program that runs on the host.
    """
    given = input_of(Path(probe.__file__), question)
    try:
        done = subprocess.run(
            request.command(host), input=given, capture_output=True, timeout=request.seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return Answer(facts=None, lost=True, reason="no answer")
    except OSError as error:
        return Answer(facts=None, lost=True, reason=f"{request.ssh[0]} cannot be started: {error.strerror}")
    lines = done.stdout.decode(errors="replace").splitlines()
    marked = [line for line in lines if line.startswith(probe.MARK)]
    if marked:
        return Answer(facts=json.loads(marked[-1].removeprefix(probe.MARK)))
    last = failure_message(done.stderr.decode(errors="replace").splitlines())
    return Answer(facts=None, lost=done.returncode == LOST, reason=last or f"exit status {done.returncode}")


def failure_message(lines: Sequence[str]) -> str:
    """Returns the last line of ssh's error output without program name, host and port; "" if there is none."""
    content = [line.strip() for line in lines if line.strip()]
    if not content:
        return ""
    line = content[-1]
    return line.rpartition(": ")[2].rstrip(".") if line.startswith("ssh: ") else line.rstrip(".")


AT_ONCE = 64
"""Maximum number of hosts contacted at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReply:
    """Facts about a host that answered the check before the job starts."""

    host: Host
    folder: bool
    """True if the launcher's folder exists on the host."""
    python: str
    torch: str
    trine: str
    """Version of Trine; empty if not installed, since Trine may run from sources."""
    script: str
    engine: str
    """Digest of the engine's sources; empty if missing."""
    engine_folder: str
    gpus: Sequence[str]
    port: int
    """Free port on the first host; 0 if the requested port is taken."""
    unknown: Sequence[str]
    """Host names of the job that do not resolve on the host."""

    @property
    def gpu_text(self) -> str:
        """GPUs as text, such as ``2 x NVIDIA H100`` or ``no GPU``."""
        return ", ".join(f"{count} x {name}" for name, count in Counter(self.gpus).items()) or "no GPU"


def question_for(request: JobRequest, ssh: SshRequest, port: int | None) -> dict[str, Any]:
    """Returns the input of the program that checks a host before the job starts.

    ``port``: port that must be free; 0: a free port is found; None: no port is checked.
    """
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
    """Hosts on which the job starts, and hosts that did not answer and are left out of an elastic job."""

    found: tuple[HostReply, ...]
    absent: Mapping[Host, str]
    """Hosts without an answer, with the reason."""


def examine(request: JobRequest, ssh: SshRequest) -> AnsweringHosts:
    """Checks all hosts in parallel, and compares their software, sources and GPUs with the first host's.

    An elastic job may start without some hosts.

    Raises:
        LaunchError: too many hosts do not answer, a host is unsuitable, or hosts differ.
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
    if found[0].host != ssh.hosts[0]:  # only the first host was asked for a port
        found[0] = replace(found[0], port=request.port or free_port(request, ssh, found[0].host))
    return AnsweringHosts(found=tuple(found), absent=absent)


def unanswered(ssh: SshRequest, host: Host, answer: Answer) -> LaunchError:
    """Returns the error for a host that did not answer, with ``answer.reason``."""
    if not answer.lost:
        return LaunchError(
            f"{host.name}: {ssh.python} does not run there ({answer.reason}); pass --python PATH, where PATH is a "
            "Python interpreter on every host."
        )
    return LaunchError(
        f"{host.name}: cannot be reached by ssh within {ssh.seconds:g} s ({answer.reason}); "
        f"make `{' '.join(ssh.ssh)} {host.name}` work without a password, or remove {host.name} from {ssh.hostfile}."
    )


def _own_problems(request: JobRequest, ssh: SshRequest, facts: HostReply) -> Iterator[LaunchError]:
    """Yields the problems of a host by itself."""
    name, ranks = facts.host.name, ranks_on(request, facts)
    if not facts.folder:
        yield LaunchError(
            f"{name} has no folder {request.folder}; every host runs in the launcher's folder: share or copy it."
        )
    elif not facts.script and request.form == "script":
        yield LaunchError(f"{name} has no {request.script} in {request.folder}; share the folder or copy the script.")
    if not facts.torch:
        yield LaunchError(f"{name} has no torch for {ssh.python}; install torch there, or pass another --python PATH.")
    if facts.gpus and ranks > len(facts.gpus):
        yield LaunchError(
            f"{name} has {facts.gpu_text} but {ranks} ranks; each needs its own GPU: "
            f"give --ranks-per-node {len(facts.gpus)}."
        )
    if facts.unknown:
        yield LaunchError(
            f"{name} cannot resolve {', '.join(facts.unknown)}; ranks connect by the names of {ssh.hostfile}: "
            "write names or addresses there that all hosts resolve."
        )


def differences(facts: HostReply, other: HostReply, script: str) -> Iterator[LaunchError]:
    """Yields an error for each difference between two hosts: Python, packages, ``script``, engine sources, GPUs."""
    name, than = facts.host.name, other.host.name
    if facts.python != other.python:
        yield LaunchError(
            f"{name} has Python {facts.python}, but {than} has {other.python}; all ranks need the same: give --python."
        )
    for package, mine, theirs in (("torch", facts.torch, other.torch), ("trine", facts.trine, other.trine)):
        if mine != theirs and (mine or package == "trine"):
            yield LaunchError(
                f"{name} has {_version(package, mine)}, but {than} has {_version('', theirs)}; install the same "
                "version on all hosts."
            )
    if facts.script and other.script and facts.script != other.script:
        yield LaunchError(f"{name} has another {script} than {than}; copy the same one to all hosts.")
    if facts.engine != other.engine:
        yield LaunchError(
            f"{name} has other sources of Trine ({facts.engine_folder or 'none'}) than {than} "
            f"({other.engine_folder or 'none'}); copy the same sources to all hosts, or install the same wheel."
        )
    if sorted(facts.gpus) != sorted(other.gpus):
        yield LaunchError(
            f"{name} has {facts.gpu_text}, but {than} has {other.gpu_text}; a job needs the same GPUs on all hosts; "
            "leave one of these hosts out."
        )


def _version(package: str, version: str) -> str:
    return f"{package} {version}".strip() if version else f"no {package} installed".replace("  ", " ")


def _port_problem(request: JobRequest, facts: HostReply) -> list[LaunchError]:
    if facts.port:
        return []
    return [
        LaunchError(
            f"{facts.host.name}: port {request.port} of the rendezvous is taken; give another --port, or leave it out "
            "to use a free one."
        )
    ]


def ranks_on(request: JobRequest, facts: HostReply) -> int:
    """Returns the number of ranks on a host: from the command line, else from the hostfile, else one per GPU.

    It is 1 if none of these is known.
    """
    return request.ranks_per_node or facts.host.slots or len(facts.gpus) or 1


def free_port(request: JobRequest, ssh: SshRequest, host: Host) -> int:
    """Returns a free port on ``host`` for the rendezvous store; 0 if the host does not answer."""
    answer = ask(ssh, host, question_for(request, ssh, 0))
    return int(answer.facts["port"]) if answer.facts is not None else 0
