"""Parameters of experts that tensor ranks cut along their width: every element is held, counted and stored once."""

import pytest
import torch
from torch import Tensor, nn

from engine.checkpoint.contents.local_tensors import local_region, stored_part
from engine.checkpoint.format.manifest import StoredPiece, piece_from_json, piece_to_json
from engine.checkpoint.format.pieces import covers_once
from engine.parallel.experts.forms import expert_cut
from engine.parallel.grid import ShardHolder as At
from engine.parallel.shard_table import Division, Range, build_table
from engine.parallel.tensor.plan.tensor_plan import ParameterCut
from engine.zero.optim.bf16_updates import FullShapes


@pytest.mark.parametrize(("dim", "pieces"), [(1, ((0, 2), (2, 4), (4, 6), (6, 8))), (2, ((0, 3), (3, 6)))])
def test_experts_that_tensor_ranks_cut_are_held_and_counted_once_by_expert_and_tensor_rank(
    dim: int, pieces: tuple[tuple[int, int], ...]
) -> None:
    """The gate and the value of each expert are in one parameter, or the parameter has its width in the last dim."""
    model = nn.ParameterDict({"up": nn.Parameter(torch.arange(5 * 8 * 6.0).view(5, 8, 6))})
    width = ParameterCut(dim, tuple(Range(*piece, (place % 2,)) for place, piece in enumerate(pieces)))
    (found,) = build_table(model, {}, Division(2, {"up": width}, experts={"up": expert_cut(5, 2)}))
    seen, pieces_of_all = list[Tensor](), []
    for at in (At(0, tp, ep) for ep in range(2) for tp in range(2)):
        own, part = found.local(model["up"].detach(), at), local_region(found, at)
        assert found.held(at) and found.counted(at) and not found.copies(at) and part == stored_part(found, at)
        assert own.shape == found.local_shape(at) and part.elements == own.numel()
        rows = FullShapes({"up": 0}, {"up": found}, at).index("up", 0, own.numel(), torch.device("cpu"))
        assert torch.equal(model["up"].detach().view(-1)[rows], own.reshape(-1))
        spans = part.whole().spans()
        assert torch.equal(torch.cat([rows[a : a + n] for a, n in zip(spans.local, spans.length, strict=True)]), rows)
        assert [int(rows[a]) for a in spans.local] == spans.full.tolist()
        seen.append(rows)
        pieces_of_all.append(part.whole())
    assert torch.cat(seen).sort().values.tolist() == list(range(5 * 8 * 6)) and not found.equal_on_tensor_ranks
    assert covers_once((5, 8, 6), pieces_of_all) and not covers_once((5, 8, 6), pieces_of_all[1:])
    assert not covers_once((5, 8, 6), [*pieces_of_all[:2], *pieces_of_all[:2]])
    for piece in pieces_of_all:
        stored = StoredPiece("a", "up", piece)
        assert piece_from_json(piece_to_json(stored, 0), (5, 8, 6), "a", "up") == stored
