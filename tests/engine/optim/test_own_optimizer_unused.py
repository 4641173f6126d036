"""Optimizers passed in code: a parameter without a gradient keeps weights, moments and its own step count."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.engine import Engine
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.verify import verify
from tests.selection import wide

WIDTH, ROWS = 8, 8
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda groups: torch.optim.Adam(groups, lr=1e-2, eps=1e-5, weight_decay=0.1, amsgrad=True),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2, eps=1e-5, weight_decay=0.1),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=1e-2, eps=1e-5),
    "RAdam": lambda groups: torch.optim.RAdam(groups, lr=1e-2, eps=1e-5),
    "Adamax": lambda groups: torch.optim.Adamax(groups, lr=1e-2, eps=1e-5),
    "ASGD": lambda groups: torch.optim.ASGD(groups, lr=1e-2, lambd=0.5, t0=1),
}
"""Those whose state has numbers that count updates."""
GRIDS = [
    ({"data": 2}, 0, 2),
    wide({"data": 2}, 1, 2),
    wide({"data": 2}, 2, 2),
    ({"data": 2}, 3, 2),
    ({"tensor": 2}, 0, 2),
    ({"pipeline": 2}, 0, 2),
    wide({"data": 2, "tensor": 2, "pipeline": 2}, 1, 8),
]


class Turns(nn.Module):
    """A trunk, heads of which a batch names some, and a layer that no batch uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
        self.never = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, 4) for name in "ab"})

    def forward(self, x: Tensor, turn: str) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        return torch.stack([self.heads[name](hidden).square().mean() for name in turn]).sum()


def batch(step: int, turn: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(ROWS, WIDTH, generator=generator), "turn": turn}


def settings(parallel: dict[str, Any], stage: int) -> dict[str, Any]:
    """Clipped steps of two microbatches a data rank; tensor ranks cut the trunk."""
    parallel = parallel | ({"tensor_plan": {"trunk.0": "column", "trunk.2": "row"}} if "tensor" in parallel else {})
    return {
        "train_batch_size": ROWS, "gradient_accumulation_steps": 2, "gradient_clipping": 0.05, "parallel": parallel,
        "zero_optimization": {"stage": stage},
    }  # fmt: skip


@pytest.mark.parametrize(("parallel", "stage", "ranks"), GRIDS)
def test_every_parameter_counts_its_own_updates_as_in_torch(parallel: dict[str, int], stage: int, ranks: int) -> None:
    batches = [batch(step, turn) for step, turn in enumerate(("a", "a", "ab", "b", "a"))]
    for name, optimizer in OPTIMIZERS.items():
        found = verify(
            Turns, settings(parallel, stage), batches, lambda output, batch: output, optimizer, threads=ranks
        )
        assert found is not None and found.holds(), f"{name}: {found}"
        assert all(norm > 0.05 for norm in found.reference.norms), "clipping must be active"


def on_threads(
    ranks: int, parallel: dict[str, int], stage: int, optimizer: Any, body: Callable[[Engine], Any]
) -> list[Any]:
    """``body`` of every rank."""

    def rank(world: World) -> Any:
        example = batch(0, "ab") | {"x": torch.zeros(2, WIDTH)}
        with engine.initialize(
            Turns(), settings(parallel, stage), lambda output, batch: output, example, optimizer, world=world
        ) as eng:
            return body(eng)

    return run_thread_ranks(ranks, rank)


def train(eng: Engine, steps: dict[int, str]) -> None:
    rank, ranks = eng.grid.coord().dp, eng.grid.dp
    for step, turn in steps.items():
        rows = batch(step, turn)
        eng.train_batch(rows | {"x": torch.split(rows["x"], ROWS // ranks)[rank]})


FIRST, THEN = {0: "a", 1: "a", 2: "ab"}, {3: "b", 4: "a"}
PLACES: list[tuple[dict[str, int], int]] = [({"data": 2}, 1), ({"tensor": 2}, 0), ({"data": 2}, 0)]


def start(name: str, parallel: dict[str, int], stage: int) -> Engine:
    example = batch(0, "ab") | {"x": torch.zeros(2, WIDTH)}
    return engine.initialize(
        Turns(), settings(parallel, stage), lambda output, batch: output, example, OPTIMIZERS[name]
    )


def go_on(name: str, folder: str, parallel: dict[str, int], stage: int) -> dict[str, Tensor]:
    with start(name, parallel, stage) as eng:
        eng.load_checkpoint(folder)
        train(eng, THEN)
        return eng.full_state_dict()


def on_other_grids(folder: str, names: list[str]) -> dict[str, list[dict[str, Tensor]]]:
    """Body of a rank: a save of ZeRO 3 for each optimizer, and what runs on other grids make of it."""
    found = {}
    for name in names:
        with start(name, {"data": 2}, 3) as eng:
            train(eng, FIRST)
            eng.save_checkpoint(f"{folder}/{name}").wait()
        found[name] = [go_on(name, f"{folder}/{name}", *place) for place in PLACES]
    return found


def test_counts_go_on_from_a_checkpoint_on_another_grid(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    names = ["Adam", "NAdam", "ASGD"]
    for name, found in run_ranks(on_other_grids, 2, str(tmp_path), names)[0].items():
        with start(name, {}, 0) as eng:
            train(eng, FIRST | THEN)
            expected = eng.full_state_dict()
        for weights in (*found, go_on(name, f"{tmp_path}/{name}", {}, 2)):
            for key, value in expected.items():
                torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-6)


def test_a_thawed_parameter_begins_at_its_first_update() -> None:
    def plain() -> dict[str, Tensor]:
        model, rows = Turns(), [batch(step, "ab") for step in range(4)]
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        for step, each in enumerate(rows):
            model.heads["b"].requires_grad_(step > 1)
            optimizer.zero_grad()
            model(**each).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        return model.state_dict()

    def body(eng: Engine) -> dict[str, Tensor]:
        for step in range(4):
            eng.module.get_submodule("heads.b").requires_grad_(step > 1)
            train(eng, {step: "ab"})
        with eng.optimizer_state("*") as state:
            assert state["heads.b.weight"]["exp_avg"].abs().max() > 0
        return eng.full_state_dict()

    for stage in (0, 2):
        found = on_threads(2, {"data": 2}, stage, OPTIMIZERS["AdamW"], body)[0]
        for key, value in plain().items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-5)
