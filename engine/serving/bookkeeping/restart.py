"""Start of a service from its journal: newest snapshots, and the commands after them, which the ranks run again."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.serving.bookkeeping.entry import INTERNAL, EntryState, FutureEntry
from engine.serving.bookkeeping.journal import RESTORE_FOLDER, CommandJournal, JournalRecord
from engine.serving.bookkeeping.ledger import Ledger
from engine.serving.bookkeeping.queue import FairQueue
from engine.serving.bookkeeping.session import ClientSession, LedgerLimits
from engine.serving.commands import Command, CreateModel, Failure, LoadWeights, decode_message

RESTORE = "restore"
"""Route of the entries that load a snapshot."""


def open_ledger(queue: FairQueue, folder: Path, limits: LedgerLimits) -> tuple[Ledger, "Restart"]:
    """Opens the journal in ``folder``; returns a new ledger (record of commands), and the ``Restart`` that restores it.

    Run the commands of ``Restart.entries`` before serving requests.

    Raises:
        CheckpointError: another process has the journal, or it is damaged.
    """
    journal = CommandJournal(folder)
    try:
        ledger = Ledger(queue, journal, limits)
        return ledger, Restart(ledger, journal.take_records())
    except BaseException:
        journal.close()
        raise


class Restart:
    """Restoration of a service's commands, sessions and models from the journal of an earlier process.

    Args:
        ledger: new ledger, which receives sessions, models and results.
        records: records of the journal, in their order.

    Raises:
        CheckpointError: a record is damaged.
    """

    def __init__(self, ledger: Ledger, records: list[JournalRecord]) -> None:
        self._ledger = ledger
        ledger.is_replaying = True
        self._run_again = 0
        self._snapshots: dict[str, JournalRecord] = {}
        self._ends: dict[str, Mapping[str, Any]] = {}
        self._gone: set[str] = set()
        self._stored = list[tuple[FutureEntry, Command | None]]()
        for record in records:
            try:
                self._read(record)
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"record {record.identity} of the service's journal is damaged or of another version of Trine; "
                    f"{RESTORE_FOLDER}"
                ) from error

    def _read(self, record: JournalRecord) -> None:
        kind, _, name = record.identity.partition("/")
        values = record.values
        match kind:
            case "note":
                note, _, own = name.partition("/")
                self._read_note(note, own, values)
            case "snapshot":
                self._snapshots[name] = record
            case "end":
                self._ends[name] = values
            case "gone":
                self._gone.add(name)
            case "entry":
                command = decode_message(record.body) if record.body else None
                if command is None:
                    self._ends[name] = values
                entry = FutureEntry(
                    name, values["session"], command, values["line"], values["number"], values["route"],
                    values["about"], values["digest"],
                )  # fmt: skip
                entry.stored.set_result(None)
                self._stored.append((entry, command))
                if isinstance(command, CreateModel):
                    self._gone.discard(command.model)  # created again after a failure

    def _read_note(self, kind: str, name: str, values: Mapping[str, Any]) -> None:
        if kind == "session" and "ended" in values:
            self._ledger.ended[name] = values["ended"]
        if not values.get("gone"):
            self._ledger.note(kind, name, values)
            if kind == "session":
                self._ledger.open_session(name)

    def entries(self) -> Iterator[FutureEntry]:
        """Yields the commands that all ranks must run again, in order.

        Pass each result to ``Ledger.finish`` before taking the next command.

        Raises:
            CheckpointError: a snapshot could not be loaded.
        """
        ledger = self._ledger
        for entry, command in self._stored:
            session, line = ledger.sessions.get(entry.session), ledger.lines.get(entry.line or "")
            is_covered = line is not None and line.snapshot is not None and (entry.number or 0) <= line.covered
            if session is None or is_covered:
                ledger.forget(f"entry/{entry.key}", f"end/{entry.key}")
                continue
            ledger.enter(session, entry)
            entry.accepted = ledger.clock()
            yield from self._runs(session, entry, command)
        ledger.is_replaying = False

    def _runs(self, session: ClientSession, entry: FutureEntry, command: Command | None) -> Iterator[FutureEntry]:
        """Yields what runs for one stored command."""
        line = self._ledger.lines.get(entry.line or "")
        end = self._ends.get(entry.key)
        if getattr(command, "model", None) in self._gone:
            session.open.pop(entry.key, None)
            self._end(entry, Failure(f"model {getattr(command, 'model', '')} was unloaded or could not be created."))
            if isinstance(command, CreateModel):
                self._ledger.lines.pop(command.model, None)
            return
        if end is not None:
            session.open.pop(entry.key, None)
            self._end(entry, Failure(end["error"]) if "error" in end else None)
        if line is not None and entry.number:
            line.hold(entry)
            entry.state = EntryState.HELD if end is None else entry.state
            for released in line.released():
                yield from self._run(released)
        elif end is None:
            yield from self._run(entry)
        if isinstance(command, CreateModel):
            yield from self._restore(session, command.model)

    @property
    def counts(self) -> Mapping[str, int]:
        """Numbers of restored "sessions", "models" and "snapshots", and of "commands" run again."""
        ledger = self._ledger
        loaded = sum(line.snapshot is not None for line in ledger.lines.values())
        return {
            "sessions": len(ledger.sessions), "models": len(ledger.lines), "snapshots": loaded,
            "commands": self._run_again,
        }  # fmt: skip

    def _run(self, entry: FutureEntry) -> Iterator[FutureEntry]:
        self._run_again += 1
        if entry.is_sample:  # it depends on saved weights only; sessions of clients that have gone must delay nobody
            self._ledger.queue.put(entry)
            return
        entry.state = EntryState.RUNNING
        yield entry
        assert entry.state is EntryState.DONE, "the loop calls finish"

    def _end(self, entry: FutureEntry, result: Failure | None) -> None:
        entry.result, entry.command = result, None
        entry.state = EntryState.FORGOTTEN if result is None else EntryState.DONE

    def _restore(self, session: ClientSession, model: str) -> Iterator[FutureEntry]:
        """Yields the load of a model's newest snapshot, and gives the ledger the results before it."""
        record, line = self._snapshots.get(model), self._ledger.lines.get(model)
        if record is None or line is None:
            return
        number, name, at = record.values["number"], record.values["name"], 0
        for key, own, route, about, digest, size in record.values["results"]:
            result = decode_message(record.body[at : at + size])
            at += size
            entry = FutureEntry(key, session.name, None, model, own, route, about, digest, EntryState.DONE, result)
            entry.stored.set_result(None)
            session.entries[key] = entry
        line.following, line.done, line.covered = number + 1, number, number
        line.assigned, line.snapshot = number, name
        restore = FutureEntry(f"{RESTORE}/{model}", INTERNAL, LoadWeights(model, name, True), model, route=RESTORE)
        restore.state = EntryState.RUNNING
        yield restore
        if isinstance(restore.result, Failure):
            raise CheckpointError(
                f"the service cannot load the snapshot {name} of model {model}; start it with the --model of its last "
                f"run and the unchanged folder serve.folder, or with a new folder: {restore.result.error}"
            )
