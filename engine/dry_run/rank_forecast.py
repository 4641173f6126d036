"""Peak of live storages of a rank: its actions from a rehearsal, in the order of its schedule; on any device."""

from dataclasses import dataclass

import torch

from engine.dry_run.dry_run_rank import DryRunStep
from engine.kernels.dispatch import Kernels, Mode, find_choice, shipped_choices
from engine.parallel.pipeline.runtime.executor import rank_schedule
from engine.planning.activation_memory.schedule_walk import LivePeak, peak_of_row
from engine.planning.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RankForecast:
    """What lives on a rank in a steady step, beside its state: parameters, gradients and optimizer."""

    rank: int
    peak: LivePeak
    step: DryRunStep


def forecast_of(plan: Plan, rank: int, step: DryRunStep) -> RankForecast:
    """The peak of ``rank``, whose actions do to memory what ``step`` says."""
    row = rank_schedule(plan.schedule, plan.grid(rank).coord().pp)
    peak = peak_of_row(row.actions, row.releases, step.memory_of, step.base, step.end_rise)
    return RankForecast(rank=rank, peak=peak, step=step)


class PlannedKernels(Kernels):
    """The kernels of a GPU that is not here, as :class:`Kernels` chooses them there; only shapes reach the operators.

    Args:
        card: name of the GPU, as rows of ``tuned.json`` have it.
    """

    def __init__(self, mode: Mode, card: str) -> None:
        super().__init__(mode)
        self.card = card

    def replaces(self, device: torch.device) -> bool:
        """Modules are given our operators, as on any GPU."""
        return True

    def _decide(self, operator: str, device: torch.device, dtype: torch.dtype, width: int) -> bool:
        if self.mode != "auto":
            return self.mode == "triton"
        name = str(dtype).removeprefix("torch.")
        row = find_choice(shipped_choices(), operator, self.card or "*", name, width)
        return row is not None and row.triton
