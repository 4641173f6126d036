"""The collectives of a group of ranks that take turns: each brings its part to the next one, and waits for all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from engine.errors import EngineError
from engine.kernels.device import PostedCopy
from engine.parallel.comm.threads.turns import Turns


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
