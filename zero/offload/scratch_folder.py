"""Folder of one engine's files on disk: locked while the engine lives; the next engine deletes the folder of a killed
one.

    nvme_path/trine-moments-rank3-x8k2/lock          held by flock, which the kernel frees when the process ends
                                       bucket-0 ...

Files of a killed run are deleted, never read: runs resume from checkpoints.

``MappedMemory`` uses unnamed files in this folder: the system writes their pages to disk when memory is short.
"""

import fcntl
import logging
import os
import shutil
import tempfile
import weakref
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import EngineError

logger = logging.getLogger("trine")

PREFIX = "trine-moments-"


class ScratchFolder:
    """Temporary folder in ``parent`` for files of the rank ``rank``, locked until ``close``. Deletes folders that
    killed engines have left in ``parent``.

    Raises:
        EngineError: the folder cannot be created.
    """

    def __init__(self, parent: str, rank: int) -> None:
        place = Path(parent).absolute()  # files are made later, perhaps in another working directory
        try:
            place.mkdir(parents=True, exist_ok=True)
            delete_left_behind(place)
            fresh = Path(tempfile.mkdtemp(prefix=f".{PREFIX}rank{rank}-", dir=place))
            lock = os.open(fresh / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.path = fresh.rename(fresh.with_name(fresh.name[1:]))  # seen by others once it is locked
        except OSError as error:
            raise EngineError(
                f"zero_optimization.offload_optimizer.nvme_path: no folder can be made in {parent} "
                f"({error.strerror or error}); give a folder on a local disk that this process may write."
            ) from error
        self._end = weakref.finalize(self, _remove, self.path, lock, os.getpid())  # at the end of the process too

    def close(self) -> None:
        """Deletes the folder and its contents, and releases its lock. A second call does nothing."""
        self._end()


def _remove(path: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # and not a fork of it
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def delete_left_behind(parent: Path) -> None:
    """Deletes the temporary folders in ``parent`` that killed engines have left. Locked folders of running engines
    remain.
    """
    for folder in sorted(parent.glob(f"{PREFIX}*")):
        try:
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # being made at this moment, or deleted by another engine
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            logger.warning("optimizer state that a run left in %s, when it was killed, is deleted", folder)
        except OSError:
            continue
        finally:
            os.close(lock)


class MappedMemory:
    """Allocator of tensors in memory-mapped files in ``folder``. When memory is short, the operating system can write
    the tensors to disk.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        """Returns a tensor of ``count`` zeros of ``dtype`` in a memory-mapped file, with its disk space reserved.

        Raises:
            EngineError: the folder cannot be created or written, or the disk is full.
        """
        size = count * dtype.itemsize
        if not size:
            return torch.zeros(0, dtype=dtype)
        try:
            Path(self._folder).mkdir(parents=True, exist_ok=True)
            file, path = tempfile.mkstemp(prefix=".trine-mapped-", dir=self._folder)
            try:
                os.posix_fallocate(file, 0, size)
                return torch.from_file(path, shared=True, size=count, dtype=dtype)
            finally:
                os.close(file)
                os.unlink(path)
        except OSError as error:
            raise EngineError(
                f"zero_optimization.offload_optimizer.map_memory: no file of {size} bytes can be made in "
                f"{self._folder} ({error.strerror or error}); free the space or give another folder in nvme_path."
            ) from error
