"""Every element has one place in the whole parameter, whoever holds it."""

import pytest
import torch

from engine.parallel.grid import ShardHolder
from engine.parallel.shard_table import Range, ShardRow
from engine.parallel.tensor.layers.apply_plan import local_shard
from engine.parallel.tensor.plan.tensor_plan import ParameterCut
from engine.zero.flat_buckets import Ownership
from engine.zero.layout import Item, build_layout
from engine.zero.optim.bf16_updates import PIECE, FullShapes, RoundedUpdates
from tests.zero.buckets import allocate

FUSED = (Range(0, 4, (0,)), Range(4, 8, (1,)), Range(8, 10, (0, 1)), Range(10, 13, (0,)), Range(13, 16, (1,)))
"""As a fused query, key and value are cut: the key is shared."""


def row(name: str, shape: tuple[int, ...], dim: int | None, ranges: tuple[Range, ...]) -> ShardRow:
    return ShardRow(name, (), shape, torch.bfloat16, (0,), dim, ranges, False, False, True, 0)


@pytest.mark.parametrize(("shape", "dim"), [((16,), 0), ((16, 3), 0), ((3, 16), 1), ((2, 16, 5), 1)])
@pytest.mark.parametrize("tp", [0, 1])
def test_indices_are_those_of_the_whole_parameter(shape: tuple[int, ...], dim: int, tp: int) -> None:
    whole = FullShapes({"w": 0}, {"w": row("w", shape, dim, FUSED)}, ShardHolder(tp=tp))
    full = torch.arange(torch.Size(shape).numel()).view(shape)
    expected = local_shard(full, ParameterCut(dim, FUSED), tp).reshape(-1)
    found = whole.index("w", 0, len(expected), torch.device("cpu"))
    assert torch.equal(found, expected)
    assert torch.equal(whole.index("w", 3, 7, torch.device("cpu")), expected[3:7])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_pieces_of_all_shards_cover_every_element_once(ranks: int) -> None:
    shapes = {"large": (PIECE + 300,), "small": (7,), "none": (0, 3)}
    rows = {name: row(name, shape, None, (Range(0, shape[0], (0,)),)) for name, shape in shapes.items()}
    items = [Item(name=name, shape=shape, dtype="bfloat16") for name, shape in shapes.items()]
    layout = build_layout(items, ranks, 10**9)
    seen = {0: torch.zeros(PIECE + 300, dtype=torch.int64), 1: torch.zeros(7, dtype=torch.int64)}
    for rank in range(ranks):
        parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
        who = Ownership(rank, ranks, True, master=False)
        (flat,) = allocate(layout, parameters, who, torch.device("cpu"))
        assert flat.master is None and flat.grads.dtype == torch.bfloat16
        updates = RoundedUpdates(1, FullShapes({"large": 0, "small": 1, "none": 2}, rows, ShardHolder()), torch.float32)
        for segment in flat.bucket.segments(flat.owned):
            weights = flat.kept[segment.start - flat.owned.start : segment.stop - flat.owned.start]
            updates.add(weights, flat, slice(segment.start, segment.stop))
            for piece in updates.pieces(weights):
                seen[piece.number][piece.places] += 1
                assert len(piece.places) == piece.part.stop - piece.part.start <= PIECE
                updates.store(weights, piece, torch.ones(len(piece.places)), step=1, kind=0)
        for slot in flat.bucket.slots:
            start, stop = max(slot.start, flat.owned.start), min(slot.stop, flat.owned.stop)
            if start < stop:
                assert bool((flat.kept[start - flat.owned.start : stop - flat.owned.start] == 1).all())
    assert all(bool((count == 1).all()) for count in seen.values())
