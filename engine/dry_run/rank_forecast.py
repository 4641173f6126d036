"""Peak of live storages of a rank: its actions from a rehearsal, in the order of its schedule; on any device.

Which pipeline ranks of a plan do the same to memory, so that one of them is rehearsed for all.

All pipeline ranks of a plan, with no more of it rehearsed than differs: alike ranks and blocks count once.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from engine.build.request import Request
from engine.dry_run.dry_run_rank import DryRunRank, DryRunStep
from engine.dry_run.repeating_blocks import KindNames
from engine.dry_run.shortened_models import PlanOf, shortened_step
from engine.kernels.dispatch import Kernels, Mode, find_choice, shipped_choices
from engine.parallel.grid import Coord
from engine.parallel.pipeline.runtime.executor import rank_schedule
from engine.planning.activation_memory import LivePeak, peak_of_row
from engine.planning.plan import Plan
from engine.program.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class RankForecast:
    """Live bytes of a rank in a steady step, in addition to its state (parameters, gradients and optimizer)."""

    rank: int
    peak: LivePeak
    step: DryRunStep


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


NEAR = 2
"""Cap of distances, in stages or in calls before a stage: 0 none, 1 the next one, 2 farther."""


class RankLikeness:
    """Descriptions of pipeline ranks: ranks with equal descriptions have equal live bytes, action by action.

    A description contains the calls, messages and shapes of each stage with the kinds of its blocks, the layout of its
    parameters in buckets, and the split of its backwards. The walk over the schedule applies the order of the row.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._plan, self._names = plan, KindNames(model)

    def of(self, pp: int) -> Hashable:
        """Returns the description of pipeline rank ``pp``."""
        plan = self._plan
        if plan.partition is None or plan.trace is None:
            return pp
        stages, row = plan.stages(pp), plan.schedule.per_rank[pp]
        operations = tuple(frozenset(action.op for action in row if action.stage == stage) for stage in stages)
        return tuple(self._stage(stage) for stage in stages), operations, self._buckets(pp), self._gathers(pp)

    def _stage(self, stage: int) -> Hashable:
        assert self._plan.partition is not None and self._plan.trace is not None
        part, trace = self._plan.partition.stages[stage], self._plan.trace
        first = min(part.calls, default=0)
        glue = [trace.glue[index] for index in sorted(part.glue)]
        return (
            (stage == 0, part.last, part.tier, min(NEAR, first)),
            tuple(self._names.of(trace.calls[index].unit) for index in sorted(part.calls)),
            tuple((self._value(number), self._distance(stage, source)) for number, source in part.receives.items()),
            tuple(
                (self._value(number), tuple(self._distance(stage, target) for target in targets))
                for number, targets in part.sends.items()
            ),
            tuple((one.name, max(-1, one.calls_before - first), tuple(map(self._value, one.makes))) for one in glue),
            tuple(sorted(map(self._names.of, part.parameters))),
        )

    def _value(self, number: int) -> Hashable:
        assert self._plan.trace is not None
        value = self._plan.trace.values[number]
        return value.shape, value.stride, value.dtype, value.grad, value.rewritten

    def _distance(self, stage: int, other: int) -> int:
        """Returns the distance of a message: 0 within the rank, else stages up to NEAR: longer sends are retained
        longer."""
        ranks = self._plan.schedule.rank_of_stage
        return 0 if ranks[stage] == ranks[other] else min(NEAR, abs(stage - other))

    def _buckets(self, pp: int) -> Hashable:
        layout, stages = self._plan.layout(Coord(pp=pp)), self._plan.stages(pp)
        return tuple(
            (
                (bucket.dtype, bucket.elements, len(bucket.ties), bucket.partial, bucket.exact),
                tuple((self._names.of(slot.name), slot.shape, slot.start, slot.counted) for slot in bucket.slots),
                tuple(map(stages.index, bucket.stages)),
            )
            for bucket in (*layout.buckets, *layout.frozen)
        )

    def _gathers(self, pp: int) -> Hashable:
        gathers, stages = self._plan.gathers(Coord(pp=pp)), self._plan.stages(pp)
        if gathers is None:
            return None
        turns = tuple(stages.index(turn.stage) if turn.stage in stages else -1 for turn in gathers.order.turns)
        return turns, gathers.order.members, gathers.pinned, gathers.sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDryRun:
    """Inputs of dry runs of the ranks of a plan; nothing is computed, sent, or changed in the model."""

    model: nn.Module
    """As it was given to the plan."""
    plan: Plan
    request: Request
    """Loss and rows of the run."""
    example: Batch
    """One microbatch; on the meta device it stands for zeros."""
    kernels: Kernels | None = None
    """Choices for a device that is not here; None: those of the CPU."""
    plan_of: PlanOf | None = None
    """Plans a model with fewer blocks; None: all blocks are dry."""

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
        """Rehearses a step; ``before``: the first rehearsed rank, which shares its traces."""

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
