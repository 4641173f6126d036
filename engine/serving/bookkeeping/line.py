"""Lines of numbered commands, and their records in the journal.

A line per model runs its numbers without gaps, whatever their arrival order.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from engine.serving.bookkeeping.entry import EntryState, FutureEntry
from engine.serving.bookkeeping.journal import JournalRecord
from engine.serving.commands import (
    BackwardTensors,
    DropTicket,
    Failure,
    ForwardBackward,
    ForwardTensors,
    LoadWeights,
    OptimStep,
    Result,
    encode_message,
)


@dataclass(eq=False, slots=True)
class ModelLine:
    """Sequence of one model's commands. They run in the order of their numbers, not in the order of arrival."""

    model: str
    session: str
    staleness: int = 0
    """Updates after which a retained forward still serves a backward."""
    following: int = 1
    """Number that runs next; higher ones wait for it."""
    held: dict[int, FutureEntry] = field(default_factory=dict)
    assigned: int = 0
    """Highest number so far of requests that carry none."""
    free: set[int] = field(default_factory=set)
    """Numbers of commands that could not be stored; the next commands get them, because later ones wait for them."""
    done: int = 0
    """Last number that has run."""
    covered: int = 0
    """Last number whose effect the newest snapshot has."""
    uncovered: list[tuple[int, str]] = field(default_factory=list)
    """Numbers and keys of commands that a start would run again."""
    loaded: list[tuple[int, str]] = field(default_factory=list)
    """Numbers and names of loads of saved weights."""
    snapshot: str | None = None
    """Name of the newest snapshot's weights."""
    has_gradient: bool = False
    """True if a gradient is accumulated, which a snapshot would lose."""
    tickets: dict[str, int] = field(default_factory=dict)
    """Retained forwards that wait for their backward, which a snapshot would lose, with the updates until they are
    stale.
    """
    is_saving: bool = False
    """True while a snapshot is being made."""

    def enter(self, entry: FutureEntry) -> None:
        """Records the accepted command ``entry``, and gives it a number if it carries none."""
        if entry.number is None:
            entry.number = min(self.free, default=self.assigned + 1)
        self.free.discard(entry.number)
        self.assigned = max(self.assigned, entry.number)
        self.uncovered.append((entry.number, entry.key))
        if isinstance(entry.command, LoadWeights):
            self.loaded.append((entry.number, entry.command.name))

    def leave(self, entry: FutureEntry) -> None:
        """Removes the command ``entry``, which could not be stored, and makes its number available again."""
        assert entry.number is not None
        self.uncovered.remove((entry.number, entry.key))
        if entry.number:
            self.free.add(entry.number)
        if isinstance(entry.command, LoadWeights):
            self.loaded.remove((entry.number, entry.command.name))

    def would_load(self, name: str) -> bool:
        """Returns True if a restart of the service would load the saved weights ``name`` into this model."""
        return any(own == name and (self.snapshot is None or at > self.covered) for at, own in self.loaded)

    def waits_for(self, number: int) -> bool:
        """Returns True if command ``number`` is the next to run and later commands already wait for it."""
        return number == self.following and bool(self.held)

    def hold(self, entry: FutureEntry) -> None:
        """Stores a numbered command until all commands with lower numbers have arrived."""
        assert entry.number is not None
        self.held[entry.number] = entry

    def released(self) -> Iterator[FutureEntry]:
        """Removes and yields the stored commands that may run now, in order of their numbers."""
        while (entry := self.held.pop(self.following, None)) is not None:
            self.following += 1
            if entry.state is EntryState.HELD:
                yield entry

    @property
    def is_clean(self) -> bool:
        """True if the model has neither an accumulated gradient nor a forward that waits for its backward.

        A snapshot would lose these.
        """
        return not self.has_gradient and not self.tickets

    def advance(self, entry: FutureEntry, result: Result) -> None:
        """Records that command ``entry`` has ended, and its effect on accumulated gradients and on forwards that wait
        for a backward.

        Args:
            result: result of the command.
        """
        if entry.number:
            self.done = max(self.done, entry.number)
        if isinstance(entry.command, BackwardTensors | DropTicket):
            self.tickets.pop(entry.command.ticket, None)
        if isinstance(result, Failure):
            return
        match entry.command:
            case ForwardTensors(ticket=ticket) if ticket:
                self.tickets[ticket] = self.staleness
            case ForwardBackward(forward_only=False) | BackwardTensors(step=None):
                self.has_gradient = True
            case OptimStep() | BackwardTensors():
                self.has_gradient = False
                self.tickets = {ticket: left - 1 for ticket, left in self.tickets.items() if left}
            case LoadWeights():
                self.tickets.clear()


def command_digest(entry: FutureEntry) -> str:
    """Returns the SHA-256 of the command and route of ``entry``, as hexadecimal digits."""
    assert entry.command is not None
    return sha256(entry.route.encode() + b"\0" + encode_message(entry.command)).hexdigest()


def record_of(entry: FutureEntry) -> JournalRecord:
    """Returns the journal's record of an accepted command, from which a restart runs the command again."""
    values = {
        "session": entry.session, "line": entry.line, "number": entry.number, "route": entry.route,
        "about": dict(entry.about), "digest": entry.digest,
    }  # fmt: skip
    if entry.command is None:
        assert isinstance(entry.result, Failure)
        return JournalRecord(f"entry/{entry.key}", values | {"error": entry.result.error})
    return JournalRecord(f"entry/{entry.key}", values, encode_message(entry.command))


def snapshot_record(line: ModelLine, kept: Iterable[FutureEntry]) -> JournalRecord:
    """Returns the journal's record of a model's newest snapshot.

    ``kept``: ended commands; the record contains their results, because clients may still fetch them.
    """
    bodies, rows = list[bytes](), list[Any]()
    for entry in kept:
        assert entry.result is not None
        bodies.append(encode_message(entry.result))
        rows.append([entry.key, entry.number, entry.route, dict(entry.about), entry.digest, len(bodies[-1])])
    values = {"session": line.session, "number": line.covered, "name": line.snapshot, "results": rows}
    return JournalRecord(f"snapshot/{line.model}", values, b"".join(bodies))
