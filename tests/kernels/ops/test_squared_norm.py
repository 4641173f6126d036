"""Sums of squares are those of float64, far outside of fp32 too, and tell what is not finite."""

import math

import pytest
import torch
from torch import Tensor

from engine.kernels.dispatch import Kernels, Mode
from engine.kernels.ops.norm import squared_norm

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
