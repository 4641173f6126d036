"""What is predicted of a record's rows, and what a benchmark trains, without processes."""

import pytest
import torch

from benchmarks.scaling.prediction import ranked, with_predictions
from benchmarks.scaling.ranking import GridChoice, grid_choices
from benchmarks.scaling.record import ScalingRecord
from benchmarks.scaling.task import Task
from engine.errors import ConfigError
from engine.models.decoder import DecoderConfig, loss_sum
from tests.benchmarks.scaling.test_record import machine

TASK = Task(decoder=DecoderConfig(layers=2, width=16, heads=2, context=8, vocabulary=32), micro=2, rows=8)
PP2, DP2 = GridChoice(dp=1, tp=1, pp=2), GridChoice(dp=2, tp=1, pp=1)


def test_rows_are_shared_or_those_of_a_rank() -> None:
    assert (TASK.data_rows(DP2, "strong"), TASK.data_rows(DP2, "weak")) == (4, 8)
    assert (TASK.tokens(DP2, "strong"), TASK.tokens(DP2, "weak")) == (64, 128)
    weights = 2 * 12 * 16 * 16 + 32 * 16
    assert TASK.flops(PP2, "strong") == (6 * weights + 12 * 2 * 16 * 8) * 64
    with pytest.raises(ConfigError, match="--rows 8 cannot be shared by 8 data ranks in microbatches of 2"):
        TASK.data_rows(GridChoice(dp=8, tp=1, pp=1), "strong")


def test_a_slice_computes_a_part_of_every_product() -> None:
    whole, half = TASK.model(), TASK.slice(2)
    shapes = {name: (full.numel(), half.get_parameter(name).numel()) for name, full in whole.named_parameters()}
    kept = {name for name, (full, part) in shapes.items() if full == part}
    assert {name.split(".")[-2] for name in kept} == {"tokens", "positions", "norm", "norm1", "norm2", "output", "down"}
    assert all(name.endswith("bias") for name in kept if name.split(".")[-2] in ("output", "down"))
    assert all(full == 2 * part for name, (full, part) in shapes.items() if name not in kept)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    total, count = loss_sum(half(ids), {"labels": ids})
    assert half(ids).shape == (1, 8, 16) and total.isfinite() and int(count) == 8


def test_every_grid_gets_a_row_and_samples_stay() -> None:
    given = machine()
    choices = [choice for choice in grid_choices(4, [0]) if choice.tp == 1]  # a search of tensor plans takes long
    found = ranked(TASK, "strong", given, choices)
    assert len(found) == len(choices) == 3
    record = with_predictions(ScalingRecord(task={}), TASK, given, found, "strong")
    assert {row.choice for row in record.rows} == set(choices)
    times = [row.predicted.total for row in record.rows if row.predicted is not None]
    assert times == sorted(times)
    refused = [row for row in record.rows if row.predicted is None]
    assert [(str(row.choice), row.tokens) for row in refused] == [("pp4", 0)]  # of two blocks
