"""Functions element by element: broadcasting, dtypes, writing in place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.errors import EngineError
from tests.parallel.tensor.global_tensor.rig import KINDS, Given, compare, normal, run

RANKS = (2, 4)


def x(kind: str = "blocks", dim: int = 1) -> Given:
    """[2, 24, 12], cut."""
    return Given(normal(2, 24, 12), {dim: kind})


OTHERS = {
    "plain row": Given(normal(12, seed=1)),
    "plain column": Given(normal(24, 1, seed=1)),
    "plain whole": Given(normal(2, 24, 12, seed=1)),
    "plain number": Given(normal(seed=1)),
    "plain one": Given(normal(1, 1, 12, seed=1)),
    "parameter row": Given(normal(12, seed=1), parameter=True),
    "parameter column": Given(normal(24, 1, seed=1), parameter=True),
    "uncut view": Given(normal(24, 12, seed=1), {}),
    "constant": Given(normal(24, 12, seed=1), grad=False),
    "more dims": Given(normal(3, 2, 24, 12, seed=1)),
}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", OTHERS)
def test_a_cut_tensor_and_another(kind: str, other: str, ranks: int) -> None:
    found = compare(lambda x, y: x * y + torch.maximum(y, x), {"x": x(kind), "y": OTHERS[other]}, ranks)
    assert not found[0].gathers
    assert found[0].partial == ({"y"} if other.startswith("parameter") else set())


@pytest.mark.parametrize("kind", KINDS)
def test_two_tensors_that_are_cut_alike(kind: str) -> None:
    given = {"x": x(kind), "y": Given(normal(2, 24, 12, seed=5), {1: kind}), "z": Given(normal(24, 1), {0: kind})}
    found = compare(lambda x, y, z: (x - y) * z, given, 4)
    assert not found[0].called


def test_what_both_hold_is_the_smaller_set() -> None:
    found = compare(lambda x, y: x * y, {"x": x("pairs"), "y": Given(normal(24, 12, seed=1), {0: "blocks"})}, 4)
    assert not found[0].called and all(one.output[0].shape == (2, 6, 12) for one in found)


def test_two_tensors_that_are_cut_otherwise_are_gathered() -> None:
    for cut in ({0: "interleaved"}, {1: "blocks"}):
        found = compare(lambda x, y: x * y, {"x": x("blocks"), "y": Given(normal(24, 12, seed=1), cut)}, 2)
        assert found[0].gathers == {"mul": 2} and not isinstance(found[0].sets[0], tuple)


def test_a_plain_tensor_of_which_each_rank_uses_a_block_gathers_its_gradient() -> None:
    found = compare(lambda x, y: x + y, {"x": x(), "y": OTHERS["plain whole"]}, 4)
    assert [(call.op, call.shape) for call in found[0].called] == [("all_gather", (2, 6, 12))]


def test_a_plain_tensor_that_is_used_whole_sums_its_gradient_once() -> None:
    found = compare(lambda x, y: (x + y) * y - y, {"x": x(), "y": OTHERS["plain row"]}, 4)
    assert [(call.op, call.shape) for call in found[0].called] == [("all_reduce", (12,))]


UNARY: dict[str, Callable[..., Any]] = {
    "chain": lambda x: torch.exp(-x.abs()).sqrt() + (1 - x) / 2 + 2 / (x * x + 1) + x**2,
    "clamp": lambda x: x.clamp(min=-0.5, max=0.5),
    "where": lambda x: torch.where(x > 0, x, 0.0) + torch.where(x < 0, torch.zeros_like(x), x),
    "masked_fill": lambda x: x.masked_fill(x > 0.3, 2.0),
    "functional": lambda x: functional.gelu(x, approximate="tanh") + functional.silu(x) + functional.softplus(x),
    "inplace flag": lambda x: functional.relu(x * 2, inplace=True),
    "float": lambda x: x.float().to(torch.float64) + x.type_as(x).to(x) + x.to(dtype=torch.float64),
    "blank": lambda x: x + torch.ones_like(x) * 3 + x.new_zeros(24, 12) + torch.full_like(x, 2.0),
    "detach": lambda x: x * x.detach(),
    "contiguous": lambda x: x.contiguous().clone(),
    "numbers": lambda x: x.mul(2).add(x, alpha=3).div(4).sub(1),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.3) + torch.addcmul(x, x, x, value=0.5),
}


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("kind", ["blocks", "shared"])
def test_functions_of_one_tensor(name: str, kind: str) -> None:
    found = compare(UNARY[name], {"x": x(kind)}, 2, bound=1e-6 if name == "float" else 1e-10)
    assert not found[0].gathers and not found[0].called


def add_(x: Tensor, y: Tensor) -> Tensor:
    """In place, in every spelling."""
    x = x * 1
    x += y
    x.mul_(y).add_(1).clamp_(-2, 2)
    x *= 2
    return x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", ["plain row", "plain whole", "uncut view", "parameter row", "constant"])
def test_writing_in_place(kind: str, other: str) -> None:
    found = compare(add_, {"x": x(kind), "y": OTHERS[other]}, 2)
    assert not found[0].gathers


def test_the_tensor_itself_is_written() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x * 1
        same = x
        same += 1
        half = x[..., :6]
        half.mul_(3)
        return x, same

    compare(program, {"x": x()}, 2)


def test_writing_what_is_cut_otherwise_gathers_it_first() -> None:
    found = compare(add_, {"x": x("blocks"), "y": Given(normal(24, 12), {0: "interleaved"})}, 2)
    assert found[0].gathers and found[0].sets[0] == x("blocks").sets(2)


def test_writing_a_cut_tensor_into_a_plain_one_gathers_it() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        y = y * 1
        y += x
        return y

    found = compare(program, {"x": x(), "y": OTHERS["plain whole"]}, 2)
    assert found[0].gathers == {"add_": 1} and found[0].sets == [None]


def test_writing_into_a_copy_is_refused() -> None:
    def program(x: Tensor) -> Tensor:
        piece = (x * 1)[:, ::3]
        return piece.mul_(2)

    with pytest.raises(EngineError, match=r"mul_ writes in place into a slice of a tensor .* write x = mul\(x, ...\)"):
        run(program, {"x": x("thirds")}, 2)


@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("index_add_", lambda x: (x * 1).index_add_(0, torch.tensor([0]), torch.ones(1, 24, 12).double())),
        ("__setitem__", lambda x: (x * 1).__setitem__(0, 1.0)),
        ("add", lambda x: torch.add(x, x, out=x.detach())),
        ("data_ptr", lambda x: x.data_ptr()),
        ("set data", lambda x: setattr(x, "data", torch.zeros(1))),
        ("normal_", lambda x: x.detach().normal_()),
    ],
)
def test_other_ways_to_write_are_refused(name: str, program: Callable[..., Any]) -> None:
    with pytest.raises(
        EngineError, match=rf"^{name} was called on a tensor \[2, 24, 12\] that is sharded over tensor ranks"
    ):
        run(program, {"x": Given(normal(2, 24, 12), {1: "blocks"})}, 2)
