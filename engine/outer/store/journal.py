"""Journal of a store: one JSON line for every event, and a file for every body. Both are on disk before a reply.

trace.jsonl             events, in order; a half-written last line was never acknowledged and is cut off
bodies/push-4-0-12-1    body of one rank, written as bodies/push-4-0-12-1.new and renamed
snapshot-000000004096/  state after the first 4,096 bytes of the trace
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint.format.filesystem import Files, named, read_all, write_new
from engine.errors import COPY_AGAIN, CheckpointError
from engine.outer.store.records import Event

TRACE, BODIES, NEW = "trace.jsonl", "bodies", ".new"
_LONGEST_BODY = 1 << 46


def read_events(folder: Path, start: int = 0) -> Iterator[tuple[int, Event]]:
    """Yields (offset of the event's end, event) for each event of the journal in ``folder`` that begins at byte
    ``start`` or later.

    Raises:
        CheckpointError: a line is damaged.
    """
    if not (folder / TRACE).exists():
        return
    with open(folder / TRACE, "rb") as file:
        file.seek(start)
        for line in file:
            start += len(line)
            try:
                event = json.loads(line)
            except ValueError as error:
                if not file.read(1):
                    return
                raise CheckpointError(
                    f"{folder / TRACE} is damaged: the line that ends at byte {start:,} is no JSON; {COPY_AGAIN}"
                ) from error
            if not line.endswith(b"\n"):
                return
            yield start, event


def read_body(folder: Path, name: str) -> Tensor:
    """Returns the bytes of the stored push or initial weights called ``name``, uint8 [bytes].

    Raises:
        CheckpointError: the file cannot be read.
    """
    data = read_all(Files(), folder / BODIES, name, _LONGEST_BODY)
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


class Journal:
    """Journal of a store in a folder: one file of events, and one file for each rank's part of a push and for each
    rank's initial weights of a fragment.

    Raises:
        CheckpointError: another process has the journal open.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._files, self._open = folder, Files(), ExitStack()
        (folder / BODIES).mkdir(parents=True, exist_ok=True)
        if not self._open.enter_context(self._files.locked(folder)):
            self._open.close()
            raise CheckpointError(f"{folder} is in use by another store; end it, or give another folder.")
        for path in [*folder.glob(f"*{NEW}/*"), *folder.glob(f"*{NEW}"), *(folder / BODIES).glob(f"*{NEW}")]:
            path.rmdir() if path.is_dir() else path.unlink()
        self._trace = os.open(folder / TRACE, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._open.callback(os.close, self._trace)
        self.position = os.fstat(self._trace).st_size
        """Bytes of the trace."""
        self._files.sync_folder(folder)

    def cut(self, position: int) -> None:
        """Shortens the journal's file of events to at most ``position`` bytes."""
        if position < self.position:
            os.ftruncate(self._trace, position)
            self.position = position

    def write(self, event: Event, synced: bool = True) -> None:
        """Appends an event to the journal's file of events; with ``synced``, waits until it is on disk."""
        line = json.dumps(event, separators=(",", ":")).encode() + b"\n"
        with named(self.folder / TRACE):
            self._files.write(self._trace, memoryview(line))
            if synced:
                self._files.sync(self._trace)
        self.position += len(line)

    def write_body(self, name: str, body: Tensor) -> None:
        """Writes ``body``, a push or initial weights of one rank, into a file, and waits until it is on disk."""
        path = self.folder / BODIES / name
        new = path.with_name(name + NEW)
        write_new(self._files, new, [body.numpy().data] if len(body) else [])
        self._files.rename(new, path)
        self._files.sync_folder(path.parent)

    def body_names(self) -> list[str]:
        """Returns the file names of all stored pushes and initial weights."""
        return self._files.names(self.folder / BODIES)

    def remove_bodies(self, names: Iterable[str]) -> None:
        """Deletes the stored pushes and initial weights with the file names ``names``."""
        for name in names:
            self._files.unlink(self.folder / BODIES / name)

    def close(self) -> None:
        """Closes the journal's files, and unlocks its folder for other processes."""
        self._open.close()
