"""Compares the quick estimate of a layout search with whole plans: seconds and memory of a 3.5 B decoder."""

from collections.abc import Mapping, Sequence

from engine.config import load_config
from engine.launch.planner.plan_command import settings_of
from engine.launch.planner.plan_request import ModelSource
from engine.launch.planner.planned_model import build_model
from engine.planning.cost_model.hardware import load_gpu
from engine.planning.cost_model.layout import TrainingLayout
from engine.planning.cost_model.workload import DecoderShape
from engine.planning.step_time.plan_costs import PlanCosts, plan_costs

SHAPE = DecoderShape(layers=16, width=4096, heads=32, vocabulary=32000, context=4096)
LAYOUTS = (
    TrainingLayout(dp=8, micro=2, microbatches=4),
    TrainingLayout(dp=64, stage=1, micro=2, microbatches=4),
    TrainingLayout(dp=64, stage=2, reduction="microbatch", micro=2, microbatches=4),
    TrainingLayout(dp=64, stage=3, micro=2, microbatches=4),
    TrainingLayout(dp=64, stage=3, reduction="microbatch", micro=2, microbatches=4, recomputation="full"),
    TrainingLayout(dp=8, tp=8, stage=1, micro=4, microbatches=2),
    TrainingLayout(dp=8, tp=8, stage=1, micro=4, microbatches=2, recomputation="full"),
    TrainingLayout(dp=8, tp=2, pp=4, stage=1, microbatches=16),
    TrainingLayout(dp=8, tp=2, pp=4, stage=1, microbatches=16, schedule="interleaved", virtual=2),
    TrainingLayout(dp=8, pp=8, stage=1, microbatches=16, schedule="zb-h1"),
    TrainingLayout(dp=8, pp=4, stage=1, microbatches=16, schedule="zb-v", virtual=2),
    TrainingLayout(dp=8, pp=4, stage=3, microbatches=8),
)


def costs_of(layouts: Sequence[TrainingLayout], shape: DecoderShape = SHAPE) -> list[PlanCosts]:
    """Returns the costs of full plans of ``layouts`` on H100s, 8 per node, with the cost model's estimates."""
    model, gpu = build_model(ModelSource(decoder=shape, shape=shape)), load_gpu("h100")
    plans = (model.plan(load_config(settings_of(layout), layout.world)) for layout in layouts)
    return [plan_costs(plan, shape.workload(), gpu, 8) for plan in plans]


def agreement_cells() -> Mapping[tuple[str, str], str]:
    """Formats seconds and memory of estimates and full plans, with the deviation."""
    cells: dict[tuple[str, str], str] = {}
    for costs in costs_of(LAYOUTS):
        name, memory, closed = str(costs.layout), costs.fullest.total, costs.closed.memory.total
        cells[name, "step, whole plan"] = f"{costs.time.total:.3f} s"
        cells[name, "closed form"] = f"{costs.closed.seconds.total:.3f} s"
        cells[name, "off"] = f"{costs.closed.seconds.total / costs.time.total - 1:+.1%}"
        cells[name, "memory, whole plan"] = f"{memory / 2**30:.1f} GiB"
        cells[name, "closed form of it"] = f"{closed / 2**30:.1f} GiB"
    return cells
