"""Activations counted on shapes in place of the cost model's estimate: of a whole plan where that takes seconds.

Else of one more block, on models of a few blocks without a pipeline, which takes a second:

    blocks     | first | A A | last       two periods of alike blocks: plays a step, whose peak is counted
               | first | A A A | last     three: plays a forward; the difference of both is one period
    layouts    with the same tensor ranks, sequence parallelism and recomputation share a sample

So a layout whose whole plan takes long to count has an estimate that rests on the code of the model, and the first
layout that is counted whole is most often the one that fits.
"""

import logging
import sys
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import cached_property

from torch import nn

from engine.build.request import Request
from engine.config import Config
from engine.errors import first_line
from engine.launch.planner.planned_model import PlannedModel
from engine.parallel.model.user_code import is_own_mistake
from engine.parallel.pipeline.schedule.actions import Op
from engine.planning.cost_model.estimate import LayoutEstimate
from engine.planning.cost_model.hardware import GpuSpec
from engine.planning.cost_model.layout import TrainingLayout
from engine.planning.cost_model.memory import CONTEXT_BYTES, SLACK, BlockSample, working_bytes
from engine.planning.cost_model.search import Working
from engine.planning.cost_model.workload import Workload
from engine.planning.plan import Plan
from engine.planning.step_time.plan_costs import PlanCosts
from engine.program.batch import map_tensors
from engine.rehearsal.block_kinds import is_called, longest_run, outer_runs
from engine.rehearsal.plan_rehearsal import PlanRehearsal
from engine.rehearsal.rank_forecast import PlannedKernels, RankForecast, forecast_of
from engine.rehearsal.rehearsed_rank import FIRST, RehearsedRank
from engine.rehearsal.shortened_models import shorten

MOST_LEAVES = 2000
"""Modules without children of a model whose plan is counted."""
MOST_SEARCHED = 400
"""Of them times pipeline ranks, each of which traces all of them and plays its stages, in a search: some 40 ms each."""

MOST_SILENT = 150
"""Modules that are run on shapes without a word: a few seconds."""


def why_not_counted(plan: Plan, planned: PlannedModel, searches: bool = False) -> str:
    """Why the activations of ``plan`` stay estimates; empty if they are counted.

    Args:
        searches: the plan is one of several, so that a long pipeline of a deep model keeps the estimate too.
    """
    leaves = _leaves(planned)
    if searches and leaves * plan.config.pp > MOST_SEARCHED:
        return (
            f"a search does not run {leaves:,} modules on {plan.config.pp} pipeline ranks on shapes; the plan of this "
            "configuration alone does"
        )
    return f"{leaves:,} modules are too many to run on shapes" if leaves > MOST_LEAVES else ""


def _leaves(planned: PlannedModel) -> int:
    return sum(1 for module in planned.model.modules() if not any(True for _ in module.children()))


def counted_costs(costs: PlanCosts, plan: Plan, planned: PlannedModel, gpu: GpuSpec) -> tuple[PlanCosts, str]:
    """The costs with what lives on each pipeline rank in place of activations and buffers; and words about that.

    A model that does not run on shapes keeps the estimate; the words say so.
    """
    leaves = _leaves(planned)
    if leaves > MOST_SILENT:
        print(
            f"counting activations of {costs.layout} on shapes: {leaves:,} modules, {plan.config.pp} pipeline ranks",
            file=sys.stderr,
            flush=True,
        )
    quiet = logging.getLogger("trine")
    before, quiet.disabled = quiet.disabled, True
    try:
        found = list(_forecasts(plan, planned, gpu))
    except Exception as error:  # the model's own code may raise anything on shapes; a line of the plan says it
        if is_own_mistake(error):
            raise
        return costs, f"activations and buffers are estimates: on shapes the model raises {first_line(error)}"
    finally:
        quiet.disabled = before
    memory = tuple(
        replace(
            rank,
            activations=float(forecast.peak.bytes),
            buffers=0.0,
            slack=CONTEXT_BYTES + SLACK * forecast.peak.bytes,
        )
        for rank, forecast in zip(costs.memory, found, strict=True)
    )
    where = ", ".join(f"{one.peak.bytes / 2**20:,.1f} MiB in {one.peak.action}" for one in found)
    words = f"activations and buffers of each pipeline rank, by storages on shapes: {where}"
    return replace(costs, memory=memory), words


def kernels_of(config: Config, gpu: GpuSpec) -> PlannedKernels | None:
    """What ``gpu`` would choose; None where the configuration wants the reference operators."""
    return None if config.kernels == "reference" else PlannedKernels(config.kernels, gpu.name)


def _forecasts(plan: Plan, planned: PlannedModel, gpu: GpuSpec) -> Iterator[RankForecast]:
    rehearsal = PlanRehearsal(
        model=planned.model,
        plan=plan,
        request=Request(planned.loss_fn),
        example=map_tensors(planned.row, lambda row: row.new_empty((plan.config.micro, *row.shape[1:]))),
        kernels=kernels_of(plan.config, gpu),
        plan_of=lambda shorter: planned.plan_shorter(shorter, plan),
    )
    return rehearsal.forecasts()


PERIODS = (2, 3)
"""Of the short models."""
LONG_PERIODS = (1, 2)
"""Of those whose period is of several blocks: it has neighbours of its own."""


class SampledBlocks:
    """Samples of a model, made when they are first asked for.

    Args:
        planned: the model.
        config_of: the configuration of a layout.
        gpu: decides which operators have kernels.
    """

    def __init__(self, planned: PlannedModel, config_of: Callable[[TrainingLayout], Config], gpu: GpuSpec) -> None:
        self._planned, self._config_of, self._gpu = planned, config_of, gpu
        outer = outer_runs(planned.model)
        called = planned.called() if len(outer) > 1 else None
        idle = [] if called is None else [run for run in outer if not is_called(planned.model, run.blocks, called)]
        self._idle = idle
        """Runs of lists that a forward does not call, such as a vision tower on rows of text."""
        self._run = longest_run(planned.model, called)
        self._samples: dict[Hashable, BlockSample | None] = {}

    def of(self, layout: TrainingLayout, fresh: bool = True) -> BlockSample | None:
        """The sample of ``layout``.

        None if the model has no run of alike blocks, does not run on shapes, or holds less with more blocks.

        ``fresh``: make it if there is none yet.
        """
        key = layout.tp, layout.sequence, layout.recomputation
        if key not in self._samples and fresh:
            self._samples[key] = self._sample(layout)
        return self._samples.get(key)

    def _sample(self, layout: TrainingLayout) -> BlockSample | None:
        if self._run is None or self._run.periods < PERIODS[-1]:
            return None
        alone = replace(
            layout, dp=1, pp=1, stage=0, reduction="step", micro=1, microbatches=1, schedule="1f1b", virtual=1
        )
        try:
            config = self._config_of(alone)
            few, more = (self._rank(short, config) for short in self._shorts)
            step = few.step()
            peak = forecast_of(few.plan, 0, step).peak.bytes
            period = more.forward().left - step.actions[Op.FORWARD, 0, FIRST].left
        except Exception as error:  # the model's own code may raise anything on shapes; its estimate stays
            if is_own_mistake(error):
                raise
            return None
        if period < 0:  # code whose forwards depend on those before them; the estimate stays
            return None
        return BlockSample(kept=period / self._run.period, around=max(0.0, peak - self._periods[0] * period))

    @property
    def _periods(self) -> tuple[int, int]:
        return PERIODS if self._run is None or self._run.period == 1 else LONG_PERIODS

    @cached_property
    def _shorts(self) -> tuple[nn.Module, ...]:
        """The short models; plans and rehearsals leave them as they are."""
        assert self._run is not None
        model = self._planned.model
        for run in self._idle:
            model = shorten(model, run, 1)
        return tuple(shorten(model, self._run, periods) for periods in self._periods)

    def _rank(self, model: nn.Module, config: Config) -> RehearsedRank:
        """The only rank of a short model."""
        short = self._planned.shortened(model, config)
        plan = short.plan(config)
        example = map_tensors(short.row, lambda row: row.new_empty((1, *row.shape[1:])))
        request = Request(short.loss_fn)
        return RehearsedRank(short.model, plan, 0, request, example, kernels_of(config, self._gpu))


def working_of(samples: SampledBlocks, work: Workload) -> Working:
    """Bytes of activations and buffers of a layout: its closed form, at the scale of the sample."""

    def working(one: LayoutEstimate, fresh: bool) -> float | None:
        layout, closed = one.layout, working_bytes(work, one.layout)[0]
        sample = samples.of(layout, fresh)
        if sample is None or not closed:
            return None
        activations = one.memory.activations * sample.kept * layout.micro / closed
        return activations + max(one.memory.buffers, sample.around * layout.micro)

    return working
