"""``parallel.schedule: "auto"``: what a plan makes of the costs of its calls. On shapes; nothing runs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.build.assemble import plan_run
from engine.build.request import Request
from engine.config import Config, load_config
from engine.errors import ConfigError, PlanError, ScheduleError
from engine.parallel.pipeline.partition.auto_schedule import MicrobatchCost, cost_of_stages
from engine.parallel.pipeline.partition.cost_model import stage_costs
from engine.parallel.pipeline.schedule.kinds import make_schedule
from engine.parallel.pipeline.schedule.simulate import Cost
from engine.parallel.trace.model_trace import ModelTrace
from engine.parallel.trace.tracer import trace_model
from engine.planning.analysis import ScheduleChoice, choose_schedule
from engine.planning.profile_calls import Costs, flop_costs_only

WIDTH, ROWS, BLOCKS = 8, 4, 8


class Chain(nn.Module):
    """Equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean()


def config(world: int = 2, microbatches: int = 4, **parallel: Any) -> Config:
    sizes = {"train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": microbatches}
    return load_config(sizes | {"parallel": {"pipeline": world, "schedule": "auto", **parallel}}, world)


def timeline() -> ModelTrace:
    model = Chain()
    return trace_model(model, lambda: model(torch.ones(ROWS, WIDTH)))


def seconds(*, of_block: float, first: float = 1.0, kept: int = 100) -> Costs:
    calls = [MicrobatchCost(part, part, part, kept, kept) for part in (first, *[of_block] * (BLOCKS - 1))]
    return Costs(tuple(f"blocks.{index}" for index in range(BLOCKS)), tuple(calls), measured=True, device="cpu")


def choose(settings: Config, costs: Costs) -> ScheduleChoice:
    return choose_schedule(settings, timeline(), costs)


def test_the_cut_is_of_the_chosen_schedule() -> None:
    choice = choose(config(activation_limit_bytes=10**9), seconds(of_block=1.0))
    decision = choice.decision
    assert decision.virtual_stages > 1 and decision.chosen.seconds < 4 * 24 + 12
    assert len(choice.partition.stages) == decision.schedule.stages == 2 * decision.virtual_stages


def test_stages_are_tried_as_far_as_the_model_can_be_cut() -> None:
    tried = choose(config(4, 8), seconds(of_block=1.0)).decision.ranking
    assert {t.virtual_stages: t.refused for t in tried}[4] == "the model does not cut into 16 stages"
    assert {t.virtual_stages for t in tried} == {1, 2, 4}


def test_a_given_number_of_virtual_stages_is_tried_beside_one() -> None:
    tried = choose(config(virtual_stages=3), seconds(of_block=1.0)).decision.ranking
    assert {t.virtual_stages for t in tried} == {1, 3}


def test_stages_that_are_named_say_how_many_a_rank_has() -> None:
    settings = config(split=["blocks.2", "blocks.4", "blocks.6"])
    choice = choose(settings, seconds(of_block=1.0))
    assert choice.decision.virtual_stages == 2
    assert [unit for unit, _ in choice.partition.boundaries] == ["blocks.2", "blocks.4", "blocks.6"]
    with pytest.raises(ScheduleError, match="no schedule for 4 stages on 2 pipeline ranks"):
        choose_schedule(settings, timeline(), seconds(of_block=1.0), ("1f1b", "gpipe"))
    with pytest.raises(PlanError, match=r"parallel\.split names 2 calls"):
        choose(config(split=["blocks.2", "blocks.4"]), seconds(of_block=1.0))


def test_one_slow_call_gets_a_stage_of_its_own_by_time_only() -> None:
    costs = seconds(of_block=1.0, first=20.0)
    for balance, start in (("time", "blocks.1"), ("flops", "blocks.4")):
        choice = choose_schedule(config(balance=balance), timeline(), costs, ("1f1b",))
        assert choice.partition.boundaries == ((start, 0),)


def test_links_count_where_time_was_measured() -> None:
    costs = seconds(of_block=1.0)
    assert costs.transfer_seconds(10**9) > 1 > costs.transfer_seconds(0) > 0
    slow = choose(config(activation_limit_bytes=10**9), seconds(of_block=1e-6, first=1e-6))
    assert slow.decision.virtual_stages == 1  # messages take longer than blocks
    assert flop_costs_only(timeline()).transfer_seconds(10**9) == 0


def test_a_plan_has_the_choice_of_what_can_run() -> None:
    plan = plan_run(Chain(), config(), Request(), torch.ones(ROWS, WIDTH))
    assert plan.decision is not None and plan.schedule == plan.decision.schedule
    assert plan.decision.lines()[0].startswith("auto: ")
    named = plan_run(
        Chain(), load_config(config().to_json() | {"parallel": {"pipeline": 2}}, 2), Request(), torch.ones(ROWS, WIDTH)
    )
    assert named.decision is None


def test_one_rank_needs_no_choice() -> None:
    plan = plan_run(Chain(), config(1), Request(), None)
    assert plan.decision is None and plan.schedule == make_schedule("1f1b", 1, 4)


def named(**parallel: Any) -> Config:
    sizes = {"train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": 6}
    return load_config(sizes | {"parallel": {"pipeline": 2, "schedule": "zb-h1", "virtual_stages": 2, **parallel}}, 2)


def test_a_named_schedule_takes_the_order_that_suits_measured_or_declared_costs() -> None:
    example = torch.ones(ROWS, WIDTH)
    costs = seconds(of_block=1e-4, first=1e-4)
    assert plan_run(Chain(), named(), Request(), example).schedule == make_schedule("zb-h1", 2, 6, 2)
    measured = plan_run(Chain(), named(balance="time"), Request(), example, costs)
    assert measured.partition is not None
    stages = stage_costs(measured.partition.stage_of_call, costs.calls)
    crossing = measured.partition.crossing_bytes / (len(measured.partition.stages) - 1)
    known = cost_of_stages(stages, costs.transfer_seconds(crossing))
    assert measured.schedule == make_schedule("zb-h1", 2, 6, 2, known)
    given = {"forward": 1, "input": 2, "weight": 0.5, "transfer": 0}
    declared = plan_run(Chain(), named(balance="time", schedule_costs=given), Request(), example, costs)
    assert declared.schedule == make_schedule("zb-h1", 2, 6, 2, Cost.of_parts(1, 2, 0.5, 0).shared(2, 4))
    assert declared.schedule != make_schedule("zb-h1", 2, 6, 2)


def test_costs_of_a_schedule_that_does_not_depend_on_them_are_refused() -> None:
    for schedule in ("1f1b", "auto", "own.csv"):
        with pytest.raises(ConfigError, match=r"schedule_costs: given for schedule .*; leave schedule_costs out"):
            named(schedule=schedule, virtual_stages=1, schedule_costs={"transfer": 0.5})
