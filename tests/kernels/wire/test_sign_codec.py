"""Signs with the mean size of their block: what they stand for, what they leave, and what is not finite."""

import math

import pytest
import torch

from engine.kernels.codecs.block_codec import BlockCodec, BlockFormat, encode_blocks
from engine.kernels.dispatch import REFERENCE

SIGNS = BlockFormat(1, 64)


def test_a_number_becomes_the_mean_size_of_its_block_with_its_sign() -> None:
    values = torch.randn(10 * 64, generator=torch.Generator().manual_seed(0))
    mean = values.view(-1, 64).abs().mean(1, keepdim=True)
    expected = torch.where(values.view(-1, 64) < 0, -mean, mean).view(-1)
    codec = BlockCodec(SIGNS, REFERENCE)
    assert torch.equal(codec.rounded(values, torch.float32), expected)
    assert codec.message(values).numel() == SIGNS.message_bytes(640) == 640 // 8 + 10 * 4
    assert SIGNS.elements(SIGNS.message_bytes(640)) == 640


def test_zeros_stay_zero() -> None:
    zeros = torch.zeros(128)
    assert torch.equal(BlockCodec(SIGNS, REFERENCE).rounded(zeros, torch.float32), zeros)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_block_that_is_not_finite_arrives_as_nan_and_leaves_nothing(value: float) -> None:
    values, residual = torch.ones(1, 192), torch.full((1, 192), 0.25)
    values[0, 70] = value
    message = encode_blocks(values, SIGNS, REFERENCE, residual)
    found = torch.empty(1, 192)
    BlockCodec(SIGNS, REFERENCE).decode(message, found)
    assert found.isnan().nonzero()[:, 1].tolist() == list(range(64, 128))
    assert torch.equal(found[0, :64], torch.full((64,), 1.25)) and not residual.any()


def test_the_residual_is_what_the_signs_leave_out() -> None:
    values = torch.randn(2, 128, generator=torch.Generator().manual_seed(1))
    residual = torch.randn(2, 128, generator=torch.Generator().manual_seed(2)) / 8
    given, found = values + residual, torch.empty(2, 128)
    BlockCodec(SIGNS, REFERENCE).decode(encode_blocks(values, SIGNS, REFERENCE, residual), found)
    torch.testing.assert_close(residual, given - found)
