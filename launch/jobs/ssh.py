"""torchrun on hosts that ssh reaches: how it is started, what it prints, and what it is told.

``HostRun`` is one host as the launcher sees it, ``Running`` all of them; when they end, ``ssh_job`` decides.
"""

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import IO, Any

from engine.launch.jobs.hostfile import Host
from engine.launch.jobs.preflight import HostReply, ranks_on
from engine.launch.jobs.remote import SshRequest, guard_input, last_words
from engine.launch.jobs.request import JobRequest
from engine.launch.jobs.sent.guard import MARK
from engine.launch.jobs.torchrun import Rendezvous, torchrun_command, torchrun_environment
from engine.reporting.last_words import is_consequence

BEAT_SECONDS = 5.0
NO_MEETING = ("RendezvousTimeoutError", "RendezvousConnectionError")
"""How torchrun says that its nodes have not met."""
KILLED = 128 + signal.SIGKILL
_KEPT = 60
"""Lines of the error stream that are kept for a reason."""
_STORE_GONE = re.compile(rb"\[W\S* \S+ TCPStore\.cpp:\d+\] |W.* The node '.*' has failed to shutdown the rendezvous ")
"""A torchrun whose job is done says so where the first host, which has the store, has ended before it."""
_ITS_FRAMES = re.compile(rb"Exception raised from |frame #\d+: |<omitting python frames>|\s*$")


class Screen:
    """What all hosts print, line by line, behind their names."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def show(self, stream: IO[bytes], host: str, line: bytes) -> None:
        """A line of a host."""
        with self._lock, contextlib.suppress(BrokenPipeError):
            stream.write(f"[{host}] ".encode() + line.rstrip(b"\r\n") + b"\n")
            stream.flush()

    def say(self, text: str) -> None:
        """A line of the launcher itself."""
        with self._lock:
            print(f"trine launch: {text}", file=sys.stderr, flush=True)


class HostRun:
    """torchrun on a host, and what it has said of itself."""

    def __init__(self, host: Host, command: list[str], wish: Mapping[str, Any], screen: Screen) -> None:
        self.host = host
        self.joined = False
        """Whether it has reached the store."""
        self.no_meeting = False
        self._held: list[bytes] = []
        """Lines that are shown if the host ends with an error."""
        self._screen = screen
        self._errors: list[str] = []
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the launcher's, which passes it on
        )
        self._write(guard_input(wish))
        pairs = ((self._process.stdout, sys.stdout.buffer), (self._process.stderr, sys.stderr.buffer))
        self._readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in pairs]
        for reader in self._readers:
            reader.start()

    def _read(self, source: IO[bytes], target: IO[bytes]) -> None:
        holding = False
        for line in source:
            text = line.decode(errors="replace")
            if text.startswith(MARK):
                self.joined = True
                continue
            if target is sys.stderr.buffer:
                if _STORE_GONE.match(line) or (self._held and holding and _ITS_FRAMES.match(line)):
                    holding = True
                    self._held.append(line)
                    continue
                holding = False
                self._errors = [*self._errors[1 - _KEPT :], text]
                self.no_meeting |= any(name in text for name in NO_MEETING)
            self._screen.show(target, self.host.name, line)

    def say(self, word: str) -> None:
        """A word for the guard."""
        self._write(f"{word}\n".encode())

    def _write(self, given: bytes) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(given)
                self._process.stdin.flush()

    def status(self) -> int | None:
        """How it ended, once all that it printed is shown; None while it runs."""
        code = self._process.poll()
        if code is not None:
            for reader in self._readers:
                reader.join(1.0)
            for line in self._held if code else ():
                self._screen.show(sys.stderr.buffer, self.host.name, line)
            self._held.clear()
        return code

    @property
    def taken_down(self) -> bool:
        """Whether the rank that torchrun calls the root cause here blames another one, or was ended by a signal."""
        root = "".join(self._errors).rpartition("Root Cause")[2]
        return is_consequence(root) or re.search(r"exitcode +: -15\b", root) is not None

    @property
    def reason(self) -> str:
        """Why ssh has ended, in its words."""
        return last_words(self._errors) or "without a word"

    def abandon(self) -> None:
        """End ssh itself; the guard on the host sees that nobody is there."""
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingPlace:
    """Where the hosts meet, and for which time they do."""

    first: Host
    port: int
    identity: str
    round: int = 0

    def moved(self, first: Host, port: int) -> "MeetingPlace":
        """The same job with another host in the first place."""
        return replace(self, first=first, port=port, round=self.round + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SshPlan:
    """What is started where."""

    request: JobRequest
    ssh: SshRequest
    hosts: tuple[HostReply, ...]

    def wish(self, facts: HostReply, meeting: MeetingPlace) -> dict[str, Any]:
        """What the guard of a host is asked to do."""
        rendezvous = Rendezvous(
            address=meeting.first.address,
            port=meeting.port,
            identity=f"{meeting.identity}-{meeting.round}",
            is_host="1" if facts.host == meeting.first else "0",
            local_address=facts.host.address,
        )
        nodes = str(self.request.nodes) if self.request.elastic else str(len(self.hosts))
        return {
            "key": f"{meeting.identity}-{facts.host.name}",
            "command": torchrun_command(self.request, ranks_on(self.request, facts), nodes, rendezvous),
            "environment": torchrun_environment(self.request, facts.host.devices),
            "folder": str(self.request.folder),
            "grace": self.request.grace_seconds + 5,
            "port": meeting.port,
        }

    def start(self, facts: HostReply, meeting: MeetingPlace, screen: Screen) -> HostRun:
        """Start torchrun on a host."""
        return HostRun(facts.host, self.ssh.command(facts.host), self.wish(facts, meeting), screen)


class Running:
    """All hosts that run now, and how the launcher talks to them."""

    def __init__(self, plan: SshPlan, screen: Screen) -> None:
        self._plan = plan
        self._screen = screen
        self._beaten = 0.0
        self.runs: dict[Host, HostRun] = {}

    def start(self, facts: HostReply, meeting: MeetingPlace) -> None:
        """Start a host."""
        self.runs[facts.host] = self._plan.start(facts, meeting, self._screen)

    def ended(self) -> list[tuple[HostRun, int]]:
        """Hosts that have ended since the last call, which waits a little; those that run are told that we are here."""
        time.sleep(0.1)
        if time.monotonic() > self._beaten + BEAT_SECONDS:
            self._beaten = time.monotonic()
            self.say("beat")
        found = [(run, code) for run in self.runs.values() if (code := run.status()) is not None]
        for run, _ in found:
            del self.runs[run.host]
        return found

    def say(self, word: str) -> None:
        """A word for all guards."""
        for run in self.runs.values():
            run.say(word)

    def end(self, seconds: float) -> list[tuple[HostRun, int]]:
        """End all: kindly, then not, then without the host."""
        found: list[tuple[HostRun, int]] = []
        for word, wait in (("TERM", seconds), ("KILL", 10.0)):
            self.say(word)
            deadline = time.monotonic() + wait
            while self.runs and time.monotonic() < deadline:
                found += self.ended()
        for run in self.runs.values():
            run.abandon()
            found.append((run, KILLED))
        self.runs.clear()
        return found
