"""All tensor ranks in one process: one thread per rank, and a meeting at every collective.

No process group is needed, and every thread comes to an end: when a rank raises, or returns while others wait in a
collective, all of them raise. So a plan can be tried before any process of the run relies on it.

    rank 0 ──┐ tensor    ┌── sum ── ...
    rank 1 ──┤ waits for ├── sum ── ...
    rank 2 ──┘ the last  └── sum ── ...
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.parallel.comm.backend import Reduction
from engine.parallel.comm.comm import Pending
from engine.parallel.tensor.tp_axis import TensorAxis

Result = TypeVar("Result")


class CollectiveCall(NamedTuple):
    """A collective as a rank calls it; all ranks make the same calls in the same order."""

    op: str
    label: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class _DisagreementError(EngineError):
    """The ranks called different collectives."""


class _AbortedError(EngineError):
    """Another rank has raised."""


class _Meeting:
    """The ranks exchange tensors here; the last one to arrive releases all."""

    def __init__(self, size: int) -> None:
        self._condition = threading.Condition()
        self._size, self._round, self._ended = size, 0, 0
        self._parts: dict[int, tuple[CollectiveCall, Tensor]] = {}
        self._results: list[Tensor] = []
        self._failed = False

    def exchange(self, index: int, call: CollectiveCall, part: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in rank order, once every rank has brought its own."""
        with self._condition:
            round_ = self._round
            self._parts[index] = call, part
            if len(self._parts) == self._size:
                self._close_round()
            elif self._ended:
                self._failed = True
                self._condition.notify_all()
            while self._round == round_ and not self._failed:
                self._condition.wait()
            if self._failed:
                raise (
                    _DisagreementError("the tensor ranks called different collectives")
                    if self._ended
                    else _AbortedError("")
                )
            return self._results

    def end(self, failed: bool) -> None:
        """A rank has finished, with or without an error."""
        with self._condition:
            self._ended += not failed
            self._failed = self._failed or failed or bool(self._parts)
            self._condition.notify_all()

    def _close_round(self) -> None:
        calls = {call for call, _ in self._parts.values()}
        if len(calls) > 1:
            self._ended, self._failed = 1, True
        else:
            self._results = [self._parts[index][1] for index in range(self._size)]
            self._parts = {}
            self._round += 1
        self._condition.notify_all()


class SimulatedAxis(TensorAxis):
    """The axis of one simulated rank; ``called`` records its collectives."""

    def __init__(self, index: int, size: int, meeting: _Meeting) -> None:
        self.index, self.size, self.dry, self.listener = index, size, False, None
        self.called: list[CollectiveCall] = []
        self._meeting = meeting

    def _all_reduce(self, tensor: Tensor, label: str, op: Reduction) -> Pending:
        parts = torch.stack(self._exchange("all_reduce", label, tensor))
        tensor.copy_(parts.amax(0) if op == "max" else parts.sum(0))
        return Pending()

    def _all_gather(self, full: Tensor, part: Tensor, label: str) -> Pending:
        full.copy_(torch.stack(self._exchange("all_gather", label, part)))
        return Pending()

    def _reduce_scatter(self, part: Tensor, full: Tensor, label: str) -> Pending:
        parts = self._exchange("reduce_scatter", label, full)
        part.copy_(torch.stack([other[self.index] for other in parts]).sum(0))
        return Pending()

    def _exchange(self, op: str, label: str, part: Tensor) -> list[Tensor]:
        call = CollectiveCall(op, label, tuple(part.shape), part.dtype)
        self.called.append(call)
        with torch.no_grad():
            return self._meeting.exchange(self.index, call, part.detach().clone())


def run_tensor_ranks(size: int, body: Callable[[TensorAxis], Result]) -> list[Result]:
    """Run ``body(axis)`` on ``size`` tensor ranks, each a thread of this process; returns their results by rank.

    All threads draw from one random generator in an order that varies, so dropout must be off.

    Raises:
        EngineError: the ranks do not call the same collectives in the same order.
        Exception: the first one that a rank raised.
    """
    meeting = _Meeting(size)
    results: list[Any] = [None] * size
    problems: list[BaseException | None] = [None] * size
    grad = torch.is_grad_enabled()

    def run(index: int) -> None:
        torch.set_grad_enabled(grad)
        try:
            results[index] = body(SimulatedAxis(index, size, meeting))
        except BaseException as problem:
            problems[index] = problem
        finally:
            meeting.end(problems[index] is not None)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raised = [problem for problem in problems if problem is not None]
    first = next((problem for problem in raised if not isinstance(problem, _AbortedError)), None)
    if first is not None:
        raise first
    return results
