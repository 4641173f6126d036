"""A run goes on with a model that has more parameters, or trains more of them: those begin as in plain torch."""

import logging
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from tests import models
from tests.engine.every_grid import GRIDS
from tests.engine.step.test_user_loop import loss_of
from tests.engine.test_training_changes import CLIP, ROWS, data, freeze, settings
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
Grid = dict[str, int]


class Growing(nn.Module):
    """A decoder, later with an adapter behind it."""

    def __init__(self, grown: bool) -> None:
        super().__init__()
        self.inner = models.decoder()
        torch.manual_seed(3)
        self.adapter = nn.Linear(models.VOCABULARY, models.VOCABULARY) if grown else None

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.inner(ids)
        return logits if self.adapter is None else logits + self.adapter(logits)


def made(grown: bool) -> nn.Module:
    """The first block is frozen as long as the adapter is missing."""
    model = Growing(grown)
    freeze("inner.blocks.0", not grown, model)
    return model


def in_one_process(before: int, after: int) -> dict[str, Tensor]:
    """Plain torch on the batches of these data ranks: what is new joins the optimizer after three steps."""
    model = made(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    for step, ids in enumerate([*data(before)[:3], *data(after)[3:]]):
        if step == 3:
            larger = made(True)
            model.adapter = larger.get_submodule("adapter")
            freeze("inner.blocks.0", False, model)
            optimizer.add_param_group({"params": list(model.get_submodule("adapter").parameters())})
        loss_of(model(ids), ids).backward()  # type: ignore[no-untyped-call]
        assert float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)) > CLIP
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


def part_of_run(grown: bool, grid: Grid, stage: int, folder: Path) -> dict[str, Tensor]:
    """Body of a rank: three steps, and a checkpoint after them."""
    example = data(1)[0][: ROWS // 2]
    with engine.initialize(made(grown), settings(grid, stage), loss_of, example_batch=example) as eng:
        if grown:
            with pytest.raises(engine.CheckpointError):
                eng.load_checkpoint(folder)
            eng.load_checkpoint(folder, strict=False)
        batches = data(eng.grid.dp)
        for ids in batches[3:] if grown else batches[:3]:
            eng.train_batch(ids.chunk(eng.grid.dp)[eng.grid.coord().dp])
        if not grown:
            eng.save_checkpoint(folder).wait()
        return eng.full_state_dict()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (({"data": 2}, 1), ({"data": 2}, 3)),
        pytest.param(({"data": 2}, 3), ({"data": 2}, 1), marks=pytest.mark.long),
        wide(({"data": 1, "tensor": 2}, 0), ({"data": 1, "pipeline": 2}, 0)),
        *(pytest.param(before, after, marks=pytest.mark.long) for before, after in pairwise(GRIDS.values())),
    ],
)
def test_added_and_thawed_parameters_join_as_in_plain_torch(
    before: tuple[Grid, int], after: tuple[Grid, int], tmp_path: Path, run_ranks: RunRanks
) -> None:
    run_ranks(part_of_run, math.prod(before[0].values()), False, *before, tmp_path)
    weights = run_ranks(part_of_run, math.prod(after[0].values()), True, *after, tmp_path)[0]
    expected = in_one_process(before[0]["data"], after[0]["data"])
    assert max(float((weights[name] - value).abs().max()) for name, value in expected.items()) <= 1e-5


def test_the_log_names_what_is_on_one_side_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = settings({"data": 1}, 0)
    with engine.initialize(made(True), config, loss_of) as eng:
        eng.save_checkpoint(tmp_path / "larger").wait()
    with engine.initialize(made(False), config, loss_of) as eng, caplog.at_level(logging.WARNING):
        eng.load_checkpoint(tmp_path / "larger", strict=False)
        eng.save_checkpoint(tmp_path / "smaller").wait()
    with engine.initialize(made(True), config, loss_of) as eng, caplog.at_level(logging.WARNING):
        eng.load_checkpoint(tmp_path / "smaller", strict=False)
    told = [record.getMessage() for record in caplog.records if "checkpoint" in record.getMessage()]
    assert told == [
        "the checkpoint has 2 tensor(s) that the model lacks: adapter.bias, adapter.weight",
        "the checkpoint lacks 2 tensor(s), which keep their values: adapter.weight, adapter.bias",
    ]
