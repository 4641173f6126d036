"""Gradients of inputs on pipelines: of a tensor that the first stage reads, one that the last reads, and both."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import engine
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.serving.commands import AdamParameters, BackwardTensors, ForwardTensors
from engine.serving.tensor_calls import TensorCalls
from engine.serving.training import TenantTrainer
from tests.engine.serving.test_training import CONFIG

WIDTH, ROWS = 8, 4
PLAN = {"blocks.*.up": "column", "blocks.*.down": "row"}
GRIDS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "pp2": (2, {"pipeline": 2}),
    "tp2 x pp2": (4, {"tensor": 2, "pipeline": 2, "tensor_plan": PLAN, "prove_plan": False}),
    "dp2 x pp2": (4, {"data": 2, "pipeline": 2}),
}


class Block(nn.Module):
    """A residual perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Gated(nn.Module):
    """Blocks on x; their result is multiplied by a gate, and the gate's square is an output of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x: Tensor, gate: Tensor) -> dict[str, Tensor]:
        y = x + gate
        for block in self.blocks:
            y = block(y)
        return {"y": y * torch.sigmoid(gate), "square": gate.square()}


def frozen() -> nn.Module:
    """The model, of which only the last block trains: other stages have no gradient but that of x."""
    model = Gated()
    model.requires_grad_(False)
    model.blocks[3].requires_grad_(True)
    return model


MODELS = {"trained": Gated, "frozen": frozen}
Found = list[dict[str, Tensor]]


def drawn(name: str, step: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Draws a tensor of a call."""
    seed = step + sum(map(ord, name))
    return np.random.default_rng(seed).standard_normal((ROWS, WIDTH)).astype(np.float32)


def served(model: str, parallel: Mapping[str, Any], world: World | None) -> Found:
    """Body of a rank: outputs and gradients of inputs of a few steps, two forwards before two backwards in each."""
    config, found = {**CONFIG, "parallel": dict(parallel)}, Found()
    example = {name: torch.zeros(1, WIDTH) for name in ("x", "gate")}
    with engine.initialize(MODELS[model](), config, example_batch=example, world=world) as eng:
        trainer, calls = TenantTrainer(eng, {}), TensorCalls({})
        eng(x=torch.from_numpy(drawn("x", 9)), gate=torch.from_numpy(drawn("gate", 9)))  # inputs without gradients
        for step in range(3):
            for ticket in "ab":
                given = {name: drawn(name + ticket, step) for name in ("x", "gate")}
                made = calls.forward(trainer, ForwardTensors("m", given, ticket))
                found.append({name: torch.from_numpy(value) for name, value in made.tensors.items()})
            for ticket, names in (("a", ("y", "square")), ("b", ("y",))):
                gradients = {name: drawn(name + ticket, step) for name in names}
                after = AdamParameters(lr=1e-2, eps=1e-5) if ticket == "b" else None
                back = calls.backward(trainer, BackwardTensors("m", ticket, gradients, after))
                found.append({name: torch.from_numpy(value) for name, value in back.tensors.items()})
    return found


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("grid", GRIDS)
def test_inputs_get_the_gradients_of_one_process(grid: str, model: str) -> None:
    ranks, parallel = GRIDS[grid]
    expected = served(model, {}, None)
    assert all(value.abs().sum() > 0 for one in expected for value in one.values())
    for found in run_thread_ranks(ranks, lambda world: served(model, parallel, world)):
        for mine, whole in zip(found, expected, strict=True):
            assert mine.keys() == whole.keys()
            for name, value in whole.items():
                torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=1e-6, msg=f"{grid} {name}")
