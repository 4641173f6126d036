"""A low-rank weight gives what the dense one gives: values, and products of its gradient with vectors. One process."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from engine.parallel.tensor.auto import low_rank_factors
from engine.parallel.tensor.auto.low_rank_weight import (
    LowRankWeight,
    WholeWeightError,
    gradient_leaves,
    low_rank_parameter,
    memory_of,
)

O, I, E = 6, 4, 3  # noqa: E741


def weight_of(*shape: int) -> LowRankWeight:
    return low_rank_parameter(shape, "w", torch.Generator().manual_seed(3), set())


def noise(*shape: int) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64
    ).requires_grad_()


def dense_of(weight: LowRankWeight) -> Tensor:
    return weight.factors.full().detach().requires_grad_()


def compare(shape: tuple[int, ...], body: Callable[[Any], Tensor]) -> None:
    """Value and gradient of ``body``, given the weight in factors and dense."""
    weight = weight_of(*shape)
    dense = dense_of(weight)
    mine, whole = body(weight), body(dense)
    torch.testing.assert_close(mine, whole)
    cotangent = torch.randn(whole.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    of_left, of_right = torch.autograd.grad(mine, gradient_leaves(weight), cotangent)
    (gradient,) = torch.autograd.grad(whole, dense, cotangent)
    assert weight.parts is not None
    (u, v) = weight.parts.vectors
    torch.testing.assert_close(of_left, (gradient.unsqueeze(-1) * v).sum_to_size(of_left.shape))
    torch.testing.assert_close(of_right, (gradient.unsqueeze(-1) * u).sum_to_size(of_right.shape))


PRODUCTS: dict[str, Callable[[Any], Tensor]] = {
    "linear": lambda w: functional.linear(noise(2, 5, I), w, noise(O)),
    "linear of a transposed weight": lambda w: functional.linear(noise(5, O), w.t()),
    "x @ w.t()": lambda w: noise(2, 5, I) @ w.t(),
    "x @ w.T": lambda w: noise(I) @ w.T,
    "w @ x": lambda w: w @ noise(I, 5),
    "w @ vector": lambda w: w @ noise(I),
    "addmm": lambda w: torch.addmm(noise(I), noise(5, O), w),
    "einsum": lambda w: torch.einsum("bsi,oi->bso", noise(2, 5, I), w),
    "einsum that keeps both": lambda w: torch.einsum("oi,bi->bo", w, noise(5, I)),
    "embedding": lambda w: functional.embedding(torch.tensor([[1, 5, 1]]), w),
    "a third": lambda w: functional.linear(noise(5, I), w[2:4]),
    "split": lambda w: functional.linear(noise(5, I), w.split(2)[1]) + functional.linear(noise(5, I), w.chunk(3)[2]),
    "inputs": lambda w: functional.linear(noise(5, 2), w[:, 1:3]),
    "every second row": lambda w: functional.linear(noise(5, I), w[::2]),
    "heads": lambda w: torch.einsum("si,hdi->hsd", noise(5, I), w.view(3, 2, I)),
    "rows": lambda w: functional.linear(noise(5, I), w.index_select(0, torch.tensor([4, 0]))),
    "a conversion": lambda w: functional.linear(noise(5, I), w.to(torch.float64).contiguous()),
    "a number of a weight": lambda w: w.square().sum() + (w * 2).amax(),
    "both factors in one dim": lambda w: w.reshape(-1) * noise(O * I),
    "a weight with itself": lambda w: w @ w.t(),
    "with a product added": lambda w: functional.linear(noise(5, I), torch.addmm(w, noise(O, 2), noise(2, I))),
    "stacked": lambda w: functional.linear(noise(5, I), torch.cat([w, w[:2]])),
}
EXPERTS: dict[str, Callable[[Any], Tensor]] = {
    "one expert": lambda w: functional.linear(noise(5, I), w[torch.tensor(1)]) + functional.linear(noise(5, I), w[-1]),
    "bmm": lambda w: torch.bmm(noise(E, 5, O), w),
    "transposed": lambda w: noise(E, 5, I) @ w.transpose(1, 2),
    "one of transposed ones": lambda w: noise(5, I) @ w.transpose(-2, -1)[2],
    "unbound": lambda w: torch.stack([functional.linear(noise(5, I), one) for one in w.unbind()]),
    "chosen": lambda w: torch.bmm(noise(4, 5, O), w[torch.tensor([2, 0, 2, 1])]),
    "einsum": lambda w: torch.einsum("si,eoi->seo", noise(5, I), w),
    "halves": lambda w: torch.bmm(noise(E, 5, O // 2), w[:, 1::2]),
    "for each of a batch": lambda w: noise(2, E, 5, I) @ w.mT.unsqueeze(0).expand(2, -1, -1, -1),
    "all numbers": lambda w: w.softmax(0),
    "with products added": lambda w: noise(E, 5, I) @ summed(w).transpose(-2, -1),
    "one with its product added": lambda w: functional.linear(noise(5, I), summed(w)[torch.tensor(1)]),
    "with products added twice": lambda w: torch.bmm(noise(E, 5, O), summed(summed(w))),
    "with all numbers of a product": lambda w: torch.bmm(noise(E, 5, O), w + noise(E, O, 2) @ noise(E, 2, I)),
}


SUMMED = ("with products added", "one with its product added", "with products added twice")


def summed(w: Any) -> Any:
    """The weight of each expert and the product of its adapter."""
    return torch.baddbmm(w, noise(E, O, 2), noise(E, 2, I), alpha=0.5)


@pytest.mark.parametrize("body", PRODUCTS.values(), ids=PRODUCTS)
def test_a_matrix(body: Callable[[Any], Tensor]) -> None:
    compare((O, I), body)


@pytest.mark.parametrize("body", EXPERTS.values(), ids=EXPERTS)
def test_experts(body: Callable[[Any], Tensor]) -> None:
    compare((E, O, I), body)


@pytest.mark.parametrize("shape", [(E, O, I), (E, I, O)])
@pytest.mark.parametrize("rows", [[0, 0, 2, 2, 2], [2, 0, 1, 2, 0]])
@pytest.mark.parametrize("added", [False, True])
def test_rows_of_groups(shape: tuple[int, ...], rows: list[int], added: bool) -> None:
    left, right = noise(E, shape[1], 2), noise(E, 2, shape[2])

    def body(w: Any) -> Tensor:
        x = noise(5, shape[1])
        w = torch.baddbmm(w, left, right) if added else w
        if isinstance(w, LowRankWeight):
            return w.factors.grouped(x, torch.tensor(rows))
        return torch.stack([one @ w[row] for one, row in zip(x, rows, strict=True)])

    compare(shape, body)
    compare(shape, lambda w: torch.stack([noise(5, shape[2]) @ one.t() for one in w.unbind()]))


def test_a_stack_has_its_experts_in_the_factor_of_the_shorter_edge() -> None:
    for shape, of_experts in (((E, O, I), 1), ((E, I, O), 0)):
        parts = weight_of(*shape).parts
        assert parts is not None
        for pair in (parts.random, parts.vectors, parts.zeros):
            assert [factor.shape[0] for factor in pair] == ([1, E] if of_experts else [E, 1])


def test_products_make_no_dense_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank_factors.Factors, "full", None)
    weight, experts = weight_of(O, I), weight_of(E, O, I)
    for name in ("linear", "x @ w.t()", "addmm", "einsum", "split", "heads", "embedding", "rows"):
        PRODUCTS[name](weight)
    PRODUCTS["with a product added"](weight)
    for name in ("one expert", "bmm", "one of transposed ones", "chosen", "einsum", *SUMMED):
        EXPERTS[name](experts)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


def quietly(w: Any) -> Tensor:
    with torch.no_grad():
        y: Tensor = noise(5, I) @ w.t()
        return y


def applied(w: Any) -> Any:
    return Doubled.apply(noise(5, I), w)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("read", [quietly, applied, lambda w: w.mul_(2), lambda w: w.detach_()])
def test_what_factors_cannot_answer_is_refused_and_remembered(read: Callable[[Any], Any]) -> None:
    weight = weight_of(O, I)
    with pytest.raises(WholeWeightError, match=r"^w is read"):
        read(weight)
    assert weight.refused == {"w"}


def test_a_parametrization_reads_its_factors_and_leaves_it_as_it_was() -> None:
    """As PEFT puts adapters on a stack of experts."""
    layer = nn.Linear(I, O, bias=False)
    given: Any = weight_of(O, I)
    layer._parameters["weight"] = given
    adapter = Added()
    parametrize.register_parametrization(layer, "weight", adapter)
    y, dense = layer(noise(5, I)), given.factors.full() + adapter.left @ adapter.right
    parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
    torch.testing.assert_close(y, noise(5, I) @ dense.t())
    assert not given.refused and layer._parameters["weight"] is given


class Added(nn.Module):
    """An adapter of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = noise(O, 2), noise(2, I)

    def forward(self, weight: Any) -> Any:
        return torch.addmm(weight, self.left, self.right)


def test_it_is_a_parameter_of_its_shape() -> None:
    layer = nn.Linear(I, O, bias=False)
    layer._parameters["weight"] = weight_of(O, I)  # type: ignore[assignment]
    copied = copy.deepcopy(layer)
    for one in (layer, copied):
        (weight,) = one.parameters()
        assert isinstance(weight, nn.Parameter) and isinstance(weight, LowRankWeight)
        assert weight.shape == (O, I) and weight.stride() == (I, 1) and weight.dtype is torch.float64
        assert weight.device.type == "cpu" and weight.requires_grad and weight.numel() == O * I
    x = noise(5, I)
    torch.testing.assert_close(layer(x), copied(x))
    assert memory_of(layer.weight) == memory_of(layer.weight.t()[1:]) != memory_of(copied.weight)
    copied(x).sum().backward()
    assert [leaf.grad is None for leaf in gradient_leaves(layer.weight)] == [True, True]
    assert [leaf.grad is None for leaf in gradient_leaves(copied.weight)] == [False, False]


@pytest.mark.parametrize(("dim", "rows"), [(0, [2, 0]), (1, [1, 2, 5]), (2, [3, 0])])
def test_a_shard_has_the_rows(dim: int, rows: list[int]) -> None:
    whole = weight_of(E, O, I)
    shard = whole.shard(dim, rows)
    wanted = whole.factors.full().index_select(dim, torch.tensor(rows))
    assert shard.shape == wanted.shape
    torch.testing.assert_close(shard.factors.full(), wanted)
