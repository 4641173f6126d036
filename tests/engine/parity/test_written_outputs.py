"""Models that write in place into what a layer returns: the training of one process, however the layer is patched."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import engine
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.verify import Parity, TrainingRecord, train_on_grid, verify
from tests import models
from tests.engine.parity.launches import settings
from tests.selection import wide

WIDTH = 16
PLAN = {"*.up": "column", "*.down": "row"}
GRIDS: dict[str, tuple[dict[str, Any], int]] = {
    "dp2-zero3": ({"data": 2}, 3),
    "dp2-zero1": ({"data": 2}, 1),
    "tp2": ({"tensor": 2, "tensor_plan": PLAN}, 0),
    "pp2": ({"pipeline": 2}, 0),
    "tp2-pp2": ({"tensor": 2, "tensor_plan": PLAN, "pipeline": 2}, 0),
    "dp2-tp2-zero3": ({"data": 2, "tensor": 2, "tensor_plan": PLAN}, 3),
}
Write = Callable[["Block", Tensor], Tensor]


class Block(nn.Module):
    """Two layers with a norm; ``write`` runs them and writes into what they return."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.layers = nn.Sequential(self.norm, self.up, nn.ReLU(inplace=True), self.down)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        return self.write(self, x)


def residual(block: Block, x: Tensor) -> Tensor:
    out: Tensor = block.down(F.gelu(block.up(block.norm(x))))
    out += x
    return out


def masked(block: Block, x: Tensor) -> Tensor:
    hidden = block.up(block.norm(x)).masked_fill_(torch.arange(x.shape[1])[:, None] > 5, 0.1)
    out: Tensor = x + block.down(F.gelu(hidden))
    return out


def scaled(block: Block, x: Tensor) -> Tensor:
    out: Tensor = x + block.down(block.up(block.norm(x)).mul_(0.7)).mul_(1.3).add_(0.01)
    return out


def first_word(block: Block, x: Tensor) -> Tensor:
    out: Tensor = block.down(F.gelu(block.up(block.norm(x))))
    out[:, 0] = 0
    return x + out


def other_words(block: Block, x: Tensor) -> Tensor:
    out: Tensor = block.down(F.gelu(block.up(block.norm(x))))
    out[:, 1:] += x[:, :-1]
    return x + out


def through_view(block: Block, x: Tensor) -> Tensor:
    hidden = block.up(block.norm(x))
    hidden.view(-1, hidden.shape[-1]).clamp_(min=-0.5)
    out: Tensor = x + block.down(hidden)
    return out


def normed(block: Block, x: Tensor) -> Tensor:
    hidden = block.norm(x)
    hidden *= 0.5
    out: Tensor = x + block.down(torch.relu_(block.up(hidden)))
    return out


def copied(block: Block, x: Tensor) -> Tensor:
    out: Tensor = block.down(F.gelu(block.up(block.norm(x))))
    out[:, -1].copy_(x[:, 0])
    return x + out


WRITES: dict[str, Write] = {
    "ReLU(inplace)": lambda block, x: x + block.layers(x),
    "residual +=": residual,
    "masked_fill_": masked,
    "mul_ and add_": scaled,
    "x[:, 0] = 0": first_word,
    "x[:, 1:] +=": other_words,
    "a view": through_view,
    "a norm": normed,
    "copy_": copied,
}
INTO_INPUT: dict[str, Write] = {
    "into what the embedding returns": lambda block, x: x.mul_(1.1) + block.down(torch.relu(block.up(block.norm(x)))),
    "residual into the input": lambda block, x: x.add_(block.down(torch.relu(block.up(block.norm(x.clone()))))),
}


class Decoder(nn.Module):
    """Blocks between an embedding and a head, whose logits it writes into as well."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed, self.blocks = nn.Embedding(models.VOCABULARY, WIDTH), nn.ModuleList(Block(write) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, models.VOCABULARY)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        x *= 1.5
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        logits[..., 0] -= 0.5
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def dropped(inplace: bool) -> Write:
    """Drops what both layers return; a mask is that of one process where no layer is shared over tensor ranks."""

    def write(block: Block, x: Tensor) -> Tensor:
        hidden = F.dropout(block.up(block.norm(x)), 0.2, block.training, inplace)
        return x + F.dropout(block.down(F.gelu(hidden)), 0.2, block.training, inplace)

    return write


def inputs_of(grid: str, mode: str) -> tuple[dict[str, Any], list[tuple[Tensor, Tensor]], int]:
    """Configuration, batches and ranks."""
    axes, stage = GRIDS[grid]
    changes = {"zero_optimization": {"stage": stage}, "activation_checkpointing": {"mode": mode}}
    config = settings(axes.get("pipeline", 1), parallel=axes, **changes)
    batches = [(t[:, :-1], t[:, 1:]) for t in models.token_batches(config["train_batch_size"], 3)]
    return config, batches, int(axes.get("data", 1) * axes.get("tensor", 1) * axes.get("pipeline", 1))


def trains(grid: str, write: Write, mode: str) -> None:
    """Train three steps on the threads of a grid and in one process."""
    config, batches, ranks = inputs_of(grid, mode)
    result = verify(lambda: Decoder(write), config, batches, threads=ranks)
    assert result is not None and result.holds(), str(result)


OFTEN = ("ReLU(inplace)", "residual +=", "x[:, 1:] +=", "a view", "copy_")
"""By default; the others write as one of these."""
OTHERS = [pytest.param(grid, marks=pytest.mark.long) for grid in GRIDS if grid != "dp2-zero3"]
MODES = ["none", pytest.param("full", marks=pytest.mark.long)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [name if name in OFTEN else wide(name) for name in WRITES])
@pytest.mark.parametrize("grid", ["dp2-zero3", *OTHERS])
def test_writes_into_what_a_layer_returns_train_as_in_one_process(grid: str, name: str, mode: str) -> None:
    trains(grid, WRITES[name], mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("grid", ["dp2-zero3", *OTHERS])
def test_dropout_in_place_drops_what_dropout_drops(grid: str, mode: str) -> None:
    config, batches, ranks = inputs_of(grid, mode)

    def body(world: World) -> list[TrainingRecord]:
        writes = dropped(True), dropped(False)
        return [train_on_grid(partial(Decoder, write), config, batches, world=world) for write in writes]

    parity = Parity(*run_thread_ranks(ranks, body)[0])
    assert parity.holds(), str(parity)
    if "tp2" not in grid:
        trains(grid, dropped(True), mode)


@pytest.mark.long
@pytest.mark.parametrize("name", INTO_INPUT)
@pytest.mark.parametrize("grid", GRIDS)
def test_writes_into_the_input_of_a_block_train_where_nothing_runs_again(grid: str, name: str) -> None:
    trains(grid, INTO_INPUT[name], "none")


@pytest.mark.long
@pytest.mark.parametrize("name", INTO_INPUT)
@pytest.mark.parametrize("grid", GRIDS)
def test_a_recomputed_block_that_writes_into_its_input_is_refused(grid: str, name: str) -> None:
    with pytest.raises(engine.EngineError, match="writes in"):
        trains(grid, INTO_INPUT[name], "full")
