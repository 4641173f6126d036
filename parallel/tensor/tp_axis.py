"""The tensor axis as the layers see it: an index, a size, and collectives that are named and counted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from engine.kernels.dispatch import REFERENCE, Kernels
from engine.parallel.comm.backend import Reduction
from engine.parallel.comm.comm import Comm, Pending
from engine.parallel.comm.traffic import Op


class Expected(NamedTuple):
    """A collective that a dry run has passed, or that the backward of what it made will make."""

    op: Op
    label: str
    bytes: int
    """Of the whole tensor."""
    backward: bool


class Overlap(NamedTuple):
    """Where it pays to compute while a collective is under way: on ``devices``, for tensors of ``bytes`` and more."""

    devices: frozenset[str] = frozenset({"cuda"})
    bytes: int = 1 << 20


class Repeats(Protocol):
    """Who keeps what the collectives of a forward gave that is run again in backward."""

    def collective(self, given: Tensor, result: Tensor, start: Callable[[], Pending]) -> Pending:
        """Fill ``result`` from ``given``, which is spoiled unless it is that: by ``start``, or with what was kept."""


class TensorAxis:
    """Collectives between the tensor ranks of one data rank and stage.

    While ``dry`` nothing is communicated: sums leave the local part as it is, gathers repeat it and scatters keep a
    slice, so that all shapes are right. A model is run so when only its shapes are wanted, and what it would have
    sent is told to ``listener``. Collectives go by ``repeats``, if there is one.
    """

    overlap = Overlap()
    kernels: Kernels = REFERENCE
    """Which implementation of an operator the layers on this axis run."""
    repeats: Repeats | None = None

    def __init__(self, comm: Comm) -> None:
        self.index = comm.grid.index("tp")
        self.size = comm.grid.tp
        self.dry = False
        self.listener: Callable[[Expected], None] | None = None
        self._comm = comm

    @contextmanager
    def dry_run(self) -> Iterator[None]:
        """Communicate nothing inside."""
        before, self.dry = self.dry, True
        try:
            yield
        finally:
            self.dry = before

    def expect(self, op: Op, label: str, whole: Tensor, backward: bool = True) -> None:
        """Tell the listener of a collective over ``whole``; without one nothing happens."""
        fake = isinstance(whole, FakeTensor)  # which a probe runs beside, to learn what autocast makes of an operation
        if self.dry and self.listener is not None and not fake:
            self.listener(Expected(op, label, whole.numel() * whole.element_size(), backward))

    def all_reduce(self, tensor: Tensor, label: str, op: Reduction = "sum") -> None:
        """Sum ``tensor`` (any shape, contiguous) in place over the axis, or leave the largest values."""
        self.start_all_reduce(tensor, label, op).wait()

    def all_gather(self, part: Tensor, label: str) -> Tensor:
        """Every rank's ``part`` [...], contiguous and of one shape on all ranks, as a new tensor [size, ...]."""
        full, pending = self.start_all_gather(part, label)
        pending.wait()
        return full

    def reduce_scatter(self, full: Tensor, label: str) -> Tensor:
        """The sum over ranks of ``full[index]``, of [size, ...], contiguous and spoiled, as a new tensor [...]."""
        part, pending = self.start_reduce_scatter(full, label)
        pending.wait()
        return part

    def start_all_reduce(self, tensor: Tensor, label: str, op: Reduction = "sum") -> Pending:
        """``all_reduce`` that is under way until ``wait``."""
        if self.dry or self.size == 1:
            self.expect("all_reduce", label, tensor, backward=False)
            return Pending()
        return self._start(tensor, tensor, lambda: self._all_reduce(tensor, label, op))

    def start_all_gather(self, part: Tensor, label: str) -> tuple[Tensor, Pending]:
        """``all_gather`` whose result may be read after ``wait``."""
        if self.dry or self.size == 1:
            full = part.expand(self.size, *part.shape)
            self.expect("all_gather", label, full, backward=False)
            return full, Pending()
        full = torch.empty((self.size, *part.shape), dtype=part.dtype, device=part.device)
        return full, self._start(full, full, lambda: self._all_gather(full, part, label))

    def start_reduce_scatter(self, full: Tensor, label: str) -> tuple[Tensor, Pending]:
        """``reduce_scatter`` whose result may be read after ``wait``."""
        if self.dry or self.size == 1:
            self.expect("reduce_scatter", label, full, backward=False)
            return full[self.index], Pending()
        part = torch.empty(full.shape[1:], dtype=full.dtype, device=full.device)
        return part, self._start(full, part, lambda: self._reduce_scatter(part, full, label))

    def _start(self, given: Tensor, result: Tensor, start: Callable[[], Pending]) -> Pending:
        return start() if self.repeats is None else self.repeats.collective(given, result, start)

    def _all_reduce(self, tensor: Tensor, label: str, op: Reduction) -> Pending:
        return self._comm.all_reduce(tensor, "tp", label, op)

    def _all_gather(self, full: Tensor, part: Tensor, label: str) -> Pending:
        return self._comm.all_gather(full.view(-1), part.view(-1), "tp", label)

    def _reduce_scatter(self, part: Tensor, full: Tensor, label: str) -> Pending:
        return self._comm.reduce_scatter(part.view(-1), full.view(-1), "tp", label)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TensorAxis":
        """A copied model talks through the same processes."""
        return self


class DryAxis(TensorAxis):
    """The first of ``size`` ranks without any process: always dry."""

    def __init__(self, size: int, listener: Callable[[Expected], None] | None = None) -> None:
        self.index, self.size, self.dry, self.listener = 0, size, True, listener
