"""Memory that lies in files: the system keeps it in its page cache while there is room, and writes it out when not.

It does not count as the data of a process, and a limit on the memory of a group of processes makes the system write it
out instead of ending them. The files are deleted as soon as they are mapped, so no end of a run leaves any behind.
"""

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import EngineError


class MappedMemory:
    """Makes tensors in files of ``folder``, which is made if it does not exist."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        """``count`` zeros, whose space on the disk is taken.

        Raises:
            EngineError: the folder cannot be made or written, or the disk is full.
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
