"""Stochastic rounding keeps the mean, never leaves the two neighbours, and depends on key and index alone."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels.optim.stochastic_rounding import random_bits, round_to_bf16

DRAWS = 1 << 18


def rounded(value: float, key: int = 7, count: int = DRAWS) -> Tensor:
    return round_to_bf16(torch.full((count,), value), torch.arange(count), key)


@pytest.mark.parametrize("value", [1.001, -1.001, 3.1415927, 1e-3, -6.02e23, 1e-40, 0.99999])
@pytest.mark.parametrize("key", [0, 7, 2**62 + 12345])
def test_the_mean_is_kept(value: float, key: int) -> None:
    found = rounded(value, key)
    values = torch.unique(found).double()
    assert len(values) == 2, "only the neighbours"
    exact = float(torch.tensor(value))  # as fp32 has it
    gap, share = float(values[1] - values[0]), (exact - float(values[0])) / float(values[1] - values[0])
    error = math.sqrt(share * (1 - share) / DRAWS) * gap
    assert abs(float(found.double().mean()) - exact) < 5 * error + gap * 2**-16


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(0, 2**63 - 1))
def test_a_number_goes_to_one_of_its_neighbours_and_bf16_numbers_stay(value: float, key: int) -> None:
    given_value = torch.tensor([value])
    towards_zero = (given_value.view(torch.int32) & -0x10000).view(torch.float32)
    away = ((given_value.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)
    found = round_to_bf16(given_value, torch.tensor([3]), key).float()
    assert torch.equal(found, towards_zero) or (torch.equal(found, away) and not torch.equal(given_value, towards_zero))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays(value: float) -> None:
    found = rounded(value, count=1 << 17).float()
    assert bool((found.isnan() if math.isnan(value) else found == value).all())


def test_a_nan_with_all_bits_does_not_become_a_number() -> None:
    full = torch.full((1000,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    assert bool(round_to_bf16(full, torch.arange(1000), 5).isnan().all())


def test_pieces_give_what_the_whole_gives() -> None:
    values, index = torch.randn(4099), torch.arange(4099) + 2**33
    whole = round_to_bf16(values, index, 11)
    order = torch.randperm(4099)
    assert torch.equal(round_to_bf16(values[order], index[order], 11), whole[order])
    assert torch.equal(round_to_bf16(values[1000:1003], index[1000:1003], 11), whole[1000:1003])


def test_keys_and_high_indices_give_unrelated_bits() -> None:
    index = torch.arange(1 << 14)
    streams = [random_bits(index + high, key) for high in (0, 2**32, 5 * 2**40) for key in (0, 1, 77 << 32, 1 << 62)]
    bits = torch.stack([(s[:, None] >> torch.arange(32)) & 1 for s in streams]).double()  # [stream, element, bit]
    assert bool(((bits.mean(dim=1) - 0.5).abs() < 5 * 0.5 / 128).all())
    signs = (2 * bits - 1).flatten(1)
    table = signs @ signs.T / signs.shape[1]
    assert float((table - torch.eye(len(streams))).abs().max()) < 5 / math.sqrt(signs.shape[1])
    near = (signs[0, :-32] * signs[0, 32:]).mean()
    assert abs(float(near)) < 5 / math.sqrt(signs.shape[1])
