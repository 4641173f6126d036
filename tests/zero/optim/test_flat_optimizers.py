"""The optimizers that a JSON file can name are ordinary torch optimizers with moments alone as state."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from engine.zero.optim.flat_optimizers import FlatAdam, FlatLion, FlatSGD

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

KINDS: dict[str, tuple[Make, int]] = {
    "Adam": (lambda params: FlatAdam(params, lr=0.1, weight_decay=0.1), 2),
    "AdamW": (lambda params: FlatAdam(params, lr=0.1, weight_decay=0.1, decoupled=True), 2),
    "SGD": (lambda params: FlatSGD(params, lr=0.1), 0),
    "SGD momentum": (lambda params: FlatSGD(params, lr=0.1, momentum=0.9), 1),
    "Lion": (lambda params: FlatLion(params, lr=0.1), 1),
}


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(2)
    return [nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(3))]


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int) -> None:
    for step in range(steps):
        for parameter in params:
            parameter.grad = parameter.detach() * (step + 1) - 1
        optimizer.step()


@pytest.mark.parametrize("name", KINDS)
def test_state_is_the_moments_alone(name: str) -> None:
    make, moments = KINDS[name]
    params = parameters()
    optimizer = make(params)
    train(optimizer, params, 3)
    for parameter in params:
        assert [value.shape for value in optimizer.state[parameter].values()] == [parameter.shape] * moments
    assert optimizer.param_groups[0]["step"] == 3


@pytest.mark.parametrize("name", KINDS)
def test_a_state_dict_resumes_exactly(name: str) -> None:
    make, _ = KINDS[name]
    straight, broken = parameters(), parameters()
    first = make(straight)
    train(first, straight, 5)
    before = make(broken)
    train(before, broken, 3)
    after = make(broken)
    after.load_state_dict(before.state_dict())
    for step in (3, 4):
        for parameter in broken:
            parameter.grad = parameter.detach() * (step + 1) - 1
        after.step()
    assert all(torch.equal(a, b) for a, b in zip(straight, broken, strict=True))


@pytest.mark.parametrize("name", KINDS)
def test_a_tensor_without_gradient_and_an_empty_group_are_passed_over(name: str) -> None:
    make, _ = KINDS[name]
    idle, used = parameters()
    optimizer = make([idle, used])
    optimizer.add_param_group({"params": []})
    before = idle.detach().clone()
    used.grad = torch.ones(3)
    moved = used.detach().clone()
    optimizer.step()
    assert torch.equal(idle, before) and not torch.equal(used, moved)


def test_step_returns_the_loss_of_a_closure() -> None:
    params = parameters()
    optimizer = FlatSGD(params, lr=0.1)
    assert optimizer.step(lambda: 4.5) == 4.5


def test_a_scheduler_of_torch_sets_the_rate_of_the_next_update() -> None:
    params = [nn.Parameter(torch.ones(1))]
    optimizer = FlatSGD(params, lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    seen = []
    for _ in range(3):
        before = float(params[0].detach())
        params[0].grad = torch.ones(1)
        optimizer.step()
        schedule.step()
        seen.append(before - float(params[0].detach()))
    assert seen == [1.0, 0.5, 0.25]
