"""Blocks that hold one layer together: tensor ranks leave them whole, and share the others."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.planning.tensor_plan_search import blocks_with_shared_layers
from engine.verify import Parity, TrainingRecord, VerifyOptions, train_alone
from tests.engine.planning.tensor_runs import CONFIG, WIDTH, drawn_batches, recorded


class Block(nn.Module):
    """A feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


def build(sharing: str = "layer") -> nn.Module:
    """Four blocks, of which the last two share a layer, a weight, or are one."""
    torch.manual_seed(1)
    blocks: list[Any] = [Block() for _ in range(4)]
    if sharing == "layer":
        blocks[3].down = blocks[1].down
        blocks[2].up.weight = blocks[3].up.weight
    elif sharing == "weight":
        blocks[3].down.weight = blocks[1].down.weight
    else:
        blocks[3] = blocks[1]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, 4))


@pytest.mark.parametrize(("sharing", "whole"), [("layer", {"2", "3", "4"}), ("weight", set()), ("block", set())])
def test_blocks_with_a_layer_of_another_one_are_found(sharing: str, whole: set[str]) -> None:
    assert blocks_with_shared_layers(build(sharing), ["1", "2", "3", "4"]) == whole


def loss(out: Tensor, _: Tensor) -> Tensor:
    return out.square().mean()


def trained(config: dict[str, Any], batches: list[Tensor], world: World) -> tuple[TrainingRecord, str]:
    """Body of a rank: the run, and why blocks are whole."""
    with engine.initialize(build, config, loss_fn=loss, example_batch=batches[0][:2], world=world) as eng:
        record = recorded(eng, batches)
        tensor = eng.plan.tensor
        assert tensor is not None and "1.up" in tensor.layers and "2.up" not in tensor.layers
        return record, " ".join(reason.why for reason in tensor.reasons)


def test_tensor_ranks_train_blocks_that_hold_one_layer_together() -> None:
    batches = drawn_batches()
    alone = train_alone(build, CONFIG, batches, VerifyOptions(loss))
    body = partial(trained, CONFIG | {"parallel": {"tensor": 2}}, batches)
    for record, why in run_thread_ranks(2, body)[:1]:
        parity = Parity(record, alone)
        assert parity.holds() and min(alone.norms) > 0.01, str(parity)
        assert "holds a layer of another block too" in why
