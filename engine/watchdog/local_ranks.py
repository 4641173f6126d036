"""Ranks of one host for its monitor: flight files, processes, exit statuses, stacks.

Newest events of all ranks are printed on one clock, as text and as a trace for ui.perfetto.dev:

-5.312 s  rank 1  forward of stage 0, microbatch 0                      not ended
-5.310 s  rank 0  gradients over dp (#70 of 'dp', 5120 bytes float32)   not ended
"""

import contextlib
import json
import os
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from engine.parallel.comm.flight.flight import SECOND, Event, FlightFile
from engine.reporting.failure_message import torchrun_error
from engine.watchdog.exchange import await_any
from engine.watchdog.view import RankView, ending, exit_of, look, process_state, started_after

MOST = 200
"""Number of newest events of each rank in a report."""


class TimedEvent(NamedTuple):
    """Communication or computation of a rank, with begin and end in nanoseconds since 1970."""

    begun: int
    ended: int
    """End of the event; 0 if it is unfinished."""
    text: str
    axis: str
    """Axis of communication; "" for computation."""


def timed(events: Sequence[Event], wall_offset: int) -> list[TimedEvent]:
    """Returns the 200 newest of one rank's ``events``, with times in nanoseconds since 1970.

    Args:
        events: communication and computation of the rank, oldest first, in monotonic time.
        wall_offset: nanoseconds to add to monotonic time, which then counts from 1970.
    """
    return [
        TimedEvent(event.begun + wall_offset, event.ended and event.ended + wall_offset, str(event), event.axis)
        for event in events[-MOST:]
    ]


def merged_text(ranks: Mapping[int, Sequence[TimedEvent]], now: int) -> str:
    """Returns a text with one line for each event of all ranks, ordered by start time.

    A line has the start time in seconds relative to ``now``, the rank, the event, and its duration or "not ended".

    Args:
        ranks: events of each rank, by global rank.
        now: time in nanoseconds since 1970.
    """
    rows = sorted((event.begun, rank, event) for rank, events in ranks.items() for event in events)
    lines = []
    for begun, rank, event in rows:
        took = f"{(event.ended - begun) / 1e6:.3f} ms" if event.ended else "not ended"
        lines.append(f"{(begun - now) / SECOND:9.3f} s  rank {rank}  {event.text}  {took}")
    return "\n".join(lines) + "\n"


def perfetto_trace(ranks: Mapping[int, Sequence[TimedEvent]], now: int) -> str:
    """Returns the events as JSON text for the trace viewer Perfetto.

    A rank is shown as a process, with threads for computation and for each communication axis, such as "dp".

    Args:
        ranks: events of each rank, by global rank.
        now: time in nanoseconds since 1970, at which unfinished events end in the trace.
    """
    found = [
        {
            "name": event.text, "ph": "X", "ts": event.begun / 1e3, "dur": ((event.ended or now) - event.begun) / 1e3,
            "pid": rank, "tid": event.axis or "computation",
        }
        for rank, events in sorted(ranks.items())
        for event in events
    ]  # fmt: skip
    names = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}} for rank in sorted(ranks)
    ]
    return json.dumps({"traceEvents": names + found})


STACK_SIGNAL = signal.SIGRTMIN + 7
"""Signal on which a rank writes its Python stack to a file; see :class:`Watchdog`."""
SUFFIX, STACK_SUFFIX, ERROR_VARIABLE = ".flight", ".stack", "error_file"


@dataclass(slots=True)
class _Local:
    file: FlightFile
    pid: int
    process: int | None
    """Descriptor that is readable once the process has ended; None: it ended before it was opened."""
    state: str = "R"
    """Letter of its state in /proc; empty once it has ended."""
    ended: str = ""
    reused: bool = False
    """A later process has the pid of the rank, which has ended."""


@dataclass(slots=True)
class LocalRanks:
    """Ranks of this host, as their watchdog process (monitor) sees them. A rank records its communication and
    computation in a flight file in ``folder``.
    """

    folder: Path
    ranks: dict[int, _Local] = field(default_factory=dict)

    def refresh(self) -> list[int]:
        """Finds new flight files (records of ranks' calls) and ended ranks. Returns the global ranks that have ended
        since the previous call.
        """
        ended = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            number = path.stem.removeprefix("rank")
            if number.isdecimal() and int(number) not in self.ranks:
                self._open(int(number), path)
        for rank, local in self.ranks.items():
            if local.state:
                over = _readable(local.process)
                state, status = ("", 0) if local.reused else process_state(local.pid)
                if over and state not in ("Z", "X"):
                    state, status = "", 0  # another process has the same pid now
                local.state = "" if state in ("Z", "X") else state
                if not local.state:
                    told = status if state else None if local.process is None else exit_of(local.process)
                    local.ended = "" if told is None else ending(told)
                    ended.append(rank)
        return ended

    def _open(self, rank: int, path: Path) -> None:
        try:
            file = FlightFile(path)
            flight = file.read()
        except (OSError, ValueError):
            return  # the rank is still writing the header, or has removed the file again
        reused = started_after(flight.pid, flight.newest)
        try:
            process = None if reused else os.pidfd_open(flight.pid)
        except OSError:
            process = None
        self.ranks[rank] = _Local(file, flight.pid, process, reused=reused)

    @property
    def descriptors(self) -> list[int]:
        """Pidfds (Linux file descriptors of processes) of running ranks; one becomes readable when its process ends."""
        return [local.process for local in self.ranks.values() if local.process is not None and local.state]

    @property
    def running(self) -> list[int]:
        """Global ranks with a running process, ascending."""
        return sorted(rank for rank, local in self.ranks.items() if local.state)

    def views(self, detailed: bool) -> list[RankView]:
        """Returns the state of each rank of this host that ``refresh`` has found, including ended ranks.

        With ``detailed``, a state also has the rank's recent collectives and messages.
        """
        found = []
        for local in self.ranks.values():
            flight, events = local.file.read(), local.file.events() if detailed else []
            found.append(look(flight, events, time.monotonic_ns(), local.state, local.ended))
        return found

    def stacks(self, seconds: float) -> dict[int, str]:
        """Returns the Python stacks of this host's running ranks as text, by global rank.

        A signal makes each rank write its stacks to a file. The text is empty or incomplete for ranks that need more
        than ``seconds``.
        """
        asked = [(rank, local) for rank, local in self.ranks.items() if local.state]
        paths = {rank: local.file.path.with_suffix(STACK_SUFFIX) for rank, local in asked}
        for _, local in asked:
            if _catches(local.pid, STACK_SIGNAL):
                self._signal(local, STACK_SIGNAL)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not all(path.exists() and path.stat().st_size for path in paths.values()):
            time.sleep(0.02)
        return {rank: path.read_text(errors="replace") for rank, path in paths.items() if path.exists()}

    def events(self) -> dict[int, list[TimedEvent]]:
        """Returns the 200 newest events of each rank of this host, including ended ranks, by global rank."""
        return {rank: timed(local.file.events(), local.file.read().wall_offset) for rank, local in self.ranks.items()}

    def tell_launcher(self, rank: int, sentence: str) -> None:
        """Writes ``sentence`` as cause of failure into the error file of ``rank``, which torchrun reads. Does nothing
        if the file exists, or if torchrun did not start the rank.
        """
        name = self.ranks[rank].file.read().identity.get(ERROR_VARIABLE, "")
        if not name or Path(name).exists():
            return
        temporary = Path(f"{name}.{os.getpid()}")
        try:
            temporary.write_text(torchrun_error(sentence), encoding="utf-8")
            temporary.rename(name)
        except OSError:
            temporary.unlink(missing_ok=True)

    def end(self, sentence: str) -> None:
        """Writes ``sentence`` into the error files of all running ranks of this host, for torchrun; then kills these
        ranks.
        """
        for rank, local in self.ranks.items():
            if local.state:
                self.tell_launcher(rank, sentence)
                self._signal(local, signal.SIGKILL)

    def close(self, remove: bool) -> None:
        """Closes the flight files and process descriptors of all ranks, and deletes their folder if ``remove``."""
        for local in self.ranks.values():
            local.file.close()
            if local.process is not None:
                os.close(local.process)
        if remove:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _signal(self, local: _Local, number: int) -> None:
        if local.process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(local.process, number)


def _readable(process: int | None) -> bool:
    """Returns True if a pidfd reports that its process has ended."""
    return process is not None and await_any([process], 0)


def _catches(pid: int, number: int) -> bool:
    """Returns True if a process has a handler for a signal, which would kill it otherwise."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    masks = [line.split()[1] for line in text.splitlines() if line.startswith("SigCgt:")]
    return bool(masks) and bool(int(masks[0], 16) >> (number - 1) & 1)


_OLD_SECONDS = 24 * 3600


def flight_folder() -> Path:
    """Creates and returns the folder of this user's flight files, in /dev/shm or the folder for temporary files.

    Raises:
        OSError: the path is a link or belongs to another user, or others may write there.
    """
    memory = Path("/dev/shm")
    folder = (memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())) / f"trine-{os.getuid()}"
    folder.mkdir(exist_ok=True, mode=0o700)
    there = folder.lstat()  # anyone may write next to it, so it may be a link to files of somebody else
    if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.getuid() or there.st_mode & 0o022:
        raise OSError(f"{folder} is no folder that only this user can write; remove it")
    return folder


def remove_old(folder: Path) -> None:
    """Deletes subfolders of ``folder`` (flight files of jobs) that are older than a day and in which no rank runs;
    ignores errors.
    """
    for old in folder.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > _OLD_SECONDS:
                local = LocalRanks(old)
                local.refresh()
                local.close(remove=not local.running)
