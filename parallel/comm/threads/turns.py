"""Threads that take turns: one runs until it waits for another, and then hands over.

    rank 0   ███ waits ········ ██████ ends
    rank 1             ██ waits ······ ····· ███ ends
    rank 2                  ███████ waits ·······  ███ ends

So a run is the same every time, and a deadlock is found when it happens: everybody waits, and each says for what. What
a process has one of (random generators, the default dtype) is put away at each hand-over: every rank has its own. So is
the generator of a device that several ranks share.
"""

import copy
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils import checkpoint

from engine.errors import EngineError
from engine.kernels.device import PostedCopy

Result = TypeVar("Result")
_NUMPY: Any = np.random  # its stubs lack the exchange of generators


class DeadlockError(EngineError):
    """All ranks wait for each other; the message says who waits for what."""


class _AbortedError(EngineError):
    """Another rank has raised."""


@dataclass(slots=True)
class _Rank(Generic[Result]):
    """One thread; ``ready`` tells whether what it waits for has come."""

    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ready: Callable[[], bool] | None = None
    what: Callable[[], str] = str
    ended: bool = False
    results: list[Result] = field(default_factory=list)
    problem: BaseException | None = None


class Turns:
    """``size`` ranks that take turns; the order depends on nothing but what they wait for.

    ``generators`` are those of devices that several ranks share.
    """

    def __init__(self, size: int, generators: Sequence[torch.Generator] = ()) -> None:
        self._generators = generators
        self._ranks: list[_Rank[Any]] = [_Rank() for _ in range(size)]
        self._failed = False
        self._deadlock = ""

    def run(self, body: Callable[[int], Result]) -> list[Result]:
        """``body(rank)`` of every rank, in rank order.

        Raises:
            DeadlockError: all ranks that have not ended wait for each other.
            Exception: the one of the first rank that raised; others end where they wait for what does not come.
        """
        process = _ProcessState.take(self._generators)
        grad = torch.is_grad_enabled()

        def thread(index: int) -> None:
            rank = self._ranks[index]
            rank.turn.acquire()
            process.put(self._generators)
            _NUMPY.set_bit_generator(copy.deepcopy(process.numpy))
            torch.set_grad_enabled(grad)
            try:
                rank.results.append(body(index))
            except BaseException as problem:
                rank.problem = problem
                self._failed = True
            rank.ended = True
            self._hand_over(index)

        threads = [threading.Thread(target=thread, args=(index,), daemon=True) for index in range(len(self._ranks))]
        for one in threads:
            one.start()
        self._ranks[0].turn.release()
        try:
            for one in threads:
                one.join()
        finally:
            process.put(self._generators)
        problem = self._take_problem()
        try:
            if problem is not None:
                raise problem
        finally:
            del problem  # this frame is in its traceback: they would keep each other, and all tensors of the ranks
        return [rank.results[0] for rank in self._ranks]

    def _take_problem(self) -> BaseException | None:
        """The first error of a rank's own, which no rank keeps."""
        problems = [rank.problem for rank in self._ranks if rank.problem is not None]
        for rank in self._ranks:
            rank.problem = None
        own = (problem for problem in problems if not isinstance(problem, _AbortedError))
        return next(own, problems[0] if problems else None)

    def wait(self, index: int, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Let other ranks run until ``ready``; ``what`` this rank waits for, in words. Called by its thread alone.

        Raises:
            DeadlockError: no rank can go on.
        """
        rank = self._ranks[index]
        if ready():
            return
        rank.ready, rank.what = ready, what
        process = _ProcessState.take(self._generators)
        self._hand_over(index)
        rank.turn.acquire()
        process.put(self._generators)
        rank.ready = None
        if self._deadlock:
            raise DeadlockError(self._deadlock)
        if not ready():  # what has come is taken, as by processes: the cause may be an error that is told next
            raise _AbortedError("another rank has raised")

    def _hand_over(self, index: int) -> None:
        """Wake the next rank that can go on; every rank, if none can: they end by an error."""
        size = len(self._ranks)
        order = [self._ranks[(index + step) % size] for step in range(1, size + 1)]
        left = [rank for rank in order if not rank.ended]
        chosen = next((rank for rank in left if self._failed or rank.ready is None or rank.ready()), None)
        if chosen is None and left:
            self._failed, self._deadlock = True, self._who_waits()
            chosen = left[0]
        if chosen is not None:
            chosen.turn.release()

    def _who_waits(self) -> str:
        told = (
            f"rank {index} {'has ended' if rank.ended else f'waits for {rank.what()}'}"
            for index, rank in enumerate(self._ranks)
        )
        return f"no rank can go on: {'; '.join(told)}."


@dataclass(frozen=True, slots=True)
class _ProcessState:
    """What a process has one of, and each rank needs for itself."""

    generator: torch.Tensor
    random: Any
    numpy: Any
    dtype: torch.dtype
    functions: tuple[Any, ...]
    """Those of :data:`_REPLACED`."""
    shared: tuple[torch.Tensor, ...]
    """The states of generators that ranks share on a device."""

    @staticmethod
    def take(generators: Sequence[torch.Generator]) -> "_ProcessState":
        functions = tuple(vars(owner).get(name, _INHERITED) for owner, name in _REPLACED)
        host = random.getstate(), _NUMPY.get_bit_generator()
        shared = tuple(generator.get_state() for generator in generators)
        return _ProcessState(torch.get_rng_state(), *host, torch.get_default_dtype(), functions, shared)

    def put(self, generators: Sequence[torch.Generator]) -> None:
        torch.set_rng_state(self.generator)
        for generator, state in zip(generators, self.shared, strict=True):
            generator.set_state(state)
        random.setstate(self.random)
        _NUMPY.set_bit_generator(self.numpy)
        torch.set_default_dtype(self.dtype)
        for (owner, name), function in zip(_REPLACED, self.functions, strict=True):
            if function is not _INHERITED:
                setattr(owner, name, function)
            elif name in vars(owner):
                delattr(owner, name)


_INHERITED = object()
_REPLACED: tuple[tuple[Any, str], ...] = (
    (torch.autograd.Function, "apply"),
    (checkpoint.CheckpointFunction, "apply"),
    (checkpoint, "_checkpoint_without_reentrant_generator"),
)
"""Functions of torch that the forward of a pipeline stage replaces while it runs."""


@dataclass(slots=True)
class _Round:
    """One collective: what its ranks have brought so far."""

    calls: dict[int, Any] = field(default_factory=dict)
    parts: dict[int, PostedCopy] = field(default_factory=dict)


@dataclass(slots=True)
class Rounds:
    """The collectives of ``ranks``, in the order in which each of them makes them."""

    turns: Turns
    ranks: Sequence[int]
    _open: dict[int, _Round] = field(default_factory=dict)
    _brought: dict[int, int] = field(default_factory=dict)
    """How many collectives a rank has issued."""

    def bring(self, rank: int, call: Any, part: Tensor) -> Callable[[], list[Tensor]]:
        """Bring a copy of ``part`` to the next collective; the result waits, and gives the parts in the order of ranks,
        on the device of ``part``.

        Raises:
            EngineError: another rank has brought a part to another ``call``, which is named by its ``str``.
        """
        number = self._brought[rank] = self._brought.get(rank, -1) + 1
        round_ = self._open.setdefault(number, _Round())
        for other, theirs in round_.calls.items():
            if theirs != call:
                raise EngineError(
                    f"rank {rank} calls {call} where rank {other} calls {theirs}; all ranks make the same calls in the "
                    "same order."
                )
        round_.calls[rank], round_.parts[rank] = call, PostedCopy(part)

        def absent() -> str:
            return f"{call}, to which ranks {[one for one in self.ranks if one not in round_.parts]} have not come"

        def collect() -> list[Tensor]:
            self.turns.wait(rank, lambda: len(round_.parts) == len(self.ranks), absent)
            self._open.pop(number, None)
            return [round_.parts[one].read_on(part.device) for one in self.ranks]

        return collect
