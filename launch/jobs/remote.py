"""A program on another host, over ssh. Its source and its question travel as two lines of input.

So the command that ssh is given is the same for all, the remote shell has nothing to misread, and neither variables nor
their values stand in the list of processes.
"""

import json
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.launch.jobs.hostfile import Host
from engine.launch.jobs.sent import guard, probe

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
    """Run the probe on a host, for as long as it may take."""
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
    last = last_words(told.stderr.decode(errors="replace").splitlines())
    return Answer(facts=None, lost=told.returncode == LOST, reason=last or f"exit status {told.returncode}")


def last_words(lines: Sequence[str]) -> str:
    """The reason in what ssh printed last, without its own name, the host and the port."""
    told = [line.strip() for line in lines if line.strip()]
    if not told:
        return ""
    line = told[-1]
    return line.rpartition(": ")[2].rstrip(".") if line.startswith("ssh: ") else line.rstrip(".")
