"""Codes of traffic and sums of them come out of a GPU as out of torch."""

import math

import pytest
import torch

from engine.kernels.codecs.block_codec import BlockFormat, encode_blocks, sum_blocks
from engine.kernels.dispatch import REFERENCE, Kernels
from tests.kernels.codecs.test_block_codec import FORMATS, random

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wire", FORMATS, ids=str)
def test_a_gpu_gives_the_values_of_torch(wire: BlockFormat, dtype: torch.dtype) -> None:
    rows = torch.randn(4, 1000 * wire.block, generator=random(3)).to(dtype).cuda()
    rows[1, 7] = math.nan
    triton = Kernels("triton")
    message = encode_blocks(rows, wire, triton)
    assert torch.equal(message, encode_blocks(rows, wire, REFERENCE))
    found, expected = torch.empty(rows.shape[1]).cuda(), torch.empty(rows.shape[1]).cuda()
    sum_blocks(message, found, wire, triton)
    sum_blocks(message, expected, wire, REFERENCE)
    torch.testing.assert_close(found, expected, equal_nan=True)
