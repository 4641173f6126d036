"""Parameters without a gradient in a step keep values, moments and step count, as in plain torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import engine

RunRanks = Callable[..., list[Any]]
WIDTH, ROWS = 8, 4
TURNS = ("ab", "a", "b", "a", "ab", "b")
"""The heads of each step."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "dampening": 0.2},
    "Adafactor": {"lr": 0.05, "weight_decay": 0.1},
}


class Turns(nn.Module):
    """A trunk, heads that take turns, and a layer that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, 1) for name in "ab"})

    def forward(self, x: Tensor, turn: list[str]) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        losses = [self.heads[name](hidden).square().mean() for name in turn]
        return torch.stack(losses).sum()


def settings(kind: str, ranks: int, **more: Any) -> dict[str, Any]:
    """Clipped steps of two microbatches."""
    return {
        "train_batch_size": ROWS * ranks, "train_micro_batch_size_per_gpu": ROWS // 2, "gradient_clipping": 0.1,
        "parallel": {"data": ranks}, "optimizer": {"type": kind, "params": OPTIMIZERS[kind]}, **more,
    }  # fmt: skip


def batch(step: int, ranks: int) -> Tensor:
    """All rows of a step."""
    return torch.randn(ROWS * ranks, WIDTH, generator=torch.Generator().manual_seed(step))


def alone(kind: str, turns: Callable[[int, int], str], ranks: int) -> dict[str, Tensor]:
    """Plain torch: ``turns(step, data rank)`` names the heads."""
    model = Turns()
    optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(model.parameters(), **OPTIMIZERS[kind])
    for step in range(len(TURNS)):
        optimizer.zero_grad()
        micro = torch.split(batch(step, ranks), ROWS // 2)
        for index, x in enumerate(micro):
            (model(x, list(turns(step, index // 2))) / len(micro)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
        optimizer.step()
    return model.state_dict()


def all_turn(step: int, rank: int) -> str:
    """Every rank uses the same heads."""
    return TURNS[step]


def each_turns(step: int, rank: int) -> str:
    """Data ranks use other heads in each other step, so a head has a gradient on one of them."""
    return TURNS[step] if step % 2 == 0 else "ab"[rank]


WAYS = {"all": all_turn, "each": each_turns}


def train(eng: engine.Engine, way: str, steps: range) -> None:
    rank, ranks = eng.grid.coord().dp, eng.grid.dp
    for step in steps:
        mine = torch.split(batch(step, ranks), ROWS)[rank]
        eng.train_batch(iter([(x, list(WAYS[way](step, rank))) for x in torch.split(mine, ROWS // 2)]))


def on_a_grid(kind: str, way: str, more: dict[str, Any], folder: str) -> dict[str, Tensor]:
    """Body of a rank: half the steps, a checkpoint, and the other half in another engine."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    with engine.initialize(Turns(), settings(kind, ranks, **more)) as eng:
        train(eng, way, range(3))
        eng.save_checkpoint(folder).wait()
    with engine.initialize(Turns(), settings(kind, ranks, **more)) as eng:
        eng.load_checkpoint(folder)
        train(eng, way, range(3, len(TURNS)))
        return eng.full_state_dict()


def check(found: dict[str, Tensor], kind: str, way: str, ranks: int) -> None:
    for name, expected in alone(kind, WAYS[way], ranks).items():
        close = torch.allclose(found[name], expected, rtol=1e-5, atol=1e-6)
        assert close, f"{name}: off by {float((found[name] - expected).abs().max()):.1e}"


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_process(kind: str, tmp_path: Path) -> None:
    check(on_a_grid(kind, "all", {}, str(tmp_path)), kind, "all", 1)


MODES: list[dict[str, Any]] = [{"stage": 0}, {"stage": 1}, {"stage": 2, "reduce": "microbatch"}, {"stage": 3}]


Case = tuple[str, str, dict[str, Any]]
"""Optimizer, way, mode."""
EVERY: list[Case] = [(kind, way, mode) for kind in OPTIMIZERS for way in WAYS for mode in MODES]
SOME: list[Case] = [case for case in EVERY if case[1] == "each" and (case[0] == "AdamW" or case[2] == MODES[3])]


def all_modes(cases: list[Case], folder: str) -> list[tuple[str, str, dict[str, Any], dict[str, Tensor]]]:
    """Body of a rank."""
    return [
        (kind, way, mode, on_a_grid(kind, way, {"zero_optimization": mode}, f"{folder}/{number}"))
        for number, (kind, way, mode) in enumerate(cases)
    ]


@pytest.mark.parametrize(
    "cases", [pytest.param(SOME, id="some"), pytest.param(EVERY, id="every", marks=pytest.mark.long)]
)
def test_data_ranks(run_ranks: RunRanks, tmp_path: Path, cases: list[Case]) -> None:
    for kind, way, mode, found in run_ranks(all_modes, 2, cases, str(tmp_path))[0]:
        try:
            check(found, kind, way, 2)
        except AssertionError as error:
            error.add_note(f"{kind}, {way} rank, {mode}")
            raise


def test_deepspeeds_way_updates_all() -> None:
    config = settings("AdamW", 1)
    config["optimizer"] = config["optimizer"] | {"update_unused": True}
    with engine.initialize(Turns(), config) as eng:
        train(eng, "all", range(2))
        never = eng.full_state_dict()["never.weight"]
    torch.testing.assert_close(never, Turns().never.weight.detach() * (1 - 1e-2 * 0.1) ** 2)
