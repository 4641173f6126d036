"""A decoder of a few blocks, and engines over it whose ranks are threads."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

import engine
from engine.engine import Engine
from engine.models.decoder import Decoder, DecoderConfig, loss_sum
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World

Result = TypeVar("Result")
SIZES = DecoderConfig(layers=2, width=32, heads=2, context=16)
ROWS = 2


def on_threads(ranks: int, changes: dict[str, Any], body: Callable[[Engine], Result], layers: int = 2) -> list[Result]:
    """``body(engine)`` of every rank; four microbatches a step."""

    def rank(world: World) -> Result:
        torch.manual_seed(3)
        config = {"train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": 4} | changes
        sizes = DecoderConfig(layers=layers, width=SIZES.width, heads=SIZES.heads, context=SIZES.context)
        ids = torch.zeros(ROWS, SIZES.context, dtype=torch.long)
        example = {"input_ids": ids, "labels": ids}
        with engine.initialize(Decoder(sizes), config, loss_sum, example, world=world) as eng:
            return body(eng)

    return run_thread_ranks(ranks, rank)


def batch(eng: Engine, step: int) -> dict[str, Tensor]:
    """This data rank's share of a step."""
    generator = torch.Generator().manual_seed(100 * step + eng.grid.coord().dp)
    ids = torch.randint(0, 128, (4 * ROWS, SIZES.context + 1), generator=generator)
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
