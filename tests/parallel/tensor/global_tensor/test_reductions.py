"""Functions along dims, and norms: local where the dim is whole, one small sum where it is cut."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.parallel.tensor.global_tensor.rig import KINDS, Given, compare, normal

RANKS = (2, 4)


def x(kind: str, dim: int = 1) -> Given:
    """[2, 24, 12], cut."""
    return Given(normal(2, 24, 12), {dim: kind})


def parameter(size: int, kind: str | None = None) -> Given:
    """A vector."""
    return Given(normal(size, seed=3), {0: kind} if kind else None, parameter=True)


LOCAL: dict[str, Callable[..., Any]] = {
    "softmax": lambda x: x.softmax(-1) + torch.softmax(x, dim=2) + functional.softmax(x, -1, dtype=torch.float64),
    "log_softmax": lambda x: functional.log_softmax(x, dim=-1) + x.log_softmax(0),
    "sums": lambda x: x.sum(-1) + x.sum((0, 2), keepdim=False) + torch.sum(x, dim=0).mean(dim=-1) + x.mean([0, 2]),
    "var": lambda x: x.var(-1, keepdim=True) + x.std(2, unbiased=False, keepdim=True) + torch.var(x, 2, keepdim=True),
    "extremes": lambda x: x.amax(-1) + x.max(-1).values + x.min(dim=2)[0] + x.logsumexp(-1) + x.argmax(-1),
    "cumsum": lambda x: x.cumsum(-1) + x.cumsum(dim=0),
    "norms": lambda x: x.norm(dim=-1) + torch.linalg.vector_norm(x, dim=-1) + torch.norm(x, 2, -1),
    "tril": lambda x: x.permute(1, 0, 2).tril() + x.transpose(0, 1).triu(1),
    "topk": lambda x: x.topk(3, dim=-1)[0] + x.topk(3).values,
    "any": lambda x: ((x > 0.5).any(-1) | (x > 2).all(dim=-1)).double(),
}


@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.parametrize("kind", KINDS)
def test_along_whole_dims(name: str, kind: str) -> None:
    found = compare(LOCAL[name], {"x": x(kind)}, 2)
    assert not found[0].called and not found[0].gathers


SUMMED: dict[str, tuple[Callable[..., Any], int]] = {
    "sum": (lambda x: x.sum(1), 1),
    "sum of all": (lambda x: x.sum(), 1),
    "mean": (lambda x: x.mean((1, 2), keepdim=True), 1),
    "var": (lambda x: x.var(1), 2),
    "std": (lambda x: x.std(dim=1, keepdim=True, unbiased=False), 2),
}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", SUMMED)
@pytest.mark.parametrize("kind", KINDS)
def test_over_the_cut_dim(name: str, kind: str, ranks: int) -> None:
    program, sums = SUMMED[name]
    found = compare(program, {"x": x(kind)}, ranks)
    assert not found[0].gathers and found[0].sets == [None]
    assert [call.label for call in found[0].called].count("statistics") == sums


def test_fp16_statistics_of_a_cut_dim_are_summed_in_fp32() -> None:
    def program(x: Tensor) -> list[Tensor]:
        return [x.mean(1), x.std(1) + x.var(1, unbiased=False).sqrt()]

    compare(program, {"x": Given(normal(1, 24, 3).half() * 300 + 6000, {1: "blocks"})}, 2, bound=2e-3)


OTHERS: dict[str, Callable[..., Any]] = {
    "softmax": lambda x: x.softmax(1),
    "amax": lambda x: x.amax(1),
    "max": lambda x: torch.max(x),
    "cumsum": lambda x: x.cumsum(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "norm": lambda x: x.norm() + torch.linalg.vector_norm(x, dim=1).sum(),
    "tril": lambda x: x.tril(),
    "sort": lambda x: x.sort(dim=1)[0],
    "item": lambda x: x * x.detach().sum().item() + float(x.detach().amax()),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("kind", ["blocks", "shared"])
def test_others_over_a_cut_dim_are_gathered(name: str, kind: str) -> None:
    found = compare(OTHERS[name], {"x": x(kind)}, 2)
    assert found[0].gathers


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_norms_over_whole_dims(kind: str, ranks: int) -> None:
    def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return functional.layer_norm(x, (12,), w, b, 1e-3) + functional.rms_norm(x, [12], w) + torch.rms_norm(x, (12,))

    found = compare(program, {"x": x(kind), "w": parameter(12), "b": parameter(12)}, ranks)
    assert not found[0].called and found[0].partial == {"w", "b"}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [True, False])
def test_norms_over_a_cut_dim_sum_their_statistics(kind: str, ranks: int, cut: bool) -> None:
    def program(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        return [functional.layer_norm(x, (24,), w, bias=b), functional.rms_norm(x, (24,), w, 1e-5)]

    given = {"x": Given(normal(2, 5, 24), {2: kind})}
    given |= {name: parameter(24, kind if cut else None) for name in ("w", "b")}
    found = compare(program, given, ranks, bound=1e-8)
    assert [(call.label, call.shape) for call in found[0].called[:3]] == [("statistics", (2, 5, 1))] * 3
    assert not found[0].gathers and found[0].partial == (set() if cut else {"w", "b"})
    assert all(call.shape == (2, 5, 1) for call in found[0].called)


class OlmoNorm(torch.nn.Module):
    """As Hugging Face writes it: over the width of all heads."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """In 32 bits."""
        wide = x.to(torch.float64)
        variance = wide.pow(2).mean(-1, keepdim=True)
        return w * (wide * torch.rsqrt(variance + 1e-6)).to(x.dtype)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_that_is_written_out(kind: str, ranks: int) -> None:
    found = compare(OlmoNorm(), {"x": Given(normal(2, 5, 24), {2: kind}), "w": parameter(24)}, ranks)
    assert [call.label for call in found[0].called] == ["statistics", "column inputs"]
    assert not found[0].gathers and found[0].partial == {"w"}
