"""Tiny runs that are ended and begun again: their grids, their data, and a digest of all that training has made."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import engine
from engine.data import Sampler
from engine.models.decoder import loss_sum
from engine.parallel.comm.world import read_world
from engine.program.batch import Batch
from engine.reporting.step_report import StepReport
from tests import models
from tests.models import take_rows

ROWS = 8
WINDOWS = 44
"""No multiple of ROWS: batches span epochs."""
GRIDS: dict[str, tuple[dict[str, int], int]] = {
    "dp1": ({"data": 1}, 0),
    "dp2": ({"data": 2}, 0),
    "dp2 zero 1": ({"data": 2}, 1),
    "dp2 zero 3": ({"data": 2}, 3),
    "pp2": ({"pipeline": 2}, 0),
    "dp2 x tp2 zero 1": ({"data": 2, "tensor": 2}, 1),
    "dp2 x pp2": ({"data": 2, "pipeline": 2}, 0),
    "dp4 zero 3": ({"data": 4}, 3),
}
"""Sizes of the axes, ZeRO stage."""


def world_of(grid: str) -> int:
    return prod(GRIDS[grid][0].values())


def settings(grid: str, folder: Path | None = None, **changes: Any) -> dict[str, Any]:
    """A run on a grid; with a folder, a checkpoint after every second update, of which two stay."""
    sizes, stage = GRIDS[grid]
    kept = {"checkpoint": {"folder": str(folder), "every": 2, "keep": 2}} if folder is not None else {}
    return {
        "train_batch_size": ROWS, "gradient_accumulation_steps": 2, "parallel": {"data": 1} | sizes,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 6000}, "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
    } | kept | changes  # fmt: skip


@dataclass(frozen=True)
class Course:
    """An engine with its data."""

    eng: engine.Engine
    sampler: Sampler
    windows: Tensor

    def step(self) -> StepReport:
        """The next update."""
        tokens = self.windows[torch.from_numpy(next(self.sampler))]
        return self.eng.train_batch(_batch(tokens))

    def until(self, step: int) -> list[float]:
        """The losses up to this update."""
        return [self.step().loss for _ in range(step - self.eng.step_count)]


@contextmanager
def course(config: dict[str, Any], build: Callable[[], nn.Module] = models.decoder) -> Iterator[Course]:
    """A fresh run of the decoder; the sampler is registered, nothing is loaded yet."""
    (windows,) = models.token_batches(WINDOWS, 1)
    resolved = engine.load_config(config, read_world().size)
    example = take_rows(_batch(windows), 0, resolved.micro or 1)
    with engine.initialize(build(), config, loss_sum, example) as eng:
        sampler = Sampler(WINDOWS, ROWS, seed=3, data_rank=eng.grid.coord().dp, data_size=eng.grid.dp)
        eng.register_for_checkpointing(data=sampler)
        yield Course(eng, sampler, windows)


def digest(eng: engine.Engine) -> str:
    """sha256 over what this rank holds: weights, buffers, masters, optimizer state, counters. Collective."""
    found = hashlib.sha256()

    def take(name: str, value: Any) -> None:
        found.update(name.encode())
        if isinstance(value, Tensor):
            found.update(str((value.dtype, tuple(value.shape))).encode())
            copy = value.detach().cpu().clone(memory_format=torch.contiguous_format)  # numpy() pins its storage
            found.update(copy.view(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(value).encode())

    for name, tensor in eng.full_state_dict().items():
        take(name, tensor)
    with eng.full_parameters("*") as whole:
        for name, tensor in sorted(whole.items()):
            take(name, tensor)
    for name, tensor in eng.module.named_buffers():
        take(name, tensor)
    for group in eng.optimizer.param_groups:
        take("step", group.get("step"))
        for parameter in group["params"]:
            take("weight", parameter)
            for name, value in sorted(eng.optimizer.state.get(parameter, {}).items()):
                take(name, value)
    take("counters", (eng.step_count, eng.skipped_steps, eng.lr))
    return found.hexdigest()


def _batch(tokens: Tensor) -> Batch:
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
