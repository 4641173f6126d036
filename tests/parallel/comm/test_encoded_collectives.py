"""Collectives of activations in fewer bits: their sums, their bounds, their bytes, and equal bits on all ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels.codecs.block_codec import BlockFormat, CastFormat, NumberFormat, make_codec
from engine.kernels.dispatch import REFERENCE, Kernels
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.encoded_collectives import ActivationFormat, EncodedCollectives
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.traffic import Traffic, sent_bytes
from engine.parallel.comm.world import World
from engine.parallel.grid import Grid
from tests.kernels.codecs.test_block_codec import DISTRIBUTIONS, ROUNDED

INT8, INT4, BF16 = BlockFormat(8, 64), BlockFormat(4, 64), CastFormat(torch.bfloat16)
FORMATS: list[NumberFormat] = [INT8, INT4, BF16]
Body = Callable[[EncodedCollectives, int], Tensor]


def on_ranks(
    ranks: int, wire: NumberFormat, body: Body, kernels: Kernels = REFERENCE
) -> list[tuple[Tensor, tuple[Traffic, ...]]]:
    """(result, traffic) of every rank."""

    def rank(world: World) -> tuple[Tensor, tuple[Traffic, ...]]:
        grid = Grid(tp=ranks, rank=world.rank)
        assert world.connect is not None
        comm = Comm(grid, world.connect(grid))
        form = ActivationFormat(wire, frozenset({"test"}))
        return body(EncodedCollectives(comm, "tp", form, kernels), world.rank), comm.tally.rows()

    return run_thread_ranks(ranks, rank)


def given(rank: int, elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank)).to(dtype)


def rounded(values: Tensor, wire: NumberFormat) -> Tensor:
    """What receivers get of a run of numbers, in fp32."""
    size = wire.padded(values.numel())
    codec, out = make_codec(wire, REFERENCE), torch.empty(1, size)
    codec.decode(codec.encode(torch.nn.functional.pad(values.float(), (0, size - values.numel())).view(1, -1)), out)
    return out.view(-1)[: values.numel()]


def in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].float().clone()
    for part in parts[1:]:
        total += part
    return total


def all_reduce(elements: int, dtype: torch.dtype, axis: EncodedCollectives, rank: int) -> Tensor:
    tensor = given(rank, elements, dtype)
    axis.all_reduce(tensor, "test").wait()
    return tensor


@pytest.mark.parametrize("wire", FORMATS, ids=str)
@pytest.mark.parametrize(("ranks", "elements"), [(2, 512), (3, 1000), (4, 77)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ranks_hold_the_bits_of_one_rounded_sum(
    ranks: int, elements: int, wire: NumberFormat, dtype: torch.dtype
) -> None:
    found = [tensor for tensor, _ in on_ranks(ranks, wire, partial(all_reduce, elements, dtype))]
    assert all(torch.equal(tensor, found[0]) for tensor in found)
    size = wire.padded(-(-elements // ranks))
    starts = range(0, elements, size)
    sums = in_order(
        [
            torch.cat([rounded(given(rank, elements, dtype)[start : start + size], wire) for start in starts])
            for rank in range(ranks)
        ]
    )
    expected = torch.cat([rounded(sums[start : start + size], wire) for start in starts])
    assert torch.equal(found[0], expected.to(dtype))


@pytest.mark.parametrize("wire", [INT8, INT4], ids=str)
def test_sums_of_10000_blocks_err_by_half_a_scale_of_each_rank_and_of_the_sum(wire: BlockFormat) -> None:
    ranks, count = 2, 1500
    for name, make in DISTRIBUTIONS.items():  # of seven distributions: 10,500 blocks
        values = [make(count, wire.block), make(count, wire.block).flip(0) * 0.05]

        def body(axis: EncodedCollectives, rank: int, values: list[Tensor] = values) -> Tensor:
            tensor = values[rank].clone().view(-1)
            axis.all_reduce(tensor, "test").wait()
            return tensor

        found = on_ranks(ranks, wire, body)[0][0].view(count, -1).double()
        exact = values[0].double() + values[1].double()
        scales = [part.double().abs().amax(1, keepdim=True) / wire.largest for part in values]
        inputs = sum(scale / 2 for scale in scales)
        peak = exact.abs().amax(1, keepdim=True) + inputs
        allowed = (inputs + peak / wire.largest / 2) * ROUNDED + 2.0**-125
        error = (found - exact).abs()
        assert bool((error <= allowed).all()), f"{name}: {float((error / allowed).max())}"
        assert name == "sparse" or float(error.max()) > 0


def reduce_scatter(elements: int, axis: EncodedCollectives, rank: int) -> Tensor:
    part = torch.empty(elements)
    axis.reduce_scatter(part, given(rank, 2 * elements), "test").wait()
    return part


def all_gather(elements: int, axis: EncodedCollectives, rank: int) -> Tensor:
    full = torch.empty(2 * elements)
    axis.all_gather(full, given(rank, elements), "test").wait()
    return full


@pytest.mark.parametrize("wire", FORMATS, ids=str)
@pytest.mark.parametrize("elements", [256, 100])
def test_shards_are_sums_of_what_was_rounded(elements: int, wire: NumberFormat) -> None:
    found = [part for part, _ in on_ranks(2, wire, partial(reduce_scatter, elements))]
    for index, part in enumerate(found):
        slices = [given(rank, 2 * elements).view(2, -1)[index] for rank in range(2)]
        assert torch.equal(part, in_order([rounded(one, wire) for one in slices]))


@pytest.mark.parametrize("wire", FORMATS, ids=str)
@pytest.mark.parametrize("elements", [256, 100])
def test_a_gather_gives_every_rank_what_all_have_rounded_its_own_too(elements: int, wire: NumberFormat) -> None:
    expected = torch.cat([rounded(given(rank, elements), wire) for rank in range(2)])
    for full, _ in on_ranks(2, wire, partial(all_gather, elements)):
        assert torch.equal(full, expected)


@pytest.mark.parametrize("wire", FORMATS, ids=str)
@pytest.mark.parametrize(
    ("op", "body", "full"),
    [
        ("all_reduce", partial(all_reduce, 1000, torch.float32), 1000),
        ("reduce_scatter", partial(reduce_scatter, 500), 1000),
        ("all_gather", partial(all_gather, 500), 1000),
    ],
)
def test_bytes_are_those_of_the_format(wire: NumberFormat, op: Any, body: Body, full: int) -> None:
    planned = ActivationFormat(wire).collectives(op, full, 2)
    total = Traffic("tp", "test", len(planned), sum(sent_bytes(kind, size, 2) for kind, size in planned))
    for _, rows in on_ranks(2, wire, body):
        assert rows == (total,)
    by_hand = {INT8: 512 + 512 // 64 * 4, INT4: 256 + 512 // 64 * 4, BF16: 1000}[wire]
    assert total.bytes == by_hand * (2 if op == "all_reduce" else 1)


def test_only_what_becomes_shorter_and_may_be_rounded_is_encoded() -> None:
    form = ActivationFormat(BlockFormat(8, 256), frozenset({"row outputs"}))
    assert form.encodes("row outputs", torch.float32, 512, 2)
    assert not form.encodes("loss", torch.float32, 512, 2), "losses are exact"
    assert not form.encodes("row outputs", torch.float32, 100, 2), "a block of 256 for 50 numbers would be longer"
    for dtype in (torch.int64, torch.bool, torch.uint8, torch.float64):
        assert not form.encodes("row outputs", dtype, 4096, 2)
    assert not ActivationFormat(BF16).shortens(torch.bfloat16, 4096), "a cast to the same width"


def test_kernels_sum_as_torch() -> None:
    found = [
        on_ranks(2, INT8, partial(all_reduce, 1000, torch.float32), kernels)[0][0]
        for kernels in (REFERENCE, Kernels("triton"))
    ]
    assert torch.equal(*found)
