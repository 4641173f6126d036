"""Plans with context ranks: a rank computes and stores its positions, waits for keys, and shards state over dp x cp."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from engine.config import load_config
from engine.launch.planner.plan_command import settings_of
from engine.launch.planner.plan_request import ModelSource
from engine.launch.planner.planned_model import PlannedModel, build_model
from engine.planning.cost_model.estimate import StepModel
from engine.planning.cost_model.hardware import load_gpu
from engine.planning.cost_model.layout import TrainingLayout
from engine.planning.cost_model.links import Links, placement_picture
from engine.planning.cost_model.search import Wish, layouts
from engine.planning.cost_model.workload import DecoderShape
from engine.planning.plan import Plan
from engine.planning.step_time.plan_costs import PlanCosts, plan_costs, planned_layout

GPU = load_gpu("h100")
SHAPE = DecoderShape(layers=4, width=64, heads=4, vocabulary=64, context=256)
DP2_CP2 = TrainingLayout(dp=2, cp=2, stage=2, microbatches=2)


@cache
def model() -> PlannedModel:
    return build_model(ModelSource(decoder=SHAPE, shape=SHAPE, context=SHAPE.context))


@cache
def planned(layout: TrainingLayout) -> Plan:
    return model().plan(load_config(settings_of(layout), layout.world))


def costs_of(layout: TrainingLayout, **gpu: Any) -> PlanCosts:
    return plan_costs(planned(layout), SHAPE.workload(), replace(GPU, **gpu), 8)


def test_a_plan_has_the_layout_of_its_context_ranks() -> None:
    assert planned_layout(planned(DP2_CP2)) == DP2_CP2
    assert str(DP2_CP2).startswith("dp2 x cp2, ZeRO 2")


def test_keys_values_and_their_gradients_are_waited_for_over_the_context_axis() -> None:
    costs, reached = costs_of(DP2_CP2, link_latency=0.0), GPU.link_rate * GPU.reached.link
    sent = {(row.axis, row.label): row.bytes for row in planned(DP2_CP2).rank(0).traffic}
    keys = 2 * SHAPE.layers * 2 * SHAPE.width * 2 * SHAPE.context // 2  # of 2 microbatches, one way
    assert sent["cp", "keys"] == 2 * keys and sent["cp", "key gradients"] == keys
    assert costs.time.communication["cp"] * reached == pytest.approx(3 * keys, rel=1e-3)
    assert costs.closed.seconds.context * reached == pytest.approx(3 * keys)
    assert ("dp+cp", "gradients") in sent and "dp+cp" in costs.time.communication


def test_context_ranks_divide_computation_activations_and_state() -> None:
    one = replace(DP2_CP2, dp=4, cp=1)
    mine, alone = costs_of(DP2_CP2), costs_of(one)
    assert mine.time.computation == pytest.approx(alone.time.computation / 2, rel=0.1)  # the update is the same
    assert mine.fullest.optimizer == alone.fullest.optimizer
    keys = 2 * 2 * SHAPE.context * SHAPE.width * SHAPE.layers
    assert mine.fullest.activations == pytest.approx(alone.fullest.activations / 2 + keys)
    assert mine.fullest.communication == 2 * alone.fullest.communication


def test_a_ring_of_context_ranks_leaves_a_node_only_with_them() -> None:
    near = Links(TrainingLayout(dp=4, cp=4, tp=2), GPU, 8)
    assert near.ring("cp").latency == GPU.link_latency and near.ring("dp+cp").latency == GPU.network_latency
    far = Links(TrainingLayout(cp=8, tp=2), GPU, 8)
    assert far.ring("cp").latency == GPU.network_latency
    assert placement_picture(planned(DP2_CP2).grid(0), 2).splitlines()[1].split() == ["0", "0-1", "0", "0", "0-1", "0"]


def test_a_search_weighs_context_ranks_for_long_rows_only() -> None:
    wish = Wish(world=16, rows=16, node=8, memory_bytes=GPU.memory_bytes)
    for context, most in ((8192, 1), (16384, 2), (131072, 16)):
        work = replace(SHAPE, context=context).workload()
        assert max(layout.cp for layout in layouts(work, wish)) == most
    long = replace(SHAPE, context=1 << 17).workload()
    model = StepModel(long, GPU, 8)
    assert model.estimate(TrainingLayout(cp=4)).memory.total < model.estimate(TrainingLayout()).memory.total
