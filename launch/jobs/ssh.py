"""Job over ssh: starts torchrun on the hosts, shows its output, and controls its end.

``HostRun`` is one host from the view of the launcher, ``Running`` all of them, and ``SshJob`` decides when they end:

a host ends with 0        it is done; the others continue
with an error             the job ends everywhere
its ssh ends (LOST)       the job ends everywhere; an elastic one continues while enough hosts are left
.. and it had the store   an elastic job restarts on the remaining hosts, with the store on the next one
a lost host answers       it joins again
"""

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import IO, Any

from engine.launch.jobs.guard import MARK
from engine.launch.jobs.hostfile import Host
from engine.launch.jobs.remote import (
    LOST,
    Answer,
    HostReply,
    SshRequest,
    ask,
    differences,
    failure_message,
    free_port,
    guard_input,
    question_for,
    ranks_on,
    unanswered,
)
from engine.launch.jobs.request import JobRequest
from engine.launch.jobs.torchrun import RendezvousEndpoint, torchrun_command, torchrun_environment
from engine.reporting.failure_message import is_consequence

BEAT_SECONDS = 5.0
NO_MEETING = ("RendezvousTimeoutError", "RendezvousConnectionError")
"""Errors of torchrun if its nodes did not join."""
KILLED = 128 + signal.SIGKILL
_KEPT = 60
"""Number of the last lines of the error stream that are searched for a reason."""
_STORE_GONE = re.compile(rb"\[W\S* \S+ TCPStore\.cpp:\d+\] |W.* The node '.*' has failed to shutdown the rendezvous ")
"""Messages of a finished torchrun after the first host, which has the store, has ended before it."""
_ITS_FRAMES = re.compile(rb"Exception raised from |frame #\d+: |<omitting python frames>|\s*$")


class Screen:
    """Thread-safe printer of the output of all hosts; it puts the host name before each line."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def show(self, stream: IO[bytes], host: str, line: bytes) -> None:
        """Prints ``line``, a line of a host's output, to ``stream``."""
        with self._lock, contextlib.suppress(BrokenPipeError):
            stream.write(f"[{host}] ".encode() + line.rstrip(b"\r\n") + b"\n")
            stream.flush()

    def say(self, text: str) -> None:
        """Prints a message of the launcher to stderr."""
        with self._lock:
            print(f"trine launch: {text}", file=sys.stderr, flush=True)


class HostRun:
    """Local ssh process that runs torchrun on one host, with threads for its output."""

    def __init__(self, host: Host, command: list[str], wish: Mapping[str, Any], screen: Screen) -> None:
        self.host = host
        self.joined = False
        """True once it has reached the store."""
        self.no_meeting = False
        self._held: list[bytes] = []
        """Lines that are printed only if the host ends with an error."""
        self._screen = screen
        self._errors: list[str] = []
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # the launcher receives Ctrl-C, and passes it on
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
        """Sends a control word ("beat", "TERM", "INT" or "KILL") to the program that runs torchrun on the host."""
        self._write(f"{word}\n".encode())

    def _write(self, given: bytes) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(given)
                self._process.stdin.flush()

    def status(self) -> int | None:
        """Returns the exit status after torchrun's end, once its output is printed; None while torchrun runs."""
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
        """True if torchrun's error report shows that the failure began on another host."""
        root = "".join(self._errors).rpartition("Root Cause")[2]
        return is_consequence(root) or re.search(r"exitcode +: -15\b", root) is not None

    @property
    def reason(self) -> str:
        """Last line of ssh's error output without host and port; "without a message" if there is none."""
        return failure_message(self._errors) or "without a message"

    def abandon(self) -> None:
        """Kills the local ssh process; torchrun on the host then ends because its connection is closed."""
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingPlace:
    """Rendezvous of a job's hosts: host and port of the store, rendezvous id, and number of restarts so far."""

    first: Host
    port: int
    identity: str
    round: int = 0

    def moved(self, first: Host, port: int) -> "MeetingPlace":
        """Returns the rendezvous for the next restart of the job, with its store on the host ``first`` at ``port``."""
        return replace(self, first=first, port=port, round=self.round + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SshPlan:
    """Plan of a job over ssh: the user's options, the ssh command, and facts about the hosts."""

    request: JobRequest
    ssh: SshRequest
    hosts: tuple[HostReply, ...]

    def wish(self, facts: HostReply, meeting: MeetingPlace) -> dict[str, Any]:
        """Returns the request for the program that runs torchrun on a host: command, environment and rendezvous."""
        rendezvous = RendezvousEndpoint(
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
        """Starts torchrun over ssh on a host, and returns the process; ``screen`` prints its output."""
        return HostRun(facts.host, self.ssh.command(facts.host), self.wish(facts, meeting), screen)


class Running:
    """All hosts on which torchrun runs now."""

    def __init__(self, plan: SshPlan, screen: Screen) -> None:
        self._plan = plan
        self._screen = screen
        self._beaten = 0.0
        self.runs: dict[Host, HostRun] = {}

    def start(self, facts: HostReply, meeting: MeetingPlace) -> None:
        """Starts torchrun on the host that sent ``facts``, with the rendezvous ``meeting``."""
        self.runs[facts.host] = self._plan.start(facts, meeting, self._screen)

    def ended(self) -> list[tuple[HostRun, int]]:
        """Waits 0.1 s; returns (process, exit status) for each host that has ended since the previous call.

        Ended hosts are removed. If the last keep-alive is 5 s old, each host gets another.
        """
        time.sleep(0.1)
        if time.monotonic() > self._beaten + BEAT_SECONDS:
            self._beaten = time.monotonic()
            self.say("beat")
        found = [(run, code) for run in self.runs.values() if (code := run.status()) is not None]
        for run, _ in found:
            del self.runs[run.host]
        return found

    def say(self, word: str) -> None:
        """Sends a control word ("beat", "TERM", "INT" or "KILL") to the program that runs torchrun, on each host."""
        for run in self.runs.values():
            run.say(word)

    def end(self, seconds: float) -> list[tuple[HostRun, int]]:
        """Ends torchrun on all hosts: sends TERM, waits ``seconds``, sends KILL, waits 10 s, and kills ssh processes.

        Returns (process, exit status) for each host.
        """
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


RETRY_SECONDS = 2.0
"""Seconds between two attempts to reach a lost host, of ``TRY_SECONDS`` each."""
TRY_SECONDS = 5.0
FAILED_SECONDS = 15.0
"""Seconds that hosts have to end after another host has failed, enough for the watchdog's report."""
HURRY_SECONDS = 1.0
"""Seconds within which several signals count as one."""


class AskedToStop:
    """Record of the signals SIGTERM and SIGINT that the launcher has received."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._last = float("-inf")

    def note(self, number: int, frame: FrameType | None) -> None:
        """Records the signal ``number``, but ignores it if another signal came less than a second before."""
        if time.monotonic() - self._last > HURRY_SECONDS:
            self.numbers.append(number)
        self._last = time.monotonic()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Returns a context in which SIGTERM and SIGINT are recorded instead of ending the launcher."""
        before = {number: signal.signal(number, self.note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass(slots=True)
class JobEnd:
    """Outcome of the job: its exit status, and the reason as text."""

    code: int = 0
    words: str = ""

    @property
    def given(self) -> bool:
        """True if the outcome is known: the reason is not empty."""
        return bool(self.words)


class SshJob:
    """Job on several hosts over ssh; an elastic job continues without a lost host.

    After any other failure, the job ends on all hosts.
    """

    def __init__(self, plan: SshPlan, meeting: MeetingPlace, absent: Mapping[Host, str] | None = None) -> None:
        """Takes ``absent``, the hosts that an elastic job starts without, with the reasons; they are tried again."""
        self._plan = plan
        self._meeting = meeting
        self._screen = Screen()
        self._running = Running(plan, self._screen)
        self._absent = absent or {}
        self._lost = dict.fromkeys(self._absent, time.monotonic() + RETRY_SECONDS)
        """Lost hosts, with the time of the next attempt."""
        self._tries: dict[Host, Future[Answer]] = {}
        self._pool = ThreadPoolExecutor(max(1, min(16, len(plan.hosts))))
        self._verdict = JobEnd()
        self._done = 0
        self._facts = {facts.host: facts for facts in plan.hosts}
        """Facts of all hosts, lost or not."""

    def run(self) -> int:
        """Runs the job to its end; returns the exit status of the first host that fails, or 0."""
        stop = AskedToStop()
        try:
            with stop.listening():
                for facts in self._plan.hosts:
                    self._running.start(facts, self._meeting)
                begin = f"{len(self._plan.hosts)} hosts start without it, and it is tried again."
                for host, reason in self._absent.items():
                    self._screen.say(f"{host.name} does not answer ({reason}); {begin}")
                while self._running.runs and not self._verdict.given:
                    if stop.numbers:
                        self._stop(stop)
                        break
                    self._round()
                self._finish()
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)
            for run in self._running.runs.values():
                run.abandon()
        return self._verdict.code

    def _round(self) -> None:
        meeting = self._meeting
        for run, code in self._running.ended():
            if self._verdict.given or self._meeting is not meeting:
                break  # the run belongs to a round that has ended meanwhile
            if code == 0:
                self._done += 1
            elif self._plan.request.elastic and self._done and (code == LOST or run.no_meeting):
                # a host has finished, so the rendezvous is closed: a host that is lost or late is no failure
                self._say_too_late(run, code)
            elif not self._plan.request.elastic:
                self._fail(run, code)
            elif code == LOST:
                self._go_on_without(run.host, run.reason)
            elif run.host != self._meeting.first and (gone := self._store_is_gone()):
                # torchrun notices the loss of the store before ssh notices the loss of its host
                self._go_on_without(self._meeting.first, gone)
            else:
                self._fail(run, code)
        if self._plan.request.elastic and not (self._done or self._verdict.given):
            self._try_lost_hosts()

    # -- the end ------------------------------------------------------------------------------------------------------

    def _fail(self, run: HostRun, code: int) -> None:
        """Ends the job because of this host, or of a host that is lost at the same time and is the cause."""
        missing = [other.host for other in self._running.runs.values() if not other.joined]
        missing += [] if run.joined else [run.host]
        others = self._running.end(FAILED_SECONDS)
        if self._plan.request.elastic and run.no_meeting and others and not any(ended for _, ended in others):
            self._done += len(others)
            self._say_too_late(run, code)
            return
        lost = [other for other, ended in [(run, code), *others] if ended == LOST]
        # hosts whose ranks were ended or blame another rank only report the consequence
        first, self._verdict.code = next(
            ((other, ended) for other, ended in [(run, code), *others] if ended and not other.taken_down), (run, code)
        )
        if lost:
            self._verdict.words = "; ".join(
                f"{other.host.name} was lost: its ssh connection ended ({other.reason})" for other in lost
            )
        elif run.no_meeting and missing:
            self._verdict.words = "; ".join(self._did_not_join(host) for host in missing)
        else:
            self._verdict.words = (
                f"{first.host.name} was the first to fail: its torchrun ended with exit status {self._verdict.code}"
            )

    def _say_too_late(self, run: HostRun, code: int) -> None:
        """Reports a host that failed after the others had finished; the job counts as done."""
        event = f"was lost ({run.reason})" if code == LOST else "came back"
        self._screen.say(f"{run.host.name} {event} after other hosts had finished.")

    def _did_not_join(self, host: Host) -> str:
        first, seconds = self._meeting.first, self._plan.request.join_seconds
        return (
            f"{host.name} did not join the others within {seconds} s: it has not reached port {self._meeting.port} of "
            f"{first.name}; look for a firewall, another network or a slow start of torch (--join-timeout)"
        )

    def _stop(self, stop: AskedToStop) -> None:
        """Passes the signal on and waits; a second signal ends everything at once."""
        name = signal.Signals(stop.numbers[0]).name
        self._running.say(name.removeprefix("SIG"))
        deadline = time.monotonic() + self._plan.request.grace_seconds + 5
        while self._running.runs and len(stop.numbers) == 1 and time.monotonic() < deadline:
            for _, code in self._running.ended():
                self._verdict.code = self._verdict.code or code
        for _, code in self._running.end(0.0):
            self._verdict.code = self._verdict.code or code
        self._verdict.words = f"stopped by {name}"

    def _finish(self) -> None:
        if not self._verdict.given and self._lost and not self._done:
            names = ", ".join(host.name for host in self._lost)
            self._verdict.code, self._verdict.words = LOST, f"all hosts are lost ({names})"
        if self._verdict.given:
            self._screen.say(f"{self._verdict.words}; the job has ended on all hosts.")

    # -- an elastic job -----------------------------------------------------------------------------------------------

    def _go_on_without(self, host: Host, reason: str) -> None:
        """Drops a lost host, and continues if enough hosts are left."""
        nodes = self._plan.request.nodes
        least = nodes.least if nodes is not None else 1
        if run := self._running.runs.pop(host, None):
            run.abandon()
        self._lost[host] = time.monotonic() + RETRY_SECONDS
        left = len(self._left)
        if left < least:
            self._running.end(FAILED_SECONDS)
            self._verdict.code = LOST
            self._verdict.words = f"{host.name} was lost ({reason}), and only {left} of at least {least} hosts are left"
            return
        self._screen.say(f"{host.name} was lost ({reason}); {left} hosts continue, and it is tried again.")
        if host == self._meeting.first:
            self._start_anew()

    @property
    def _left(self) -> list[HostReply]:
        """Hosts that are not lost; torchrun may have ended on some of them, because the store has."""
        return [facts for host, facts in self._facts.items() if host not in self._lost]

    def _store_is_gone(self) -> str:
        """Returns the reason why the host with the store does not answer; empty if it does."""
        first = self._meeting.first
        answer = ask(self._plan.ssh, first, question_for(self._plan.request, self._plan.ssh, None))
        return answer.reason if answer.facts is None else ""

    def _start_anew(self) -> None:
        """Ends torchrun everywhere and restarts it, with the store on the next host that answers."""
        left = self._left
        self._running.end(FAILED_SECONDS)
        for facts in left:
            if port := free_port(self._plan.request, self._plan.ssh, facts.host):
                self._meeting = self._meeting.moved(facts.host, port)
                self._screen.say(f"{facts.host.name} has the store now; torchrun restarts on {len(left)} hosts.")
                for host in left:
                    self._running.start(host, self._meeting)
                return
        self._verdict.code, self._verdict.words = LOST, "no remaining host provides a port for the rendezvous"

    def _try_lost_hosts(self) -> None:
        """Asks lost hosts periodically, in the background, and adds hosts that answer."""
        for host, due in list(self._lost.items()):
            if host not in self._tries and time.monotonic() > due:
                question = question_for(self._plan.request, self._plan.ssh, None)
                hasty = replace(self._plan.ssh, seconds=min(TRY_SECONDS, self._plan.ssh.seconds))
                self._tries[host] = self._pool.submit(ask, hasty, host, question)
            elif host in self._tries and self._tries[host].done():
                self._lost[host] = time.monotonic() + RETRY_SECONDS
                self._take_in(host, self._tries.pop(host).result())

    def _take_in(self, host: Host, answer: Answer) -> None:
        """Starts torchrun on a host that is back, if it has not changed."""
        if answer.facts is None:
            if not answer.lost:
                self._screen.say(str(unanswered(self._plan.ssh, host, answer)))
            return
        facts = HostReply(host=host, **answer.facts)
        known = self._facts.get(host, self._plan.hosts[0])
        if problems := list(differences(facts, known, self._plan.request.script)):
            self._screen.say(f"{host.name} answers again but differs from before: {problems[0]}")
            return
        del self._lost[host]
        self._facts.setdefault(host, facts)
        self._screen.say(f"{host.name} answers again; torchrun starts there.")
        self._running.start(facts, self._meeting)
