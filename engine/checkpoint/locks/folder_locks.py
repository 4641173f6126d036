"""Locks on the folders that an engine saves into, so that no other engine sets its checkpoints aside.

    RUN/.trine.lock    {"host": ..., "pid": ..., "since": ...} of the last holder; the lock is flock's, not the file

A lock ends with ``close`` or with the process, also when it is killed: the file that stays behind locks nothing.

On NFS (Linux, version 3 with lockd or version 4) and on Lustre mounted with ``flock``, the lock holds on all machines.
Lustre with ``localflock`` sees the engines of one machine only. On a file system without locks an engine goes on
without one, and a warning says so.
"""

import fcntl
import json
import logging
import os
import socket
import weakref
from datetime import UTC, datetime
from pathlib import Path

from engine.errors import CheckpointError

LOCK = ".trine.lock"
"""Name of the lock file in the folder of a run."""
logger = logging.getLogger("trine")


class FolderLocks:
    """The folders that one engine has locked. Two engines of one process exclude each other too."""

    def __init__(self) -> None:
        self._held: dict[Path, int | None] = {}
        """Open lock file of each folder; None where the file system has no locks."""
        self._closed = False

    def hold(self, folder: Path, early: bool = False) -> None:
        """Lock an existing folder until ``close``; a second call locks it again if the folder was replaced.

        ``early``: nothing is written yet, so an engine of this process may hold the lock until the next call: in
        ``eng = initialize(...)`` the old one is dropped once the new one is there.

        Raises:
            CheckpointError: another engine holds the lock; the message names its process and machine.
        """
        if self._closed:
            raise CheckpointError(f"{folder} was to be locked after close(): the engine is over; make a new one.")
        if not self._held:
            self._forget_in_children()
        file = self._held.get(folder)
        if file is not None:
            if _is_same(file, folder):
                return
            self._held.pop(folder)
            os.close(file)
        try:
            self._held[folder] = _locked(folder)
        except _HeldHereError:
            if not early:
                raise
        except OSError as error:
            if folder not in self._held:
                logger.warning(
                    "checkpoint: %s cannot be locked (%s); make sure that no other engine saves there",
                    folder,
                    error.strerror or error,
                )
            self._held[folder] = None

    def close(self) -> None:
        """Unlock all folders. A second call does nothing."""
        self._closed = True
        while self._held:
            _, file = self._held.popitem()
            if file is not None:
                fcntl.flock(file, fcntl.LOCK_UN)  # a forked child may still have the file open
                os.close(file)

    def _forget_in_children(self) -> None:
        """Let forked children close their copies: a data loader's workers must not keep the lock of a killed run."""
        this = weakref.ref(self)

        def forget() -> None:
            locks = this()
            while locks is not None and locks._held:
                _, file = locks._held.popitem()
                if file is not None:
                    os.close(file)

        os.register_at_fork(after_in_child=forget)


class _HeldHereError(CheckpointError):
    """Another engine of this process holds the lock."""


def _locked(folder: Path) -> int:
    """Open and lock the lock file of a folder, and write into it who holds it.

    Raises:
        CheckpointError: somebody else holds the lock.
        OSError: the file cannot be written, or the file system has no locks.
    """
    while True:
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same(file, folder):
                _write_holder(file)
                return file
        except BlockingIOError as error:
            here, holder = _holder(file)
            os.close(file)
            raise (_HeldHereError if here else CheckpointError)(
                f"{folder}: {holder} saves its checkpoints there, and a second engine would set them aside; end that "
                "one first, or name another folder."
            ) from error
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # the folder was replaced between the two calls


def _is_same(file: int, folder: Path) -> bool:
    try:
        there = os.stat(folder / LOCK, follow_symlinks=False)
    except OSError:
        return False
    return os.path.samestat(os.fstat(file), there)


def _write_holder(file: int) -> None:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}).encode(), 0)


def _holder(file: int) -> tuple[bool, str]:
    """Whether the engine that holds the lock is in this process, and words for it."""
    try:
        found = json.loads(os.pread(file, 1 << 12, 0))
        host, pid, since = found["host"], int(found["pid"]), found["since"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return False, "another engine"
    here = (host, pid) == (socket.gethostname(), os.getpid())
    process = "this process" if here else f"process {pid} on {host!r:.80}"
    return here, f"another engine ({process}, since {since!r:.40})"
