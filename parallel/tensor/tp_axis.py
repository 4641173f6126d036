"""Tensor axis of the layers: rank index, size, and collectives that are labelled and counted."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from engine.kernels.device import ACCELERATORS
from engine.kernels.dispatch import REFERENCE, Kernels
from engine.kernels.overlap import OverlapChoices
from engine.parallel.comm.backend import Reduction, Wait
from engine.parallel.comm.comm import Comm, Pending
from engine.parallel.comm.encoded_collectives import ActivationFormat, EncodedCollectives
from engine.parallel.comm.symmetric_memory import SymmetricBuffer
from engine.parallel.comm.traffic import Op
from engine.parallel.grid import Axis


class Expected(NamedTuple):
    """Collective that a dry run skips, for the listener of a :class:`TensorAxis`. ``backward``: True in backward."""

    op: Op
    label: str
    bytes: int
    """Bytes of the full tensor."""
    backward: bool


class ExpectedRows(NamedTuple):
    """All-to-all that a dry run skips, for the listener of a :class:`TensorAxis`. ``backward``: True in backward."""

    op: Op
    label: str
    sent: tuple[int, ...]
    """Bytes that each rank sends."""
    backward: bool


Node = Any
"""Autograd node whose backward runs a collective."""
Listener = Callable[[Any, Node | None], None]
"""Function (collective, autograd node) that a dry run calls; node None: the forward makes the collective."""


class Overlap(NamedTuple):
    """Condition for an overlap of compute and collectives: device types, and minimum ``bytes`` per chunk sent."""

    devices: frozenset[str] = frozenset(ACCELERATORS)
    bytes: int = 1 << 20


class Repeats(Protocol):
    """Interface of a cache for results of collectives in forward; recomputation reads it instead of communicating."""

    def collective(self, given: Tensor, result: Tensor, start: Callable[[], Pending]) -> Pending:
        """Launches a collective by ``start()`` and caches its ``result``; in recomputation fills ``result`` from the
        cache instead.

        Returns a handle to wait for. ``given``: the collective's input, which ``start()`` may overwrite.
        """


class TensorAxis:
    """Collectives over the tensor axis: the group of tensor ranks that have the same data and pipeline coordinates as
    this rank.

    While ``dry`` is set, nothing is communicated: collectives return tensors of the right shape and are reported to
    ``listener`` (exchanges only by :meth:`expect_rows`). ``repeats``: cache for recomputation.
    """

    overlap = Overlap()
    kernels: Kernels = REFERENCE
    """Implementation of the layers' operators on this axis."""
    repeats: Repeats | None = None
    symmetric: SymmetricBuffer | None = None
    """Memory through which kernels of all ranks communicate; None: layers use collectives."""
    fill_wait: Callable[[], None] | None = None
    """Function that computes a piece of another microbatch, called before each wait for a collective."""
    wire: ActivationFormat | None = None
    """Format of encoded activations and activation gradients; None: they are sent unencoded."""
    measured: OverlapChoices | None = None
    """Shapes for which communicating kernels are measured to be faster; None: the kernels run on all supported
    shapes.
    """

    nested = False
    """True if shards of global tensors over "cp" may be global tensors over "tp"."""
    name: Axis = "tp"
    """Axis of the grid over which the collectives run."""

    def __init__(self, comm: Comm, name: Axis = "tp") -> None:
        self.name, self.index, self.size = name, comm.grid.index(name), comm.grid.size(name)
        self.nested = name in ("tp", "cp") and comm.grid.cp > 1 and comm.grid.tp > 1
        self.dry = False
        self.listener: Listener | None = None
        self._comm = comm

    @contextmanager
    def filling_waits(self, spare: Callable[[], None], device: torch.device) -> Iterator[None]:
        """Calls ``spare``, for other work, before each wait for a collective of this axis, or for an exchange of expert
        rows, inside the context.

        On a ``device`` without overlap, ``spare`` is not called.
        """
        if device.type not in self.overlap.devices:
            yield
            return
        self.fill_wait = self._comm.fill_wait = spare
        try:
            yield
        finally:
            self.fill_wait = self._comm.fill_wait = None

    @contextmanager
    def dry_run(self) -> Iterator[None]:
        """Makes the axis dry inside the context: collectives send nothing and are reported to ``listener``."""
        before, self.dry = self.dry, True
        try:
            yield
        finally:
            self.dry = before

    def expect(self, op: Op, label: str, whole: Tensor, made: Tensor | None = None) -> None:
        """Reports the collective ``op`` to ``listener``, only in a run without communication.

        ``whole``: a tensor of the full size, for the number of bytes. ``made``: for a collective in backward, the
        tensor returned by forward, with a ``grad_fn`` that runs the collective; None for a collective in forward.
        """
        # a trace runs each operation a second time on fake tensors, to learn the dtype that autocast chooses
        if not self.dry or self.listener is None or isinstance(whole, FakeTensor):
            return
        node = None if made is None else made.grad_fn
        for sent, size in self._as_sent(op, label, whole):
            self.listener(Expected(sent, label, size, made is not None), node)

    def _as_sent(self, op: Op, label: str, whole: Tensor) -> tuple[tuple[Op, int], ...]:
        """Returns the collectives of a call, each with the bytes of the full tensor."""
        if self.wire is not None and self.wire.encodes(label, whole.dtype, whole.numel(), self.size):
            return self.wire.collectives(op, whole.numel(), self.size)
        return ((op, whole.numel() * whole.element_size()),)

    def _encoded(self, label: str, whole: Tensor) -> EncodedCollectives | None:
        """Returns the collectives that send ``whole`` in fewer bits; None: the collective is exact."""
        if self.wire is None or not self.wire.encodes(label, whole.dtype, whole.numel(), self.size):
            return None
        return EncodedCollectives(self._comm, self.name, self.wire, self.kernels)

    def all_reduce(self, tensor: Tensor, label: str, op: Reduction = "sum") -> None:
        """Reduces the contiguous ``tensor`` over the axis in place, with ``op`` "sum" or "max"."""
        self.start_all_reduce(tensor, label, op).wait()

    def all_gather(self, part: Tensor, label: str) -> Tensor:
        """Gathers the contiguous ``part`` [...] of all ranks into a new tensor [size, ...], in rank order.

        ``part`` has the same shape on all ranks.
        """
        full, pending = self.start_all_gather(part, label)
        pending.wait()
        return full

    def reduce_scatter(self, full: Tensor, label: str) -> Tensor:
        """Sums ``full`` [size, ...] over the ranks and returns this rank's slice [...] of the sum as a new tensor.

        ``full`` must be contiguous; its elements may be overwritten.
        """
        part, pending = self.start_reduce_scatter(full, label)
        pending.wait()
        return part

    def start_all_reduce(self, tensor: Tensor, label: str, op: Reduction = "sum") -> Pending:
        """Starts :meth:`all_reduce` of ``tensor`` and returns a handle; its ``wait`` completes ``tensor``."""
        if self.dry or self.size == 1:
            self.expect("all_reduce", label, tensor)
            return Pending()
        return self._start(tensor, tensor, lambda: self._all_reduce(tensor, label, op))

    def start_all_gather(self, part: Tensor, label: str) -> tuple[Tensor, Pending]:
        """Starts :meth:`all_gather` of ``part``. Returns (result, handle); the result is complete after the handle's
        ``wait``.
        """
        if self.dry or self.size == 1:
            full = part.expand(self.size, *part.shape)
            self.expect("all_gather", label, full)
            return full, Pending()
        full = part.new_empty((self.size, *part.shape))
        return full, self._start(full, full, lambda: self._all_gather(full, part, label))

    def start_reduce_scatter(self, full: Tensor, label: str) -> tuple[Tensor, Pending]:
        """Starts :meth:`reduce_scatter` of ``full``. Returns (result, handle); the result is complete after the
        handle's ``wait``.
        """
        if self.dry or self.size == 1:
            self.expect("reduce_scatter", label, full)
            return full[self.index], Pending()
        part = full.new_empty(full.shape[1:])
        return part, self._start(full, part, lambda: self._reduce_scatter(part, full, label))

    def start_exchange(
        self, given: Tensor, gives: Sequence[int], gets: Sequence[int], label: str
    ) -> tuple[Tensor, Pending]:
        """Starts an all-to-all of rows: ``gives[r]`` rows of ``given`` to rank r, ``gets[r]`` rows from it.

        Returns:
            (rows, handle): the received rows [sum of gets, ..] in rank order, ready after the handle's ``wait``; zeros
                if nothing is communicated.
        """
        received = given.new_empty((sum(gets), *given.shape[1:]))
        if self.dry or self.size == 1:
            return received.zero_(), Pending()
        return received, self._start(given, received, lambda: self._exchanged(received, given, gives, gets, label))

    def exchange(self, given: Tensor, gives: Sequence[int], gets: Sequence[int], label: str) -> Tensor:
        """Exchanges rows as :meth:`start_exchange`, waits, and returns the received rows; all ranks must call it."""
        if self.dry or self.size == 1:
            return given.new_zeros((sum(gets), *given.shape[1:]))
        received, pending = self.start_exchange(given, gives, gets, label)
        pending.wait()
        return received

    def expect_rows(self, label: str, sent: tuple[int, ...], whole: Tensor, made: Tensor | None = None) -> None:
        """Reports an all-to-all exchange to ``listener``, only in a run without communication.

        ``sent[r]``: bytes that rank r sends of the tensor ``whole``. ``made``: for an exchange in backward, the tensor
        returned by forward, with a ``grad_fn`` that runs the exchange; None for an exchange in forward.
        """
        if self.dry and self.listener is not None and not isinstance(whole, FakeTensor):
            node = None if made is None else made.grad_fn
            self.listener(ExpectedRows("exchange", label, sent, made is not None), node)

    def in_kernel(self, op: Op, full: Tensor, label: str, call: Callable[[], Wait]) -> Pending:
        """Launches, by ``call``, a kernel that performs the collective ``op``; counts the bytes of ``full`` as traffic.

        Returns a handle to wait for.
        """
        return self._comm.in_kernel(op, full, self.name, label, call)

    def _start(self, given: Tensor, result: Tensor, start: Callable[[], Pending]) -> Pending:
        pending = start() if self.repeats is None else self.repeats.collective(given, result, start)
        return pending if self.fill_wait is None else pending.beside(self._use_wait)

    def _use_wait(self) -> None:
        if self.fill_wait is not None:
            self.fill_wait()

    def _exchanged(
        self, received: Tensor, given: Tensor, gives: Sequence[int], gets: Sequence[int], label: str
    ) -> Pending:
        return self._comm.exchange(received, given, gets, gives, self.name, label)

    def _all_reduce(self, tensor: Tensor, label: str, op: Reduction) -> Pending:
        encoded = self._encoded(label, tensor) if op == "sum" else None
        return encoded.all_reduce(tensor, label) if encoded else self._comm.all_reduce(tensor, self.name, label, op)

    def _all_gather(self, full: Tensor, part: Tensor, label: str) -> Pending:
        if (encoded := self._encoded(label, full)) is not None:
            return encoded.all_gather(full.view(-1), part.view(-1), label)
        return self._comm.all_gather(full.view(-1), part.view(-1), self.name, label)

    def _reduce_scatter(self, part: Tensor, full: Tensor, label: str) -> Pending:
        if (encoded := self._encoded(label, full)) is not None:
            return encoded.reduce_scatter(part.view(-1), full.view(-1), label)
        return self._comm.reduce_scatter(part.view(-1), full.view(-1), self.name, label)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TensorAxis":
        """Returns ``self``: a copied model communicates through the same processes."""
        return self


class DryAxis(TensorAxis):
    """Tensor axis for runs without communication in one process, as rank 0 of ``size`` ranks."""

    def __init__(self, size: int, listener: Listener | None = None, name: Axis = "tp") -> None:
        self.name, self.index, self.size, self.dry, self.listener = name, 0, size, True, listener
