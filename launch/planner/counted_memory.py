"""Activations of a plan, counted on shapes in place of the cost model's estimate, where that takes seconds."""

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace

from engine.build.request import Request
from engine.config import Config
from engine.errors import first_line
from engine.launch.planner.planned_model import PlannedModel
from engine.parallel.model.user_code import is_own_mistake
from engine.planning.cost_model.hardware import GpuSpec
from engine.planning.cost_model.memory import CONTEXT_BYTES, SLACK
from engine.planning.plan import Plan
from engine.planning.step_time.plan_costs import PlanCosts
from engine.program.batch import map_tensors
from engine.rehearsal.plan_rehearsal import PlanRehearsal
from engine.rehearsal.rank_forecast import PlannedKernels, RankForecast

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
