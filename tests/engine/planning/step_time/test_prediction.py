"""The predicted time of a step, computed by hand from a plan, a computation and links."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.scaling.ranking import GridChoice, grid_choices, rank_grids
from engine.config import load_config
from engine.errors import PlanError
from engine.parallel.comm.traffic import Traffic
from engine.parallel.grid import Coord, Grid
from engine.parallel.pipeline.schedule.actions import Action, Op
from engine.parallel.pipeline.schedule.kinds import SCHEDULE_KINDS, make_schedule
from engine.parallel.pipeline.schedule.simulate import Cost, simulate
from engine.planning.analysis import PlanRequest
from engine.planning.cost_model.links import LinkSpeed
from engine.planning.plan import Plan, build_plan
from engine.planning.step_time.prediction import (
    AxisLinks,
    Computation,
    HostLinks,
    place_axes,
    play_schedule,
    predict_step,
)
from engine.precision.dtypes import make_precision
from engine.program.program import Program

WIDTH, ROWS, BLOCKS = 64, 4, 4
ONE = Computation(forward=1.0, backward=2.0, update=0.5)
BARE = Computation(forward=1.0, backward=0.0)
"""Without weight gradients that sums over tensor ranks could run beside."""
OPS = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0, Op.BACKWARD_INPUT: 1.0, Op.BACKWARD_WEIGHT: 1.0}
FREE = HostLinks(within=LinkSpeed(0.0, 1e30), between=LinkSpeed(0.0, 1e30))


class Block(nn.Module):
    """A perceptron beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(self.up(x).relu())
        return x + down


class Chain(nn.Module):
    """Equal blocks of two products each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def loss(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


@cache
def planned(
    choice: GridChoice, microbatches: int = 4, schedule: str = "1f1b", wire: str = "exact", **zero: Any
) -> Plan:
    world = choice.dp * choice.tp * choice.pp
    virtual = 2 if schedule in ("interleaved", "zb-v") else 1
    layout = {"schedule": schedule, "virtual_stages": virtual}
    settings = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": microbatches,
        "parallel": {"data": choice.dp, "tensor": choice.tp, "pipeline": choice.pp, **layout},
        "zero_optimization": {"stage": choice.stage, **zero},
        "wire": {"tensor": wire, "pipeline": wire},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    config, model = load_config(settings, world), Chain()
    program = Program(model, loss, make_precision(config, model), torch.device("cpu"))
    return build_plan(config, PlanRequest(program, torch.ones(ROWS, WIDTH)))


def links(choice: GridChoice, speeds: HostLinks = FREE) -> AxisLinks:
    grid = Grid(pp=choice.pp, dp=choice.dp, tp=choice.tp)
    return place_axes(grid, [str(rank) for rank in range(grid.world_size)], speeds)


def sent(plan: Plan, axis: str, label: str) -> Traffic:
    (row,) = (row for row in plan.rank(0).traffic if (row.axis, row.label) == (axis, label))
    return row


def test_one_rank_computes() -> None:
    time = predict_step(planned(GridChoice(dp=1, tp=1, pp=1)), ONE, links(GridChoice(dp=1, tp=1, pp=1)))
    assert (time.computation, time.bubble, time.communication, time.total) == (12.5, 0.0, {}, 12.5)


def test_a_pipeline_has_its_bubble() -> None:
    choice = GridChoice(dp=1, tp=1, pp=4)
    time = predict_step(planned(choice), ONE, links(choice))
    # each of 4 stages has a quarter of 3 s: 4 microbatches are 3 s of work in a row of (m + p - 1) / m
    assert time.computation == pytest.approx(3.0 + 0.5 / 4)
    assert time.bubble == pytest.approx(3.0 * 3 / 4)
    assert time.communication == pytest.approx({"pp": 0.0, "replica": 0.0, "world": 0.0})


def test_tensor_ranks_share_all_but_the_fixed_part() -> None:
    choice = GridChoice(dp=1, tp=2, pp=1)
    time = predict_step(planned(choice), Computation(forward=1.0, backward=2.0, fixed=0.5), links(choice))
    assert time.computation == pytest.approx(12 * 0.75)


def test_sums_over_tensor_ranks_are_waited_for() -> None:
    choice = GridChoice(dp=1, tp=2, pp=1)
    plan, slow = planned(choice), HostLinks(within=FREE.within, between=LinkSpeed(0.01, 1e5))
    rows = [row for row in plan.rank(0).traffic if row.axis == "tp"]
    time = predict_step(plan, BARE, links(choice, slow))
    steps = 2 * (2 - 1)  # of a ring of two
    assert rows and time.communication["tp"] == pytest.approx(
        sum(row.calls * steps * 0.01 + row.bytes / 1e5 for row in rows)
    )


def test_sums_in_fewer_bits_are_exchanges_and_gathers() -> None:
    choice = GridChoice(dp=1, tp=2, pp=1)
    exact, plan = planned(choice), planned(choice, wire="int8")
    slow = HostLinks(within=FREE.within, between=LinkSpeed(0.01, 1e5))
    rows = [row for row in plan.rank(0).traffic if row.axis == "tp"]
    assert {row.label for row in rows} == {"column inputs", "row outputs"}
    time = predict_step(plan, BARE, links(choice, slow))
    assert time.communication["tp"] == pytest.approx(sum(row.calls * 0.01 + row.bytes / 1e5 for row in rows))
    assert [row.calls for row in rows] == [2 * row.calls for row in exact.rank(0).traffic if row.axis == "tp"]


def test_sums_of_column_inputs_count_where_they_exceed_weight_gradients() -> None:
    choice = GridChoice(dp=1, tp=2, pp=1)
    slow = HostLinks(within=FREE.within, between=LinkSpeed(0.0, 1e4))
    plan = planned(choice)
    shown, left = (predict_step(plan, one, links(choice, slow)).communication["tp"] for one in (BARE, ONE))
    column = sum(row.bytes for row in plan.rank(0).traffic if row.label == "column inputs") / 1e4
    assert shown - left == pytest.approx(min(column, 4 * 0.5))  # half of a backward of 1 s, four times


@pytest.mark.parametrize("stage", [0, 1])
def test_one_bucket_is_reduced_after_the_last_backward(stage: int) -> None:
    choice = GridChoice(dp=4, tp=1, pp=1, stage=stage)
    plan, slow = planned(choice, 1), HostLinks(within=FREE.within, between=LinkSpeed(0.0, 1e4))
    time = predict_step(plan, ONE, links(choice, slow))
    sizes = [sent(plan, "dp", "gradients").bytes, *(sent(plan, "dp", "parameters").bytes for _ in range(stage))]
    assert time.communication["dp"] == pytest.approx(sum(sizes) / 1e4)
    assert time.computation == pytest.approx(3.0 + 0.5 / (4 if stage else 1))


def test_shard_groups_inside_hosts_wait_for_what_crosses_only() -> None:
    choice = GridChoice(dp=4, tp=1, pp=1, stage=1)
    plan, slow = planned(choice, 1, shard_size=2), HostLinks(within=FREE.within, between=LinkSpeed(0.0, 1e4))
    time = predict_step(plan, ONE, place_axes(plan.grid(0), tuple("aabb"), slow))
    across = sent(plan, "dp_replicate", "gradients").bytes
    assert across == sent(plan, "dp_shard", "gradients").bytes, "a half of the half, twice"
    # both ranks of a host send what crosses, over its one link
    assert time.communication == pytest.approx({"dp_shard": 0.0, "dp_replicate": 2 * across / 1e4, "world": 0.0})
    assert time.computation == pytest.approx(3.0 + 0.5 / 2)


def test_buckets_are_reduced_beside_the_last_backward() -> None:
    choice = GridChoice(dp=2, tp=1, pp=1)
    plan = planned(choice, 1, reduce_bucket_size=2 * WIDTH * WIDTH)
    buckets = len(plan.layout(Coord()).buckets)
    each = sent(plan, "dp", "gradients").bytes / buckets
    assert buckets == BLOCKS
    # of 2 s of backward, a bucket is there every half second: one that takes as long leaves the last one to wait for
    same = HostLinks(within=FREE.within, between=LinkSpeed(0.0, each / 0.5))
    slow = HostLinks(within=FREE.within, between=LinkSpeed(0.0, each / 1.0))
    assert predict_step(plan, ONE, links(choice, same)).communication["dp"] == pytest.approx(0.5)
    assert predict_step(plan, ONE, links(choice, slow)).communication["dp"] == pytest.approx(0.5 + 4 * 1.0 - 2.0)


def test_microbatches_hide_what_the_ones_before_send() -> None:
    choice = GridChoice(dp=2, tp=1, pp=1, stage=2)
    plan = planned(choice, 4, reduce="microbatch")
    row = sent(plan, "dp", "gradients")
    link = HostLinks(within=FREE.within, between=LinkSpeed(0.0, row.bytes / 4 / 3.0))  # 3 s each
    time = predict_step(plan, ONE, links(choice, link))
    parameters = sent(plan, "dp", "parameters").bytes / link.between.rate
    assert time.communication["dp"] == pytest.approx(3.0 + parameters)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-v"])
def test_every_gradient_is_reduced_once_a_microbatch(schedule: str) -> None:
    """Whatever the schedule, a rank that computes nearly nothing waits for just the bytes of its plan."""
    choice = GridChoice(dp=2, tp=1, pp=2, stage=2)
    plan = planned(choice, 8, schedule=schedule, reduce="microbatch")
    bytes_sent = sum(sent(plan, "dp", label).bytes for label in ("gradients", "parameters"))
    slow = HostLinks(within=LinkSpeed(0.0, 1e30), between=LinkSpeed(0.0, 1e6))
    time = predict_step(plan, Computation(forward=1e-6, backward=2e-6), links(choice, slow))
    assert time.communication["dp"] == pytest.approx(bytes_sent / 1e6, rel=0.05)


def test_the_first_gather_of_a_pass_is_waited_for() -> None:
    choice = GridChoice(dp=2, tp=1, pp=1, stage=3)
    plan = planned(choice, 1)
    groups, row = len(plan.layout(Coord()).buckets), sent(plan, "dp", "parameters")
    fast = HostLinks(within=FREE.within, between=LinkSpeed(0.0, row.bytes * 100.0))
    time = predict_step(plan, ONE, links(choice, fast))
    reduced = sent(plan, "dp", "gradients").bytes / (row.bytes * 100.0)
    last = reduced / groups  # the others hide behind the backward
    assert time.communication["dp"] == pytest.approx(0.01 / groups + last, rel=0.2)


def test_a_stage_waits_for_messages() -> None:
    choice = GridChoice(dp=1, tp=1, pp=2)
    plan = planned(choice, 1)
    size = ROWS * WIDTH * 4
    slow = HostLinks(within=FREE.within, between=LinkSpeed(0.25, float(size)))
    time = predict_step(plan, ONE, links(choice, slow))
    assert time.communication["pp"] == pytest.approx(2 * 1.25)  # there and back
    assert time.communication["world"] == time.communication["replica"] == pytest.approx(2 * 0.25)


def test_all_grids_of_a_world() -> None:
    found = grid_choices(8, (0,))
    assert len(found) == len(set(found)) == 10
    assert all(choice.dp * choice.tp * choice.pp == 8 for choice in found)
    staged = grid_choices(4, (0, 1, 3))
    assert [choice.stage for choice in staged if (choice.dp, choice.tp) == (2, 2)] == [0, 1, 3]
    assert [choice.stage for choice in staged if choice.dp == 1] == [0, 0, 0]
    assert str(GridChoice(dp=2, tp=2, pp=1, stage=1)) == "dp2 x tp2, ZeRO 1"
    assert str(GridChoice(dp=1, tp=1, pp=1)) == "1 rank"


def test_grids_are_ranked_and_refused_ones_come_last() -> None:
    def plan_of(choice: GridChoice) -> Plan:
        if choice.tp > 1:
            raise PlanError("no tensor ranks here.")
        return planned(choice, 4 // choice.dp)

    slow = HostLinks(within=FREE.within, between=LinkSpeed(0.0, 1e4))
    ranked = rank_grids(grid_choices(4, (0,)), plan_of, lambda choice: links(choice, slow), ONE)
    times = [grid.time.total for grid in ranked if grid.time is not None]
    assert times == sorted(times) and len(times) == 3
    assert [grid.refused for grid in ranked[3:]] == ["no tensor ranks here."] * 3
    assert str(ranked[0].choice) == "pp4"  # 14 s of gradients are more than a bubble of 2.25 s


def seconds(stages: int) -> dict[tuple[Op, int], float]:
    return {(op, stage): each for op, each in OPS.items() for stage in range(stages)}


@pytest.mark.parametrize("kind", SCHEDULE_KINDS)
def test_a_message_that_shares_nothing_is_the_plain_simulation(kind: str) -> None:
    schedule = make_schedule(kind, 4, 8, 2 if kind in ("interleaved", "looped-bfs", "zb-v", "dualpipe-v") else 1)
    plain = simulate(schedule, Cost(1, 2, 1, 1, transfer=0.5))
    found = play_schedule(schedule, seconds(schedule.stages), lambda action, to: (0.0, 0.5))
    assert found.spans == plain.spans


def test_a_stage_has_seconds_of_its_own() -> None:
    found = play_schedule(make_schedule("gpipe", 2, 1, 1), seconds(2) | {(Op.FORWARD, 1): 5.0})
    assert [(span.start, span.end) for span in found.spans[1]] == [(1.0, 6.0), (6.0, 8.0)]
    assert found.makespan == 10.0


def test_messages_leave_a_rank_one_after_another() -> None:
    # gpipe, 2 stages, 2 microbatches: forwards end at 1 and 2, and each takes 5 on the way out
    schedule = make_schedule("gpipe", 2, 2, 1)

    def hop(action: Action, to: int) -> tuple[float, float]:
        assert to == (1 if action.op is Op.FORWARD else 0)
        return (5.0, 1.0) if action.op is Op.FORWARD else (0.0, 0.0)

    found = play_schedule(schedule, seconds(2), hop)
    assert [span.start for span in found.spans[1][:2]] == [7.0, 12.0]
