"""Monitor: a process on each host that reads flight files and ends a hung job.

    look        reads flight files and processes of this host
    tell        sends views of its ranks to the hub, the monitor of the first host
    diagnose    the hub finds the cause, and reports it after finding the same twice
    report      writes the cause to stderr and to a file, with the stacks of all ranks
    end         every monitor writes the cause for its launcher, and kills the ranks of its host

It imports no torch and has no thread in a rank, so it costs a step nothing.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from typing import Any

from engine.parallel.comm.rendezvous import name_ranks
from engine.watchdog.diagnosis import Blame, SilentHost, diagnose
from engine.watchdog.exchange import Hub, Spoke
from engine.watchdog.local_ranks import LocalRanks, TimedEvent, merged_text, perfetto_trace
from engine.watchdog.stragglers import Stragglers
from engine.watchdog.view import RankView

_MOST_POLL_SECONDS = 0.25
_TELL_SECONDS = 1.0
"""Seconds between two messages of a host without news."""
_STACK_SECONDS = 0.5
_LAUNCHER_SECONDS = 4.0
"""Seconds for torchrun to end the other ranks after a rank has ended; then the monitor kills them."""
_LEAVE_SECONDS = 15.0
"""The same without torchrun, where ranks end by themselves: longer than they need to find the cause and to close."""
_CAUSE_SECONDS = 1.5
"""Seconds for which a message that blames another rank waits for the message of that rank."""
REPORT, EVENTS, TRACE = "watchdog_report.json", "watchdog_events.txt", "watchdog_trace.json"
STRAGGLERS = "watchdog_stragglers.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubPlace:
    """Address of the hub (the monitor of the first host), and name and global ranks of the first host."""

    address: str
    port: int = 0
    """TCP port of the hub; 0 if this monitor is the hub."""
    host: str = ""
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """Settings of a monitor process, such as folder, timeout and hub, read as JSON from stdin."""

    folder: str
    """Folder of the flight files of this host."""
    job: str
    host: str
    size: int
    timeout: float
    slow_factor: float
    """Factor from which a rank or link is reported as slow; 0: never."""
    slow_steps: int
    report: str
    """Folder of the report; "": no report is written."""
    hub: HubPlace
    launched: bool = False
    """True if torchrun has started the ranks, and ends them."""


@dataclass(slots=True)
class Monitor:
    """Watchdog process of one host, which reads the flight files (recorded calls) of the host's ranks.

    The hub, the monitor of the first host, finds the cause of a hang. Every monitor then kills its host's ranks.
    """

    orders: Orders
    local: LocalRanks = field(init=False)
    hub: Hub | None = None
    spoke: Spoke | None = None
    views: dict[int, RankView] = field(default_factory=dict)
    detailed_until: float = 0.0
    told_at: float = 0.0
    suspected: Blame | None = None
    suspected_at: float = 0.0
    reported: Blame | None = None
    cause: str = ""
    """Reported cause of a hang, for which the ranks of this host are killed at ``ends_at``."""
    ends_at: float = float("inf")
    stacks: dict[int, str] = field(default_factory=dict)
    events: dict[int, list[TimedEvent]] = field(default_factory=dict)
    over: set[str] = field(default_factory=set)
    """Hosts whose ranks have ended without an error."""
    stragglers: Stragglers | None = None

    def __post_init__(self) -> None:
        orders = self.orders
        self.local = LocalRanks(Path(orders.folder))
        if orders.slow_factor:
            self.stragglers = Stragglers(orders.slow_factor, orders.slow_steps)
        if orders.hub.port == 0:
            self.hub = Hub(orders.job, orders.hub.address)

    def run(self) -> None:
        """Watches the ranks of this host until all have ended or closed their engines.

        Kills the ranks that still run: at once after a hang, and some seconds after a rank has failed.
        """
        poll = min(_MOST_POLL_SECONDS, self.orders.timeout / 20)
        try:
            while True:
                ended = self.local.refresh()
                own = self.local.views(self._detailed())
                self.views |= {view.rank: view for view in own}
                for rank in ended:
                    self._tell_launcher(self.views[rank])
                self._exchange(own, poll)
                if self.hub is not None or self._alone():
                    self._judge()
                self._name_stragglers()
                # without files, all ranks of this host have closed their engines before the first look
                over = all(not view.runs or view.phase == "ENDED" for view in own)
                if over or time.monotonic() > self.ends_at:
                    break
        finally:
            self._leave()

    def _name_stragglers(self) -> None:
        """Reports slow ranks and links; the job continues."""
        if self.hub is None or self.stragglers is None or self.reported is not None:
            return
        for sentence in self.stragglers.look(self.views, self.orders.size):
            print(f"trine watchdog: {sentence}", file=sys.stderr, flush=True)
            self._append(STRAGGLERS, {"time": datetime.now(UTC).isoformat(), "sentence": sentence})

    def _detailed(self) -> bool:
        """Returns True if views contain calls, which begins when a rank has waited for long."""
        late = max((view.waiting.seconds for view in self.views.values() if view.waiting is not None), default=0.0)
        if late > self.orders.timeout / 2:
            self.detailed_until = time.monotonic() + self.orders.timeout
            if self.hub is not None:
                self.hub.broadcast({"detailed": True})
        return time.monotonic() < self.detailed_until

    def _exchange(self, own: list[RankView], poll: float) -> None:
        if self.hub is None and self.spoke is None:
            ranks = sorted(self.local.ranks)
            hello = {"hello": self.orders.job, "host": self.orders.host, "ranks": ranks}
            self.spoke = Spoke(self.orders.hub.address, self.orders.hub.port, hello)
        due = time.monotonic() - self.told_at > min(_TELL_SECONDS, self.orders.timeout / 4)
        if self.hub is not None:
            if due:
                self.told_at = time.monotonic()
                self.hub.broadcast({"alive": True})  # a host without messages of the hub judges by itself
            for line, message in self.hub.poll(poll, self.local.descriptors):
                self._hear_host(line.host, message)
        elif self.spoke is not None:
            urgent = self._detailed() or any(not view.runs for view in own)
            if urgent or due:
                self.told_at = time.monotonic()
                self.spoke.send({"views": [view.to_json() for view in own]})
            for message in self.spoke.poll(poll, self.local.descriptors):
                self._hear_hub(message)

    def _hear_host(self, host: str, message: dict[str, Any]) -> None:
        for data in message.get("views", ()):
            view = RankView.from_json(data)
            self.views[view.rank] = view
        self.stacks |= {int(rank): text for rank, text in message.get("stacks", {}).items()}
        for rank, events in message.get("events", {}).items():
            self.events[int(rank)] = [TimedEvent(*event) for event in events]
        if message.get("bye"):
            self.over.add(host)

    def _hear_hub(self, message: dict[str, Any]) -> None:
        if message.get("detailed"):
            self.detailed_until = time.monotonic() + self.orders.timeout
        if message.get("stacks") and self.spoke is not None:
            self.spoke.send({"stacks": self.local.stacks(_STACK_SECONDS), "events": self.local.events()})
        if message.get("end"):
            self.cause, self.ends_at = message["end"], time.monotonic() + message.get("seconds", 0.0)
        if message.get("over"):
            self.over.add(self.orders.hub.host)

    def _hub_silence(self) -> float:
        """Returns the seconds since the last contact with the hub; 0 once it has ended well."""
        if self.spoke is None or self.orders.hub.host in self.over:
            return 0.0
        return time.monotonic() - self.spoke.heard

    def _alone(self) -> bool:
        """Returns True if the hub cannot be reached or has ended without a report, so this host judges by itself."""
        return not self.cause and (self._hub_silence() > self.orders.timeout or self.orders.hub.host in self.over)

    def _silent(self) -> list[SilentHost]:
        now = time.monotonic()
        if self.hub is None:
            hub = self.orders.hub
            return [SilentHost(host=hub.host, ranks=tuple(hub.ranks), seconds=self._hub_silence())]
        return [
            SilentHost(host=line.host, ranks=line.ranks, seconds=now - line.heard)
            for line in self.hub.lines
            if line.host and line.host not in self.over and now - line.heard > 3 * _TELL_SECONDS
        ]

    def _judge(self) -> None:
        verdict = diagnose(self.views, self.orders.size, self.orders.timeout, self._silent())
        if verdict is None or (self.reported is not None and verdict.ranks == self.reported.ranks):
            self.suspected = None
            return
        if self.suspected is None or (self.suspected.kind, self.suspected.ranks) != (verdict.kind, verdict.ranks):
            self.suspected_at = time.monotonic()
        self.suspected = verdict
        seen = time.monotonic() - self.suspected_at
        # one verdict may compare views of different moments; only an exit is certain at first sight
        wanted = 0.0 if verdict.kind == "ended" else 1e-3
        if self.reported is None and seen >= (wanted if verdict.certain else _CAUSE_SECONDS):
            self._report(verdict)

    def _tell_launcher(self, view: RankView) -> None:
        """Writes the cause at once: the launcher reads the error of a rank as soon as it notices its end."""
        verdict = diagnose({view.rank: view}, self.orders.size, self.orders.timeout)
        if verdict is not None and verdict.certain:
            self.local.tell_launcher(view.rank, verdict.sentence)

    def _report(self, verdict: Blame) -> None:
        """Reports the cause, and sets the time at which the job ends."""
        self.reported, self.cause = verdict, verdict.sentence
        print(f"trine watchdog: {verdict.sentence}", file=sys.stderr, flush=True)
        self.events |= self.local.events()
        self._write(verdict)  # the launcher may end this host before all stacks have arrived
        if self.hub is not None:
            self.hub.broadcast({"stacks": True})
        self.stacks |= self.local.stacks(_STACK_SECONDS)
        deadline = time.monotonic() + _STACK_SECONDS
        while self.hub is not None and self.hub.lines and time.monotonic() < deadline:
            for line, message in self.hub.poll(0.05):
                self._hear_host(line.host, message)
        self._write(verdict)
        patience = _LAUNCHER_SECONDS if self.orders.launched else _LEAVE_SECONDS
        self.ends_at = time.monotonic() + (patience if verdict.kind == "ended" else 0.0)

    def _write(self, verdict: Blame) -> None:
        if not self.orders.report:
            return
        ranks = [{**view.to_json(), "stack": self.stacks.get(rank, "")} for rank, view in sorted(self.views.items())]
        told = {"job": self.orders.job, "time": datetime.now(UTC).isoformat(), **asdict(verdict), "views": ranks}
        folder, now = Path(self.orders.report), time.time_ns()
        texts = {
            REPORT: json.dumps(told, indent=1),
            EVENTS: merged_text(self.events, now),
            TRACE: perfetto_trace(self.events, now),
        }
        with _writing_into(folder):
            for name, text in texts.items():
                temporary = folder / f"{name}.{os.getpid()}"
                temporary.write_text(text, encoding="utf-8")
                temporary.replace(folder / name)

    def _append(self, name: str, told: dict[str, str]) -> None:
        """Appends a line to a file in the report's folder."""
        if not self.orders.report:
            return
        folder = Path(self.orders.report)
        with _writing_into(folder), (folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")

    def _leave(self) -> None:
        """Ends the ranks if that was decided, and sends the end of this host to the others."""
        if self.cause:
            if self.hub is not None:
                # the ranks of this host may have ended before the time; the others still have the rest of it
                left = max(0.0, self.ends_at - time.monotonic())
                self.hub.broadcast({"end": self.cause, "seconds": left})
            self._kill_ranks()
        elif self.hub is not None:
            self.hub.broadcast({"over": True})  # its ranks have ended well; other hosts may still end theirs
        if self.spoke is not None:
            self.spoke.send({"views": [view.to_json() for view in self.local.views(False)], "bye": True})
            self.spoke.close()
        if self.hub is not None:
            self.hub.close()
        self.local.close(remove=self.reported is None)

    def _kill_ranks(self) -> None:
        """Kills the ranks of this host that still run, after a line that names them and the cause."""
        if running := self.local.running:
            told = f"kills {name_ranks(running)} on {self.orders.host} with SIGKILL, because {self.cause}"
            if self.orders.report and (Path(self.orders.report) / REPORT).exists():
                told += f" `trine watch {quote(self.orders.report)}` shows the report."
            with suppress(OSError):  # whoever read this output may have ended
                print(f"trine watchdog {told}", file=sys.stderr, flush=True)
        self.local.end(self.cause)


@contextmanager
def _writing_into(folder: Path) -> Iterator[None]:
    """Creates the folder of the report; prints errors of writing, so that the watchdog continues."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        print(f"trine watchdog: {folder} cannot be written: {error.strerror}", file=sys.stderr, flush=True)


def watch() -> None:
    """Starts a monitor, the watchdog of one host, in a forked child process; the calling process exits.

    Reads the monitor's settings (``Orders``) from stdin, as a line of JSON. Prints the TCP port of the hub (the first
    host's monitor), or 0 on other hosts. Only the child returns, after the monitor has ended. If stdin ends within the
    line, starts nothing and returns at once.
    """
    given = sys.stdin.readline()
    if not given.endswith("\n"):
        return
    told = json.loads(given)
    monitor = Monitor(Orders(**{**told, "hub": HubPlace(**told["hub"])}))
    with suppress(BrokenPipeError):
        print(monitor.hub.port if monitor.hub is not None else 0, flush=True)
    if os.fork():
        os._exit(0)  # the starting rank need not wait for the monitor's end, and cannot end it with itself
    os.close(1)
    monitor.run()


if __name__ == "__main__":
    watch()
