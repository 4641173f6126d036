"""Norms and squared norms: the reference against float64, the interpreted kernels against eager torch."""

import math
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.dispatch import Kernels, Mode
from engine.kernels.gpu.norm import norm_forward
from engine.kernels.ops.norm import WIDEST_LAYER_FP32, Norm, add_norm, norm, squared_norm
from tests.kernels.error import check_error
from tests.kernels.registered import check_operator
from tests.selection import wide

DTYPES = (torch.float32, wide(torch.float16), torch.bfloat16)
FORMS = {
    "rms": Norm(1e-6),
    "rms, weight from 1": Norm(1e-6, offset=1.0),
    "layer": Norm(1e-5, centered=True),
}
SHAPES = ((3, 5, 40), (1, 16), (0, 24), (9, 129), (2, 3))


def eager(x: Tensor, weight: Tensor, bias: Tensor | None, form: Norm) -> Tensor:
    """As models write it."""
    if form.centered:
        return functional.layer_norm(x, x.shape[-1:], weight, bias, form.eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + form.eps)
    return (form.offset + weight) * normed.to(x.dtype)


def made(shape: tuple[int, ...], dtype: torch.dtype, biased: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = [shape, shape[-1:], *[shape[-1:]] * biased]
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


@pytest.mark.parametrize("mode", ["reference", "triton"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_is_at_most_twice_eager_torchs(dtype: torch.dtype, form: Norm, shape: tuple[int, ...], mode: str) -> None:
    kernels = Kernels(mode)  # type: ignore[arg-type]
    given = made(shape, dtype, form.centered)
    check_error(lambda x, w, b=None: norm(x, w, b, form, kernels), lambda x, w, b=None: eager(x, w, b, form), given)


@pytest.mark.parametrize("mode", ["reference", "triton"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_residual_sum_goes_in_and_on(dtype: torch.dtype, form: Norm, mode: str) -> None:
    kernels = Kernels(mode)  # type: ignore[arg-type]
    x, weight, *bias = made((2, 7, 33), dtype, form.centered)

    def ours(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return add_norm(x, residual, (weight, bias), form, kernels)

    def eagerly(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        stream = x + residual
        return eager(stream, weight, bias, form), stream

    check_error(ours, eagerly, [x, x.flip(0), weight, *bias])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_wide_rows_have_their_parameter_gradients_from_a_second_pass(form: Norm) -> None:
    kernels, given = Kernels("triton"), made((3, 9000), torch.bfloat16, form.centered)
    check_error(lambda x, w, b=None: norm(x, w, b, form, kernels), lambda x, w, b=None: eager(x, w, b, form), given)


@pytest.mark.parametrize(("width", "launches"), [(WIDEST_LAYER_FP32, 1), (WIDEST_LAYER_FP32 + 1, 0)])
def test_rows_that_no_program_holds_go_to_torch(width: int, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Mock(wraps=norm_forward)
    monkeypatch.setattr("engine.kernels.gpu.norm.norm_forward", launch)
    x, weight, bias = made((1, width), torch.float32, biased=True)
    norm(x, weight, bias, FORMS["layer"], Kernels("triton"))
    assert launch.call_count == launches


@pytest.mark.parametrize("mode", ["reference", "triton"])
def test_parameters_of_another_width_are_refused(mode: Mode) -> None:
    x = torch.ones(2, 16)
    with pytest.raises(RuntimeError, match="shape"):
        norm(x, torch.ones(8), None, FORMS["rms"], Kernels(mode))
    with pytest.raises(RuntimeError, match="shape"):
        add_norm(x, x, (torch.ones(16), torch.ones(8)), FORMS["layer"], Kernels(mode))


def test_reference_has_the_gradients_of_finite_differences() -> None:
    x, weight, bias = (t.double().requires_grad_() for t in made((3, 6), torch.float64, biased=True))
    for form in FORMS.values():
        assert torch.autograd.gradcheck(partial(norm, form=form, kernels=Kernels("reference")), (x, weight, bias))


def test_what_is_not_finite_stays_in_its_row() -> None:
    x, weight = made((4, 32), torch.float32, biased=False)
    x[1, 3], x[2, 5] = float("inf"), float("nan")
    y = norm(x, weight, None, FORMS["rms"], Kernels("triton"))
    expected = norm(x, weight, None, FORMS["rms"], Kernels("reference"))
    torch.testing.assert_close(y, expected, equal_nan=True)


def test_same_bits_twice() -> None:
    x, weight, bias = (t.requires_grad_() for t in made((37, 65), torch.bfloat16, biased=True))
    kernels = Kernels("triton")

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(norm(x, weight, bias, FORMS["layer"], kernels).sum(), (x, weight, bias))

    assert all(torch.equal(one, other) for one, other in zip(gradients(), gradients(), strict=True))


def test_operator_is_registered_as_torch_wants_it() -> None:
    x, weight, bias = (t.requires_grad_() for t in made((5, 32), torch.float32, biased=True))
    check_operator(torch.ops.trine.norm.default, (x, weight, bias, 1e-5, 0.0, True))
    check_operator(torch.ops.trine.add_norm.default, (x, x.detach().clone(), weight, None, 1e-5, 1.0, False))


MODES: tuple[Mode, ...] = ("reference", "triton")


def values(count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("counts", [(1,), (2048,), (2049, 5), (20001, 64, 3)], ids=str)
def test_it_is_the_sum_in_float64(counts: tuple[int, ...], dtype: torch.dtype, mode: Mode) -> None:
    parts = [(values(count, dtype, seed), True) for seed, count in enumerate(counts)]
    found = squared_norm(parts, Kernels(mode))
    exact = math.fsum(float(x) ** 2 for part, _ in parts for x in part.double())
    assert (found.dtype, found.shape) == (torch.float64, ())
    assert float(found) == pytest.approx(exact, rel=1e-13)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", [1e-30, 1e30, 3e38])
def test_neither_large_nor_small_is_lost(scale: float, mode: Mode) -> None:
    part = torch.full((3000,), scale)
    assert float(squared_norm([(part, True)], Kernels(mode))) == pytest.approx(3000 * float(part[0]) ** 2, rel=1e-12)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_shows_wherever_it_is(value: float, mode: Mode) -> None:
    good, bad = values(2500, torch.float32), values(2500, torch.float32)
    bad[2499] = value
    assert not math.isfinite(float(squared_norm([(good, True), (bad, True)], Kernels(mode))))
    assert math.isnan(float(squared_norm([(good, True), (bad, False)], Kernels(mode))))


@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_counted_adds_nothing(mode: Mode) -> None:
    one, other = values(77, torch.bfloat16), torch.full((99,), 3e38)
    both, alone = (squared_norm(parts, Kernels(mode)) for parts in ([(one, True), (other, False)], [(one, True)]))
    assert torch.equal(both, alone) and float(both) > 0


@pytest.mark.parametrize("mode", MODES)
def test_no_part_is_zero(mode: Mode) -> None:
    assert float(squared_norm([], Kernels(mode))) == float(squared_norm([(torch.empty(0), True)], Kernels(mode))) == 0


def test_same_bits_twice_and_parts_of_both_implementations_are_added() -> None:
    narrow, wide = values(9999, torch.float32), values(50, torch.float64)
    kernels = Kernels("triton")
    assert torch.equal(squared_norm([(narrow, True)], kernels), squared_norm([(narrow, True)], kernels))
    both = float(squared_norm([(narrow, True), (wide, True)], kernels))
    assert both == pytest.approx(float(narrow.double().square().sum() + wide.square().sum()), rel=1e-13)
