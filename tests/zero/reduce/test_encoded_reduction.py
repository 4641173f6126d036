"""Sums of gradients in fewer bits: what every rank encodes, in which order it is added, and what is kept for later."""

import math
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from engine.kernels.codecs.block_codec import BlockCodec, BlockFormat
from engine.kernels.dispatch import REFERENCE
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.traffic import Traffic
from engine.parallel.comm.world import World
from engine.parallel.grid import Grid
from engine.zero.flat_buckets import FlatBucket, Ownership
from engine.zero.layout import Item, build_layout
from engine.zero.reduce.encoded_reduction import EncodedReduction, connect_hops
from engine.zero.wire_formats import WireFormats
from tests.selection import wide
from tests.zero.buckets import allocate

WIRE = BlockFormat(8, 64)
ELEMENTS = 1000


def formats(ranks: int, within: int, wire: BlockFormat = WIRE, feedback: bool = False) -> WireFormats:
    return WireFormats(ranks=ranks, within=within, axis="dp", gradients=wire, feedback=feedback)


def bucket(given: WireFormats, rank: int) -> FlatBucket:
    layout = build_layout([Item("w", (ELEMENTS,), "float32")], given.ranks, 1, given.alignment)
    who = Ownership(rank, given.ranks, sharded=True)
    (flat,) = allocate(layout, {"w": nn.Parameter(torch.zeros(ELEMENTS))}, who, torch.device("cpu"))
    return flat


def gradient(rank: int, step: int, elements: int) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(1000 * step + rank))


def reduce_on_all(given: WireFormats, steps: int, spoiled: int = -1) -> list[tuple[list[Tensor], tuple[Traffic, ...]]]:
    """(what each step leaves in the shard, traffic) of every rank; ``spoiled``: the rank with a NaN in each step."""
    assert given.gradients is not None

    def body(world: World) -> tuple[list[Tensor], tuple[Traffic, ...]]:
        grid = Grid(dp=given.ranks, rank=world.rank)
        assert world.connect is not None and given.gradients is not None
        comm, flat = Comm(grid, world.connect(grid)), bucket(given, world.rank)
        connect_hops(given, comm)
        reduction = EncodedReduction(flat, given.gradients, given, comm, REFERENCE)
        found = []
        for step in range(steps):
            full = gradient(world.rank, step, flat.bucket.elements)
            if world.rank == spoiled:
                full[77] = math.nan
            out = torch.empty(flat.bucket.elements // given.ranks)
            reduction.start(full, out).wait()
            found.append(out)
        assert all(residual.isfinite().all() for residual in reduction.residuals)
        return found, comm.tally.rows()

    return run_thread_ranks(given.ranks, body)


def rounded(values: Tensor, wire: BlockFormat = WIRE) -> Tensor:
    return BlockCodec(wire, REFERENCE).rounded(values, torch.float32)


def in_order(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_shard_is_the_sum_of_what_every_rank_has_encoded(ranks: int, bits: int) -> None:
    wire = BlockFormat(bits, 64)
    found = [outs[0] for outs, _ in reduce_on_all(formats(ranks, ranks, wire), 1)]
    size = found[0].numel()
    expected = in_order([rounded(gradient(rank, 0, ranks * size), wire) for rank in range(ranks)])
    assert torch.equal(torch.cat(found), expected)


def test_on_two_nodes_sums_of_a_node_are_encoded_again() -> None:
    found = [outs[0] for outs, _ in reduce_on_all(formats(4, 2), 1)]
    elements = 4 * found[0].numel()
    nodes = [in_order([rounded(gradient(rank, 0, elements)) for rank in node]) for node in ((0, 1), (2, 3))]
    assert torch.equal(torch.cat(found), in_order([rounded(node) for node in nodes]))


@pytest.mark.parametrize("within", [1, 2, 4])
def test_bytes_are_those_of_the_formats(within: int) -> None:
    given = formats(4, within)
    for _, rows in reduce_on_all(given, 3):
        planned = given.reduction(bucket(given, 0).bucket, itemsize=4)
        assert list(rows) == sorted((row + row + row for row in planned), key=lambda row: row.label)
    size = bucket(given, 0).bucket.elements // 4
    message = size + size // 64 * 4
    by_hand = {
        2: {"gradients within nodes": 2 * message, "gradients across nodes": message},
    }.get(within, {"gradients": 3 * message})
    assert {row.label: row.bytes for row in given.reduction(bucket(given, 0).bucket, 4)} == by_hand


@pytest.mark.parametrize("within", [2, 4])
def test_a_nan_arrives_at_its_owner_and_leaves_no_trace_in_later_steps(within: int) -> None:
    given = formats(4, within, feedback=True)
    outs = [outs[0] for outs, _ in reduce_on_all(given, 1, spoiled=2)]
    assert torch.cat(outs).isnan().nonzero().flatten().tolist() == [77]


@cache
def bias(within: int, steps: int, feedback: bool, bits: int = 4) -> float:
    """The mean over steps of what was sent, less that of the true sums: the largest of all elements."""
    outs = [outs for outs, _ in reduce_on_all(formats(4, within, BlockFormat(bits, 64), feedback), steps)]
    sent = [torch.cat([own[step] for own in outs]).double() for step in range(steps)]
    true = [sum(gradient(rank, step, sent[0].numel()).double() for rank in range(4)) for step in range(steps)]
    return float(torch.stack([a - b for a, b in zip(sent, true, strict=True)]).mean(0).abs().max())


@pytest.mark.parametrize("within", [2, wide(4)])
def test_with_error_feedback_the_bias_falls_as_one_over_the_steps(within: int) -> None:
    few, many = bias(within, 6, True), bias(within, 48, True)
    assert many < few / 5, f"{few} after 6 steps, {many} after 48"
    assert many < bias(within, 48, False) / 2, "without feedback it falls as the root of the steps"


def test_the_bias_of_signs_falls_as_well() -> None:
    few, many = bias(4, 20, True, bits=1), bias(4, 160, True, bits=1)
    assert many < few / 4, f"{few} after 20 steps, {many} after 160"
