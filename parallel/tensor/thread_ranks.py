"""Tensor ranks as threads of one process, which meet at every collective.

No process group is needed, and every thread ends: if a rank raises, or returns while others wait in a collective, all
of them raise. A plan can therefore be tested before the processes of the run use it.

    rank 0 ──┐ tensor    ┌── sum ── ...
    rank 1 ──┤ waits for ├── sum ── ...
    rank 2 ──┘ the last  └── sum ── ...
"""

import ctypes
from collections import Counter
from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from engine.parallel.comm.backend import Reduction
from engine.parallel.comm.comm import Pending
from engine.parallel.comm.threads import Rounds, Turns
from engine.parallel.tensor.tp_axis import TensorAxis

Result = TypeVar("Result")


class CollectiveCall(NamedTuple):
    """Record of one collective call on a simulated rank. All ranks must make the same calls in the same order."""

    op: str
    label: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.op} {self.label!r} of {list(self.shape)} {self.dtype}"


class SimulatedAxis(TensorAxis):
    """Tensor-parallel communication of a simulated rank, which runs as a thread. ``called`` records its collectives."""

    def __init__(self, index: int, size: int, rounds: Rounds) -> None:
        self.index, self.size, self.dry, self.listener = index, size, False, None
        self.called: list[CollectiveCall] = []
        self.sent: Counter[str] = Counter()
        """Number of elements sent to other ranks by exchanges, by label."""
        self._rounds = rounds

    def _all_reduce(self, tensor: Tensor, label: str, op: Reduction) -> Pending:
        parts = self._exchange("all_reduce", label, tensor)
        tensor.copy_(reduce(torch.maximum if op == "max" else torch.add, parts))
        return Pending()

    def _all_gather(self, full: Tensor, part: Tensor, label: str) -> Pending:
        for own, other in zip(full.unbind(), self._exchange("all_gather", label, part), strict=True):
            own.copy_(other)
        return Pending()

    def _reduce_scatter(self, part: Tensor, full: Tensor, label: str) -> Pending:
        parts = self._exchange("reduce_scatter", label, full)
        part.copy_(reduce(torch.add, [other[self.index] for other in parts]))
        return Pending()

    def _exchanged(
        self, received: Tensor, given: Tensor, gives: Sequence[int], gets: Sequence[int], label: str
    ) -> Pending:
        self.sent[label] += sum(gives) - gives[self.index]
        tables = self._exchange("exchange of counts", label, torch.tensor(gives))
        brought = self._exchange("exchange", label, given, even=False)
        parts = [torch.split(part, row.tolist())[self.index] for part, row in zip(brought, tables, strict=True)]
        assert [len(part) for part in parts] == list(gets), f"rank {self.index} expects {gets} elements"
        received.copy_(torch.cat(parts))
        return Pending()

    def _exchange(self, op: str, label: str, part: Tensor, even: bool = True) -> list[Tensor]:
        call = CollectiveCall(op, label, tuple(part.shape) if even else (), part.dtype)
        self.called.append(call)
        if part.nbytes >= _LARGE:
            _give_back_memory()
        return self._rounds.bring(self.index, call, part)()


_LARGE = 2**20
"""Bytes of a tensor from which on free memory is returned to the system before a collective."""


def _give_back_memory() -> None:
    """Returns free memory to the system: each thread has its own heap, and other ranks cannot use its free memory."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
    if trim is not None:
        trim(0)


def run_tensor_ranks(size: int, body: Callable[[TensorAxis], Result]) -> list[Result]:
    """Runs ``body(axis)`` on ``size`` simulated tensor ranks, each a thread; returns the results in rank order.

    Ranks run one at a time, so results are deterministic.

    Raises:
        EngineError: the ranks do not call the same collectives in the same order.
        Exception: the first error that a rank raises.
    """
    turns = Turns(size)
    rounds = Rounds(turns, range(size))
    return turns.run(lambda index: body(SimulatedAxis(index, size, rounds)))
