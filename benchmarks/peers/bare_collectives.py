"""Replays the collectives of one Trine step without a model: equal calls and bytes, one after another.

The collectives are recorded at Trine's communication backend in one real step. Their time is a lower bound, which
faster Python in the engine cannot undercut.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from benchmarks.peers.trine import Trine
from benchmarks.peers.workload import Mode, Workload

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "gather_parameters", "exchange_gathers")
TRAINED_STEPS = 1
"""Number of steps before the recorded one, since the first step communicates more."""


@dataclass
class _Recording:
    """A backend of communication whose collectives are noted, with tensors of their own in the places of theirs."""

    inner: Any
    calls: list[Callable[[], Any]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        real = getattr(self.inner, name)
        return (lambda *given: self._note(real, given)) if name in COLLECTIVES else real

    def _note(self, real: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        memory: dict[int, torch.UntypedStorage] = {}
        own = tree_map(lambda value: _apart(value, memory) if isinstance(value, Tensor) else value, given)
        self.calls.append(lambda: real(*own))
        return real(*given)


class BareCollectives(Trine):
    """:class:`Trine` with steps that, from the third on, repeat only the collectives of the second."""

    def __init__(self, mode: Mode, workload: Workload) -> None:
        super().__init__(mode, workload)
        self._steps, self._loss, self._recording = 0, 0.0, _Recording(None)

    def step(self, rows: Tensor) -> float:
        self._steps += 1
        if self._steps <= TRAINED_STEPS:
            return super().step(rows)
        if self._steps == TRAINED_STEPS + 1:
            self._loss = self._recorded(rows)
            return self._loss
        for call in self._recording.calls:
            if callable(wait := call()):
                wait()
        return self._loss

    def _recorded(self, rows: Tensor) -> float:
        comm: Any = self._engine.comm
        comm._backend = self._recording = _Recording(comm._backend)
        try:
            return super().step(rows)
        finally:
            comm._backend = self._recording.inner


def _apart(tensor: Tensor, memory: dict[int, torch.UntypedStorage]) -> Tensor:
    """A tensor of the same shape in a copy of its memory, which those share that shared it before."""
    with torch._C.DisableTorchFunctionSubclass():
        there = tensor.untyped_storage()
        kept = memory.setdefault(there._cdata, there.clone())  # type: ignore[no-untyped-call]
        return torch.empty(0, dtype=tensor.dtype).set_(kept, tensor.storage_offset(), tensor.shape, tensor.stride())
