"""Positions of each parameter and its moments in DeepSpeed's ZeRO files.

ZeRO 1, 2   each optimizer group is one flat tensor, split into one partition a data rank

    group 0     | embed.weight .......... | hidden.weight ....... | padding |
    partition   |         rank 0          |         rank 1        |

ZeRO 3      each parameter is sharded over the data ranks, and a rank stores its shards in flat tensors

    rank 0      | embed.weight 0 | hidden.weight 0 | ...
    rank 1      | embed.weight 1 | hidden.weight 1 | ...     the last shard of a parameter ends in padding

universal   one file a tensor, in full

zero/NAME/fp32.pt, exp_avg.pt, ...    {"param": tensor}
zero/NAME/step.pt                     number of updates of that parameter; not written by ZeRO 3
zero/optimizer_state.pt               loss scaler, options of the groups
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

from engine.checkpoint.foreign.foreign_step import ParameterGroup, described_group, spanned
from engine.checkpoint.foreign.torch_file import (
    TorchTensor,
    numbers_of,
    read_torch_file,
    tensor_of,
    value_dict,
    value_list,
)
from engine.checkpoint.format.file_spans import SpannedTensor
from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.pieces import Part, Piece
from engine.checkpoint.format.safetensors_file import TensorKind
from engine.errors import CheckpointError

Shapes = Sequence[Mapping[str, tuple[int, ...]]]
"""Parameter shapes of each optimizer group, in the order of its flat tensor."""


@dataclass(frozen=True, slots=True)
class FlatFragment:
    """Position of a parameter's elements in the flat fp32 tensor of one data rank of a DeepSpeed checkpoint."""

    rank: int
    flat: int
    """Index of the flat tensor, and of its optimizer state, on that rank."""
    start: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class RankState:
    """ZeRO state of one data rank in a DeepSpeed checkpoint: flat fp32 weights and optimizer state."""

    flats: Sequence[TorchTensor]
    """Flat fp32 weights."""
    states: Sequence[Mapping[str, Any]]
    """Optimizer state of each flat tensor: moments of equal length, and scalars."""
    groups: Sequence[Mapping[str, Any]]
    """Options of the parameter groups."""
    gaps: Sequence[Sequence[int]]
    """For ZeRO 1 and 2: padding elements after each parameter of a flat tensor; empty without padding."""
    loss_scaler: Any


def rank_state(optimizer: Mapping[str, Any], what: str) -> RankState:
    """Returns the ZeRO state of one data rank from the dict in its DeepSpeed file. ``what`` names the file in messages.

    Raises:
        CheckpointError: entries are missing, for example because state was offloaded to disk.
    """
    sharded = "fp32_flat_groups" in optimizer
    flats = value_list(optimizer.get("fp32_flat_groups" if sharded else "single_partition_of_fp32_groups"), what)
    base = optimizer.get("optimizer_state_dict" if sharded else "base_optimizer_state")
    groups: list[Any] = []
    if isinstance(base, list):  # with elastic_checkpoint, a state for each group
        states = [value_dict(state, what) for state in base]
    else:
        base = value_dict(base, what)
        groups = [value_dict(group, what) for group in value_list(base.get("param_groups", []), what)]
        by_index = value_dict(base.get("state", {}), what)
        states = [value_dict(by_index.get(index, {}), what) for index in range(len(flats))]
    gaps = [numbers_of(each, what) for each in value_list(optimizer.get("param_alignment_paddings") or [], what)]
    found = [tensor_of(flat, f"{what}: a flat tensor") for flat in flats]
    return RankState(found, states, groups, gaps, optimizer.get("loss_scaler"))


def fragments_of_groups(ranks: Sequence[RankState], shapes: Shapes) -> Iterator[tuple[str, list[FlatFragment]]]:
    """Yields each parameter of a ZeRO 1 or 2 checkpoint, with the fragments of flat tensors that contain its elements.

    ``shapes``: parameter name -> shape, by parameter group.
    """
    for group, params in enumerate(shapes):
        ends = list(accumulate(rank.flats[group].kind.elements for rank in ranks))
        firsts, place = [0, *ends[:-1]], 0
        for index, (name, shape) in enumerate(params.items()):
            part, found = Part(shape), []
            for rank, (first, end) in enumerate(zip(firsts, ends, strict=True)):
                begin, stop = max(first, place), min(end, place + part.elements)
                if begin < stop:
                    found.append(FlatFragment(rank, group, begin - first, Piece(part, begin - place, stop - place)))
            place += part.elements + (ranks[0].gaps[group][index] if group < len(ranks[0].gaps) else 0)
            yield name, found


def fragments_of_shares(ranks: Sequence[RankState], shapes: Shapes) -> Iterator[tuple[str, list[FlatFragment]]]:
    """Yields each parameter of a ZeRO 3 checkpoint, with the fragments of flat tensors that contain its elements.

    ``shapes``: parameter name -> shape, by parameter group.
    """
    flat, place = 0, 0
    sizes = [each.kind.elements for each in ranks[0].flats]
    for name, shape in ((name, shape) for params in shapes for name, shape in params.items()):
        part = Part(shape)
        share = -(-part.elements // len(ranks))
        while flat < len(sizes) and place + share > sizes[flat]:
            flat, place = flat + 1, 0
        if flat == len(sizes):
            raise CheckpointError(
                f"the flat tensors are too short for {name!r}: the folder mixes files of two saves; copy one save into "
                "an empty folder."
            )
        pieces = [
            Piece(part, min(index * share, part.elements), min((index + 1) * share, part.elements))
            for index in range(len(ranks))
        ]
        yield name, [FlatFragment(index, flat, place, piece) for index, piece in enumerate(pieces)]
        place += share


def tensors_of_fragments(
    ranks: Sequence[RankState], found: Mapping[str, Sequence[FlatFragment]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, SpannedTensor]:
    """Returns the positions in the files of weights and moments of all parameters, by "param/NAME", "exp_avg/NAME" etc.

    Args:
        found: fragments of each parameter in the flat tensors of ``ranks``.
        shapes: full shape of each parameter.
    """
    tensors: dict[str, SpannedTensor] = {}
    for name, fragments in found.items():
        held = {"param": [(ranks[each.rank].flats[each.flat], each) for each in fragments]}
        for family in sorted(_families(ranks, fragments)):
            states = [(ranks[each.rank].states[each.flat].get(family), each) for each in fragments]
            held[family] = [(tensor_of(value, f"{family}/{name}"), each) for value, each in states]
        for family, parts in held.items():
            kind = TensorKind(parts[0][0].kind.dtype, shapes[name])
            spans = [flat.span(each.piece, each.start, name) for flat, each in parts if each.piece.elements]
            if prod(kind.shape) and any(flat.kind.dtype != kind.dtype for flat, _ in parts):
                raise CheckpointError(
                    f"{family}/{name} has several dtypes: the folder mixes files of two saves; copy one save into an "
                    "empty folder."
                )
            tensors[f"{family}/{name}"] = spanned(kind, spans)
    return tensors


def _families(ranks: Sequence[RankState], fragments: Sequence[FlatFragment]) -> set[str]:
    """Returns the entries of a state with a value for each element."""
    return {
        str(key)
        for each in fragments
        for key, value in ranks[each.rank].states[each.flat].items()
        if each.piece.elements and key != "step" and isinstance(value, TorchTensor) and value.kind.shape
    }


COMMON = "optimizer_state.pt"


def read_universal(
    files: Files, folder: Path, shapes: Shapes, others: set[str]
) -> tuple[dict[str, SpannedTensor], list[ParameterGroup], Any]:
    """Reads ``folder``, which is "zero" in a universal DeepSpeed checkpoint and has a subfolder for each parameter.
    Returns the weights and moments, the parameter groups, and the state of the loss scaler.

    Args:
        shapes: trainable parameters by group, from the model's file; if empty, all parameters form one group.
        others: names of subfolders to skip: buffers, and second names of tied parameters.
    """
    known = {name: shape for group in shapes for name, shape in group.items()}
    groups = [list(group) for group in shapes] or [[name for name in files.names(folder) if name not in others]]
    tensors: dict[str, SpannedTensor] = {}
    steps: dict[str, Any] = {}
    for name in [name for group in groups for name in group]:
        for file in files.names(folder / name) if files.is_folder(folder / name) else ():
            value = read_torch_file(files, folder / name / file) if file.endswith(".pt") else None
            if file == "step.pt":
                steps[name] = value
            elif value is not None:
                held = tensor_of(value.get("param") if isinstance(value, dict) else value, f"{name}/{file}")
                family = "param" if file == "fp32.pt" else file.removesuffix(".pt")
                kind = TensorKind(held.kind.dtype, known.get(name, held.kind.shape))  # ZeRO 3 writes them flat
                tensors[f"{family}/{name}"] = spanned(kind, [held.span(Part(kind.shape).whole(), 0, name)])
    common = _common(files, folder)
    inner = value_dict(common.get("optimizer_state_dict") or {}, COMMON)
    options = value_list(common.get("param_groups") or inner.get("param_groups") or [], COMMON)
    states = value_dict(inner.get("state") or {}, COMMON)
    step = next((value_dict(state, COMMON).get("step") for state in states.values()), 0)
    described = [
        described_group(
            [name for name in group if f"param/{name}" in tensors],
            value_dict(options[index], COMMON) if index < len(options) else {},
            {"step": next((steps[name] for name in group if name in steps), step)},
            files,
        )
        for index, group in enumerate(groups)
    ]
    return tensors, described, common.get("loss_scaler")


def _common(files: Files, folder: Path) -> dict[Any, Any]:
    return value_dict(read_torch_file(files, folder / COMMON), COMMON) if COMMON in files.names(folder) else {}
