"""What a step gathers on this rank, and what all ranks then agree on."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from engine.parallel.comm.traffic import Tally
from engine.program.batch import Batch, count_tokens, is_text
from engine.program.loss import WeightedLoss


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


@dataclass(frozen=True, slots=True)
class StepTotals:
    """The sums that all ranks agree on once a step."""

    loss: float
    weight: float
    squared_norm: float
    tokens: float
    problems: float
    stops: float
    """Ranks that were asked to stop."""
