"""DeepSpeed's checkpoint folders: ZeRO 0 to 3, pipelines, and universal ones.

mp_rank_00_model_states.pt                        weights (ZeRO 0 to 2), names, counters, client state
zero_pp_rank_D_mp_rank_00_model_states.pt         the same at ZeRO 3, without the weights, which are in the next files
zero_pp_rank_D_mp_rank_00_optim_states.pt         fp32 weights and moments of data rank D
layer_NN-model_states.pt                          weights of layer NN of a pipeline; mp_rank is then the stage
zero/NAME/fp32.pt, exp_avg.pt, ...                a universal folder: one file a tensor
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.checkpoint.foreign.deepspeed_zero import (
    RankState,
    Shapes,
    fragments_of_groups,
    fragments_of_shares,
    rank_state,
    read_universal,
    tensors_of_fragments,
)
from engine.checkpoint.foreign.foreign_step import ForeignContents, ParameterGroup, described_group, spanned
from engine.checkpoint.foreign.pickle_values import PickledObject, plain
from engine.checkpoint.foreign.torch_file import (
    TorchTensor,
    numbers_of,
    read_torch_file,
    shape_of,
    tensor_of,
    value_dict,
    value_list,
)
from engine.checkpoint.format.file_spans import SpannedTensor
from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.pieces import Part, Piece
from engine.checkpoint.format.safetensors_file import TensorKind
from engine.errors import COPY_AGAIN, CheckpointError

_OWN = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "num_experts",
    "checkpoint_parallel_dimensions", "ds_config", "ds_version", "universal_checkpoint_info", "autotp_uc_info",
})  # fmt: skip
"""Keys that DeepSpeed writes; all others are the user's client state."""


def count_of(state: Mapping[str, Any], key: str, default: int = 0) -> int:
    """Returns the counter ``key`` of a DeepSpeed file; ``default`` if it is missing.

    Raises CheckpointError for a value that is not an integer >= 0.
    """
    value = state.get(key, default)
    return numbers_of([default if value is None else value], key)[0]


def zero_stage_of(optimizer: Mapping[str, Any]) -> int:
    """Returns the ZeRO stage in the optimizer state of a DeepSpeed file; 1 if none is recorded, as in bf16 runs."""
    value = optimizer.get("zero_stage", 1)
    value = value.arguments[0] if isinstance(value, PickledObject) and value.arguments else value
    return value if isinstance(value, int) else 1


def first_flat(options: Mapping[str, Any], index: int) -> int:
    """Returns the index of a parameter group's state in DeepSpeed's list of optimizer states.

    The index is the first entry of "params" in the group's ``options`` if that is an int; otherwise ``index``, the
    number of the group.
    """
    params = options.get("params")
    first = params[0] if isinstance(params, list) and params else index
    return first if isinstance(first, int) else index


def loss_scale_state(scaler: Any) -> dict[str, Any] | None:
    """Converts the state of a DeepSpeed dynamic loss scaler to this engine's dict; returns None for a fixed scale.

    Keys: "value" (the scale), "forgiven" (overflows that did not lower the scale) and "good" (steps without overflow).
    """
    if not isinstance(scaler, PickledObject) or scaler.get("dynamic") is not True:
        return None
    value, window = scaler.get("cur_scale"), scaler.get("scale_window")
    last, now = scaler.get("last_overflow_iter"), scaler.get("cur_iter")
    counts = (window, last, now, scaler.get("delayed_shift"), scaler.get("cur_hysteresis"))
    if not isinstance(value, int | float) or not all(isinstance(count, int) for count in counts) or not window:
        raise CheckpointError(
            "the state of the loss scaler has other values in place of its counters: the checkpoint is damaged; "
            f"{COPY_AGAIN}"
        )
    return {"value": float(value), "forgiven": max(0, counts[3] - counts[4]), "good": (now - last - 1) % window}


def scheduler_state(state: Any) -> dict[str, Any] | None:
    """Converts the state of a DeepSpeed scheduler to torch's "last_epoch" and "_step_count"; returns None if it is no
    dict.

    State without "last_batch_iteration" is not converted; only values that JSON cannot express are left out.
    """
    if not isinstance(state, dict):
        return None
    found: dict[str, Any] = plain(state, [])
    if isinstance(last := found.get("last_batch_iteration"), int):
        return {"last_epoch": last + 1, "_step_count": last + 2}
    return found


_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d{1,6})(?:-model_(\d{1,6}))?-model_states\.pt")
_EXPERT = re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+.*_optim_states\.pt")


def is_deepspeed(names: Sequence[str]) -> bool:
    """Returns True if a folder with these file names is a DeepSpeed checkpoint."""
    return any(_MODEL.fullmatch(name) for name in names)


def read_deepspeed(files: Files, folder: Path, optimizer: bool = True) -> tuple[ForeignContents, list[str]]:
    """Reads the DeepSpeed checkpoint in ``folder``. Returns its contents, and the paths of values that JSON cannot
    express.

    Args:
        optimizer: True to read optimizer state, which must name its parameters.

    Raises:
        CheckpointError: the files are damaged, or have tensor-parallel shards, experts or unnamed optimizer state.
    """
    names = files.names(folder)
    listing = _Listing.of(folder, names)
    stages = [_Stage.read(files, folder, listing, rank) for rank in sorted(listing.model)]
    first, dropped, shared = stages[0].state, list[str](), {a: b for stage in stages for a, b in stage.shared.items()}
    if "zero" in names:
        others = {*shared, *(name for stage in stages for name in stage.buffers)}
        shapes = [group for stage in stages for group in stage.shapes]
        tensors, groups, scaler = read_universal(files, folder / "zero", shapes, others)
    else:
        tensors, groups = _sharded(stages, files, optimizer)
        scaler = stages[0].ranks[0].loss_scaler if stages[0].ranks else None
    tensors |= _unsharded(files, folder, stages, listing, tensors)
    made = count_of(first, "global_steps") - count_of(first, "skipped_steps")
    word = "universal, saved" if "zero" in names else f"ZeRO {max(stage.zero for stage in stages)}"
    origin = f"DeepSpeed {str(first.get('ds_version'))[:20]}, {word} over {count_of(first, 'dp_world_size')} data ranks"
    contents = ForeignContents(
        origin=origin,
        tensors=tensors,
        made=max(0, made),
        skipped=count_of(first, "skipped_steps"),
        samples=count_of(first, "global_samples"),
        loss_scale=loss_scale_state(scaler),
        scheduler=scheduler_state(first.get("lr_scheduler")),
        groups=groups,
        aliases=shared,
        user=plain({key: value for key, value in first.items() if key not in _OWN}, dropped),
    )
    return contents, dropped


@dataclass(frozen=True, slots=True)
class _Listing:
    """Files of the folder by rank of the model: pipeline stages, because tensor parallelism is refused."""

    model: Mapping[int, Mapping[int, str]]
    """Stage -> data rank -> file."""
    optim: Mapping[int, Mapping[int, str]]
    layers: Mapping[int, str]

    @classmethod
    def of(cls, folder: Path, names: Sequence[str]) -> "_Listing":
        model: dict[int, dict[int, str]] = {}
        optim: dict[int, dict[int, str]] = {}
        layers: dict[int, str] = {}
        for name in names:
            if found := _MODEL.fullmatch(name):
                model.setdefault(int(found[2]), {})[int(found[1] or 0)] = name
            elif found := _OPTIM.fullmatch(name):
                optim.setdefault(int(found[2]), {})[int(found[1])] = name
            elif found := _LAYER.fullmatch(name):
                if int(found[2] or 0):
                    _refuse_tensor_ranks(folder)
                layers[int(found[1])] = name
            elif _EXPERT.fullmatch(name):
                raise CheckpointError(
                    f"{folder} has experts ({name}), which DeepSpeed writes by expert rank and this engine does not "
                    "read; convert the folder with DeepSpeed's zero_to_fp32 first."
                )
        if len(model) > 1 and not layers:
            _refuse_tensor_ranks(folder)
        for stage, ranks in optim.items():
            missing = next((rank for rank in range(max(ranks) + 1) if rank not in ranks), None)
            if missing is not None:
                raise CheckpointError(
                    f"{folder} lacks zero_pp_rank_{missing}_mp_rank_{stage:02d}_optim_states.pt, a part of every "
                    "tensor; copy the whole folder."
                )
        return cls(model, optim, layers)


def _refuse_tensor_ranks(folder: Path) -> None:
    raise CheckpointError(
        f"{folder} is of several model-parallel ranks, but DeepSpeed's files do not describe the sharding of their "
        "parameters; make it a universal checkpoint with deepspeed.checkpoint.ds_to_universal first."
    )


@dataclass(frozen=True)
class _Stage:
    """Files of one pipeline stage, or of the whole model."""

    state: Mapping[str, Any]
    """Data rank 0's model states."""
    others: Sequence[Mapping[str, Any]]
    """Model states of all data ranks at ZeRO 3, otherwise of rank 0."""
    ranks: Sequence[RankState]
    """Optimizer of each data rank; empty at ZeRO 0."""
    zero: int
    what: str

    @classmethod
    def read(cls, files: Files, folder: Path, listing: _Listing, rank: int) -> "_Stage":
        model, optim = listing.model[rank], listing.optim.get(rank, {})
        states = [value_dict(read_torch_file(files, folder / name), name) for _, name in sorted(model.items())]
        ranks, zero = [], 3 if any(name.startswith("zero_pp_rank") for name in model.values()) else 0
        for _, name in sorted(optim.items()):
            loaded = value_dict(read_torch_file(files, folder / name), name)
            optimizer = value_dict(loaded.get("optimizer_state_dict"), name)
            zero = max(zero, zero_stage_of(optimizer))
            ranks.append(rank_state(optimizer, str(folder / name)))
        if optim and len(ranks) != count_of(states[0], "dp_world_size", len(ranks)):
            raise CheckpointError(
                f"{folder} has the optimizer of {len(ranks)} data ranks, but was saved by "
                f"{count_of(states[0], 'dp_world_size')}; copy the whole folder."
            )
        return cls(states[0], states, ranks, zero, str(folder / model[min(model)]))

    @property
    def shapes(self) -> Shapes:
        """Shapes of the trained parameters by optimizer group; empty at ZeRO 0."""
        return [
            {str(name): shape_of(shape, self.what) for name, shape in value_dict(group, self.what).items()}
            for group in value_list(self.state.get("param_shapes") or [], self.what)
        ]

    @property
    def module(self) -> dict[Any, Any]:
        """State dict of the model; empty with a pipeline."""
        return value_dict(self.state.get("module") or {}, self.what)

    @property
    def buffers(self) -> set[str]:
        """Names of the buffers."""
        return {str(name) for name in value_list(self.state.get("buffer_names") or [], self.what)}

    @property
    def shared(self) -> dict[str, str]:
        """Further names of tied parameters -> the first name."""
        return {str(k): str(v) for k, v in value_dict(self.state.get("shared_params") or {}, self.what).items()}


# ------------------------------------------------------------------ tensors


def _sharded(
    stages: Sequence[_Stage], files: Files, optimizer: bool
) -> tuple[dict[str, SpannedTensor], list[ParameterGroup]]:
    """Returns weights and moments from the optimizer's files, and its groups."""
    tensors: dict[str, SpannedTensor] = {}
    groups: list[ParameterGroup] = []
    for stage in stages:
        if not stage.ranks:
            made, group = _whole_optimizer(stage, files, optimizer)
            tensors |= made
            groups = _merged(groups, group)
            continue
        shapes = stage.shapes
        fragments = fragments_of_shares if stage.zero == 3 else fragments_of_groups
        flat = {name: shape for group in shapes for name, shape in group.items()}
        for name, tensor in tensors_of_fragments(stage.ranks, dict(fragments(stage.ranks, shapes)), flat).items():
            tensors.setdefault(name, tensor)  # several stages have a tied parameter
        groups = _merged(groups, [_group(stage.ranks[0], i, list(each), files) for i, each in enumerate(shapes)])
    return tensors, groups


def _merged(groups: Sequence[ParameterGroup], more: Sequence[ParameterGroup]) -> list[ParameterGroup]:
    """Returns the groups of all stages; a stage has some parameters of each."""
    merged = list(groups)
    for index, group in enumerate(more):
        if index == len(merged):
            merged.append(group)
        else:
            new = [name for name in group.params if name not in merged[index].params]
            merged[index] = replace(merged[index], params=[*merged[index].params, *new])
    return merged


def _group(rank: RankState, index: int, params: Sequence[str], files: Files) -> ParameterGroup:
    options = dict(rank.groups[index]) if index < len(rank.groups) else {}
    flat = first_flat(options, index)
    state = rank.states[flat] if flat < len(rank.states) else {}
    return described_group(params, options, state, files)


def _whole_optimizer(
    stage: _Stage, files: Files, wanted: bool
) -> tuple[dict[str, SpannedTensor], list[ParameterGroup]]:
    """Returns moments at ZeRO 0, which stores the state by the index of each parameter, without names.

    Raises:
        CheckpointError: several groups, or counts and shapes that do not match the parameters in their order.
    """
    state = stage.state.get("optimizer")
    if not wanted or not isinstance(state, dict):
        return {}, []
    shared = _alike(stage.module)
    weights = {
        str(name): tensor_of(value, str(name))
        for name, value in stage.module.items()
        if name not in stage.buffers and name not in shared and isinstance(value, TorchTensor)
    }
    states, groups = state.get("state"), state.get("param_groups")
    fits = isinstance(states, dict) and isinstance(groups, list) and len(groups) == 1 and len(states) == len(weights)
    tensors: dict[str, SpannedTensor] = {}
    first: Mapping[Any, Any] = {}
    for index, (name, weight) in enumerate(weights.items()):
        one = states.get(index) if fits and isinstance(states, dict) else None
        first = first or (one if isinstance(one, dict) else {})
        for family, value in one.items() if isinstance(one, dict) else ():
            if isinstance(value, TorchTensor) and family != "step" and value.kind.shape:
                fits = fits and value.kind.shape == weight.kind.shape
                tensors[f"{family}/{name}"] = spanned(value.kind, [value.span(Part(value.kind.shape).whole())])
    if not fits or not isinstance(groups, list):
        raise CheckpointError(
            f"{stage.what} is of ZeRO 0, where DeepSpeed numbers the optimizer's parameters and does not name them, "
            "and these numbers are ambiguous (several groups, frozen parameters, a pipeline, or 16 bits); load it with "
            "load_optimizer_states=False, or save it at ZeRO 1."
        )
    return tensors, [described_group(list(weights), value_dict(groups[0], stage.what), first, files)]


def _unsharded(
    files: Files, folder: Path, stages: Sequence[_Stage], listing: _Listing, trained: Mapping[str, SpannedTensor]
) -> dict[str, SpannedTensor]:
    """Returns buffers, frozen parameters, and tensors outside the optimizer, from the model's files."""
    tensors: dict[str, SpannedTensor] = {}
    layers = _layers(files, folder, listing, trained)
    for stage in stages:
        module, buffers = stage.module | layers, stage.buffers
        alike = _alike(module) | stage.shared
        tensors |= _frozen(stage)
        for name, value in module.items():
            place = f"{'buffer' if name in buffers else 'param'}/{name}"
            left_out = name in alike or place in trained or (stage.zero == 3 and name not in buffers)
            if not left_out and isinstance(value, TorchTensor):
                tensors.setdefault(place, spanned(value.kind, [value.span(Part(value.kind.shape).whole(), 0, name)]))
    return tensors


def _layers(files: Files, folder: Path, listing: _Listing, trained: Mapping[str, SpannedTensor]) -> dict[str, Any]:
    """Returns the state of a pipeline's layers, under the names of ``PipelineModule``.

    A tied layer is also in the file of its first index, although its name is tied_modules.KEY.
    """
    tied = [name for name in trained if name.startswith("param/tied_modules.")]
    own = {name.split(".")[0] for name in trained}
    found: dict[str, Any] = {}
    for index, name in sorted(listing.layers.items()):
        for key, value in value_dict(read_torch_file(files, folder / name), name).items():
            same = [each for each in tied if each.split(".", 2)[2] == key and f"param/{index}" not in own]
            if not any(trained[each].kind.shape == tensor_of(value, key).kind.shape for each in same):
                found[f"{index}.{key}"] = value
    return found


def _frozen(stage: _Stage) -> dict[str, SpannedTensor]:
    """Returns frozen parameters, which ZeRO 3 shards over the data ranks."""
    shapes = value_dict(stage.state.get("frozen_param_shapes") or {}, stage.what)
    tensors: dict[str, SpannedTensor] = {}
    for name, given in shapes.items():
        part = Part(shape_of(given, stage.what))
        share = -(-part.elements // len(stage.others)) if stage.zero == 3 else part.elements
        spans, kinds = [], []
        for index, state in enumerate(stage.others if stage.zero == 3 else stage.others[:1]):
            held = tensor_of(value_dict(state.get("frozen_param_fragments") or {}, stage.what).get(name), str(name))
            begin, end = min(index * share, part.elements), min((index + 1) * share, part.elements)
            spans.append(held.span(Piece(part, begin, end), 0, str(name)))
            kinds.append(held.kind.dtype)
        tensors[f"param/{name}"] = spanned(TensorKind(kinds[0], part.shape), spans)
    return tensors


def _alike(module: Mapping[Any, Any]) -> dict[str, str]:
    """Returns later names of a tensor -> its first name."""
    seen: dict[Any, str] = {}
    other: dict[str, str] = {}
    for name, value in module.items():
        if isinstance(value, TorchTensor) and value.kind.elements:
            place = (value.path, value.start, value.kind)
            if place in seen:
                other[str(name)] = seen[place]
            seen.setdefault(place, str(name))
    return other
