"""Loops that call the model itself, or another of its methods, train as plain torch does in one process."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
}  # fmt: skip
LONG = pytest.mark.long


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.down(torch.tanh(self.up(x)))
        return x + added


class ActorCritic(nn.Module):
    """Two outputs, one of them through a method that is not forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.critic = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 1)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.scale = nn.Parameter(torch.full((8,), 1.1))

    def trunk(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.trunk(x) * self.scale)
        return logits

    def value(self, x: Tensor) -> Tensor:
        value: Tensor = self.critic(self.trunk(x))
        return value


def made(kind: Callable[[], nn.Module] = ActorCritic) -> Any:
    torch.manual_seed(0)
    return kind()


def rows(*place: int) -> Tensor:
    number = sum(part * 10**power for power, part in enumerate(place))
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(number))


def loss_of(model: Any, *place: int) -> Tensor:
    loss: Tensor = model(rows(*place)).square().mean() + model.value(rows(*place)).square().mean()
    return loss


def alone(steps: int, ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    model, norms = made(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    for step in range(steps):
        for micro in range(2):
            for rank in range(ranks):
                torch.autograd.backward(loss_of(model, rank, micro, step) / (2 * ranks))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, model.state_dict()


def trained(changes: dict[str, Any], world: World) -> tuple[list[float], dict[str, Tensor]]:
    model, norms = made(), []
    with engine.initialize(model, CONFIG | changes, world=world) as eng:
        for step in range(3):
            for micro in range(2):
                loss = loss_of(model, world.rank, micro, step)
                eng.backward(loss) if step != 1 else torch.autograd.backward(loss)
                report = eng.step()
            assert report is not None
            norms.append(report.grad_norm)
            with torch.no_grad():
                assert torch.isfinite(model.value(rows(world.rank))).all()
        return norms, eng.full_state_dict()


@pytest.mark.parametrize(
    "changes",
    [
        {"zero_optimization": {"stage": 0}},
        {"zero_optimization": {"stage": 3}},
        {"zero_optimization": {"stage": 3}, "activation_checkpointing": {"mode": "full"}},
        pytest.param({"zero_optimization": {"stage": 2, "reduce": "microbatch"}}, marks=LONG),
        pytest.param({"zero_optimization": {"stage": 3, "gather": "step"}}, marks=LONG),
        pytest.param({"zero_optimization": {"stage": 3, "reduce": "step"}}, marks=LONG),
    ],
    ids=str,
)
def test_the_model_and_its_methods_are_called_directly(changes: dict[str, Any]) -> None:
    norms, state = run_thread_ranks(2, partial(trained, changes))[0]
    expected, weights = alone(3, 2)
    assert norms == pytest.approx(expected, rel=1e-5)
    assert all(torch.allclose(state[name], value, atol=1e-5) for name, value in weights.items())


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def judge() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))


class Player:
    """One of two models, and the calls of its loop."""

    def __init__(self, model: Any, backward: Callable[[Tensor], Any], step: Callable[[], Any]) -> None:
        self.model, self.backward, self.step = model, backward, step


def game(ranks: Sequence[int], made: Player, judged: Player) -> Iterator[float]:
    """Two networks against each other, called as modules; the gradient of one flows through the other."""
    criterion = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(2, 1), torch.zeros(2, 1)
    for step in range(4):
        judged.model.zero_grad()
        fakes = []
        for rank in ranks:
            judged.backward(criterion(judged.model(rows(rank, 0, step)), ones) / len(ranks))
            fakes.append(made.model(rows(rank, 1, step)))
            judged.backward(criterion(judged.model(fakes[-1].detach()), zeros) / len(ranks))
        judged.step()
        made.model.zero_grad()
        for fake in fakes:
            loss = criterion(judged.model(fake), ones)
            yield float(loss.detach())
            made.backward(loss / len(ranks))
        made.step()


def played(stage: int, world: World) -> tuple[list[float], dict[str, Tensor]]:
    config = CONFIG | {
        "gradient_accumulation_steps": 1, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage},
    }  # fmt: skip
    engines = [engine.initialize(made(kind), config, world=world) for kind in (generator, judge)]
    losses = list(game([world.rank], *(Player(eng.module, eng.backward, eng.step) for eng in engines)))
    state = engines[1].full_state_dict()
    for eng in engines:
        eng.close()
    return losses, state


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_loss_goes_through_another_engines_model_after_its_step(stage: int) -> None:
    found = run_thread_ranks(2, partial(played, stage))
    models = [made(generator), made(judge)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5) for model in models]
    players = [Player(m, torch.autograd.backward, o.step) for m, o in zip(models, optimizers, strict=True)]
    losses = list(game([0, 1], *players))
    assert [loss for pair in zip(found[0][0], found[1][0], strict=True) for loss in pair] == pytest.approx(losses)
    assert all(torch.allclose(found[0][1][name], value, atol=1e-5) for name, value in models[1].state_dict().items())


def counted(world: World) -> list[tuple[int, int]]:
    config = CONFIG | {"gradient_accumulation_steps": 1, "zero_optimization": {"stage": 3}}
    with engine.initialize(made(generator), config, world=world) as eng:
        found = []
        for step in range(3):
            before = eng.sent
            eng.backward(eng(rows(world.rank, 0, step)).square().mean())
            report = eng.step()
            assert report is not None
            found.append((report.bytes_sent, eng.sent.since(before).bytes()))
        return found[1:]


def test_the_report_of_a_step_counts_what_its_forwards_have_sent() -> None:
    for reported, sent in run_thread_ranks(2, counted)[0]:
        assert reported == sent > 0
