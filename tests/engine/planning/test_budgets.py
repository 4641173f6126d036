"""What is sent and held equals the formulas of the contract, by axis and label, in bytes and calls."""

import re
from collections.abc import Callable
from math import ceil, prod
from typing import Any, NamedTuple

import pytest
import torch

import engine
from engine.models.decoder import loss_sum
from engine.zero.layout import FlatLayout, Turn
from tests import models
from tests.engine.parity.launches import held_bytes
from tests.engine.parity.test_parity import config_for
from tests.models import take_rows
from tests.resumed_runs import own_rows

RunRanks = Callable[..., list[Any]]
STEPS = 2
LAYERS, WIDTH, ROWS = 4, 32, 2
HIDDEN = ROWS * models.LENGTH * WIDTH
"""b s h."""
TOKENS = ROWS * models.LENGTH
BUILD: dict[str, Callable[[], torch.nn.Module]] = {
    "decoder": lambda: models.decoder(layers=LAYERS),
    "decoder tied": lambda: models.decoder(layers=LAYERS, tied=True),
    "llama": lambda: models.llama(layers=LAYERS),
    "gpt2": lambda: models.gpt2(layers=LAYERS, dropout=0.0),
}


class Found(NamedTuple):
    """What a rank reports: (calls, bytes) a step by axis and label, and state."""

    coord: tuple[int, int, int]
    measured: dict[tuple[str, str], tuple[int, int]]
    planned: dict[tuple[str, str], tuple[int, int]]
    elements: int
    """Psi."""
    tied: int
    """Psi of what is tied over stages."""
    held: int
    """Bytes of live storages of parameters, gradients and optimizer."""
    state: int
    """The same by the plan."""
    stages: int
    front: int
    """Elements of the first gather group; ZeRO 3."""
    behind: int
    """Of the last one."""
    buckets: int


def train(name: str, config: dict[str, Any]) -> Found:
    """Body of a rank: some steps, then what was sent in them."""
    fn = loss_sum if name.startswith("decoder") else None
    first, *batches = models.batches_for(name.split()[0], 16, 1 + STEPS)
    resolved = engine.load_config(config, torch.distributed.get_world_size())
    with engine.initialize(BUILD[name](), resolved, fn, take_rows(first, 0, resolved.micro)) as eng:
        eng.train_batch(own_rows(eng, first))  # the plan is checked in the first step
        before = eng.sent
        for batch in batches:
            eng.train_batch(own_rows(eng, batch))
        sent = eng.sent.since(before).rows()
        plan, layout = eng.plan.rank(eng.grid.rank), eng.plan.layout(eng.grid.coord())
        return Found(
            (eng.grid.coord().pp, eng.grid.coord().dp, eng.grid.coord().tp),
            {(row.axis, row.label): (row.calls // STEPS, row.bytes // STEPS) for row in sent},
            {(row.axis, row.label): (row.calls, row.bytes) for row in plan.traffic},
            layout.elements,
            sum(bucket.elements for bucket in layout.buckets if bucket.ties),
            held_bytes(eng),
            sum(plan.state_bytes.values()),
            eng.grid.pp,
            *_ends(layout),
            len(layout.buckets) + len(layout.frozen),
        )


def _ends(layout: FlatLayout) -> tuple[int, int]:
    turns = sorted({turn for bucket in layout.buckets for turn in bucket.gathers}) or [Turn(0, 0)]
    first, last = (
        sum(bucket.elements for bucket in layout.buckets if turn in bucket.gathers) for turn in (turns[0], turns[-1])
    )
    return first, last


def expected(found: Found, config: dict[str, Any], tied: bool) -> dict[tuple[str, str], tuple[int, int]]:
    """Section 7 of the contract, for a decoder in fp32 with ZeRO 1 or 3."""
    sizes = {"data": 1, "tensor": 1, "pipeline": 1} | config["parallel"]
    n, t, p = (sizes[axis] for axis in ("data", "tensor", "pipeline"))
    m = 16 // ROWS // n
    pp, _, _ = found.coord
    first, last = pp == 0, pp == p - 1
    again = 2 if config.get("activation_checkpointing", {}).get("mode") == "full" else 1
    blocks = LAYERS // p
    rows: dict[tuple[str, str], tuple[int, int]] = {}

    def add(key: tuple[str, str], calls: int, elements: float) -> None:
        if elements:
            rows[key] = (calls, round(4 * elements))

    buckets = found.planned.get(("dp", "gradients"), (0, 0))[0]
    zero = config["zero_optimization"]
    rounds = m if zero.get("reduce") == "microbatch" else 1
    add(("dp", "gradients"), buckets, rounds * found.elements * (n - 1) / n)
    if zero["stage"] == 1:
        add(("dp", "parameters"), buckets, found.elements * (n - 1) / n)
    elif n > 1:
        groups = blocks + first + last
        times, calls = gathers(found, first, last, groups, m, zero.get("gather", "microbatch"))
        add(("dp", "parameters"), calls, times * (n - 1) / n)
        rows["dp", "batch check"] = (1, n - 1)
        rows["dp", "gather round"] = (m, m * (9 + ceil(found.buckets / 8)) * (n - 1))
    ring = 2 * HIDDEN * (t - 1) / t
    # recomputation stops before the second sum of a block: nothing after it saves a tensor
    summed = 2 if again == 1 else 3
    add(("tp", "row outputs"), summed * blocks * m, summed * blocks * m * ring)
    add(("tp", "column inputs"), (2 * blocks + last) * m, (2 * blocks + last) * m * ring)
    add(("tp", "embedding"), m, first * m * ring)
    add(("tp", "loss"), 2 * m, last * m * 6 * TOKENS * (t - 1) / t)
    add(("pp", "forward"), m, (not last) * m * HIDDEN)
    add(("pp", "backward"), m, (not first) * m * HIDDEN)
    k = 2 if tied and p > 1 and (first or last) else 1
    add(("pp", "ties"), 1, 2 * (k - 1) / k * found.tied / n)
    add(("world", "control"), 1, 2 * 2 * 9 * (n * t * p - 1) / (n * t * p))
    add(("replica", "batch check"), 1, 2 * (t * p - 1))
    return rows


def gathers(found: Found, first: bool, last: bool, groups: int, m: int, mode: str) -> tuple[float, int]:
    """Elements and batches of ZeRO 3: G Psi, G = 2 m or 1, less what is whole already where the direction turns.

    In 1F1B a stage turns between every forward and backward but in its warm-up and at its end.
    """
    if mode == "step":
        return found.elements, groups
    warm_up = min(found.stages - 1 - found.coord[0], m - 1)
    to_backward, to_forward = m - warm_up, m - warm_up - 1
    saved = to_backward * found.behind + to_forward * found.front
    return 2 * m * found.elements - saved, 2 * m * groups - to_backward - to_forward


GRIDS = [{"data": 2}, {"tensor": 2}, {"tensor": 4}, {"pipeline": 2}, {"pipeline": 4}, {"data": 2, "tensor": 2},
         {"data": 2, "pipeline": 2}, {"tensor": 2, "pipeline": 2}, {"data": 2, "tensor": 2, "pipeline": 2}]  # fmt: skip


SHORT = ({"pipeline": 4},)
"""Of the untied model; the tied one goes over all axes. ``test_covering_array`` compares every grid with its plan."""


@pytest.mark.parametrize(
    ("grid", "tied"),
    [pytest.param(grid, False, marks=[pytest.mark.long] * (grid not in SHORT)) for grid in GRIDS]
    + [pytest.param(grid, True, marks=[pytest.mark.long] * (grid != GRIDS[-1])) for grid in GRIDS],
    ids=str,
)
def test_a_decoder_sends_what_the_formulas_say(run_ranks: RunRanks, grid: dict[str, int], tied: bool) -> None:
    mode = "full" if tied and "tensor" in grid else "none"
    config = config_for(grid.get("data", 1), 1, parallel={"data": 1} | grid, activation_checkpointing={"mode": mode})
    found = run_ranks(train, prod(grid.values()), "decoder tied" if tied else "decoder", config)
    for rank in found:
        assert rank.measured == rank.planned == expected(rank, config, tied), rank.coord
        assert rank.held == rank.state, rank.coord
    if tied and grid.get("pipeline", 1) > 1:
        assert [bool(rank.tied) for rank in found] == [rank.coord[0] in (0, grid["pipeline"] - 1) for rank in found]


MODES: tuple[dict[str, Any], ...] = ({}, {"gather": "step"}, {"reduce": "microbatch"})
SHARING = [grid for grid in GRIDS if "data" in grid] + [{"data": 4}]
EVERY = [(grid, mode) for grid in SHARING for mode in MODES]
TURNS = [({"data": 2}, {"gather": "step"})]


@pytest.mark.parametrize(
    ("grid", "zero"), [pytest.param(*case, marks=[pytest.mark.long] * (case not in TURNS)) for case in EVERY], ids=str
)
def test_sharded_parameters_send_what_the_formulas_say(
    run_ranks: RunRanks, grid: dict[str, int], zero: dict[str, Any]
) -> None:
    config = config_for(grid["data"], 3, parallel=grid, zero_optimization={"stage": 3} | zero)
    config |= {"train_micro_batch_size_per_gpu": ROWS}
    for rank in run_ranks(train, prod(grid.values()), "decoder", config):
        assert rank.measured == rank.planned == expected(rank, config, tied=False), rank.coord
        assert rank.held == rank.state, rank.coord


@pytest.mark.long  # test_covering_array has rows of both models with tensor ranks
@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("llama", {"tensor": 2, "pipeline": 2}),
        ("gpt2", {"tensor": 4}),
        ("llama", {"tensor": 4}),
        ("gpt2", {"tensor": 2, "pipeline": 2}),
    ],
    ids=str,
)
def test_hugging_face_models_send_what_their_plan_says(run_ranks: RunRanks, name: str, grid: dict[str, int]) -> None:
    config = config_for(1, 1, parallel={"data": 1} | grid)
    for rank in run_ranks(train, 4, name, config):
        assert rank.measured == rank.planned, rank.coord
        assert rank.held == rank.state, rank.coord
        shared = rank.measured.get(("tp", "replicated gradients"))
        # two key and two value heads of width 8 on four ranks: R = 2 x 16 x 32 in each of the blocks
        elements = 2 * 16 * WIDTH * LAYERS
        assert shared == ((1, 4 * 2 * elements * 3 // 4) if name == "llama" and grid == {"tensor": 4} else None)


def train_with_logits() -> tuple[Any, Any, tuple[str, ...]]:
    """A loss that needs all logits: the gather is planned and counted."""

    def loss(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return logits.softmax(dim=-1).square().mean()

    config = config_for(1, 0, parallel={"data": 1, "tensor": 2})
    batch = models.batches_for("decoder", 16, 1)[0]
    with engine.initialize(models.decoder(), config, loss, take_rows(batch, 0, ROWS)) as eng:
        eng.train_batch(batch)
        before = eng.sent
        eng.train_batch(batch)
        rows = {(row.axis, row.label): (row.calls, row.bytes) for row in eng.sent.since(before).rows()}
        planned = {(row.axis, row.label): (row.calls, row.bytes) for row in eng.plan.rank(eng.grid.rank).traffic}
        return rows, planned, eng.plan.notes


def lose_in_a_loop() -> tuple[set[str], set[str], tuple[str, ...]]:
    """Labels that a user's own cross-entropy sends, labels of the plan, and its notes."""
    config = config_for(1, 0, parallel={"data": 1, "tensor": 2})
    part = take_rows(models.batches_for("decoder", 16, 1)[0], 0, ROWS)
    with engine.initialize(models.decoder(), config, example_batch=part) as eng:
        before = eng.sent
        eng.backward(torch.nn.functional.cross_entropy(eng(part).flatten(0, 1), part["labels"].flatten()))
        sent = {row.label for row in eng.sent.since(before).rows()}
        return sent, {row.label for row in eng.plan.rank(eng.grid.rank).traffic}, eng.plan.notes


def test_the_plan_of_a_loop_expects_a_cross_entropy_over_sharded_logits(run_ranks: RunRanks) -> None:
    for sent, planned, notes in run_ranks(lose_in_a_loop, 2):
        assert "loss" in sent & planned and "logits" not in sent | planned and notes == ()


def test_a_loss_that_needs_all_logits_gathers_them_as_planned(run_ranks: RunRanks) -> None:
    for measured, planned, notes in run_ranks(train_with_logits, 2):
        assert measured == planned
        (note,) = [note for note in notes if "logits" in note]
        assert re.fullmatch(r"softmax at .*test_budgets\.py:\d+ needs all logits: they are gathered over tp", note)
        # 61 rows of the vocabulary travel as two parts of 31
        assert measured["tp", "logits"] == (8, 8 * TOKENS * 62 * 4 // 2)
        assert ("tp", "loss") not in measured
