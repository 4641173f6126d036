"""Data ranks with different numbers of microbatches train as one process does, and send what is planned for them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine.models.decoder import loss_sum
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.verify import Parity, TrainingRecord, VerifyOptions, train_alone
from tests import models
from tests.engine.parity.test_parity import ADAMW
from tests.models import take_rows
from tests.selection import wide
from tests.zero.gather import test_uneven_calls as uneven_calls

COUNTS: Mapping[int, Sequence[Sequence[int]]] = {
    2: ((1, 6), (4, 3), (0, 7)),
    3: ((1, 2, 4), (4, 1, 2), (0, 2, 5)),
}
"""Microbatches of each of two or three data ranks in three steps: 7 in all."""
STEPS = 3
ROWS = 7
ZEROS: Mapping[str, dict[str, Any]] = {
    "zero0": {"stage": 0},
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero2 in every microbatch": {"stage": 2, "reduce": "microbatch"},
    "zero3": {"stage": 3},
    "zero3 once": {"stage": 3, "gather": "step"},
    "zero3 in every microbatch": {"stage": 3, "reduce": "microbatch"},
    "zero3 gathered once": {"stage": 3, "gather": "step", "reduce": "microbatch"},
}
OFTEN = ("zero1", "zero3 once", "zero3 in every microbatch")
RunRanks = Callable[..., list[Any]]


def build_for(parallel: Mapping[str, Any]) -> Callable[[], nn.Module]:
    """A model with dropout, which tensor and context ranks draw in their own way."""
    return partial(models.decoder, dropout=0.0 if {"tensor", "context"} & parallel.keys() else 0.1, layers=4)


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": ADAMW,
        "gradient_clipping": 0.25,
        "uneven_microbatches": True,
    } | changes


def batches() -> list[Any]:
    """A batch for each step; rows have different numbers of labels."""
    found = models.batches_for("decoder", ROWS, STEPS)
    for batch in found:
        batch["labels"] = batch["labels"].clone()
        for row in range(ROWS):
            batch["labels"][row, : 3 * row] = -100
    return found


def own(batch: Any, counts: Sequence[int], rank: int) -> list[Any]:
    """This data rank's microbatches of one row each."""
    return [take_rows(batch, sum(counts[:rank]) + index, 1) for index in range(counts[rank])]


def train(config: Mapping[str, Any], world: World | None = None) -> tuple[TrainingRecord, list[str]]:
    """Body of a rank: three steps, and where what was sent is not what was planned."""
    unplanned, reports = [], []
    with engine.initialize(
        build_for(config["parallel"]), dict(config), loss_sum, take_rows(batches()[0], 0, 1), world=world
    ) as eng:
        for batch, counts in zip(batches(), COUNTS[eng.grid.dp], strict=True):
            before = eng.sent
            reports.append(eng.train_batch(own(batch, counts, eng.grid.row_rank)))
            sent = {row for row in eng.sent.since(before).rows() if row.label != "used"}
            planned = {row for row in eng.plan.traffic_of(eng.grid.rank, counts) if row.calls}
            if reports[1:]:  # the first step checks the plan, which sends
                unplanned += [f"rank {eng.grid.rank}, {counts}: {row}" for row in sent ^ planned]
        assert eng._parts.update.samples == ROWS * STEPS
        weights = eng.full_state_dict()
    return TrainingRecord(tuple(r.loss for r in reports), tuple(r.grad_norm for r in reports), weights), unplanned


def alone(parallel: Mapping[str, Any]) -> TrainingRecord:
    config = settings(uneven_microbatches=False, gradient_accumulation_steps=ROWS)
    return train_alone(
        build_for(parallel), config, batches(), VerifyOptions(loss_sum), World(0, 1, 0, torch.device("cpu"))
    )


def check(parallel: Mapping[str, Any], ranks: Sequence[tuple[TrainingRecord, list[str]]]) -> None:
    """All of it equals one process, and nothing else was sent than planned."""
    parity = Parity(ranks[0][0], alone(parallel))
    assert parity.holds(), str(parity)
    assert min(parity.reference.norms) > 0.25, "clipping must be active"
    assert [line for _, unplanned in ranks for line in unplanned] == []


@pytest.mark.parametrize("zero", [zero if zero in OFTEN else wide(zero) for zero in ZEROS])
def test_ranks_with_other_numbers_of_microbatches_equal_one_process(zero: str) -> None:
    config = settings(parallel={"data": 3}, zero_optimization=ZEROS[zero] | {"reduce_bucket_size": 6000})
    check(config["parallel"], run_thread_ranks(3, partial(train, config)))


GRIDS: Mapping[str, dict[str, Any]] = {
    "dp3": {"data": 3},
    "dp2 x tp2": {"data": 2, "tensor": 2},
    "dp2 x cp2": {"data": 2, "context": 2},
    "dp3 x pp2": {"data": 3, "pipeline": 2},
    "dp2 x pp2, zb-h1": {"data": 2, "pipeline": 2, "schedule": "zb-h1"},
    "dp2 x pp2, interleaved": {"data": 2, "pipeline": 2, "schedule": "interleaved", "virtual_stages": 2},
    "dp2 x pp2, dualpipe-v": {"data": 2, "pipeline": 2, "schedule": "dualpipe-v"},
}


@pytest.mark.long
@pytest.mark.parametrize("zero", ZEROS)
@pytest.mark.parametrize("grid", GRIDS)
def test_every_grid_with_other_numbers_of_microbatches_equals_one_process(
    run_ranks: RunRanks, grid: str, zero: str
) -> None:
    sizes = prod(size for axis, size in GRIDS[grid].items() if axis in ("data", "tensor", "context", "pipeline"))
    config = settings(
        parallel=GRIDS[grid], zero_optimization=ZEROS[zero] | {"reduce_bucket_size": 6000},
        gradient_accumulation_steps=4,
    )  # fmt: skip
    check(GRIDS[grid], run_ranks(train, sizes, config, seconds=100.0))


def train_other_calls(name: str, zeros: Sequence[dict[str, Any]]) -> list[TrainingRecord]:
    """Body of one of two ranks: a model that takes other paths on other rows, with an evaluation after each step."""
    found = []
    for zero in zeros:
        config = uneven_calls.settings(2, zero, uneven_microbatches=True, train_batch_size=4)
        with engine.initialize(uneven_calls.KINDS[name](), config) as eng:
            reports = []
            for batch, counts in zip(uneven_calls.batches(), ((3, 5), (8, 0), (1, 7)), strict=True):
                mine = own(batch, counts, eng.grid.row_rank)
                reports.append(eng.train_batch(mine))
                eng.eval_batch(mine)
            losses, norms = tuple(r.loss for r in reports), tuple(r.grad_norm for r in reports)
            found.append(TrainingRecord(losses, norms, eng.full_state_dict()))
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", uneven_calls.KINDS)
def test_ranks_may_make_other_calls_too(run_ranks: RunRanks, name: str) -> None:
    alone = train_alone(uneven_calls.KINDS[name], uneven_calls.settings(1, {"stage": 0}), uneven_calls.batches())
    for record in run_ranks(train_other_calls, 2, name, uneven_calls.MODES, env=uneven_calls.ENV)[0]:
        assert Parity(record, alone).holds(), str(Parity(record, alone))
