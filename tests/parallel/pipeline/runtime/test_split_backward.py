"""A backward in two parts gives the gradients of a whole one, whatever the model does with its linear layers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from engine.errors import EngineError
from engine.parallel.model.forward_patch import ForwardPatches
from engine.parallel.pipeline.runtime.split_backward import DeferredWeightGrads, SplitBackward

WIDTH = 6
Run = Callable[["Model", Tensor], Tensor]


class LowRank(nn.Module):
    """W + a b, as LoRA has it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


class Model(nn.Module):
    """Two layers, and what happens between them."""

    def __init__(self, run: Run, prepare: Callable[["Model"], object]) -> None:
        super().__init__()
        self.first, self.second, self.run = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), run
        prepare(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def plain(model: Model, x: Tensor) -> Tensor:
    return model.second(torch.tanh(model.first(x)))  # type: ignore[no-any-return]


def in_place(model: Model, x: Tensor) -> Tensor:
    return model.second(input=model.first(input=x).relu_()).add_(x)  # type: ignore[no-any-return]


def recomputed(model: Model, x: Tensor) -> Tensor:
    return checkpoint(plain, model, x, use_reentrant=False)  # type: ignore[no-any-return]


def with_own_gradient(model: Model, x: Tensor) -> Tensor:
    """The gradient of an energy as a feature."""

    def block(x: Tensor) -> Tensor:
        with torch.enable_grad():
            other = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(plain(model, other).square().sum(), other)
            (slope,) = torch.autograd.grad(plain(model, x.detach()).sum(), model.first.weight)
        return plain(model, x) + force + slope.sum(0)

    return checkpoint(block, x, use_reentrant=False)  # type: ignore[no-any-return]


def nested(model: Model, x: Tensor) -> Tensor:
    """Rows of different lengths in one layer, dense ones in the other."""
    rows = x.reshape(-1, WIDTH)
    ragged = torch.nested.as_nested_tensor([rows[:1], rows], layout=torch.jagged)
    return model.second(model.first(ragged).values())  # type: ignore[no-any-return]


def doubles_under_autocast(model: Model, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        half = model.second(x).float()
        return half + model.first(x.double()).float()  # type: ignore[no-any-return]


def nothing(model: Model) -> None:
    pass


def tie(model: Model) -> None:
    model.second = model.first


def with_double(model: Model) -> None:
    model.first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


def low_rank(model: Model) -> None:
    parametrize.register_parametrization(model.first, "weight", LowRank())


def low_rank_bias(model: Model) -> None:
    parametrize.register_parametrization(model.first, "bias", nn.Tanh())


def weight_norm(model: Model) -> None:
    model.first = parametrizations.weight_norm(model.first)


CASES: dict[str, tuple[Run, Callable[[Model], object]]] = {
    "plain": (plain, nothing),
    "tied": (plain, tie),
    "written in place": (in_place, nothing),
    "nested": (nested, nothing),
    "doubles under autocast": (doubles_under_autocast, with_double),
    "recomputed": (recomputed, nothing),
    "gradients asked for in a recomputed block": (with_own_gradient, nothing),
    "weight of low rank": (plain, low_rank),
    "computed bias": (plain, low_rank_bias),
    "weight norm": (plain, weight_norm),
}


@pytest.mark.parametrize("shape", [(WIDTH,), (3, WIDTH), (2, 3, WIDTH)])
@pytest.mark.parametrize("name", CASES)
def test_two_parts_give_the_gradients_of_a_whole_backward(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Model(*CASES[name])
    x = torch.randn(shape)
    whole, split = x.clone().requires_grad_(), x.clone().requires_grad_()
    model(whole * 1).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    found: dict[str, Tensor] = {}

    def take(name: str, gradient: Tensor) -> None:
        found[name] = found[name] + gradient if name in found else gradient

    waiting, leftover = SplitBackward(model, ForwardPatches()), DeferredWeightGrads()
    out = model(split * 1).square().sum()
    with waiting.leaving(leftover):
        out.backward()
    assert leftover.bytes > 0, "something must wait"
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            take(name, parameter.grad)
    leftover.compute(take)
    torch.testing.assert_close(split.grad, whole.grad)
    torch.testing.assert_close(found, expected)


class Workspace(nn.Module):
    """Every forward writes into the same tensor, as it may where each backward comes before the next forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.space = nn.Linear(WIDTH, WIDTH), torch.zeros(3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.space = self.space.detach()
        self.space.copy_(x)
        return self.layer(self.space)  # type: ignore[no-any-return]


def test_what_is_written_while_it_waits_is_not_used() -> None:
    model, leftover = Workspace(), DeferredWeightGrads()
    waiting = SplitBackward(model, ForwardPatches())
    with waiting.leaving(leftover):
        model(torch.randn(3, WIDTH).requires_grad_()).sum().backward()
    model(torch.randn(3, WIDTH))
    with pytest.raises(
        EngineError, match=r"a tensor saved for the deferred gradient of 'layer\.weight' was written in place"
    ):
        leftover.compute(lambda name, gradient: None)


class Counting(TorchDispatchMode):
    """Sees every operation, as selective recomputation does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_what_is_computed_ahead_is_the_same_to_the_bit_and_nobody_sees_it() -> None:
    torch.manual_seed(0)
    model = Model(plain, nothing)
    waiting, found = SplitBackward(model, ForwardPatches()), list[dict[str, Tensor]]()
    for ahead in (0, 3, 9):
        leftover, x = DeferredWeightGrads(), torch.ones(3, WIDTH).requires_grad_()
        with waiting.leaving(leftover):
            model(x).square().sum().backward()
        with Counting() as counting, torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
            for _ in range(ahead):
                leftover.ahead()
        assert counting.seen == 0 and leftover.bytes > 0
        taken: dict[str, Tensor] = {}
        leftover.compute(taken.__setitem__)
        assert all(not grad.requires_grad for grad in taken.values())
        found.append(taken)
    assert set(found[0]) == {"first.weight", "first.bias", "second.weight", "second.bias"}
    for others in found[1:]:
        torch.testing.assert_close(others, found[0], rtol=0, atol=0)


def test_what_is_written_before_it_is_computed_ahead_is_not_used() -> None:
    model, leftover = Workspace(), DeferredWeightGrads()
    with SplitBackward(model, ForwardPatches()).leaving(leftover):
        model(torch.randn(3, WIDTH).requires_grad_()).sum().backward()
    model(torch.randn(3, WIDTH))
    with pytest.raises(EngineError, match=r"written in place"):
        leftover.ahead()
