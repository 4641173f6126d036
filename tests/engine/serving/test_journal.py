"""Journal: what was answered is on disk, at a crash of any write, fsync, rename or cut; damage is found."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from engine.errors import CheckpointError
from engine.serving.bookkeeping.entry import EntryState, FutureEntry, RequestRefusedError
from engine.serving.bookkeeping.journal import CommandJournal, JournalRecord, journal_numbers, read_journal
from engine.serving.bookkeeping.ledger import Ledger
from engine.serving.bookkeeping.session import LedgerLimits
from engine.serving.commands import TrainedOutput
from tests.engine.serving.commands_of_tests import (
    MODEL,
    SESSION,
    command_of,
    created,
    numbered,
    open_at,
    open_session,
    sample,
    submit,
)
from tests.engine.serving.executors import CountingExecutor, drain

CALLS = ("fsync", "rename", "write", "unlink", "ftruncate")
LIMITS = LedgerLimits(snapshot_every=4)
COMMANDS = 14


class DeadDisk:
    """Calls of the system that change the disk: from one of them on all fail, as in a process that has ended; a failing
    write is half made.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.fails, self.is_dead = 0, -1, False
        for name in CALLS:
            monkeypatch.setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.count == self.fails and not self.is_dead:
                self.is_dead = True
                if name == "write":
                    with suppress(OSError):
                        call(args[0], bytes(args[1])[: len(args[1]) // 2])
            if self.is_dead:
                raise OSError(5, "the process has ended")
            self.count += 1
            return call(*args, **kwargs)

        return counted

    def revive(self) -> None:
        """Ends the failures."""
        self.is_dead, self.fails = False, -1


def records(count: int, size: int = 50) -> list[JournalRecord]:
    """Returns records with bodies."""
    return [JournalRecord(f"entry/{number}", {"n": number}, bytes([number % 256]) * size) for number in range(count)]


def test_records_come_back_in_order_and_later_ones_supersede(tmp_path: Path) -> None:
    journal = CommandJournal(tmp_path)
    for record in records(5):
        journal.append(record).result(20)
    journal.append(JournalRecord("entry/1", {"n": 100}, b"new"), JournalRecord("note/a/b", {})).result(20)
    journal.close()
    found = read_journal(tmp_path)
    assert [one.identity for one in found] == ["entry/0", "entry/2", "entry/3", "entry/4", "entry/1", "note/a/b"]
    assert found[4] == JournalRecord("entry/1", {"n": 100}, b"new")
    again = CommandJournal(tmp_path)
    assert again.take_records() == found and again.take_records() == []
    again.close()


def test_a_journal_has_one_process(tmp_path: Path) -> None:
    journal = CommandJournal(tmp_path)
    with pytest.raises(CheckpointError, match="in use by another service"):
        CommandJournal(tmp_path)
    journal.close()


def test_requests_that_arrive_together_share_one_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, syncs, late, stored = CommandJournal(tmp_path), list[int](), records(40)[1:], list[Any]()
    real = os.fsync

    def fsync(file: int) -> None:
        syncs.append(file)
        stored.extend(journal.append(one) for one in late)
        late.clear()
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    journal.append(records(1)[0]).result(20)
    for one in stored:
        one.result(20)
    assert len(stored) == 39 and len(syncs) == 2
    journal.close()


def test_superseded_bytes_are_left_out_of_a_copy(tmp_path: Path) -> None:
    journal = CommandJournal(tmp_path, dead_bytes=2000)
    kept = JournalRecord("entry/kept", {"n": 1}, b"k" * 100)
    journal.append(kept).result(20)
    for number in range(100):
        journal.append(JournalRecord("entry/0", {"n": number}, b"x" * 200)).result(20)
    journal.append(*records(20, 300)).result(20)
    journal.forget(f"entry/{number}" for number in range(2, 20))
    journal.append(JournalRecord("note/z", {})).result(20)
    opened = [os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()]
    assert sum("journal-" in path for path in opened) == 1, "earlier files are closed, which frees their blocks"
    journal.close()
    assert journal_numbers(tmp_path)[0] > 2
    (file,) = tmp_path.glob("journal-*")
    assert file.stat().st_size < 4000
    found = read_journal(tmp_path)
    assert {one.identity for one in found} == {"entry/kept", "entry/0", "entry/1", "note/z"} and kept in found


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_half_written_end_is_cut_and_damage_before_it_is_an_error(tmp_path: Path, cut: int) -> None:
    journal = CommandJournal(tmp_path)
    for record in records(3):
        journal.append(record).result(20)
    journal.close()
    (file,) = tmp_path.glob("journal-*")
    data = file.read_bytes()
    file.write_bytes(data[:-cut])
    journal = CommandJournal(tmp_path)
    assert [one.identity for one in journal.take_records()] == ["entry/0", "entry/1"]
    journal.append(JournalRecord("entry/9", {})).result(20)
    journal.close()
    assert [one.identity for one in read_journal(tmp_path)] == ["entry/0", "entry/1", "entry/9"]
    for at in (4, 12, len(data) // 2):
        file.write_bytes(data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :])
        with pytest.raises(CheckpointError, match="is damaged at byte"):
            CommandJournal(tmp_path)


def test_a_full_disk_refuses_and_later_requests_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, real, full = CommandJournal(tmp_path), os.write, [True]

    def write(file: int, data: Any) -> int:
        if full[0]:
            real(file, bytes(data)[:7])
            raise OSError(28, "No space left on device")
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space"):
        journal.append(records(1)[0]).result(20)
    full[0] = False
    journal.append(records(2)[1]).result(20)
    journal.close()
    assert [one.identity for one in read_journal(tmp_path)] == ["entry/1"]


def test_a_number_of_a_command_that_was_not_stored_goes_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    ledger = open_at(tmp_path, executor := CountingExecutor(), LIMITS)
    open_session(ledger)
    submit(ledger, created())
    for number in range(3):
        own = [
            FutureEntry(f"{SESSION}:tensors:{number}", SESSION, command_of(1), MODEL, route="test") for _ in range(2)
        ]
        if number == 1:
            with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
                patch.setattr(os, "write", full)
                submit(ledger, own[0])
        entry = submit(ledger, own[1])
        drain(ledger.queue, ledger, executor)
        assert (entry.state, entry.number) == (EntryState.DONE, number + 1)
    assert ledger.journal is not None
    ledger.journal.close()
    again = CountingExecutor()
    open_at(tmp_path, again, LIMITS).journal.close()  # type: ignore[union-attr]
    assert again.models == executor.models


class Client:
    """Client whose service crashes: it repeats what was not answered, and asks for every result."""

    def __init__(self, folder: Path, disk: DeadDisk) -> None:
        self.folder, self.disk, self.starts = folder, disk, 0
        self.saved: dict[str, int] = {}
        self.results = dict[str, object]()
        self.ledger: Ledger | None = None
        self.executor = CountingExecutor()

    def start(self) -> None:
        """Starts the service until a start succeeds."""
        while self.ledger is None:
            self.starts += 1
            self.executor = CountingExecutor()
            self.executor.saved = self.saved
            try:
                self.ledger = open_at(self.folder, self.executor, LIMITS)
            except OSError:
                self.disk.revive()

    def crash(self) -> None:
        """Ends the process of the service."""
        assert self.ledger is not None and self.ledger.journal is not None
        self.ledger.journal.close()
        self.ledger = None
        self.disk.revive()

    def step(self, number: int) -> None:
        """Sends one command, runs what is queued, and fetches the result."""
        while True:
            self.start()
            assert self.ledger is not None
            try:
                self._send(number)
                self._run()
                if self.disk.is_dead:
                    raise OSError
                found = self.ledger.find(f"{MODEL}:{number}")
                assert found.result is not None
                self.results[found.key] = found.result
                self.ledger.mark_fetched(found)
                return
            except OSError:
                self.crash()

    def _send(self, number: int) -> None:
        assert self.ledger is not None
        if SESSION not in self.ledger.sessions:
            self.ledger.open_session(SESSION)
            self.ledger.append(self.ledger.note("session", SESSION, {"time": "now"})).result(20)
        for entry in (created(), numbered(number), sample(number)):
            with suppress(RequestRefusedError):  # 410: it was answered, and its sample fetched
                self.ledger.submit(entry).stored.result(20)

    def _run(self) -> None:
        assert self.ledger is not None
        while (entry := self.ledger.queue.next(0)) is not None:
            assert entry.command is not None
            self.ledger.finish(entry, self.executor.run(entry.command))


def all_results(folder: Path, disk: DeadDisk) -> Client:
    """Runs all commands of a client."""
    client = Client(folder, disk)
    for number in range(1, COMMANDS + 1):
        client.step(number)
    return client


def test_a_crash_at_any_call_loses_nothing_that_was_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = DeadDisk(monkeypatch)
    monkeypatch.setattr("engine.serving.bookkeeping.journal.DEAD_BYTES", 600)
    monkeypatch.setattr(CommandJournal.__init__, "__defaults__", (600,))
    whole = all_results(tmp_path / "whole", disk)
    whole.crash()
    assert disk.count > 60 and whole.starts == 1
    expected = whole.executor.models[MODEL]
    for fails in range(0, disk.count, 3):
        disk.count, disk.fails = 0, fails
        client = all_results(tmp_path / f"crash-{fails}", disk)
        assert client.executor.models[MODEL] == expected, fails
        for key, result in whole.results.items():
            mine = client.results[key]
            if isinstance(result, TrainedOutput) and isinstance(mine, TrainedOutput):
                assert (
                    result.metrics == mine.metrics
                    and (result.outputs[0]["logprobs"] == mine.outputs[0]["logprobs"]).all()
                )
            else:
                assert mine == result, (fails, key)
        client.crash()


def test_a_snapshot_waits_for_the_update_of_its_gradient(tmp_path: Path) -> None:
    executor = CountingExecutor()
    ledger = open_at(tmp_path, executor, LedgerLimits(snapshot_every=3))
    open_session(ledger)
    submit(ledger, created())
    for number in range(1, 6):
        submit(ledger, numbered(number))
        drain(ledger.queue, ledger, executor)
    assert ledger.journal is not None
    ledger.journal.close()
    again = CountingExecutor()
    again.saved = executor.saved
    ledger = open_at(tmp_path, again, LedgerLimits(snapshot_every=3))
    assert again.models == executor.models and executor.log[4:6] == ["OptimStep", "SaveWeights"]
    assert ledger.journal is not None
    ledger.journal.close()
