"""Peak of live bytes of every pipeline rank of a plan, from dry runs of its actions, in the order of the schedule.

Equal ranks and equal blocks are run once.
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
from engine.parallel.activation_checkpointing.blocks import offloaded_blocks, recomputed_blocks, selective_blocks
from engine.parallel.grid import Coord
from engine.parallel.model.name_patterns import is_inside
from engine.parallel.pipeline.runtime.executor import rank_schedule
from engine.planning.activation_memory import LivePeak, peak_of_row
from engine.planning.plan import Plan
from engine.program.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class RankForecast:
    """Memory forecast of a rank: the peak, in a training step, of live bytes (bytes of tensors that steps have
    allocated).

    Parameters, gradients and optimizer state that persist between steps do not count.
    """

    rank: int
    peak: LivePeak
    step: DryRunStep


def forecast_of(plan: Plan, rank: int, step: DryRunStep) -> RankForecast:
    """Returns the memory forecast of the global rank ``rank`` of ``plan``: the peak of live bytes while it runs its
    pipeline actions in the order of the schedule.

    Args:
        step: live bytes of each pipeline action of this rank, from a dry run.
    """
    row = rank_schedule(plan.schedule, plan.grid(rank).coord().pp)
    peak = peak_of_row(row.actions, row.releases, step.memory_of, step.base, step.end_rise)
    return RankForecast(rank=rank, peak=peak, step=step)


class PlannedKernels(Kernels):
    """Choice of Triton or torch for each operator on a plan's GPU, which this machine may lack.

    Args:
        mode: setting ``kernels`` of the configuration.
        card: name of the GPU in ``tuned.json``, the file with measured choices.
    """

    def __init__(self, mode: Mode, card: str) -> None:
        super().__init__(mode)
        self.card = card

    def replaces(self, device: torch.device) -> bool:
        """Returns True for every ``device``, because the plan is for a GPU, on which the engine's operators replace
        torch's.
        """
        return True

    def _decide(self, operator: str, device: torch.device, dtype: torch.dtype, width: int) -> bool:
        if self.mode != "auto":
            return self.mode == "triton"
        name = str(dtype).removeprefix("torch.")
        row = find_choice(shipped_choices(), operator, self.card or "*", name, width)
        return row is not None and row.triton


NEAR = 2
"""Largest distance between stages or calls that is distinguished: 0, 1, or 2 for more."""


class RankLikeness:
    """Descriptions of pipeline ranks; ranks with equal descriptions have equal live bytes."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._plan, self._names = plan, KindNames(model)
        settings = plan.config.activation_checkpointing
        ways = recomputed_blocks, selective_blocks, offloaded_blocks
        self._checkpointed = [tuple(way(model, settings)) for way in ways]

    def of(self, pp: int) -> Hashable:
        """Returns the description of pipeline rank ``pp``; equal descriptions (``==``) mean equal live bytes."""
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
            tuple(self._unit(trace.calls[index].unit) for index in sorted(part.calls)),
            tuple((self._value(number), self._distance(stage, source)) for number, source in part.receives.items()),
            tuple(
                (self._value(number), tuple(self._distance(stage, target) for target in targets))
                for number, targets in part.sends.items()
            ),
            tuple((one.name, max(-1, one.calls_before - first), tuple(map(self._value, one.makes))) for one in glue),
            tuple(sorted(map(self._names.of, part.parameters))),
        )

    def _unit(self, name: str) -> Hashable:
        """Describes a module and its blocks that backward recomputes, or with activations on the host."""
        blocks = (
            tuple(self._names.of(each) for each in names if is_inside(each, name) or is_inside(name, each))
            for names in self._checkpointed
        )
        return self._names.of(name), *blocks

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
    """Dry runs of all pipeline ranks of a plan on shapes without data, to forecast their memory. Nothing is
    communicated.
    """

    model: nn.Module
    """Model of the plan."""
    plan: Plan
    request: Request
    """Arguments of ``initialize`` with loss and rows."""
    example: Batch
    """One microbatch; tensors on the meta device become zeros."""
    kernels: Kernels | None = None
    """Kernel choices for an absent device; None: choices of the CPU."""
    plan_of: PlanOf | None = None
    """Function that plans a model with fewer blocks; None: all blocks run."""

    def forecasts(self) -> Iterator[RankForecast]:
        """Yields the memory forecast of each pipeline rank, in ascending order, for data rank 0 and tensor rank 0."""
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
