"""State that a step collects on this rank, and the totals that all ranks agree on."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.parallel.comm.traffic import Tally
from engine.planning.budgets import CONTROL_SCALARS
from engine.program.batch import Batch, count_tokens, is_text
from engine.program.loss import WeightedLoss

Scalar = TypeVar("Scalar")


class StopRequest(Protocol):
    """Request to end the run, which a signal makes."""

    asked: bool


@dataclass(slots=True)
class RunControl:
    """Reasons against another step of the run; the checkpoints of the run set them."""

    stop: StopRequest | None = None
    """None: nothing can ask this rank to stop."""
    spoiled: bool = False
    """A failed load has replaced only some of the weights."""
    problem: Exception | None = None
    """The failed save that has to stop the run (``checkpoint.on_failure``)."""

    @property
    def stop_asked(self) -> bool:
        """True after this rank was asked to stop after its step."""
        return self.stop is not None and self.stop.asked

    def refuse_spoiled(self) -> None:
        """Raises if a failed load has left a mixture of weights.

        Raises:
            CheckpointError: a failed load has replaced only some of them.
        """
        if self.spoiled:
            raise CheckpointError(
                "the last load_checkpoint or checkpoint.init_from failed midway, so the weights are a mixture of old "
                "and new values; load another checkpoint before training."
            )

    def take_problem(self) -> Exception | None:
        """Returns the problem and clears it."""
        problem, self.problem = self.problem, None
        return problem


@dataclass(slots=True)
class StepState:
    """State of a step on this rank so far."""

    started: float
    sent: Tally
    loss: Tensor
    """Sum of losses: fp64, 0-dim, on the device, since reading it would wait for the GPU."""
    weight: Tensor
    scale: float = 1.0
    """Loss scale: backward multiplies the loss by it, and the update divides by it."""
    added_ranks: int = 1
    """Data ranks with gradients that are added instead of averaged; 1: they are averaged."""
    max_norm: float | None = None
    """Norm to which this step clips gradients; None: ``gradient_clipping`` of the configuration."""
    seconds: float = 0.0
    tokens: int = 0
    text: bool = False
    """``tokens`` counts tokens, not rows."""
    microbatches: int = 0
    unseen: bool = False
    """True after a backward of the user's own with a loss that the engine did not receive."""
    reduced: bool = False
    """Gradients are reduced already, because the user has read them."""
    problem: BaseException | None = None
    compares_paths: bool = False
    """An attribute of the model has changed on a rank of the replica, so its ranks compare their traces."""
    digest: int = 0
    """Small digest of the batch, from 1; 0: not compared in this step."""
    copies: Tensor | float | None = None
    """Digest of weights that other ranks hold as well; None: they are not compared in this step."""
    metrics: list[Tensor | float] = field(default_factory=list)
    """Sum and weight of each metric so far, one after the other."""
    experts: Tensor | None = None
    """Rows of each expert so far, fp64 [experts of all layers]; None: they are not counted."""
    outputs: list[Any] = field(default_factory=list)
    check_trace: Callable[[], None] | None = None
    """Traces again after a NaN loss, and raises if the forward has changed; all ranks call it together."""

    def count(self, loss: WeightedLoss, microbatch: Batch) -> None:
        """Adds one microbatch."""
        self.add(loss)
        self.see(microbatch)
        self.microbatches += 1

    def add(self, loss: WeightedLoss) -> None:
        """Adds the loss of a microbatch, or one of its losses."""
        self.loss += loss.sum.detach()
        self.weight += loss.weight
        if loss.metrics:
            before = self.metrics or [0.0] * len(loss.metrics)
            more = [part.double() if isinstance(part, Tensor) else part for part in loss.metrics]
            self.metrics = [old + new for old, new in zip(before, more, strict=True)]

    def see(self, microbatch: Batch) -> None:
        """Adds the tokens of a microbatch."""
        self.tokens += count_tokens(microbatch)
        self.text = is_text(microbatch)

    @property
    def divides(self) -> float:
        """Divisor of the summed gradients for each unit of weight."""
        return self.scale / self.added_ranks

    @property
    def counted(self) -> int:
        """Number of experts with counted rows."""
        return 0 if self.experts is None else self.experts.numel()

    def again(self) -> "StepState":
        """Returns the state of the same step before it has begun."""
        zero = torch.zeros_like(self.loss)
        experts = None if self.experts is None else torch.zeros_like(self.experts)
        again = StepState(self.started, self.sent.copy(), zero, zero.clone(), scale=self.scale, experts=experts)
        again.added_ranks = self.added_ranks
        again.compares_paths = self.compares_paths
        return again

    def root(self, loss: Tensor) -> Tensor:
        """Returns the scaled loss, from which backward starts, in fp32, because a scaled fp16 loss would overflow."""
        return loss if self.scale == 1.0 else loss.float() * self.scale


class StepTotals(NamedTuple, Generic[Scalar]):
    """Values that are summed over the world once per step: floats, or 0-dim fp64 tensors until the host reads them.

    ``pack`` and ``unpack`` are the only places that know their order on the wire.
    """

    loss: Scalar
    """Sum of losses, from the ranks that compute it."""
    weight: Scalar
    squared_norm: Scalar
    """Sum of squares of the gradients, which still contain the loss scale; each gradient counts once."""
    tokens: Scalar
    problems: Scalar
    """Number of ranks that failed in this step."""
    stops: Scalar
    """Number of ranks that were asked to stop."""
    digest: Scalar
    """Sum of the digests of the data ranks' batches, and below of their squares."""
    digest_squared: Scalar
    """In a step that compares copies of weights, and no batches, the sum of their digests."""
    unused: Scalar
    """Number of parameters, over all ranks, that may be used otherwise than the optimizer takes for granted."""
    metrics: tuple[Scalar, ...] = ()
    """Sum and weight of each metric, one after the other."""
    experts: tuple[Scalar, ...] = ()
    """Rows of each expert of each layer, from one tensor rank of each stage."""

    @staticmethod
    def pack(
        step: StepState, squared_norm: Tensor | float, speaks: bool, stop: bool, unused: int = 0, metrics: int = 0
    ) -> Tensor:
        """Returns this rank's summands, [``CONTROL_SCALARS`` + 2 x ``metrics`` + experts] fp64 on the device of the
        loss.

        ``speaks``: this rank contributes loss, weight and tokens; one rank of each data coordinate does.
        """
        share = StepTotals[Tensor | float](
            loss=step.loss if speaks else 0.0,
            weight=step.weight if speaks else 0.0,
            squared_norm=squared_norm,
            tokens=float(step.tokens) if speaks else 0.0,
            problems=float(step.problem is not None),
            stops=float(stop),
            digest=float(step.digest if speaks else 0),
            digest_squared=step.copies if step.copies is not None else float(step.digest**2 if speaks else 0),
            unused=float(unused),
        )
        packed = torch.zeros(CONTROL_SCALARS + 2 * metrics, dtype=torch.float64, device=step.loss.device)
        for place, value in enumerate((*share[:CONTROL_SCALARS], *(step.metrics if speaks else ()))):
            packed[place] = value
        return packed if step.experts is None else torch.cat([packed, step.experts])

    def same_batch(self, data_ranks: int) -> bool:
        """Returns True if all data ranks got one batch: equal digests have the least sum of squares for their sum."""
        total, squares = int(self.digest), int(self.digest_squared)  # type: ignore[call-overload]
        return total > 0 and data_ranks > 1 and data_ranks * squares == total**2

    @staticmethod
    def on_device(packed: Tensor) -> "StepTotals[Tensor]":
        """Returns the sums as 0-dim views of ``packed``, without metrics and experts; the host does not wait."""
        return StepTotals._make([*packed[:CONTROL_SCALARS].unbind(), (), ()])

    @staticmethod
    def unpack(values: Sequence[float], experts: int) -> "StepTotals[float]":
        """Returns the sums after the host has read them; the last ``experts`` sums are those of experts."""
        end = len(values) - experts
        return StepTotals._make([*values[:CONTROL_SCALARS], tuple(values[CONTROL_SCALARS:end]), tuple(values[end:])])


def metric_averages(totals: StepTotals[float], names: Sequence[str]) -> dict[str, float]:
    """Returns each metric's sum over its weight; NaN for a weight of 0."""
    pairs = zip(names, totals.metrics[::2], totals.metrics[1::2], strict=False)
    return {name: total / weight if weight else math.nan for name, total, weight in pairs}
