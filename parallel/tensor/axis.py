"""The tensor axis as the layers see it: an index, a size, and collectives that are named and counted."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from engine.parallel.backend import Reduction
from engine.parallel.comm import Comm


class TensorAxis:
    """Collectives between the tensor ranks of one data rank and stage.

    While ``dry`` nothing is communicated: sums leave the local part as it is and gathers repeat it, so that
    all shapes are right. A model is run so when only its shapes are wanted.
    """

    def __init__(self, comm: Comm) -> None:
        self.index = comm.grid.index("tp")
        self.size = comm.grid.tp
        self.dry = False
        self._comm = comm

    @contextmanager
    def dry_run(self) -> Iterator[None]:
        """Communicate nothing inside."""
        before, self.dry = self.dry, True
        try:
            yield
        finally:
            self.dry = before

    def all_reduce(self, tensor: Tensor, label: str, op: Reduction = "sum") -> None:
        """Sum ``tensor`` (any shape, contiguous) in place over the axis, or leave the largest values."""
        if not self.dry:
            self._comm.all_reduce(tensor, "tp", label, op).wait()

    def all_gather(self, part: Tensor, label: str) -> Tensor:
        """Every rank's ``part`` [...], contiguous and of one shape on all ranks, as a new tensor [size, ...]."""
        if self.dry or self.size == 1:
            return part.expand(self.size, *part.shape)
        full = torch.empty((self.size, *part.shape), dtype=part.dtype, device=part.device)
        self._comm.all_gather(full.view(-1), part.view(-1), "tp", label).wait()
        return full

    def __deepcopy__(self, memo: dict[int, Any]) -> "TensorAxis":
        """A copied model talks through the same processes."""
        return self
