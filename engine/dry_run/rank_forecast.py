"""Peak of live storages of a rank: its actions from a dry run, in the order of its schedule; for any device."""

from dataclasses import dataclass

import torch
from torch import nn

from engine.build.request import Request
from engine.dry_run.dry_run_rank import DryRunRank, DryRunStep
from engine.kernels.dispatch import Kernels, Mode, find_choice, shipped_choices
from engine.parallel.pipeline.runtime.executor import rank_schedule
from engine.planning.activation_memory.schedule_walk import LivePeak, peak_of_row
from engine.planning.plan import Plan
from engine.program.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class RankForecast:
    """Live bytes of a rank in a steady step, in addition to its state (parameters, gradients and optimizer)."""

    rank: int
    peak: LivePeak
    step: DryRunStep


def forecast_rank(
    model: nn.Module, plan: Plan, rank: int, request: Request, example: Batch, kernels: Kernels | None = None
) -> RankForecast:
    """Returns the peak of ``rank``. Nothing is computed, sent, or changed in ``model``.

    Args:
        model: as it was passed to ``plan``, before an engine has placed it.
        request: loss and rows of the run.
        example: one microbatch; on the meta device it stands for zeros.
        kernels: choices for an absent device; None: those of the CPU.
    """
    return forecast_of(plan, rank, DryRunRank(model, plan, rank, request, example, kernels).step())


def forecast_of(plan: Plan, rank: int, step: DryRunStep) -> RankForecast:
    """Returns the peak of ``rank`` from the memory of its actions in ``step``."""
    row = rank_schedule(plan.schedule, plan.grid(rank).coord().pp)
    peak = peak_of_row(row.actions, row.releases, step.memory_of, step.base, step.end_rise)
    return RankForecast(rank=rank, peak=peak, step=step)


class PlannedKernels(Kernels):
    """Kernels of an absent GPU, as :class:`Kernels` chooses them there; only shapes reach the operators.

    Args:
        card: name of the GPU, as rows of ``tuned.json`` have it.
    """

    def __init__(self, mode: Mode, card: str) -> None:
        super().__init__(mode)
        self.card = card

    def replaces(self, device: torch.device) -> bool:
        """Returns True: modules get our operators, as on any GPU."""
        return True

    def _decide(self, operator: str, device: torch.device, dtype: torch.dtype, width: int) -> bool:
        if self.mode != "auto":
            return self.mode == "triton"
        name = str(dtype).removeprefix("torch.")
        row = find_choice(shipped_choices(), operator, self.card or "*", name, width)
        return row is not None and row.triton
