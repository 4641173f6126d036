"""Dry runs of all pipeline ranks of a plan; equal ranks and equal blocks run only once."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from torch import nn

from engine.build.request import Request
from engine.dry_run.dry_run_rank import DryRunRank, DryRunStep
from engine.dry_run.rank_forecast import RankForecast, forecast_of
from engine.dry_run.rank_likeness import RankLikeness
from engine.dry_run.shortened_models import PlanOf, shortened_step
from engine.kernels.dispatch import Kernels
from engine.planning.plan import Plan
from engine.program.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDryRun:
    """Inputs for dry runs of the ranks of a plan; nothing is computed, sent, or changed in the model."""

    model: nn.Module
    """The model as it was passed to the plan."""
    plan: Plan
    request: Request
    """Loss and rows of the run."""
    example: Batch
    """One microbatch; on the meta device it stands for zeros."""
    kernels: Kernels | None = None
    """Choices for an absent device; None: those of the CPU."""
    plan_of: PlanOf | None = None
    """Plans a model with fewer blocks; None: the dry run includes all blocks."""

    def forecasts(self) -> Iterator[RankForecast]:
        """Yields the forecast of the first data and tensor rank of each pipeline rank, in order."""
        likeness, known = RankLikeness(self.model, self.plan), dict[Hashable, tuple[tuple[int, ...], DryRunStep]]()
        before = list[DryRunRank]()
        for pp in range(self.plan.config.pp):
            rank, stages, key = self.plan.grid(0).rank_at(pp=pp), self.plan.stages(pp), likeness.of(pp)
            if key not in known:
                known[key] = stages, self._step(rank, before)
            ranks, step = known[key]
            yield forecast_of(self.plan, rank, step.on_stages(dict(zip(ranks, stages, strict=True))))

    def _step(self, rank: int, before: list[DryRunRank]) -> DryRunStep:
        """Runs the step of a rank dry; ``before`` contains the first rank that ran, whose traces serve later ones."""

        def run_dry(model: nn.Module, plan: Plan) -> DryRunStep:
            dry = DryRunRank(model, plan, rank, self.request, self.example, self.kernels)
            if plan is self.plan:
                for other in before:
                    dry.trace_like(other)
                before[:] = before or [dry]
            return dry.step()

        short = None
        if self.plan_of is not None and self.plan.config.pp == 1:
            short = shortened_step(self.model, self.plan, run_dry, self.plan_of)
        return run_dry(self.model, self.plan) if short is None else short
