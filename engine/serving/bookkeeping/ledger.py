"""Ledger of the training service: one future for each accepted request, whatever the network repeats or reorders.

submit   HTTP thread     checks limits, finds repeats, writes the journal; then the command is queued in its line's turn
finish   main thread     keeps the result, wakes the polls, and makes a snapshot each n commands of a model
tick     HTTP thread     ends commands after their deadline, and sessions without a heartbeat

Results are retained until their session ends. Above ``result_bytes`` the oldest fetched results are removed first, then
new requests are refused; of fetched futures a session retains the newest ``RETAINED``.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from threading import RLock
from time import monotonic
from typing import Any

from engine.errors import first_line
from engine.serving.bookkeeping.entry import INTERNAL, EntryState, FutureEntry, RequestRefusedError, cost_of
from engine.serving.bookkeeping.journal import CommandJournal, JournalRecord
from engine.serving.bookkeeping.line import ModelLine, command_digest, record_of, snapshot_record
from engine.serving.bookkeeping.queue import FairQueue
from engine.serving.bookkeeping.retained import RetainedForwards
from engine.serving.bookkeeping.session import HOUSE, WAITS, ClientSession, LedgerLimits
from engine.serving.commands import (
    Command,
    CreateModel,
    DropTicket,
    DropWeights,
    Failure,
    PlainOutput,
    Result,
    SaveWeights,
    UnloadModel,
    array_bytes,
)

RETAINED = 4096
"""Fetched futures that a session retains, for requests that the network repeats."""
SNAPSHOT_RESULTS = 64
"""Results before a snapshot that it retains, for replies that were lost."""
_ENDED_SESSIONS = 1024
_RETRY_SECONDS = 2
logger = logging.getLogger("trine")


class Ledger:
    """Record of a service's accepted commands, their results, client sessions and models.

    Args:
        queue: queue that receives each command once it may run.
        journal: journal that stores accepted commands; None: a crash loses them.
        clock: function that returns seconds, for deadlines.
    """

    def __init__(
        self,
        queue: FairQueue,
        journal: CommandJournal | None,
        limits: LedgerLimits,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.queue, self.journal, self.limits, self.clock = queue, journal, limits, clock
        self.notes: dict[str, dict[str, Mapping[str, Any]]] = {}
        """JSON values of the HTTP side, by kind and id."""
        self.on_finish: Callable[[FutureEntry, Result], list[JournalRecord]] = lambda entry, result: []
        """Function that returns the records of a result, which the journal has before it is visible."""
        self.sessions: dict[str, ClientSession] = {}
        self.lines: dict[str, ModelLine] = {}
        self.ended: OrderedDict[str, str] = OrderedDict()
        """Sentence about each session that has ended; the newest ones."""
        self.result_bytes = 0
        self.commands_done = 0
        self.is_replaying = False
        self.retained = RetainedForwards(limits.held_bytes, limits.held_seconds)
        self._marks: list[JournalRecord] = []
        self._internal = 0
        self._lock = RLock()

    # ---------------------------------------------------------------- requests, in the HTTP thread

    def open_session(self, name: str) -> None:
        """Adds a client session called ``name``."""
        with self._lock:
            self.sessions[name] = ClientSession(name, self.clock())

    def session(self, name: str) -> ClientSession:
        """Returns the session called ``name``, and notes that its client is alive.

        Raises:
            RequestRefusedError: 404, there is no such session, or it has ended.
        """
        with self._lock:
            found = self.sessions.get(name)
            if found is None or found.is_ending:
                about = self.ended.get(name, f"session {name[:80]!r} is unknown; create a ServiceClient.")
                raise RequestRefusedError(about, 404)
            found.seen = self.clock()
            return found

    def submit(self, *entries: FutureEntry) -> FutureEntry:
        """Accepts all commands of one request, or none; returns the last command's entry.

        A repeated request gets its existing entry. Wait for the entry's ``stored`` before replying to the client.

        Raises:
            RequestRefusedError: 400 (an entry's ``key`` belongs to another request), 404 (no such session or model),
                410 (answered long ago; forward dropped) or 429 (the queue or the memory for results is full).
        """
        with self._lock:
            session = self.session(entries[0].session)
            for entry in entries:
                entry.digest = entry.digest or command_digest(entry)
                known = session.entries.get(entry.key)
                if known is not None and known.digest != entry.digest:
                    raise RequestRefusedError(
                        f"{entry.key} was used before for another request; number requests of a model from 1 without "
                        "repeating a number."
                    )
            if (known := session.entries.get(entries[-1].key)) is not None:
                return known
            new = [entry for entry in entries if entry.key not in session.entries]
            self._check(session, new)
            for entry in new:
                entry.accepted = self.clock()
                self.enter(session, entry)
            stored = self.append(*(record_of(entry) for entry in new))
        stored.add_done_callback(partial(self._admit, new))
        return entries[-1]

    def enter(self, session: ClientSession, entry: FutureEntry) -> None:
        """Adds ``entry`` to ``session``, and to the command sequence of model ``entry.line``, unless that is None."""
        session.entries[entry.key] = entry
        if entry.command is not None:
            session.open[entry.key] = entry
            self.retained.accept(entry)
        entry.cost = 1 if entry.command is None else cost_of(entry.command)
        if isinstance(entry.command, CreateModel):
            model, staleness = entry.command.model, self.limits.staleness
            self.lines[model] = ModelLine(model, entry.session, staleness)
            session.models.append(model)
        line = self.lines.get(entry.line or "")
        if line is not None:
            line.enter(entry)

    def _check(self, session: ClientSession, new: list[FutureEntry]) -> None:
        """Refuses commands of unknown models, numbers of long ago, and more than the queue takes."""
        created = {entry.command.model for entry in new if isinstance(entry.command, CreateModel)}
        for entry in new:
            self.retained.check(entry.command)
            if entry.line is None:
                continue
            line = self.lines.get(entry.line)
            if line is None and entry.line not in created:
                raise RequestRefusedError(
                    f"model {entry.line[:80]!r} is unknown or was unloaded; create a model, or load saved weights.", 404
                )
            if line is not None and entry.number and entry.number < line.following:
                raise RequestRefusedError(
                    f"number {entry.number} of model {entry.line[:80]!r} was answered, and its result has been removed "
                    f"since; go on with number {line.following}.",
                    410,
                )
        first = new[0]
        line = self.lines.get(first.line or "")
        if line is not None and first.number is not None and line.waits_for(first.number):
            return
        waiting, depth = session.waiting(), sum(one.waiting() for one in self.sessions.values())
        for count, most, place in (
            (waiting, self.limits.per_session, "of this session wait"),
            (depth, self.limits.depth, "wait in the queue"),
        ):
            if count + len(new) > most:
                raise RequestRefusedError(
                    f"{count} commands {place}, and at most {most} may; repeat the request after "
                    f"{_RETRY_SECONDS} seconds.",
                    429,
                    _RETRY_SECONDS,
                )
        if self.result_bytes > self.limits.result_bytes:
            raise RequestRefusedError(
                f"{self.result_bytes:,} bytes of results wait to be fetched, and at most "
                f"{self.limits.result_bytes:,} may; fetch results of earlier requests first.",
                429,
                _RETRY_SECONDS,
            )

    def append(self, *records: JournalRecord) -> "Future[None]":
        """Writes records to the journal; returns a future, done once they are on disk (without a journal: at once)."""
        if self.journal is None:
            stored: Future[None] = Future()
            stored.set_result(None)
            return stored
        marks, self._marks = self._marks, []
        return self.journal.append(*marks, *records)

    def _admit(self, entries: list[FutureEntry], stored: "Future[None]") -> None:
        """Queues commands that are in the journal now."""
        error = stored.exception()
        with self._lock:
            for entry in entries:
                if error is not None:
                    self._take_back(entry)
                elif entry.state is EntryState.STORING:
                    self._place(entry)
        for entry in entries:
            if error is None:
                entry.stored.set_result(None)
            else:
                entry.stored.set_exception(error)

    def _take_back(self, entry: FutureEntry) -> None:
        entry.state = EntryState.DONE  # the forward of a backward waits for it no longer
        if (session := self.sessions.get(entry.session)) is not None:
            session.entries.pop(entry.key, None)
            session.open.pop(entry.key, None)
        if isinstance(entry.command, CreateModel):
            self.lines.pop(entry.command.model, None)
        elif (line := self.lines.get(entry.line or "")) is not None:
            line.leave(entry)

    def _place(self, entry: FutureEntry) -> None:
        line = self.lines.get(entry.line or "")
        if line is None or not entry.number:
            self.queue.put(entry)
            return
        entry.state = EntryState.HELD if entry.command is not None else EntryState.DONE
        line.hold(entry)
        for released in line.released():
            self.queue.put(released)

    def find(self, key: str) -> FutureEntry:
        """Returns the entry with the id ``key``.

        Raises:
            RequestRefusedError: 404, there is no such entry; 410, its result was removed.
        """
        with self._lock:
            session = self.session(key.split(":", 1)[0])
            entry = session.entries.get(key)
            if entry is None:
                raise RequestRefusedError(f"future {key[:120]!r} is unknown; repeat its request.", 404)
            if entry.state is EntryState.FORGOTTEN:
                raise RequestRefusedError(f"the result of {key} was fetched before and has been removed.", 410)
            return entry

    def watch(self, entry: FutureEntry, listener: Callable[[], None]) -> bool:
        """Registers ``listener`` for the end of command ``entry``, and returns True; False if it has ended already."""
        with self._lock:
            if entry.state in (EntryState.DONE, EntryState.FORGOTTEN):
                return False
            entry.listeners.append(listener)
            return True

    def unwatch(self, entry: FutureEntry, listener: Callable[[], None]) -> None:
        """Removes a ``listener`` that ``watch`` has registered."""
        with self._lock:
            if listener in entry.listeners:
                entry.listeners.remove(listener)

    def mark_fetched(self, entry: FutureEntry) -> None:
        """Notes that a client has received the result of ``entry``, which may then be removed to free memory."""
        with self._lock:
            session = self.sessions.get(entry.session)
            if entry.is_fetched or session is None:
                return
            entry.is_fetched = True
            session.fetched[entry.key] = entry
            if entry.route == "asample":  # a sample that was fetched does not run again after a restart
                self._marks.append(JournalRecord(f"end/{entry.key}", {"session": entry.session, "fetched": True}))
            while len(session.fetched) > RETAINED:
                key, old = session.fetched.popitem(last=False)
                self._remove_result(old)
                del session.entries[key]
                if old.route == "asample":
                    self.forget(f"entry/{key}", f"end/{key}")
            self._evict()

    def _evict(self) -> None:
        """Removes the oldest fetched results while all results take more than their limit."""
        for session in self.sessions.values():
            while session.fetched and self.result_bytes > self.limits.result_bytes:
                _, entry = session.fetched.popitem(last=False)
                self._remove_result(entry)

    def _remove_result(self, entry: FutureEntry) -> None:
        self.result_bytes -= entry.result_bytes
        entry.result, entry.result_bytes, entry.state = None, 0, EntryState.FORGOTTEN

    def cancel(self, key: str) -> bool:
        """Cancels the sampling command ``key``, and returns True; False if the command has begun or does not sample."""
        with self._lock:
            entry = self.find(key)
            if not entry.is_sample or entry.state is not EntryState.QUEUED or not self.queue.remove(entry):
                return False
            self._fail(entry, "the client has cancelled this sample.")
            return True

    def tick(self) -> None:
        """Fails late commands, ends sessions without heartbeats, drops forwards without a backward, by time limits."""
        now = self.clock()
        with self._lock:
            self._drop_retained(self.retained.late(now))
            for session in list(self.sessions.values()):
                if session.is_ending:
                    continue
                if session.name != HOUSE and now - session.seen > self.limits.session_seconds:
                    self.end_session(session.name, f"sent no heartbeat for {self.limits.session_seconds:g} seconds")
                    continue
                late = now - self.limits.seconds
                for entry in [one for one in session.open.values() if one.state in WAITS and one.accepted < late]:
                    self._expire(entry)

    def _expire(self, entry: FutureEntry) -> None:
        place, line = self.queue.before(entry), self.lines.get(entry.line or "")
        if entry.state is EntryState.QUEUED:
            if not self.queue.remove(entry):
                return
            where = f"{place} commands were before it in the queue"
        elif entry.state is EntryState.HELD and line is not None:
            where = f"number {line.following} of its model has not arrived"
        else:
            return
        self._fail(entry, f"the command did not begin within {self.limits.seconds:g} seconds: {where}.")

    def _fail(self, entry: FutureEntry, sentence: str) -> None:
        """Ends a command that will not run; the journal has it before it is visible, so that a replay skips it."""
        entry.command = None
        entry.state = EntryState.STORING
        values = {"session": entry.session, "error": sentence}
        stored = self.append(JournalRecord(f"end/{entry.key}", values))
        stored.add_done_callback(lambda _: self._conclude(entry, Failure(sentence)))

    # ---------------------------------------------------------------- results, in the main thread

    def finish(self, entry: FutureEntry, result: Result, retained: int = 0) -> None:
        """Stores a command's result; ``retained``: maximum over ranks of the bytes stored for backwards."""
        records = self.on_finish(entry, result)
        if records:
            try:
                self.append(*records).result()
            except OSError as error:
                result = Failure(f"the service could not write its journal: {first_line(error)}.", "server")
        self._conclude(entry, result)
        with self._lock:
            self._drop_retained(self.retained.above(retained))

    def _drop_retained(self, drops: Iterator[DropTicket]) -> None:
        for drop in drops:
            if (line := self.lines.get(drop.model)) is not None:
                line.tickets.pop(drop.ticket, None)
            self.run_internal("retained", drop)

    def _conclude(self, entry: FutureEntry, result: Result) -> None:
        with self._lock:
            self.commands_done += 1
            line = self.lines.get(entry.line or "")
            if line is not None and entry.session != INTERNAL:
                line.advance(entry, result)
            command, entry.command = entry.command, None
            self.retained.record(command, result, self.clock())
            session = self.sessions.get(entry.session)
            entry.result = result
            if session is not None and entry.key in session.entries:
                session.open.pop(entry.key, None)
                entry.result_bytes = array_bytes(result)
                self.result_bytes += entry.result_bytes
                self._evict()
            entry.state = EntryState.DONE
            listeners, entry.listeners = entry.listeners, []
            self._follow_up(entry, command, result, line)
        for listener in listeners:
            listener()

    def _follow_up(self, entry: FutureEntry, command: Command | None, result: Result, line: ModelLine | None) -> None:
        match entry.route, command:
            case "snapshot", SaveWeights(name=name) if line is not None:
                self._keep_snapshot(line, name, result)
            case route, UnloadModel(model=model) if isinstance(result, PlainOutput) or route == "unload-ended":
                self._remove_model(model)
            case _, CreateModel(model=model) if isinstance(result, Failure):
                self._remove_model(model)
            case _ if line is not None and self._is_snapshot_due(entry, line):
                line.is_saving = True
                name = f"snapshots/{line.model.replace(':', '-')}/{line.done:09d}"
                self.run_internal("snapshot", SaveWeights(line.model, name, True), line.model)

    def _is_snapshot_due(self, entry: FutureEntry, line: ModelLine) -> bool:
        is_boundary = entry.session != INTERNAL and line.is_clean and not line.is_saving
        is_due = line.done - line.covered >= self.limits.snapshot_every
        return is_boundary and is_due and self.journal is not None and not self.is_replaying

    def run_internal(self, route: str, command: Command, line: str | None = None) -> None:
        """Queues a ``command`` of the service before clients' commands, with kind ``route`` and model ``line``."""
        self._internal += 1
        self.queue.put(FutureEntry(f"{route}/{self._internal}", INTERNAL, command, line, route=route))

    def _keep_snapshot(self, line: ModelLine, name: str, result: Result) -> None:
        line.is_saving = False
        if isinstance(result, Failure):
            logger.warning("a snapshot of model %s failed: %s", line.model, result.error)
            return
        number, old, session = line.done, line.snapshot, self.sessions.get(line.session)
        mine = [] if session is None else [one for one in session.entries.values() if one.line == line.model]
        oldest = number - max(SNAPSHOT_RESULTS, self.limits.snapshot_every)
        kept = [
            one
            for one in mine
            if one.result is not None and one.number is not None and one.number <= number
            and (one.number > oldest or not one.is_fetched)
        ]  # fmt: skip
        line.covered, line.snapshot = number, name
        keys = [key for at, key in line.uncovered if at <= number]
        line.uncovered = [(at, key) for at, key in line.uncovered if at > number]

        def stored(future: "Future[None]") -> None:
            if future.exception() is None:
                self.forget(*(f"{kind}/{key}" for key in keys for kind in ("entry", "end")))
                if old is not None:
                    self.run_internal("drop", DropWeights(old))

        self.append(snapshot_record(line, kept)).add_done_callback(stored)

    def _remove_model(self, model: str) -> None:
        """Removes a model that was unloaded, with all that a start would need to make it again."""
        line = self.lines.pop(model, None)
        if line is None:
            return
        session = self.sessions.get(line.session)
        self.append(JournalRecord(f"gone/{model}", {"session": line.session}))
        self.forget(f"snapshot/{model}", *(f"{kind}/{key}" for _, key in line.uncovered for kind in ("entry", "end")))
        if line.snapshot is not None:
            self.run_internal("drop", DropWeights(line.snapshot))
        if (
            session is not None
            and session.is_ending
            and all(one.session != session.name for one in self.lines.values())
        ):
            self._remove_session(session)

    # ---------------------------------------------------------------- sessions

    def end_session(self, name: str, reason: str, saved: bool = True) -> None:
        """Ends session ``name``: drops its waiting commands, saves its models if ``saved``, and unloads them.

        Later requests to the session are refused with the text ``reason``.
        """
        with self._lock:
            session = self.sessions.get(name)
            if session is None or session.is_ending:
                return
            session.is_ending = True
            listeners = list[Callable[[], None]]()
            for entry in session.open.values():
                if entry.state in WAITS:
                    self.queue.remove(entry)
                    entry.state, entry.command = EntryState.DONE, None
                    listeners += entry.listeners
            models = [line.model for line in self.lines.values() if line.session == name]
            where = ""
            for model in models if saved else ():
                self.run_internal("save-ended", SaveWeights(model, f"ended/{model.replace(':', '-')}", True), model)
                where = f"; its models are saved, load tinker://{model}/weights/ended to go on"
            self.ended[name] = f"session {name} {reason}{where}."
            while len(self.ended) > _ENDED_SESSIONS:
                self.ended.popitem(last=False)
            for model in models:
                self.run_internal("unload-ended", UnloadModel(model), model)
            if not models:
                self._remove_session(session)
        for listener in listeners:
            listener()

    def _remove_session(self, session: ClientSession) -> None:
        del self.sessions[session.name]
        self.result_bytes -= sum(one.result_bytes for one in session.entries.values())
        self.append(JournalRecord(f"note/session/{session.name}", {"gone": True, "ended": self.ended[session.name]}))
        self.forget(f"note/session/{session.name}")
        self.forget(*(f"{kind}/{key}" for key in session.entries for kind in ("entry", "end")))
        self.forget(*(f"{kind}/{model}" for model in session.models for kind in ("gone", "snapshot")))

    def forget(self, *identities: str) -> None:
        """Marks records as removable at the next rewrite of the journal."""
        if self.journal is not None and identities:
            self.journal.forget(identities)

    def loads(self, name: str) -> bool:
        """Returns True if a restart of the service would load the saved weights ``name``."""
        with self._lock:
            return any(line.would_load(name) for line in self.lines.values())

    def note(self, kind: str, name: str, values: Mapping[str, Any]) -> JournalRecord:
        """Stores JSON ``values`` in ``notes[kind][name]``, in memory; returns the record for :meth:`append`."""
        self.notes.setdefault(kind, {})[name] = values
        return JournalRecord(f"note/{kind}/{name}", values)
