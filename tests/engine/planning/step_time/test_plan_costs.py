"""Costs of a whole plan: states are its own, ranks differ by stage, tensor groups that cross nodes have a price."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.config import load_config
from engine.config.sections import EmaConfig
from engine.models.decoder import Decoder, DecoderConfig, loss_sum
from engine.parallel.grid import Coord
from engine.planning.analysis import PlanRequest
from engine.planning.cost_model.estimate import StepModel
from engine.planning.cost_model.hardware import load_gpu
from engine.planning.cost_model.layout import TrainingLayout
from engine.planning.cost_model.workload import DecoderShape, Workload
from engine.planning.plan import Plan, build_plan
from engine.planning.step_time.plan_costs import plan_costs, planned_layout
from engine.planning.step_time.traced_workload import traced_workload
from engine.precision.dtypes import make_precision
from engine.program.program import Program

SHAPE = DecoderShape(layers=4, width=64, heads=4, vocabulary=256, context=32)
GPU = load_gpu("h100")
STYLES = {
    "tokens": "vocabulary", "*.query": "column", "*.key": "column", "*.value": "column", "*.output": "row",
    "*.up": "column", "*.down": "row", "head": "vocabulary",
}  # fmt: skip


def program(around: Callable[[nn.Module], nn.Module] = lambda model: model) -> Program:
    with torch.device("meta"):
        model = around(Decoder(DecoderConfig(layers=4, width=64, heads=4, context=32)))
    config = load_config({"train_batch_size": 1, "bf16": {"enabled": True}}, 1)
    return Program(model, loss_sum, make_precision(config, model), torch.device("cpu"))


@cache
def planned(pp: int, dp: int, tp: int, stage: int = 1, node: int | None = None) -> Plan:
    grid = {"data": dp, "tensor": tp, "pipeline": pp, "gpus_per_node": node}
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "bf16": {"enabled": True},
        "parallel": {**grid, "tensor_plan": STYLES, "prove_plan": False},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW"},
    }
    ids = torch.empty((2, 32), dtype=torch.int64, device="meta")
    return build_plan(load_config(settings, pp * dp * tp), PlanRequest(program(), {"input_ids": ids, "labels": ids}))


def test_32_workers_on_8_nodes_of_4() -> None:
    plan = planned(4, 2, 4)
    costs = plan_costs(plan, SHAPE.workload(), GPU, 4)
    assert (costs.layout.pp, costs.layout.dp, costs.layout.tp) == (4, 2, 4) and costs.layout == planned_layout(plan)
    for pp, memory in enumerate(costs.memory):
        state = plan.rank(plan.grid(0).rank_at(pp=pp)).state_bytes
        assert memory.parameters == state["parameters"] and memory.gradients == state["gradients"]
        assert memory.optimizer == state["master"] + state["optimizer"]
    held = [memory.activations for memory in costs.memory]
    assert held == [pytest.approx(held[-1] * live) for live in (4, 3, 2, 1)]  # 1f1b, one block a stage
    assert costs.crossing_seconds == 0
    assert costs.tokens == 2 * 2 * 4 * 32
    assert costs.time.total == pytest.approx(costs.tokens / costs.tokens_per_second / 32)


def test_a_tensor_group_that_crosses_nodes_has_a_price() -> None:
    costs = plan_costs(planned(4, 2, 4), SHAPE.workload(), GPU, 2)
    inside = plan_costs(planned(4, 2, 4), SHAPE.workload(), GPU, 4)
    assert costs.crossing_seconds > 0
    assert costs.time.communication["tp"] > inside.time.communication["tp"]


@pytest.mark.parametrize(("node", "noted"), [(None, 0), (4, 0), (2, 1)])
def test_a_run_notes_a_tensor_group_that_crosses(node: int | None, noted: int) -> None:
    notes = planned(1, 1, 4, node=node).notes
    assert sum("groups of 4 ranks cross nodes of 2 GPUs" in note for note in notes) == noted


def test_sharded_parameters_are_gathered_into_buffers() -> None:
    whole, sharded = (plan_costs(planned(1, 4, 1, stage), SHAPE.workload(), GPU, 4).memory[0] for stage in (1, 3))
    assert sharded.buffers > whole.buffers and sharded.parameters * 4 == pytest.approx(whole.parameters, rel=0.02)


def test_an_average_of_weights_takes_memory() -> None:
    plan, average = planned(1, 2, 1), 4 * sum(bucket.elements for bucket in planned(1, 2, 1).layout(Coord()).buckets)
    averaged = replace(plan, config=replace(plan.config, ema=EmaConfig()))
    without, found = (plan_costs(each, SHAPE.workload(), GPU, 4).memory[0] for each in (plan, averaged))
    assert found.optimizer - without.optimizer == average / 2  # of two data ranks


def states(
    world: int, optimizer: list[dict[str, Any]], offload: dict[str, Any] | None = None, **parallel: int
) -> tuple[Plan, list[int]]:
    """A plan with ZeRO 1, and the bytes of optimizer state of every rank."""
    with torch.device("meta"):
        model = Decoder(DecoderConfig(layers=2, width=64, heads=4, context=32))
    settings = {"train_micro_batch_size_per_gpu": 2, "parallel": parallel, "optimizer": optimizer}
    zero = {"stage": 1} if offload is None else {"stage": 1, "offload_optimizer": offload, "reduce_bucket_size": 30_000}
    config = load_config({**settings, "zero_optimization": zero}, world)
    ids = torch.empty((2, 32), dtype=torch.int64, device="meta")
    own = Program(model, loss_sum, make_precision(config, model), torch.device("cpu"))
    plan = build_plan(config, PlanRequest(own, {"input_ids": ids, "labels": ids}))
    return plan, [plan.rank(rank).state_bytes["optimizer"] for rank in range(world)]


def test_context_ranks_have_the_shares_of_data_ranks() -> None:
    two: list[dict[str, Any]] = [{"type": "SGD", "match": ["blocks.*"]}, {"type": "AdamW"}]
    (_, context), (_, data) = states(4, two, context=2), states(4, two)
    assert context == data and len(set(data)) > 1


@pytest.mark.parametrize("kind", ["SGD", "Shampoo"])
def test_memory_is_that_of_the_fullest_data_rank(kind: str) -> None:
    names = ["blocks.*.weight"] if kind == "Shampoo" else ["head.*", "tokens.*", "blocks.1.*"]
    plan, held = states(8, [{"type": kind, "match": names}, {"type": "AdamW"}])
    (memory,) = plan_costs(plan, SHAPE.workload(), GPU, 8).memory
    assert memory.optimizer == max(held) > held[0]


def frozen(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("blocks.3."))
    return model


def test_a_memory_limit_holds_on_every_data_rank() -> None:
    both: list[dict[str, Any]] = [{"type": "SGD", "match": ["head.*", "tokens.*", "blocks.1.*"]}, {"type": "AdamW"}]
    limit = 1_150_000
    plan, _ = states(8, both, {"device": "cpu", "ratio": "auto", "memory_limit": limit / 2**30})
    assert max(sum(plan.rank(rank).state_bytes.values()) for rank in range(8)) <= limit


def with_table(model: nn.Module) -> nn.Module:
    model.register_buffer("table", torch.empty(1000, 3, device="meta"))
    return model


def test_buffers_of_modules_take_memory() -> None:
    ids = torch.empty((1, 32), dtype=torch.int64, device="meta")
    plain, table = (
        traced_workload(program(each), {"input_ids": ids, "labels": ids}) for each in (lambda m: m, with_table)
    )
    found = [
        (
            plan_costs(planned(1, 2, 1), work, GPU, 4).memory[0].parameters,
            StepModel(work, GPU, 4).estimate(TrainingLayout()).memory.parameters,
        )
        for work in (plain, table)
    ]
    assert [more - less for less, more in zip(*found, strict=True)] == [4 * 3000] * 2


def test_frozen_parameters_have_neither_gradients_nor_moments() -> None:
    ids = torch.empty((1, 32), dtype=torch.int64, device="meta")
    whole, part = (traced_workload(program(each), {"input_ids": ids, "labels": ids}) for each in (lambda m: m, frozen))
    model = StepModel(part, GPU, 1), StepModel(replace(part, optimizer_bytes=0.0), GPU, 1)
    found, hosted = (each.estimate(TrainingLayout()).memory for each in model)
    trained = part.trained * part.parameters
    assert whole.trained == 1.0 and trained == pytest.approx(part.block_parameters)
    assert (found.gradients, found.optimizer) == pytest.approx((4 * trained, 12 * trained))
    assert found.parameters == 2 * part.parameters and hosted.optimizer == 0.0


def test_activations_of_a_traced_workload_are_in_the_dtype_of_its_run() -> None:
    ids, memories = torch.empty((2, 32), dtype=torch.int64, device="meta"), []
    for bf16 in (True, False):
        config = load_config({"train_batch_size": 2, "bf16": {"enabled": bf16}, "optimizer": {"type": "AdamW"}}, 1)
        own = replace(program(), precision=make_precision(config, program().model))
        plan = build_plan(config, PlanRequest(own, {"input_ids": ids, "labels": ids}))
        work = traced_workload(own, {"input_ids": ids, "labels": ids})
        memories.append(plan_costs(plan, work, GPU, 1).memory[0].activations)
    assert memories[0] < memories[1] <= 2 * memories[0]


def test_a_traced_workload_is_that_of_the_sizes() -> None:
    ids = torch.empty((1, 32), dtype=torch.int64, device="meta")
    found: Workload = traced_workload(program(), {"input_ids": ids, "labels": ids})
    known = SHAPE.workload()
    assert found.flops_of_token() == pytest.approx(known.flops_of_token())
    assert (found.blocks, found.context, found.width) == (4, 32, 64)
    extras = 4 * (9 + 4) * 64 + 32 * 64 + 2 * 64  # biases and norms of blocks, positions, last norm
    assert found.parameters == known.parameters + extras
    assert found.attention == known.attention


class Towers(nn.Module):
    """A decoder beside a longer list of wider blocks that rows of text do not call."""

    def __init__(self, text: nn.Module, reads: bool) -> None:
        super().__init__()
        self.tower = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(6))
        self.text, self.reads = text, reads

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        if self.reads and int(input_ids.sum()) < 0:  # which a forward on shapes does not know
            raise ValueError("no tokens")
        return self.text(input_ids)


@pytest.mark.parametrize("reads", [False, True])
def test_blocks_that_the_forward_does_not_call_are_not_those_of_the_workload(reads: bool) -> None:
    ids = torch.empty((1, 32), dtype=torch.int64, device="meta")
    beside, alone = (
        traced_workload(program(around), {"input_ids": ids, "labels": ids})
        for around in (lambda model: Towers(model, reads), lambda model: model)
    )
    assert beside.blocks == alone.blocks == 4
    assert beside.block_parameters == alone.block_parameters
