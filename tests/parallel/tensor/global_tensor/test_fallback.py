"""Functions without a rule, and what reaches a View past torch's functions."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import checkpoint

from engine.errors import EngineError
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.global_tensor.index_sets import Index
from engine.parallel.tensor.global_tensor.rules.table import global_context
from engine.parallel.tensor.thread_ranks import run_tensor_ranks
from engine.parallel.tensor.tp_axis import TensorAxis
from tests.parallel.tensor.global_tensor.rig import KINDS, Given, compare, normal, run


def x(kind: str = "blocks") -> Given:
    """[2, 24, 12], cut."""
    return Given(normal(2, 24, 12), {1: kind})


UNKNOWN: dict[str, Callable[..., Any]] = {
    "fft": lambda x: torch.fft.rfft(x, dim=1).abs(),
    "cdist": lambda x: torch.cdist(x, x * 2),
    "diff": lambda x: torch.diff(x, dim=1),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, x[0] * 2)[1],  # type: ignore[no-untyped-call]
    "conv1d": lambda x: functional.conv1d(x, torch.ones(3, 24, 2).double()),
    "nested": lambda x: torch.block_diag(x[0] * 1, x[1] * 1),  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", UNKNOWN)
def test_arguments_are_made_whole_and_the_function_is_noted(name: str, kind: str, ranks: int) -> None:
    found = compare(UNKNOWN[name], {"x": x(kind)}, ranks)
    assert any(key in name or name in key or name == "nested" or key == "fft_rfft" for key in found[0].gathers)
    assert found[0].sets == [None]


def test_what_all_ranks_hold_is_given_its_gradient_once() -> None:
    found = compare(lambda x: torch.cdist(x, x), {"x": Given(normal(2, 5, 3), {})}, 4)
    assert found[0].gathers == {"cdist": 2} and not found[0].called


def test_equal_parts_take_one_gathering_and_no_sum() -> None:
    for kind in ("blocks", "thirds"):
        found = compare(lambda x: torch.diff(x, dim=1), {"x": x(kind)}, 4)
        assert [call.op for call in found[0].called] == ["all_gather"]


def test_two_dims_cut_into_tiles() -> None:
    def program(x: Tensor) -> Any:
        return torch.fft.fft(x.view(2, 2, 12, 12)).abs()

    found = compare(program, {"x": x("blocks")}, 4)
    assert [call.op for call in found[0].called] == ["all_reduce"]


def test_masks_and_integers_are_gathered_too() -> None:
    found = compare(lambda x: [torch.count_nonzero(x > 0, dim=1), (x > 0.3).nonzero()], {"x": x("uneven")}, 2)
    assert found[0].gathers == {"count_nonzero": 1, "nonzero": 1}
    compare(lambda x: [(x > 0).flip(1), (x * 3).long().flip(1)], {"x": x("blocks")}, 2)


class Doubled(torch.autograd.Function):
    """A user's function, in the older form."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * ctx.saved_tensors[0] * grad


class Halved(torch.autograd.Function):
    """The newer form."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x / 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad / 2


class Same(torch.autograd.Function):
    """Does nothing in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad


@pytest.mark.parametrize("function", [Doubled, Halved, Same])
def test_an_autograd_function_is_refused_where_its_gradient_would_be_lost(function: Any) -> None:
    message = rf"^autograd.Function {function.__name__} got a tensor that is sharded over tensor ranks"
    with pytest.raises(EngineError, match=message):
        run(lambda x: function.apply(x), {"x": x()}, 2)


def test_an_autograd_function_is_refused_for_a_tensor_that_came_to_need_a_gradient() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        y = y * 1
        y += x
        result: Tensor = Doubled.apply(y)  # type: ignore[no-untyped-call]
        return result

    given = {"x": x(), "y": Given(normal(2, 24, 12, seed=1), {1: "blocks"}, grad=False)}
    with pytest.raises(EngineError, match=r"^autograd.Function Doubled"):
        run(program, given, 2)


def test_an_autograd_function_runs_where_there_is_no_gradient() -> None:
    def program(x: Tensor) -> Any:
        with torch.no_grad():
            return Doubled.apply(x) + Halved.apply(x)  # type: ignore[no-untyped-call]

    compare(program, {"x": x()}, 2)


def test_after_a_refusal_all_is_as_before() -> None:
    def program(x: Tensor) -> Tensor:
        if type(x) is not Tensor:
            with pytest.raises(EngineError):
                Doubled.apply(x)  # type: ignore[no-untyped-call]
        return x * 2

    compare(program, {"x": x()}, 2)


def test_backward_of_a_view_is_that_of_the_whole() -> None:
    weights = normal(2, 24, 12)

    def body(axis: TensorAxis) -> Tensor:
        leaf = torch.ones(2, 12, 12, dtype=torch.float64, requires_grad=True)
        index = Index.even_blocks(24, 2)
        view = GlobalTensor(leaf * leaf, (2, 24, 12), (None, index, None), global_context(axis))
        torch.autograd.backward(view, weights, retain_graph=True)
        (view * 1).sum().backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        return leaf.grad

    found = torch.cat(run_tensor_ranks(2, body), dim=1)
    torch.testing.assert_close(found, 2 * weights + 2)


def test_gradients_with_respect_to_a_view_are_refused() -> None:
    with pytest.raises(EngineError, match=r"^grad was called"):
        run(lambda x: torch.autograd.grad(x.sum(-1), x, torch.ones(2, 24).double()), {"x": x()}, 2)
    with pytest.raises(EngineError, match=r"^backward was called"):
        run(lambda x: torch.autograd.backward(x.sum(), inputs=[x]), {"x": x()}, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_activations(kind: str) -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            return torch.relu(functional.linear(x, w)).sum(1)

        out: Tensor = checkpoint.checkpoint(block, x, use_reentrant=False)
        return out

    compare(program, {"x": x(kind), "w": Given(normal(5, 12), parameter=True)}, 2)


def test_a_hook_sees_the_gradient_as_a_view() -> None:
    def program(x: Any) -> Any:
        y = x * 2
        y.register_hook(lambda grad: grad * torch.arange(12.0).double() if grad.shape == (2, 24, 12) else None)
        y.register_hook(lambda grad: None)
        return y * y

    compare(program, {"x": x("thirds")}, 2)
    with pytest.raises(EngineError, match="register_hook"):
        run(program, {"x": x("shared")}, 2)


def test_a_hook_does_not_keep_its_tensor() -> None:
    alive: list[Any] = []

    def program(x: Any) -> Any:
        y = x * 2
        y.register_hook(lambda grad: None)
        alive.append(weakref.ref(y))
        return y * y

    compare(program, {"x": x("thirds")}, 2)
    gc.collect()
    assert alive and not any(ref() is not None for ref in alive)
