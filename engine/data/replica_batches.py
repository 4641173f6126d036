"""Batches that one rank of a replica reads for all: its tensor and pipeline ranks work on the same rows.

Two all-reduces over the axis ``replica``, label "batch": 16 bytes with the length and whether reading has failed, then
the bytes.
"""

import io
from collections.abc import Callable
from typing import Any

import torch

from engine.errors import EngineError, first_line
from engine.parallel.comm.agreement import take_from
from engine.parallel.comm.comm import Comm
from engine.program.batch import map_tensors

_LABEL = "batch"


class ReplicaBatches:
    """Hands what the first rank of a replica has read to the others. Every rank of the replica makes the same calls."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._comm, self._device = comm, device
        self.reads = comm.grid.index("replica") == 0
        """Whether this rank is the one that reads."""

    def share(self, read: Callable[[], Any]) -> Any:
        """What ``read`` gives on the first rank: tensors and plain values, in tuples, lists and dicts.

        Raises:
            EngineError: the first rank could not read; that rank raises its own error.
        """
        if self._comm.grid.size("replica") == 1:
            return read()
        made, problem = b"", None
        try:
            made = _encoded(read()) if self.reads else b""
        except Exception as error:  # a dataset may raise anything, and the other ranks wait
            problem, made = error, first_line(error).encode(errors="backslashreplace")
        head = torch.tensor([len(made), problem is not None], dtype=torch.int64, device=self._device)
        self._comm.all_reduce(head, "replica", _LABEL).wait()
        data = torch.zeros(int(head[0]), dtype=torch.uint8, device=self._device)
        if self.reads:
            data.copy_(torch.frombuffer(bytearray(made), dtype=torch.uint8))
        take_from(data, self.reads, self._comm, "replica", _LABEL)
        if problem is not None:
            raise problem
        received = data.cpu().numpy().tobytes()
        if head[1]:
            reader = self._comm.grid.peers("replica")[0]
            raise EngineError(f"rank {reader} reads the batches of this replica and has failed: {received.decode()}")
        return torch.load(io.BytesIO(received), weights_only=True)


def _encoded(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(map_tensors(value, torch.clone), file)  # a view would be saved with all that it is a view of
    return file.getvalue()
