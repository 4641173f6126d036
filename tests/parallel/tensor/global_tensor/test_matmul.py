"""Matrix products: which are local, which add, and what they send."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.errors import EngineError
from engine.kernels.dispatch import Kernels
from engine.kernels.ops.activations import Activation
from engine.kernels.ops.linear import LinearForm, linear
from tests.parallel.tensor.global_tensor.rig import KINDS, Given, compare, normal, run

RANKS = (2, 4)
A, R = ("all_reduce", "row outputs"), ("all_reduce", "column inputs")


def sent(found: list[Any]) -> list[tuple[str, str]]:
    """Op and label of the collectives of rank 0."""
    return [(call.op, call.label) for call in found[0].called]


def weight(out: int, inner: int, cut: dict[int, str]) -> Given:
    """A parameter shown as a View."""
    return Given(normal(out, inner, seed=1), cut, parameter=True)


def bias(size: int, kind: str | None = None) -> Given:
    """A parameter, shown as a View where it is cut."""
    return Given(normal(size, seed=2), {0: kind} if kind else None, parameter=True)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_columns_sum_the_gradient_of_their_input_once(kind: str, ranks: int) -> None:
    def program(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        return [functional.linear(x, w, b), functional.linear(x, w), x @ w.t() + b]

    given = {"x": Given(normal(2, 5, 12)), "w": weight(24, 12, {0: kind}), "b": bias(24, kind)}
    found = compare(program, given, ranks)
    assert sent(found) == [R] and not found[0].gathers and not found[0].partial


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_added(kind: str, ranks: int) -> None:
    given = {"x": Given(normal(2, 5, 24), {2: kind}), "w": weight(12, 24, {1: kind}), "b": bias(12)}
    found = compare(functional.linear, {"input": given["x"], "weight": given["w"], "bias": given["b"]}, ranks)
    assert sent(found) == [A] and not found[0].gathers and found[0].sets == [None] and not found[0].partial


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_fused_linear_layers_follow_the_same_rule(activation: Activation, transposed: bool) -> None:
    form = LinearForm(activation, transposed)

    def program(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> list[Tensor]:
        kernels = Kernels("reference")
        return [linear(x, w, b, form, kernels), linear(x, w, None, form, kernels, r)]

    def shown(out: int, inner: int, cut: int) -> Given:
        shape = (inner, out) if transposed else (out, inner)
        return Given(normal(*shape, seed=1), {1 - cut if transposed else cut: "thirds"}, parameter=True)

    columns = {"x": Given(normal(2, 5, 12)), "w": shown(24, 12, 0), "b": bias(24, "thirds")}
    found = compare(program, columns | {"r": Given(normal(2, 5, 24))}, 2)
    assert sent(found) == [R, R] and not found[0].gathers  # of x, and of the residual, which is whole
    rows = {"x": Given(normal(2, 5, 24), {2: "thirds"}), "w": shown(12, 24, 1), "b": bias(12)}
    found = compare(program, rows | {"r": Given(normal(2, 5, 12))}, 2)
    assert sent(found) == [A, A] and not found[0].gathers


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_input_of_a_row_is_cut(kind: str) -> None:
    given = {"input": Given(normal(2, 5, 24)), "weight": weight(12, 24, {1: kind})}
    found = compare(functional.linear, given, 2)
    assert not found[0].gathers


PRODUCTS: dict[str, tuple[Callable[..., Any], dict[str, Given]]] = {
    "mm": (torch.mm, {"input": Given(normal(5, 12)), "mat2": weight(12, 24, {1: "thirds"})}),
    "bmm": (
        lambda x, y: torch.bmm(x, y) + x @ y,
        {"x": Given(normal(24, 3, 5), {0: "blocks"}), "y": Given(normal(24, 5, 2), {0: "blocks"})},
    ),
    "heads": (
        lambda q, k: q @ k.transpose(-2, -1),
        {"q": Given(normal(2, 24, 3, 5), {1: "thirds"}), "k": Given(normal(2, 1, 3, 5))},
    ),
    "vector": (lambda x, v: x @ v, {"x": Given(normal(3, 24, 12), {1: "uneven"}), "v": Given(normal(12))}),
    "vector right": (lambda v, x: v @ x, {"v": Given(normal(12)), "x": Given(normal(12, 24), {1: "shared"})}),
    "dot": (torch.dot, {"input": Given(normal(24), {0: "pairs"}), "tensor": Given(normal(24, seed=1))}),
    "addmm": (torch.addmm, {"input": bias(24), "mat1": Given(normal(5, 12)), "mat2": weight(12, 24, {1: "blocks"})}),
    "addmm row": (
        lambda b, x, w: torch.addmm(b, x, w, beta=0.5, alpha=2) + b.addmm(x, w),
        {"b": bias(12), "x": Given(normal(5, 24), {1: "thirds"}), "w": weight(24, 12, {0: "thirds"})},
    ),
    "baddbmm": (
        lambda z, q, k: torch.baddbmm(z, q, k, beta=0.0, alpha=3.0) + z.baddbmm(q, k, beta=2),
        {
            "z": Given(normal(24, 3, 3), {0: "blocks"}),
            "q": Given(normal(24, 3, 5), {0: "blocks"}),
            "k": Given(normal(24, 5, 3), {0: "blocks"}),
        },
    ),
    "einsum": (
        lambda x, w: torch.einsum("bse,ehd->bhsd", x, w),
        {"x": Given(normal(2, 5, 12)), "w": Given(normal(12, 24, 3), {1: "interleaved"}, True)},
    ),
    "einsum row": (
        lambda x, w: torch.einsum("bhsd,hde->bse", x, w) + torch.einsum("bhsd , hde -> bse", [x, w]),
        {"x": Given(normal(2, 24, 5, 3), {1: "shared"}), "w": Given(normal(24, 3, 12), {0: "shared"}, True)},
    ),
    "einsum ellipsis": (
        lambda x, w: torch.einsum("...i,oi->...o", x, w) + torch.einsum("...i,oi", x, w).sum(-1, keepdim=True) * 0,
        {"x": Given(normal(2, 5, 12)), "w": weight(24, 12, {0: "thirds"})},
    ),
    "einsum implicit": (
        lambda x, w: torch.einsum("bi,oi", x, w),
        {"x": Given(normal(5, 12)), "w": weight(24, 12, {0: "thirds"})},
    ),
    "einsum diagonal": (lambda x: torch.einsum("ii->i", x), {"x": Given(normal(24, 24), {0: "blocks"})}),
    "embedding": (
        lambda w: functional.embedding(torch.tensor([[1, 4, 1]]), w),
        {"w": weight(7, 24, {1: "thirds"})},
    ),
    "embedding rows": (
        lambda w: functional.embedding(torch.tensor([[1, 4, 1]]), w),
        {"w": weight(24, 7, {0: "thirds"})},
    ),
}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str, ranks: int) -> None:
    program, given = PRODUCTS[name]
    found = compare(program, given, ranks)
    assert bool(found[0].gathers) == (name in ("einsum diagonal", "embedding rows"))


def test_terms_on_several_ranks_are_added_once() -> None:
    given = {"input": Given(normal(2, 5, 24), {2: "pairs"}), "weight": weight(12, 24, {1: "pairs"})}
    assert sent(compare(functional.linear, given, 4)) == [A]


@pytest.mark.parametrize("kinds", [("blocks", "interleaved"), ("shared", "thirds")])
def test_what_does_not_fit_is_gathered(kinds: tuple[str, str]) -> None:
    given = {"input": Given(normal(2, 5, 24), {2: kinds[0]}), "weight": weight(12, 24, {1: kinds[1]})}
    found = compare(functional.linear, given, 2)
    assert found[0].gathers == {"matrix product": 1}


def test_both_dims_of_a_weight_may_not_be_cut_against_each_other() -> None:
    given = {"input": Given(normal(2, 5, 24)), "weight": weight(12, 24, {0: "blocks", 1: "blocks"})}
    with pytest.raises(AssertionError):  # such a weight is held by nobody in part: not what a plan makes
        compare(functional.linear, given, 2)


# ---- cut along the sequence


def stream(kind: str = "blocks") -> Given:
    """[2, 24, 12], cut along the sequence."""
    return Given(normal(2, 24, 12), {1: kind})


@pytest.mark.parametrize("ranks", RANKS)
def test_columns_of_a_cut_sequence_share_one_gathering(ranks: int) -> None:
    def program(x: Tensor, w: Tensor, v: Tensor) -> list[Tensor]:
        return [functional.linear(x, w), functional.linear(x, v)]

    given = {"x": stream(), "w": weight(24, 12, {0: "thirds"}), "v": weight(12, 12, {0: "blocks"})}
    found = compare(program, given, ranks, sequence=True)
    assert sent(found) == [("all_gather", "column inputs"), ("reduce_scatter", "column inputs")]
    assert not found[0].gathers


@pytest.mark.parametrize("ranks", RANKS)
def test_rows_stay_cut_along_the_sequence(ranks: int) -> None:
    given = {"input": Given(normal(2, 24, 12), {2: "blocks"}), "weight": weight(5, 12, {1: "blocks"}), "bias": bias(5)}
    found = compare(functional.linear, given, ranks, sequence=True)
    assert sent(found) == [("reduce_scatter", "row outputs"), ("all_gather", "row outputs")]
    assert found[0].sets == [Given(normal(2, 24, 5), {1: "blocks"}).sets(ranks)] and found[0].partial == {"bias"}


def test_a_whole_weight_multiplies_a_cut_sequence() -> None:
    given = {"input": stream(), "weight": Given(normal(5, 12), parameter=True), "bias": bias(5)}
    found = compare(functional.linear, given, 2, sequence=True)
    assert not found[0].called and found[0].partial == {"weight", "bias"}


def gpt2(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> Tensor:
    """Conv1D folds batch and sequence into one dim."""
    h = torch.addmm(b, x.view(-1, x.size(-1)), w).view(*x.size()[:-1], 24)
    h = functional.gelu(h)
    y = torch.addmm(c, h.view(-1, h.size(-1)), v).view(*x.size()[:-1], 12)
    return x + y


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("cut", [True, False])
def test_folded_rows_are_cut_along_the_sequence_they_came_from(ranks: int, cut: bool) -> None:
    x = stream() if cut else Given(normal(2, 24, 12))
    given = {"x": x, "w": weight(12, 24, {1: "blocks"}), "b": bias(24, "blocks")}
    given |= {"v": weight(24, 12, {0: "blocks"}), "c": bias(12)}
    found = compare(gpt2, given, ranks, sequence=True)
    assert found[0].sets == [stream().sets(ranks)] and not found[0].gathers
    kinds = {"all_gather", "reduce_scatter"} if cut else {"all_gather", "reduce_scatter", "all_reduce"}
    assert {op for op, _ in sent(found)} == kinds


def test_a_sequence_that_does_not_divide_is_refused() -> None:
    given = {"input": Given(normal(2, 7, 12), {2: "blocks"}), "weight": weight(5, 12, {1: "blocks"})}
    with pytest.raises(
        EngineError, match=r"a sequence of length 7 does not divide among 2 tensor ranks.*pad it to a multiple"
    ):
        compare(functional.linear, given, 2, sequence=True)


@pytest.mark.parametrize("ranks", RANKS)
def test_grouped_products_of_experts(ranks: int) -> None:
    grouped = getattr(torch, "_grouped_mm", None)
    if grouped is None:
        pytest.skip("this torch has none")
    ends = torch.tensor([16, 32, 48], dtype=torch.int32)

    def program(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        hidden = grouped(x, up, offs=ends)
        return grouped(torch.relu(hidden), down, offs=ends)  # type: ignore[no-any-return]

    given = {"x": Given(normal(48, 32).float()), "up": Given(normal(3, 32, 96).float(), {2: "blocks"}, True)}
    given["down"] = Given(normal(3, 96, 32).float(), {1: "blocks"}, True)
    found = compare(program, given, ranks, bound=1e-3)
    assert not found[0].gathers and [op for op, _ in sent(found)] == ["all_reduce", "all_reduce"]


def test_autocast_chooses_the_dtypes_of_one_process() -> None:
    def program(x: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            wide = torch.ones(12, 5)
            products = [torch.addmm(torch.ones(5), x[0], wide, alpha=2), torch.addmm(torch.ones(24, 5), x[0], wide)]
            return [*products, torch.dot(x[0, :, 0], torch.ones(24))]

    x = torch.arange(576.0).view(2, 24, 12).sin()
    wanted, found = program(x), run(program, {"x": Given(x, {1: "blocks"}, grad=False)}, 2)[0].output
    assert [one.dtype for one in found] == [one.dtype for one in wanted] == [torch.bfloat16] * 2 + [torch.float32]
