"""State that a step accumulates on this rank, and the totals that are summed over all ranks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.parallel.comm.traffic import Tally
from engine.planning.budgets import CONTROL_SCALARS
from engine.program.batch import Batch, count_tokens, is_text
from engine.program.loss import WeightedLoss

Scalar = TypeVar("Scalar")


ENDS_TRIAL = 2.0**32
"""Summand of ``StepTotals.stops`` by which rank 0 ends a trial; the ranks that have received SIGTERM sum to less."""


class StopRequest(Protocol):
    """Interface of a flag, ``asked``, that SIGTERM sets on this rank to end the run after the running step."""

    asked: bool


class TrialControl(Protocol):
    """Interface by which a hyperparameter sweep controls its trial, this engine's training run."""

    asked: bool
    """True on rank 0 if the trial has to end after the next step."""

    def end(self) -> None:
        """Ends the trial; all ranks call it after the same step."""

    def save_folder(self, folder: Path) -> Path:
        """Returns a folder that only this trial uses, for saves to the shared ``folder``."""

    def load_folder(self, folder: Path) -> Path:
        """Returns the folder with this trial's own checkpoints if there are any, else ``folder``."""


@dataclass(slots=True)
class RunControl:
    """Conditions that can stop the run before its next step: a stop request, a failed load or save, a sweep's trial."""

    stop: StopRequest | None = None
    """Stop request of this rank; None if no signal can set one."""
    spoiled: bool = False
    """True after a failed load has replaced only some of the weights."""
    problem: Exception | None = None
    """Error of a failed save that has to stop the run (``checkpoint.on_failure``)."""
    trial: TrialControl | None = None
    """Trial of a sweep; None outside of a sweep."""

    @property
    def stops(self) -> float:
        """This rank's reasons to stop: 1 for a stop request, plus ``ENDS_TRIAL`` (2^32) if the sweep's trial ends."""
        ends = self.trial is not None and self.trial.asked
        return (self.stop is not None and self.stop.asked) + ENDS_TRIAL * ends

    def end_trial(self) -> None:
        """Ends the trial of a sweep, or does nothing outside of a sweep; all ranks call it after the same step."""
        if self.trial is not None:
            self.trial.end()

    def save_folder(self, folder: Path) -> Path:
        """Returns the folder for a save to ``folder``: in a hyperparameter sweep a folder of this trial, else
        ``folder``.
        """
        return folder if self.trial is None else self.trial.save_folder(folder)

    def load_folder(self, folder: Path) -> Path:
        """Returns the folder for a load from ``folder``: a sweep trial's own folder if it has checkpoints, else
        ``folder``.
        """
        return folder if self.trial is None else self.trial.load_folder(folder)

    def refuse_spoiled(self) -> None:
        """Raises if weights are a mixture of old and loaded values.

        Raises:
            CheckpointError: a failed load has replaced only some weights.
        """
        if self.spoiled:
            raise CheckpointError(
                "the last load_checkpoint or checkpoint.init_from failed midway, so the weights are a mixture of old "
                "and new values; load another checkpoint before training."
            )

    def take_problem(self) -> Exception | None:
        """Returns the error of a failed save that has to stop the run, and forgets it; None if there is none."""
        problem, self.problem = self.problem, None
        return problem


@dataclass(slots=True)
class StepState:
    """Sums and flags that one step accumulates on this rank."""

    started: float
    sent: Tally
    loss: Tensor
    """Sum of losses: fp64, 0-dim, on the device, to avoid host synchronization."""
    weight: Tensor
    scale: float = 1.0
    """Loss scale: the backward multiplies the loss by it, and the update divides by it."""
    added_ranks: int = 1
    """Number of data ranks over which gradients are summed instead of averaged; 1: averaged over all."""
    max_norm: float | None = None
    """L2 norm to which this step clips gradients; None: ``gradient_clipping`` of the configuration."""
    seconds: float = 0.0
    tokens: int = 0
    text: bool = False
    """True if ``tokens`` counts token ids, False if it counts rows."""
    microbatches: int = 0
    rows: int | None = None
    """Rows of all data ranks; None: ``train_batch_size``."""
    unseen: bool = False
    """True after a backward of the user's loop with a loss that the engine did not receive."""
    reduced: bool = False
    """True if gradients are reduced already, because the user has read them."""
    problem: BaseException | None = None
    compares_paths: bool = False
    """True if the ranks of a replica compare their traces, because a model attribute has changed on one of them."""
    digest: int = 0
    """Hash of the batch, from 1; 0: batches are not compared in this step."""
    copies: Tensor | float | None = None
    """Digest of replicated weights; None: weights are not compared in this step."""
    metrics: list[Tensor | float] = field(default_factory=list)
    """Sum and weight of each metric so far: [sum, weight, sum, weight, ...]."""
    experts: Tensor | None = None
    """Tokens routed to each expert so far, fp64 [experts of all layers]; None: not counted."""
    used: frozenset[str] = frozenset()
    """Parameters that other sites may have used: their update is made, also if this site has not used them."""
    figures: dict[str, float] = field(default_factory=dict)
    """Numbers of step parts for the report, by name such as "outer/clock"."""
    outputs: list[Any] = field(default_factory=list)
    check_trace: Callable[[], None] | None = None
    """Callback after a NaN loss: traces again, and raises if the forward has changed. Collective."""

    def count(self, loss: WeightedLoss, microbatch: Batch) -> None:
        """Adds loss, loss weight and tokens of ``microbatch`` to the step's sums, and counts the microbatch."""
        self.add(loss)
        self.see(microbatch)
        self.microbatches += 1

    def add(self, loss: WeightedLoss) -> None:
        """Adds sum, weight and metrics of ``loss`` to the step's sums, without counting a microbatch."""
        self.loss += loss.sum.detach()
        self.weight += loss.weight
        if loss.metrics:
            before = self.metrics or [0.0] * len(loss.metrics)
            more = [part.double() if isinstance(part, Tensor) else part for part in loss.metrics]
            self.metrics = [old + new for old, new in zip(before, more, strict=True)]

    def see(self, microbatch: Batch) -> None:
        """Adds the tokens of a microbatch to ``tokens``, or its rows if it has no token ids."""
        self.tokens += count_tokens(microbatch)
        self.text = is_text(microbatch)

    @property
    def divides(self) -> float:
        """Loss scale, divided by the number of data ranks if ``gradient_allreduce_op`` is "sum". The divisor of
        gradients is the product of this value and the sum of loss weights.
        """
        return self.scale / self.added_ranks

    @property
    def counted(self) -> int:
        """Number of experts in all layers if their tokens are counted, else 0."""
        return 0 if self.experts is None else self.experts.numel()

    def again(self) -> "StepState":
        """Returns a new state with zero sums, for a second run of the step that this state describes."""
        zero = torch.zeros_like(self.loss)
        experts = None if self.experts is None else torch.zeros_like(self.experts)
        again = StepState(self.started, self.sent.copy(), zero, zero.clone(), scale=self.scale, experts=experts)
        again.added_ranks = self.added_ranks
        again.compares_paths = self.compares_paths
        return again

    def root(self, loss: Tensor) -> Tensor:
        """Returns ``loss`` times the loss scale, from which the backward starts; in fp32 if the scale is not 1."""
        return loss if self.scale == 1.0 else loss.float() * self.scale


class StepTotals(NamedTuple, Generic[Scalar]):
    """Totals of a step, summed over all ranks; the fields have the order of the all-reduced tensor.

    A total is a 0-dim fp64 tensor on the device, or a float on the host.
    """

    loss: Scalar
    """Sum of losses over all microbatches and data ranks."""
    weight: Scalar
    squared_norm: Scalar
    """Sum of squared gradients, including the loss scale; each gradient counts once."""
    tokens: Scalar
    problems: Scalar
    """Number of ranks that failed in this step."""
    stops: Scalar
    """Number of ranks that have received SIGTERM, plus ``ENDS_TRIAL`` if the trial of a sweep ends."""
    digest: Scalar
    """Sum of the batch hashes of all data ranks."""
    digest_squared: Scalar
    """Sum of the squared batch hashes; in a step that compares weights instead of batches, the sum of weight digests.
    """
    unused: Scalar
    """Number of parameters, summed over ranks, whose use differs from the optimizer's expectation."""
    metrics: tuple[Scalar, ...] = ()
    """Sum and weight of each metric: (sum, weight, sum, weight, ...)."""
    experts: tuple[Scalar, ...] = ()
    """Tokens routed to each expert of each layer, counted on one tensor rank of each stage."""

    @staticmethod
    def pack(
        step: StepState, squared_norm: Tensor | float, speaks: bool, stops: float, unused: int = 0, metrics: int = 0
    ) -> Tensor:
        """Returns this rank's summands as one fp64 device tensor [``CONTROL_SCALARS`` + 2 x ``metrics`` + experts].

        ``squared_norm``: this rank's share of the squared gradient norm. ``speaks``: True if this rank adds the loss,
        loss weight and tokens; one rank of each data coordinate does. ``stops``: this rank's ``RunControl.stops``.
        ``unused``: number of this rank's parameters that have a gradient in this step but had none on any rank in the
        previous one, or the reverse. ``metrics``: number of configured metrics.
        """
        share = StepTotals[Tensor | float](
            loss=step.loss if speaks else 0.0,
            weight=step.weight if speaks else 0.0,
            squared_norm=squared_norm,
            tokens=float(step.tokens) if speaks else 0.0,
            problems=float(step.problem is not None),
            stops=stops,
            digest=float(step.digest if speaks else 0),
            digest_squared=step.copies if step.copies is not None else float(step.digest**2 if speaks else 0),
            unused=float(unused),
        )
        packed = torch.zeros(CONTROL_SCALARS + 2 * metrics, dtype=torch.float64, device=step.loss.device)
        for place, value in enumerate((*share[:CONTROL_SCALARS], *(step.metrics if speaks else ()))):
            if isinstance(value, Tensor):
                packed[place].copy_(value)
            elif value:
                packed[place].fill_(value)  # ``packed[place] = value`` copies a number from the host, and CUDA waits
        return packed if step.experts is None else torch.cat([packed, step.experts])

    def same_batch(self, data_ranks: int) -> bool:
        """Returns True if all data ranks have hashed equal batches; False with one data rank or without hashes."""
        total, squares = int(self.digest), int(self.digest_squared)  # type: ignore[call-overload]
        return total > 0 and data_ranks > 1 and data_ranks * squares == total**2

    @property
    def terminated(self) -> bool:
        """True if any rank has received SIGTERM."""
        return bool(self.stops % ENDS_TRIAL)  # type: ignore[operator]

    @property
    def ends_trial(self) -> bool:
        """True if rank 0 ends the trial of a sweep after this step."""
        return bool(self.stops >= ENDS_TRIAL)  # type: ignore[operator]

    @staticmethod
    def on_device(packed: Tensor) -> "StepTotals[Tensor]":
        """Returns the totals as 0-dim views of ``packed``, a tensor from ``pack`` after its all-reduce.

        Does not synchronize with the device. ``metrics`` and ``experts`` are empty.
        """
        return StepTotals._make([*packed[:CONTROL_SCALARS].unbind(), (), ()])

    @staticmethod
    def unpack(values: Sequence[float], experts: int) -> "StepTotals[float]":
        """Returns the totals from ``values``, the elements of a tensor from ``pack`` after its all-reduce.

        The last ``experts`` elements are the tokens of each expert.
        """
        end = len(values) - experts
        return StepTotals._make([*values[:CONTROL_SCALARS], tuple(values[CONTROL_SCALARS:end]), tuple(values[end:])])


def metric_averages(totals: StepTotals[float], names: Sequence[str]) -> dict[str, float]:
    """Returns the weighted mean of each metric by name; NaN if its weight is 0.

    ``names``: names of the metrics in the order of ``totals``.
    """
    pairs = zip(names, totals.metrics[::2], totals.metrics[1::2], strict=False)
    return {name: total / weight if weight else math.nan for name, total, weight in pairs}
