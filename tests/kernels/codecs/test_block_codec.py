"""Codes err by at most half a scale, lose nothing that is not finite, and come out of Triton as out of torch."""

import math
from collections.abc import Callable, Iterator
from itertools import product, starmap

import pytest
import torch
from torch import Tensor

from engine.kernels.codecs.block_codec import SMALLEST_SCALE, BlockCodec, BlockFormat, encode_blocks, sum_blocks
from engine.kernels.dispatch import REFERENCE, Kernels
from tests.selection import wide

FORMATS = [BlockFormat(8, 256), BlockFormat(4, 256), BlockFormat(8, 64), BlockFormat(4, 2048)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDED = 1 + 4e-5
"""What fp32 adds to half a scale."""


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def spread(count: int, block: int, seed: int) -> Tensor:
    """Every number of another order of magnitude."""
    exponents = torch.rand(count, block, generator=random(seed)) * 60 - 40
    return torch.randn(count, block, generator=random(seed + 1)) * 2.0**exponents


DISTRIBUTIONS: dict[str, Callable[[int, int], Tensor]] = {
    "normal": lambda count, block: torch.randn(count, block, generator=random(0)),
    "uniform": lambda count, block: torch.rand(count, block, generator=random(1)) * 2 - 1,
    "one outlier": lambda count, block: torch.randn(count, block, generator=random(2)).index_fill_(
        1, torch.tensor([block // 3]), 1e4
    ),
    "many orders": lambda count, block: spread(count, block, 3),
    "sparse": lambda count, block: torch.randn(count, block, generator=random(5)).mul_(
        torch.rand(count, block, generator=random(6)) < 0.01
    ),
    "tiny": lambda count, block: torch.randn(count, block, generator=random(7)) * 1e-38,
    "huge": lambda count, block: torch.randn(count, block, generator=random(8)).clamp_(-3, 3) * 1e38,
}


def parts(message: Tensor, wire: BlockFormat) -> tuple[Tensor, Tensor]:
    """(codes [K, B] as numbers, scales [K, 1]) of one message, read anew."""
    end = wire.code_bytes(wire.elements(message.numel()))
    raw = message[:end].to(torch.int64)
    if wire.bits == 4:
        raw = torch.stack([raw % 16, raw // 16], dim=1).view(-1)
    half = 2 ** (wire.bits - 1)
    return ((raw + half) % (2 * half) - half).view(-1, wire.block), message[end:].clone().view(torch.float32).view(
        -1, 1
    )


def blocks_of(count: int, wire: BlockFormat) -> Iterator[tuple[str, Tensor]]:
    for name, make in DISTRIBUTIONS.items():
        yield name, make(count, wire.block)


@pytest.mark.parametrize("wire", [BlockFormat(8, 64), BlockFormat(4, 64)], ids=str)
def test_no_element_of_10000_blocks_errs_by_more_than_half_a_scale(wire: BlockFormat) -> None:
    codec = BlockCodec(wire, REFERENCE)
    for name, values in blocks_of(1500, wire):  # of seven distributions
        codes, scales = parts(codec.message(values.view(-1)), wire)
        peak = values.abs().amax(dim=1, keepdim=True)
        expected = torch.where(peak > 0, (peak.double() / wire.largest).clamp_min(SMALLEST_SCALE), 0.0)
        torch.testing.assert_close(scales.double(), expected, rtol=1e-7, atol=0, msg=f"scales, {name}")
        assert int(codes.abs().max()) <= wire.largest, name
        exact = values.double()
        error, allowed = (exact - codes * scales.double()).abs(), scales.double() / 2 * ROUNDED
        assert bool((error <= allowed).all()), f"{name}: {float((error / allowed.clamp_min(1e-300)).max())}"
        received = codec.rounded(values.view(-1), torch.float32).view_as(values)
        assert bool(((received.double() - exact).abs() <= allowed).all()), name


@pytest.mark.parametrize("mode", ["reference", "triton"])
@pytest.mark.parametrize("wire", FORMATS, ids=str)
def test_what_is_not_finite_arrives_as_nan_at_its_place(wire: BlockFormat, mode: str) -> None:
    values = torch.randn(4 * wire.block, generator=random(1))
    places = [0, wire.block - 1, wire.block, 3 * wire.block + 7]
    for place, value in zip(places, (math.nan, math.inf, -math.inf, math.nan), strict=True):
        values[place] = value
    found = BlockCodec(wire, Kernels(mode)).rounded(values, torch.float32)  # type: ignore[arg-type]
    assert found.isnan().nonzero().flatten().tolist() == places
    clean = values.nan_to_num(0.0, 0.0, 0.0)
    other = BlockCodec(wire, REFERENCE).rounded(clean, torch.float32)
    keep = found.isfinite()
    assert torch.equal(found[keep], other[keep]), "neighbours are as they would be without it"


@pytest.mark.parametrize("mode", ["reference", "triton"])
@pytest.mark.parametrize("wire", FORMATS, ids=str)
def test_zeros_stay_zero_and_denormal_numbers_err_by_less_than_the_smallest_normal_one(
    wire: BlockFormat, mode: str
) -> None:
    codec = BlockCodec(wire, Kernels(mode))  # type: ignore[arg-type]
    zeros = torch.zeros(2 * wire.block)
    assert torch.equal(codec.rounded(zeros, torch.float32), zeros)
    small = torch.arange(-wire.block, wire.block).float() * 2.0**-149
    assert float((codec.rounded(small, torch.float32) - small).double().abs().max()) <= SMALLEST_SCALE / 2


@pytest.mark.parametrize(
    ("wire", "dtype"),
    [
        *product(FORMATS[:2], DTYPES),
        *((wire, DTYPES[0]) for wire in FORMATS[2:]),
        *starmap(wide, product(FORMATS[2:], DTYPES[1:])),
    ],
    ids=str,
)
def test_triton_gives_the_bits_of_torch(wire: BlockFormat, dtype: torch.dtype) -> None:
    rows = torch.randn(3, 3 * wire.block, generator=random(4)).to(dtype)
    rows[1, : wire.block] = 0
    rows[2, 5] = math.inf
    residuals = [torch.randn(rows.shape, generator=random(5)) * 0.01 for _ in range(2)]
    residuals[1].copy_(residuals[0])
    triton, torch_ = Kernels("triton"), REFERENCE
    for feedback in (False, True):
        made = [
            encode_blocks(rows, wire, kernels, residual if feedback else None)
            for kernels, residual in zip((triton, torch_), residuals, strict=True)
        ]
        assert torch.equal(*made), f"messages, feedback {feedback}"
    assert torch.equal(*residuals) and residuals[0].isfinite().all()
    for kind in (torch.float32, dtype):
        whole = [torch.empty(rows.shape, dtype=kind) for _ in range(2)]
        sums = [torch.empty(rows.shape[1], dtype=kind) for _ in range(2)]
        for kernels, out, total in zip((triton, torch_), whole, sums, strict=True):
            BlockCodec(wire, kernels).decode(made[0], out)
            sum_blocks(made[0], total, wire, kernels)
        assert torch.equal(whole[0].nan_to_num(7.0), whole[1].nan_to_num(7.0)), kind
        assert torch.equal(sums[0].nan_to_num(7.0), sums[1].nan_to_num(7.0)) and sums[0].isnan().sum() == 1


def test_messages_are_added_in_their_order_in_fp32() -> None:
    wire = BlockFormat(8, 64)
    rows = torch.stack([torch.full((64,), value) for value in (3e7, 1.0, -3e7)])
    total = torch.empty(64)
    sum_blocks(encode_blocks(rows, wire, REFERENCE), total, wire, REFERENCE)
    values = BlockCodec(wire, REFERENCE)
    one, two, three = (values.rounded(row, torch.float32) for row in rows)
    assert torch.equal(total, (one + two) + three)


@pytest.mark.parametrize("wire", FORMATS, ids=str)
def test_sizes_of_messages_are_those_of_the_formula(wire: BlockFormat) -> None:
    elements = 5 * wire.block
    assert wire.message_bytes(elements) == elements * wire.bits // 8 + 4 * 5
    assert wire.elements(wire.message_bytes(elements)) == elements
    assert encode_blocks(torch.ones(2, elements), wire, REFERENCE).shape == (2, wire.message_bytes(elements))


def test_the_residual_is_what_the_code_leaves_out_and_is_added_once() -> None:
    wire, values = BlockFormat(4, 64), torch.randn(1, 256, generator=random(9))
    residual = torch.zeros(1, 256)
    sent = torch.zeros(256)
    for _ in range(100):
        message = encode_blocks(values, wire, REFERENCE, residual)
        out = torch.empty(1, 256)
        BlockCodec(wire, REFERENCE).decode(message, out)
        sent += out[0]
    # the sum of what was sent and the residual are the sum of the true values
    torch.testing.assert_close(sent + residual[0], 100 * values[0], rtol=1e-5, atol=1e-4)


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
