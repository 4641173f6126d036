"""Journal of the training service: accepted commands are on disk before their futures are answered.

    journal-000000000007        frames, one after the other; a start reads the newest file
    journal-000000000008.new    copy without superseded records, being written; renamed when it is on disk

A frame has all records of one write: an 8-byte mark, the length and the XXH3 hash of its bytes, then the records. Each
frame is on disk before the next one is written. A record has an identity, JSON values, and bytes. Records that arrive
while a frame is being written share the next one, so that many requests cost one fsync (group commit).
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import xxhash

from engine.checkpoint.format.filesystem import Files, named, write_new
from engine.checkpoint.format.safetensors_file import in_batches
from engine.errors import CheckpointError

MARK = b"\xf7TRINEJ1"
_PREFIX, _NEW = "journal-", ".new"
RESTORE_FOLDER = "restore serve.folder from a backup, or set serve.folder to a new folder."
"""End of messages about a damaged journal."""
_FRAME, _RECORD = struct.Struct("<8sQQ"), struct.Struct("<II")
_FRAME_BYTES = 8 << 20
"""Bytes after which records go into another frame."""
DEAD_BYTES = 64 << 20
"""Minimum superseded bytes at which the journal is copied without them."""


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """Record in the journal of a service; it replaces earlier records with the same ``identity``."""

    identity: str
    values: Mapping[str, Any]
    """JSON values."""
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class _Place:
    start: int
    size: int


class CommandJournal:
    """Journal on disk of the commands that a service has accepted.

    It is thread-safe, and one process at a time may open it.

    Args:
        folder: existing or new folder of the journal.
        dead_bytes: the file is rewritten if outdated records (forgotten, or followed by one of equal ``identity``) take
            more bytes than this, and more than half of the file.

    Raises:
        CheckpointError: another process has the journal, or it is damaged.
    """

    def __init__(self, folder: Path, dead_bytes: int = DEAD_BYTES) -> None:
        self.folder, self._files, self._open = folder, Files(), ExitStack()
        folder.mkdir(parents=True, exist_ok=True)
        if not self._open.enter_context(self._files.locked(folder)):
            self._open.close()
            raise CheckpointError(f"{folder} is in use by another service; end it, or give another folder.")
        self._dead_limit, self._dead = dead_bytes, 0
        self._places: dict[str, _Place] = {}
        self.records: list[JournalRecord] | None = []
        """Records of earlier processes, superseded ones left out; None once ``take_records`` has returned them."""
        self.problem: BaseException | None = None
        """Error after which nothing can be written; a new start reads the disk."""
        try:
            self._number = self._start()
        except BaseException:
            self._open.close()
            raise
        self._waiting: SimpleQueue[tuple[list[JournalRecord], Future[None]] | None] = SimpleQueue()
        self._thread = Thread(target=self._write_forever, name="trine-journal", daemon=True)
        self._thread.start()

    def take_records(self) -> list[JournalRecord]:
        """Returns the records of earlier processes in the order of writing, without replaced ones; empty on a second
        call.
        """
        found, self.records = self.records or [], None
        return found

    def append(self, *records: JournalRecord) -> Future[None]:
        """Queues records for writing, all or none.

        Returns a future that is done when they are on disk, or has an OSError.
        """
        stored = pending()
        self._waiting.put((list(records), stored))
        return stored

    def forget(self, identities: Iterable[str]) -> None:
        """Marks records as removable at the next rewrite of the journal's file."""
        self._waiting.put(([JournalRecord(one, _FORGET) for one in identities], pending()))

    def close(self) -> None:
        """Writes the queued records, and closes the journal."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()
        self._open.close()

    # ---------------------------------------------------------------- writing, in the journal's thread

    def _write_forever(self) -> None:
        while True:
            group = [self._waiting.get()]
            while group[-1] is not None:
                try:
                    group.append(self._waiting.get_nowait())
                except Empty:
                    break
            self._write([one for one in group if one is not None])
            if group[-1] is None:
                return

    def _write(self, group: list[tuple[list[JournalRecord], "Future[None]"]]) -> None:
        try:
            self._commit([record for records, _ in group for record in records])
        except OSError as error:
            for _, stored in group:
                stored.set_exception(error)
            return
        for _, stored in group:
            stored.set_result(None)

    def _commit(self, records: list[JournalRecord]) -> None:
        if self.problem is not None:
            raise OSError(f"the journal could not be written before: {self.problem}")
        for record in records:
            if record.values is _FORGET:
                self._bury(record.identity)
        written = [record for record in records if record.values is not _FORGET]
        if written:
            frame, places = _frame_of(written, self._position)
            try:
                with named(self._path(self._number)):
                    self._files.write(self._file, memoryview(frame))
                    self._files.sync(self._file)
            except OSError as error:
                self._undo(error)
                raise
            self._position += len(frame)
            for record, place in zip(written, places, strict=True):
                self._bury(record.identity)
                self._places[record.identity] = place
        if self._dead > max(self._dead_limit, self._position // 2):
            self._copy_live()

    def _undo(self, error: OSError) -> None:
        """Removes a frame that could not be written, so that the next one follows the last good one."""
        try:
            self._files.truncate(self._file, self._position)
            self._files.sync(self._file)
        except OSError:
            self.problem = error

    def _bury(self, identity: str) -> None:
        place = self._places.pop(identity, None)
        if place is not None:
            self._dead += place.size

    def _copy_live(self) -> None:
        """Copies the file without superseded records, and continues in the copy."""
        path = self._path(self._number + 1)
        new = path.with_name(path.name + _NEW)
        places: dict[str, _Place] = {}
        try:
            new.unlink(missing_ok=True)
            write_new(self._files, new, self._live_frames(places))
            self._files.rename(new, path)
            self._files.sync_folder(self.folder)
            old, file, self._number = self._path(self._number), self._file, self._number + 1
            self._open_file()
        except OSError as error:
            # the old file has all records; a start reads the copy if it has its name, so nothing may follow in the old
            self._dead = 0
            if path.exists():
                self.problem = error
            return
        self._places, self._dead = places, 0
        with suppress(OSError):  # a start removes it
            os.close(file)  # an open file keeps its blocks on the disk
            self._files.unlink(old)

    def _live_frames(self, places: dict[str, _Place]) -> Iterator[memoryview]:
        position = 0
        ordered = sorted(self._places.values(), key=lambda place: place.start)
        for batch in in_batches(ordered, lambda place: place.size, _FRAME_BYTES):
            group = [self._record_in(place) for place in batch]
            frame, found = _frame_of(group, position)
            places.update((record.identity, one) for record, one in zip(group, found, strict=True))
            position += len(frame)
            yield memoryview(frame)

    def _record_in(self, place: _Place) -> JournalRecord:
        data = bytearray(place.size)
        self._files.read_into(self._file, memoryview(data), place.start)
        return _record_of(memoryview(data), 0)[0]

    # ---------------------------------------------------------------- start

    def _path(self, number: int) -> Path:
        return self.folder / f"{_PREFIX}{number:012d}"

    def _open_file(self) -> None:
        self._file = os.open(self._path(self._number), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._position = os.fstat(self._file).st_size

    def _start(self) -> int:
        numbers = journal_numbers(self.folder)
        self._number = numbers[-1] if numbers else 1
        self._open_file()
        self._open.callback(lambda: os.close(self._file))
        end, found = 0, dict[str, JournalRecord]()
        for stop, record, place in _read(self._files, self._file, self._path(self._number)):
            self._bury(record.identity)
            found.pop(record.identity, None)
            found[record.identity], self._places[record.identity] = record, place
            end = stop
        if end < self._position:
            self._files.truncate(self._file, end)
            self._files.sync(self._file)
            self._position = end
        self.records = list(found.values())
        for path in self.folder.glob(f"{_PREFIX}*{_NEW}"):
            self._files.unlink(path)
        for number in numbers[:-1]:
            self._files.unlink(self._path(number))
        self._files.sync_folder(self.folder)
        return self._number


_FORGET: Mapping[str, Any] = {}
"""Values of a record that is only forgotten, compared by identity."""


def pending() -> "Future[None]":
    """Returns a new future that is not done and cannot be cancelled."""
    found: Future[None] = Future()
    found.set_running_or_notify_cancel()
    return found


def journal_numbers(folder: Path) -> list[int]:
    """Returns the numbers in the names of the journal files in ``folder``, ascending."""
    names = (path.name.removeprefix(_PREFIX) for path in folder.glob(f"{_PREFIX}*"))
    return sorted(int(name) for name in names if name.isdecimal())


def read_journal(folder: Path) -> list[JournalRecord]:
    """Returns the records of the journal in ``folder`` in order, without replaced ones; does not lock it.

    Raises:
        CheckpointError: there is no journal, or it is damaged.
    """
    numbers = journal_numbers(folder)
    if not numbers:
        raise CheckpointError(f"{folder} has no journal of a training service; give the folder of serve.folder.")
    path, found = folder / f"{_PREFIX}{numbers[-1]:012d}", dict[str, JournalRecord]()
    with open(path, "rb") as file:
        for _, record, _ in _read(Files(), file.fileno(), path):
            found.pop(record.identity, None)
            found[record.identity] = record
    return list(found.values())


def _frame_of(records: list[JournalRecord], position: int) -> tuple[bytes, list[_Place]]:
    """Returns a frame at ``position`` of the file, and the places of its records."""
    parts, places, at = list[bytes](), list[_Place](), position + _FRAME.size
    for record in records:
        header = json.dumps([record.identity, record.values], separators=(",", ":")).encode()
        size = _RECORD.size + len(header) + len(record.body)
        parts += [_RECORD.pack(len(header), len(record.body)), header, record.body]
        places.append(_Place(at, size))
        at += size
    data = b"".join(parts)
    return _FRAME.pack(MARK, len(data), xxhash.xxh3_64_intdigest(data)) + data, places


def _record_of(data: memoryview, start: int) -> tuple[JournalRecord, int]:
    """Returns the record at ``start`` and its end."""
    header, body = _RECORD.unpack_from(data, start)
    at = start + _RECORD.size
    identity, values = json.loads(bytes(data[at : at + header]))
    return JournalRecord(identity, values, bytes(data[at + header : at + header + body])), at + header + body


def _read(files: Files, file: int, path: Path) -> Iterator[tuple[int, JournalRecord, _Place]]:
    """Yields the records of a file with the end of their frame and their place; a half-written last frame is left out.

    Raises:
        CheckpointError: a frame before the last one is damaged.
    """
    position, size = 0, files.size(file)
    while position < size:
        data = _frame_at(files, file, position, size)
        if data is None:
            if _has_frame_after(files, file, position + 1, size):
                raise CheckpointError(f"{path} is damaged at byte {position:,}; {RESTORE_FOLDER}")
            return
        end, at = position + _FRAME.size + len(data), 0
        while at < len(data):
            record, stop = _record_of(data, at)
            yield end, record, _Place(position + _FRAME.size + at, stop - at)
            at = stop
        position = end


def _frame_at(files: Files, file: int, position: int, size: int) -> memoryview | None:
    """Returns the records' bytes of the frame at ``position``; None if there is no whole frame."""
    head = bytearray(_FRAME.size)
    if files.read_into(file, memoryview(head), position) < _FRAME.size:
        return None
    mark, length, expected = _FRAME.unpack(head)
    if mark != MARK or position + _FRAME.size + length > size:
        return None
    data = bytearray(length)
    files.read_into(file, memoryview(data), position + _FRAME.size)
    return memoryview(data) if xxhash.xxh3_64_intdigest(data) == expected else None


def _has_frame_after(files: Files, file: int, start: int, size: int) -> bool:
    """Returns True if a whole frame begins at ``start`` or later: then the bytes before it were on disk once."""
    step = 1 << 20
    for base in range(start, size, step):
        data = bytearray(step + len(MARK) - 1)
        count = files.read_into(file, memoryview(data), base)
        at = data.find(MARK, 0, count)
        while at >= 0:
            if _frame_at(files, file, base + at, size) is not None:
                return True
            at = data.find(MARK, at + 1, count)
    return False
