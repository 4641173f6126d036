"""What a step gathers on this rank, and what all ranks then agree on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from engine.parallel.comm.traffic import Tally
from engine.planning.budgets import CONTROL_SCALARS
from engine.program.batch import Batch, count_tokens, is_text
from engine.program.loss import WeightedLoss

Scalar = TypeVar("Scalar")


@dataclass(slots=True)
class StepState:
    """What a step has gathered on this rank so far."""

    started: float
    sent: Tally
    loss: Tensor
    """fp64, 0-dim, on the device: reading it would wait for the GPU."""
    weight: Tensor
    scale: float = 1.0
    """What backward multiplies the loss with, and the update divides by."""
    seconds: float = 0.0
    tokens: int = 0
    text: bool = False
    """Tokens are tokens, not rows."""
    microbatches: int = 0
    problem: Exception | None = None
    outputs: list[Any] = field(default_factory=list)
    look_again: Callable[[], None] | None = None
    """Raises where a loss that is not a number comes from a forward that has changed; all ranks call it together."""

    def count(self, loss: WeightedLoss, microbatch: Batch) -> None:
        """Add one microbatch."""
        self.loss += loss.sum.detach()
        self.weight += loss.weight
        self.tokens += count_tokens(microbatch)
        self.text = is_text(microbatch)
        self.microbatches += 1

    def root(self, loss: Tensor) -> Tensor:
        """What backward starts from; a scaled fp16 loss would overflow in its own dtype."""
        return loss if self.scale == 1.0 else loss.float() * self.scale


class StepTotals(NamedTuple, Generic[Scalar]):
    """The values that are summed over the world once a step: floats, or 0-dim fp64 tensors before the host reads them.

    ``pack`` and ``unpack`` are the only places that know their order on the wire.
    """

    loss: Scalar
    """The weighted loss, from the ranks that have it."""
    weight: Scalar
    squared_norm: Scalar
    """Sum of squares of the gradients that a rank counts, scaled by the loss scale."""
    tokens: Scalar
    problems: Scalar
    """Ranks that failed in this step."""
    stops: Scalar
    """Ranks that were asked to stop."""

    @staticmethod
    def pack(step: StepState, squared_norm: Tensor | float, speaks: bool, stop: bool) -> Tensor:
        """This rank's share, [``CONTROL_SCALARS``] fp64 on the device of the loss.

        ``speaks``: this rank gives loss, weight and tokens; one rank of each data coordinate does.
        """
        share = StepTotals[Tensor | float](
            loss=step.loss if speaks else 0.0,
            weight=step.weight if speaks else 0.0,
            squared_norm=squared_norm,
            tokens=float(step.tokens) if speaks else 0.0,
            problems=float(step.problem is not None),
            stops=float(stop),
        )
        packed = torch.zeros(CONTROL_SCALARS, dtype=torch.float64, device=step.loss.device)
        for place, value in enumerate(share):
            packed[place] = value
        return packed

    @staticmethod
    def on_device(packed: Tensor) -> "StepTotals[Tensor]":
        """The sums as 0-dim views of ``packed``; the host does not wait."""
        return StepTotals(*packed.unbind())

    @staticmethod
    def unpack(values: Sequence[float]) -> "StepTotals[float]":
        """The sums as the host has read them."""
        return StepTotals(*values)
