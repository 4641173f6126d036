"""Outputs without labels or loss: any number of rows, on every grid, equal to the model in one process."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import engine
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from tests import models
from tests.engine.every_grid import every_grid
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
MICRO = 2


def loss_of(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def settings(grid: dict[str, Any], stage: int) -> dict[str, Any]:
    return {
        "train_batch_size": 2 * MICRO * grid.get("data", 1),
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
        "zero_optimization": {"stage": stage},
        "parallel": grid,
    }


def rows(count: int) -> Tensor:
    return models.token_batches(count, 1, seed=count)[0][:, : models.LENGTH]


def own_rows(dp: int, call: int) -> int:
    """1, 3 or 5 rows, other ones on each data rank."""
    return 1 + 2 * ((dp + call) % 3)


def predictions(config: dict[str, Any]) -> list[float]:
    """Body of a rank: deviations from the model in one process, before and after a step."""
    example = models.batches_for("decoder", MICRO, 1)[0]
    deviations = []
    with engine.initialize(models.decoder(dropout=0.1, layers=4), config, loss_of, example_batch=example) as eng:
        dp = eng.grid.coord().dp
        batch = models.batches_for("decoder", 2 * MICRO * eng.grid.dp, 1)[0]
        mine = {name: value.chunk(eng.grid.dp)[dp] for name, value in batch.items()}
        found = []
        for call in range(3):
            random = torch.get_rng_state()
            ids = rows(own_rows(dp, call))
            found.append((ids, eng.predict({"input_ids": ids}), eng.full_state_dict()))
            assert torch.equal(random, torch.get_rng_state()) and eng.module.training
            eng.train_batch(mine)
        states = [state for _, _, state in found]
        torch.distributed.broadcast_object_list(states)
    for (ids, logits, _), state in zip(found, states, strict=True):
        model = models.decoder(dropout=0.1, layers=4).eval()
        model.load_state_dict(state)
        with torch.no_grad():
            deviations.append(float((model(ids) - logits).abs().max()))
        assert logits.shape == (*ids.shape, models.VOCABULARY) and not logits.requires_grad
    return deviations


GRIDS = [
    *every_grid("pp2"),
    pytest.param({"data": 1, "pipeline": 2, "schedule": "interleaved", "virtual_stages": 2}, 0, marks=pytest.mark.long),
    pytest.param({"data": 1, "tensor": 2, "pipeline": 2}, 0, marks=pytest.mark.long),
]  # fmt: skip


@pytest.mark.parametrize(("grid", "stage"), GRIDS)
def test_any_number_of_rows_gives_the_output_of_one_process(
    grid: dict[str, Any], stage: int, run_ranks: RunRanks
) -> None:
    world = math.prod(size for size in grid.values() if isinstance(size, int)) // grid.get("virtual_stages", 1)
    for deviations in run_ranks(predictions, world, settings(grid, stage), seconds=120.0):
        assert len(deviations) == 3 and max(deviations) < 1e-5


def bad_batches(config: dict[str, Any]) -> list[str]:
    """Body of a rank: rank 1 is given something else."""
    example, said = models.batches_for("decoder", MICRO, 1)[0], []
    rank = torch.distributed.get_rank()
    with engine.initialize(models.decoder(), config, loss_of, example_batch=example) as eng:
        for bad in (rows(1)[:0], "text", {"input_ids": rows(2), "labels": rows(3)}):
            with pytest.raises(engine.EngineError) as caught:
                eng.predict(bad if rank else {"input_ids": rows(2)})
            said.append(str(caught.value))
        assert eng.predict(rows(2)).shape[0] == 2, "the mistake has spoiled nothing"
    return said


@pytest.mark.parametrize(
    ("stage", "grid"),
    [(3, {"data": 2}), (0, {"data": 1, "tensor": 2}), wide(0, {"data": 2}), wide(3, {"data": 1, "tensor": 2})],
    ids=str,
)
def test_a_bad_batch_is_refused_on_all_ranks(stage: int, grid: dict[str, int], run_ranks: RunRanks) -> None:
    others, own = run_ranks(bad_batches, 2, settings(grid, stage))
    assert own[0] == "the batch has no row; give tensors with at least one row along dim 0."
    assert own[1] == "the batch is a str; give a tensor, tuple or dict."
    assert own[2].startswith("batch['labels'] has leading dim 3, but a data rank's share has 2 rows")
    assert len(others) == 3 and not set(others) & set(own)


def test_without_a_plan_it_is_refused() -> None:
    config = settings({"data": 1}, 0) | {"compile": False}
    with engine.initialize(models.decoder(), config, loss_of) as eng:
        assert eng.predict(rows(3)).shape[0] == 3, "data parallelism needs no example"


@pytest.mark.parametrize("axis", ["pipeline", "tensor"])
def test_an_evaluation_in_inference_mode_leaves_an_engine_that_trains(axis: str) -> None:
    """It places the model and makes buffers of messages, which training uses again."""

    def body(world: World) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        config = {
            "train_micro_batch_size_per_gpu": 2, "parallel": {"data": 1, axis: 2},
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        }  # fmt: skip
        batch = torch.linspace(-1, 1, 8).view(2, 4)
        with engine.initialize(model, config, lambda output, _: output.square().mean(), world=world) as eng:
            with torch.inference_mode():
                losses = [eng.eval_batch(batch).loss, float(eng.predict(batch).square().mean())]
            return [*losses, eng.train_batch(batch).loss, eng.train_batch(batch).loss]

    for losses in run_thread_ranks(2, body):
        assert losses == pytest.approx([losses[0]] * 4)


def test_a_load_in_inference_mode_leaves_an_engine_that_trains(tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "ema": {"decay": 0.5}, "optimizer": {"type": "AdamW"}}
    losses = []
    for starts in (False, True):
        torch.manual_seed(0)
        with engine.initialize(nn.Linear(4, 4), config, lambda output, _: output.square().mean()) as eng:
            if starts:
                with torch.inference_mode():
                    eng.load_checkpoint(tmp_path)
            else:
                eng.train_batch(torch.ones(2, 4))
                eng.save_checkpoint(tmp_path).wait()
            losses.append([eng.train_batch(torch.ones(2, 4)).loss for _ in range(2)])
    assert losses[0] == losses[1]
