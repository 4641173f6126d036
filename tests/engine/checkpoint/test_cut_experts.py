"""Parameters of experts that tensor ranks cut along their width: every element is held, counted and stored once."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.checkpoint.contents.local_tensors import local_region, stored_part
from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.manifest import StoredPiece, piece_from_json, piece_to_json
from engine.checkpoint.format.pieces import Piece, covers_once
from engine.checkpoint.format.step_reader import StepReader
from engine.kernels.codecs.weight_format import WeightFormat, dequantize
from engine.parallel.experts.forms import ExpertPacking, expert_cut
from engine.parallel.grid import ShardHolder as At
from engine.parallel.model.quantized_layers import quantize_part
from engine.parallel.shard_table import Division, Range, build_table
from engine.parallel.tensor.layers.apply_plan import assemble
from engine.parallel.tensor.plan.tensor_plan import ParameterCut
from engine.zero.optim.bf16_updates import FullShapes
from tests.engine.checkpoint.fake_ranks import FakeRun, fake_run, part_of, random_tensors
from tests.engine.parity.test_cut_experts import home_made
from tests.selection import wide


@pytest.mark.parametrize(("dim", "pieces"), [(1, ((0, 2), (2, 4), (4, 6), (6, 8))), (2, ((0, 3), (3, 6)))])
def test_experts_that_tensor_ranks_cut_are_held_and_counted_once_by_expert_and_tensor_rank(
    dim: int, pieces: tuple[tuple[int, int], ...]
) -> None:
    """The gate and the value of each expert are in one parameter, or the parameter has its width in the last dim."""
    model = nn.ParameterDict({"up": nn.Parameter(torch.arange(5 * 8 * 6.0).view(5, 8, 6))})
    width = ParameterCut(dim, tuple(Range(*piece, (place % 2,)) for place, piece in enumerate(pieces)))
    (found,) = build_table(model, {}, Division(2, {"up": width}, experts={"up": expert_cut(5, 2)}))
    seen, pieces_of_all, quantized = list[Tensor](), [], replace(found, quantized=WeightFormat("int8", 4))
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
        held, full = (each.quantized_shape(at) for each in (quantized, replace(quantized, dim=None, experts=())))
        assert held is not None and full is not None
        codes = [quantize_part(model["up"], each, at) for each in (quantized, replace(quantized, dim=None, experts=()))]
        whole = dequantize(codes[1], full, torch.float32)
        assert torch.equal(dequantize(codes[0], held, torch.float32), found.local(whole, at)), "scales of whole rows"
    assert torch.cat(seen).sort().values.tolist() == list(range(5 * 8 * 6)) and not found.equal_on_tensor_ranks
    assert covers_once((5, 8, 6), pieces_of_all) and not covers_once((5, 8, 6), pieces_of_all[1:])
    assert not covers_once((5, 8, 6), [*pieces_of_all[:2], *pieces_of_all[:2]])
    for piece in pieces_of_all:
        stored = StoredPiece("a", "up", piece)
        assert piece_from_json(piece_to_json(stored, 0), (5, 8, 6), "a", "up") == stored


@pytest.mark.parametrize(
    "packing", [ExpertPacking(2, 1, alternate=True), ExpertPacking(2, 1), ExpertPacking(2, 0, True)]
)
def test_experts_stacked_along_another_dim_or_in_turn_are_held_and_stored_once(packing: ExpertPacking) -> None:
    """The second half of an adapter's pair."""
    shape = packing.shape((6, 6), 5)
    model = nn.ParameterDict({"b": nn.Parameter(torch.arange(60.0).view(shape))})
    division = Division(experts={"b": expert_cut(5, 2, packing)}, expert_dims={"b": packing.dim})
    (found,) = build_table(model, {}, division)
    found, seen, parts = replace(found, quantized=WeightFormat("int8", 4)), list[Tensor](), list[Piece]()
    for at, experts in ((At(ep=0), range(3)), (At(ep=1), range(3, 5))):
        own, part = found.local(model["b"].detach(), at), local_region(found, at)
        assert torch.equal(own, packing.chosen(model["b"].detach(), 5, experts)) and own.shape == found.local_shape(at)
        assert part == stored_part(found, at) and part.elements == own.numel()
        rows = FullShapes({"b": 0}, {"b": found}, at).index("b", 0, own.numel(), torch.device("cpu"))
        assert torch.equal(model["b"].detach().view(-1)[rows], own.reshape(-1))
        codes = found.quantized_shape(at)
        assert codes is not None and sum(stop - start for start, stop in codes.runs) == packing.dim * own.shape[1]
        seen.append(rows)
        parts.append(part.whole())
    assert torch.cat(seen).sort().values.tolist() == list(range(60)) and covers_once(shape, parts)
    whole = [found.local(model["b"].detach(), At(ep=rank)) for rank in range(2)]
    assert torch.equal(assemble(whole, ParameterCut(packing.dim, found.experts)), model["b"].detach())


@cache
def run_on(listed: bool, parallel: tuple[tuple[str, Any], ...], stage: int) -> FakeRun:
    """All ranks of a grid, in this process."""
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "parallel": {"data": 2, "pipeline": 1, **dict(parallel)},
        "zero_optimization": {"stage": stage},
    }
    example = {name: torch.zeros(1, 4, dtype=torch.long) for name in ("input_ids", "labels")}
    return fake_run(lambda: home_made(listed), settings, example, None)


CUT, WHOLE = ((("expert", 2), ("tensor", 2), ("expert_tensor", form)) for form in ("cut", "whole"))


@pytest.mark.parametrize("listed", [wide(False), True])
@pytest.mark.parametrize(("saved", "wanted"), [((CUT, 3), (WHOLE, 1)), ((WHOLE, 0), (CUT, 2)), ((CUT, 1), ((), 0))])
def test_cut_experts_are_stored_once_and_load_in_every_form(
    listed: bool, saved: tuple[Any, int], wanted: tuple[Any, int], tmp_path: Path
) -> None:
    logical = random_tensors([run_on(listed, *saved)])
    for rank in run_on(listed, *saved).ranks:
        rank.fill(logical)
    reader = StepReader(Files(), run_on(listed, *saved).save(tmp_path)[0])
    files = [name for name in reader.manifest.files if name.endswith(".safetensors")]
    held = [sum(kind.bytes for kind, _ in reader.tensors_of(name).values()) for name in files]
    assert sum(held) == sum(kind.bytes for kind in reader.kinds.values()), "each element once"
    for rank in run_on(listed, *wanted).ranks:
        rank.load(reader)
        for each in rank.held():
            assert torch.equal(each.values, part_of(logical[each.tensor], each.own)), each.tensor
