"""A step that is run again in place: a machine that computes something else the second time is to blame.

Forwards and backwards of a step run twice before its update. Weights, batch and random streams are the same, so the
gradients of every rank are, bit for bit, before they are summed over ranks. Nothing is kept for it but a sum of the
bits of each gradient: the weights have not changed yet, and buffers that forwards write are put back.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.integrity.finding import Finding
from engine.parallel.comm.agreement import bit_sum


class ComputedGradients:
    """Sums of the bits of all gradients that the backwards of this rank have made."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        self._sums = torch.zeros(len(names) + 1, dtype=torch.int64, device=device)
        self._before: Tensor | None = None
        self._differs: Tensor | None = None

    def see(self, name: str, grad: Tensor) -> None:
        """A gradient as a backward has made it, before any sum over ranks."""
        self._sums[self._places[name]] += bit_sum(grad)

    def end(self, loss: Tensor) -> None:
        """End one of the two runs; ``loss``: this rank's sum of losses."""
        self._sums[-1] = bit_sum(loss)
        if self._before is None:
            self._before = self._sums.clone()
        else:
            self._differs, self._before = self._sums != self._before, None
        self._sums.zero_()

    @property
    def noticed(self) -> bool | Tensor:
        """Whether the second run has given anything else, a 0-dim tensor on the device."""
        return self._differs is not None and self._differs.any()

    def findings(self, rank: int, update: int) -> list[Finding]:
        """The first gradient that differed, or the loss; waits for the device."""
        differs, self._differs = self._differs, None
        if differs is None or not differs.any():
            return []
        names = [*self._places, ""]
        first = names[int(differs.nonzero()[0])]
        kind = "gradient" if first else "loss"
        return [Finding(how="rerun", kind=kind, name=first, update=update, ranks=(rank,))]

    @property
    def compared(self) -> bool:
        """Whether a step has been run twice since the last findings."""
        return self._differs is not None
