"""The factor of clipping is torch's, and a norm belongs to the averaged gradient."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from engine.errors import EngineError
from engine.zero.optim.master_weights import clip_factor, factor_on_device, gradient_norm

positive_st = st.floats(1e-6, 1e6)


@given(positive_st, positive_st)
def test_the_factor_is_that_of_torch(norm: float, max_norm: float) -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    parameter.grad = torch.tensor([norm], dtype=torch.float64)
    nn.utils.clip_grad_norm_([parameter], max_norm)
    assert clip_factor(norm, max_norm) * norm == pytest.approx(float(parameter.grad), rel=1e-12)


@given(positive_st, positive_st)
def test_clipping_never_enlarges_and_never_exceeds_the_limit(norm: float, max_norm: float) -> None:
    factor = clip_factor(norm, max_norm)
    assert 0 < factor <= 1
    assert factor * norm <= max_norm * (1 + 1e-12)
    assert factor == 1 or norm > max_norm * 0.99 - 1e-6


def test_zero_switches_clipping_off() -> None:
    assert clip_factor(1e30, 0.0) == 1.0
    assert clip_factor(0.0, 1.0) == clip_factor(0.0, 0.0) == 1.0


def test_the_norm_is_that_of_the_average() -> None:
    assert gradient_norm(3.0**2 + 4.0**2, 1) == 5.0
    assert gradient_norm(3.0**2 + 4.0**2, 10) == 0.5
    assert gradient_norm(0.0, 7) == 0.0


@pytest.mark.parametrize("square", [math.nan, math.inf])
def test_what_is_not_finite_stays_so(square: float) -> None:
    assert not math.isfinite(gradient_norm(square, 2))
    assert not math.isfinite(gradient_norm(4.0, math.nan))


def test_nothing_to_average_is_refused_with_a_remedy() -> None:
    with pytest.raises(EngineError, match=r"the weight of this step is 0 on all ranks: .*; mask fewer labels"):
        gradient_norm(1.0, 0.0)


@given(
    st.floats(0),
    st.floats(1e-3, 1e12),
    st.sampled_from([0.0, 1.0, 0.3, 1e-20, 1e20]),
)
@example(math.inf, 1.0, 1.0)
@example(math.nan, 1.0, 1.0)
def test_the_device_finds_what_the_host_finds(squares: float, weight: float, max_norm: float) -> None:
    norm = gradient_norm(squares, weight)
    there = [torch.tensor(x, dtype=torch.float64) for x in (squares, weight)]
    found = factor_on_device(there[0], there[1], max_norm)
    # a CPU's root may miss the last bit, and the division makes up to two of it
    assert float(found[0]) == pytest.approx(norm, rel=2**-51, nan_ok=True)
    assert str(float(found[1])) == str(clip_factor(float(found[0]), max_norm) / weight)
