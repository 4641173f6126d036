"""Folders of ``torch.distributed.checkpoint``, which TorchTitan, FSDP2 scripts and Megatron's ``torch_dist`` write.

    .metadata          a pickle: names, full shapes, and box, file and byte range of each chunk
    __R_N.distcp       chunks of rank R, each a file of torch.save

A name is the path of a value in the saved dict. Optimizer state is nested, or as ``flatten_optimizer_state_dict``:

    optim, state, NAME, exp_avg              optim, param_groups, 0, lr
    optimizer, state.NAME.exp_avg            optimizer, param_groups.NAME.lr

In a ``torch_dist`` folder, "optimizer.state.exp_avg.NAME" is a moment and "fp32_param" the fp32 weight; "layers."
without a number is a stack of layers along dim 0.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.checkpoint.foreign.foreign_step import ForeignContents, ParameterGroup, described_group, spanned
from engine.checkpoint.foreign.pickle_values import PickledObject, plain, read_pickle
from engine.checkpoint.foreign.torch_file import (
    TorchTensor,
    call_of_torch,
    numbers_of,
    read_torch_file,
    shape_of,
    value_dict,
    value_list,
)
from engine.checkpoint.format.file_spans import FileSpan, SpannedTensor, pieces_of_box
from engine.checkpoint.format.filesystem import Files, read_all
from engine.checkpoint.format.safetensors_file import TensorKind
from engine.errors import COPY_AGAIN, CheckpointError

METADATA, COMMON = ".metadata", "common.pt"
_LIMIT = 1 << 28
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
_MEGATRON = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(exp_avg|exp_avg_sq|fp32_param)\.(.+)")
_STACKED = re.compile(r"(.*\blayers)\.(?!\d+\.)(.+)")
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")
"""Prefixes that torch's wrappers add to every name."""

Place = tuple[Any, ...]


@dataclass
class _Parts:
    """Saved values by their kind."""

    weights: dict[str, SpannedTensor] = field(default_factory=dict)
    moments: dict[str, SpannedTensor] = field(default_factory=dict)
    """ "exp_avg/NAME"."""
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Parameter -> numbers of its state, such as step."""
    groups: dict[Any, dict[str, Any]] = field(default_factory=dict)
    """Index of a group -> options."""
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Parameter -> options, in the flattened form."""
    rest: dict[str, Any] = field(default_factory=dict)
    """All other values, nested as they were saved."""


def read_dcp(files: Files, folder: Path, optimizer: bool = True) -> tuple[ForeignContents, list[str]]:
    """Reads the checkpoint of torch.distributed.checkpoint in ``folder``. Returns its contents, and the paths of values
    that JSON cannot express.

    Args:
        optimizer: True to read optimizer state too.

    Raises:
        CheckpointError: the files are damaged or compressed, or have Megatron optimizer state without parameter names.
    """
    what = str(folder / METADATA)
    metadata = read_pickle(bytes(read_all(files, folder, METADATA, _LIMIT)), what, call_of_torch)
    state = value_dict(metadata.state if isinstance(metadata, PickledObject) else None, what)
    chunks = _chunks(value_dict(state.get("storage_data"), what), folder, what)
    places = value_dict(state.get("planner_data") or {}, what)
    parts, dropped = _Parts(), list[str]()
    for name, described in value_dict(state.get("state_dict_metadata"), what).items():
        if not isinstance(name, str) or not isinstance(described, PickledObject):
            raise CheckpointError(f"{what} is damaged: it describes a value without a name; {COPY_AGAIN}")
        path = places.get(name)
        place = tuple(path) if isinstance(path, tuple | list) else _guessed(name)
        if optimizer or not _of_optimizer(place):
            _put(parts, place, _value(files, described, chunks.get(name, []), name, what), files)
    common = value_dict(read_torch_file(files, folder / COMMON), COMMON) if COMMON in files.names(folder) else {}
    groups = _groups(parts, common, files, folder) if optimizer else []
    wrapper = next((word for word in _WRAPPERS if all(name.startswith(word) for name in parts.weights)), "")
    tensors = {f"param/{name.removeprefix(wrapper)}": tensor for name, tensor in parts.weights.items()} | parts.moments
    made = _updates(parts, common, groups)
    scheduler = parts.rest.pop("lr_scheduler", parts.rest.pop("scheduler", None))
    contents = ForeignContents(
        origin="Megatron torch_dist" if common else "torch.distributed.checkpoint",
        tensors=tensors,
        made=made,
        samples=_samples(common),
        scheduler=plain(scheduler, []) if isinstance(scheduler, dict) else None,
        groups=groups,
        user=plain(parts.rest, dropped),
    )
    return contents, dropped


# ------------------------------------------------------------------ chunks


@dataclass(frozen=True, slots=True)
class _Chunk:
    offset: tuple[int, ...]
    path: Path
    start: int
    length: int


def _chunks(stored: Mapping[Any, Any], folder: Path, what: str) -> dict[str, list[_Chunk]]:
    found: dict[str, list[_Chunk]] = {}
    for index, info in stored.items():
        if not isinstance(index, PickledObject) or not isinstance(info, PickledObject):
            raise CheckpointError(f"{what} is damaged: it stores a chunk without a name; {COPY_AGAIN}")
        if info.get("transform_descriptors"):
            raise CheckpointError(
                f"{folder} has chunks that the _extensions of torch's FileSystemWriter have changed, for example "
                "compressed, but only plain chunks can be read; save it again with a FileSystemWriter without "
                "_extensions."
            )
        name, file = index.get("fqn"), info.get("relative_path")
        if not isinstance(name, str) or not isinstance(file, str) or not _FILE.fullmatch(file):
            raise CheckpointError(f"{what} is damaged: it names a file outside the folder; {COPY_AGAIN}")
        start, length = numbers_of([info.get("offset"), info.get("length")], what)
        offset = shape_of(index.get("offset") or (), what)
        found.setdefault(name, []).append(_Chunk(offset, folder / file, start, length))
    return found


def _value(files: Files, described: PickledObject, chunks: Sequence[_Chunk], name: str, what: str) -> Any:
    """Returns a full tensor as pieces, or the saved object."""
    saved = [(each, read_torch_file(files, each.path, each.start, each.length)) for each in chunks]
    if described.name.attribute != "TensorStorageMetadata":
        return saved[0][1] if saved else None
    shape = shape_of(described.get("size"), what)
    boxes = {}
    for chunk in value_list(described.get("chunks"), what):
        offsets, sizes = (
            chunk.get(word) if isinstance(chunk, PickledObject) else None for word in ("offsets", "sizes")
        )
        boxes[shape_of(offsets, what)] = shape_of(sizes, what)
    spans: list[FileSpan] = []
    dtypes = {held.kind.dtype for _, held in saved if isinstance(held, TorchTensor)}
    for each, held in saved:
        size = boxes.get(each.offset)
        if not isinstance(held, TorchTensor) or size is None or not len(size) == len(shape) == len(each.offset):
            raise CheckpointError(
                f"{each.path} is damaged: a chunk of {name!r} does not match {METADATA}; {COPY_AGAIN}"
            )
        if any(at + count > whole for at, count, whole in zip(each.offset, size, shape, strict=True)):
            raise CheckpointError(f"{what} is damaged: a chunk of {name!r} reaches beyond its shape; {COPY_AGAIN}")
        spans += [held.span(piece, first, name) for piece, first in pieces_of_box(shape, each.offset, size)]
    if len(dtypes) != 1:
        raise CheckpointError(f"{what} is damaged: {name!r} has chunks of {len(dtypes)} dtypes; {COPY_AGAIN}")
    return spanned(TensorKind(dtypes.pop(), shape), spans)


# ------------------------------------------------------------------ names


def _guessed(name: str) -> Place:
    """Returns the path of a name that the planner did not write."""
    root, _, rest = name.partition(".")
    return (root, rest) if root in ("model", "optim", "optimizer") and rest else (name,)


def _of_optimizer(place: Place) -> bool:
    return _classified(place)[0] in ("moment", "group", "option")


def _classified(place: Place) -> tuple[str, Any, Any]:
    """Returns (kind, parameter or group, moment or option)."""
    last = str(place[-1])
    if found := _MEGATRON.fullmatch(".".join(map(str, place))):
        return "moment", found[2], found[1]
    if len(place) >= 3 and place[-3] == "state":
        return "moment", str(place[-2]), last
    if len(place) >= 3 and place[-3] == "param_groups":
        return "group", place[-2], last
    for word, kind in (("state.", "moment"), ("param_groups.", "option")):
        name, _, leaf = last.removeprefix(word).rpartition(".")
        if last.startswith(word) and name:
            return kind, name, leaf
    return "value", last, None


def _put(parts: _Parts, place: Place, value: Any, files: Files) -> None:
    kind, name, leaf = _classified(place)
    if kind == "group":
        parts.groups.setdefault(name, {})[leaf] = value
    elif kind == "option":
        parts.options.setdefault(name, {})[leaf] = value
    elif kind == "moment" and isinstance(value, SpannedTensor) and (value.kind.shape and leaf != "step"):
        family = "master" if leaf == "fp32_param" else leaf
        for each, tensor in _unstacked(name, value):
            parts.moments[f"{family}/{each}"] = tensor
    elif kind == "moment":
        parts.states.setdefault(name, {})[leaf] = _number(value, files)
    elif isinstance(value, SpannedTensor) and not (name == "step" and not value.kind.shape):
        parts.weights.update(_unstacked(name, value))
    elif value is not None:
        inner = parts.rest
        for word in place[:-1]:
            inner = inner.setdefault(str(word), {})
        inner[name] = _number(value, files)


def _number(value: Any, files: Files) -> Any:
    """Returns the value of a tensor with one element; anything else unchanged."""
    if not isinstance(value, SpannedTensor) or value.kind.elements != 1:
        return value
    span = value.spans[0]
    return TorchTensor(value.kind, span.path, span.start, ()).number(files)


def _unstacked(name: str, tensor: SpannedTensor) -> Iterator[tuple[str, SpannedTensor]]:
    """Yields the layers of a stack, or the tensor alone."""
    found = _STACKED.fullmatch(name)
    if found is None or not tensor.kind.shape:
        yield name, tensor
        return
    shape = tensor.kind.shape[1:]
    kind = TensorKind(tensor.kind.dtype, shape)
    for index in range(tensor.kind.shape[0]):
        spans = [part for span in tensor.spans if (part := span.slice_of(index, kind)) is not None]
        yield f"{found[1]}.{index}.{found[2]}", spanned(kind, spans)


# ------------------------------------------------------------------ groups and counters


def _groups(parts: _Parts, common: Mapping[Any, Any], files: Files, folder: Path) -> list[ParameterGroup]:
    """Returns the optimizer's groups; without written groups, parameters with equal options form one."""
    stored = [name.partition("/")[2] for name in parts.moments]
    if stored and not any(name in parts.weights for name in stored):
        raise CheckpointError(
            f"the optimizer state in {folder} is stored by names such as {stored[0]!r}, but no saved weight has one of "
            "these names; load the weights alone with load_optimizer_states=False, or convert the folder with trine "
            "convert --weights-only."
        )
    listed: list[tuple[list[str], dict[str, Any]]] = []
    for _, options in sorted(parts.groups.items(), key=lambda item: str(item[0]).rjust(9)):
        names = [str(name) for name in value_list(options.get("params") or [], "param_groups")]
        listed.append((names, options))
    alike: dict[str, tuple[list[str], dict[str, Any]]] = {}
    for name, options in parts.options.items():
        alike.setdefault(repr(sorted(plain(options, []).items())), ([], options))[0].append(name)
    listed += alike.values()
    if not listed and parts.moments:
        listed = [(sorted({name.partition("/")[2] for name in parts.moments}), _common_options(common))]
    known = [
        (names, options, next((parts.states[n] for n in names if n in parts.states), {})) for names, options in listed
    ]
    return [described_group(names, options, state, files) for names, options, state in known]


def _common_options(common: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns the options of the first group in Megatron's ``common.pt``."""
    inner: Any = common.get("optimizer")
    while isinstance(inner, dict) and "optimizer" in inner:
        inner = inner["optimizer"]
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    return groups[0] if isinstance(groups, list) and groups and isinstance(groups[0], dict) else {}


def _updates(parts: _Parts, common: Mapping[Any, Any], groups: Sequence[ParameterGroup]) -> int:
    """Returns the number of updates: "step", "train_state.step", Megatron's iteration, or the optimizer's count."""
    train_state = parts.rest.get("train_state")
    nested = train_state.pop("step", None) if isinstance(train_state, dict) else None
    for value in (parts.rest.pop("step", None), nested, common.get("iteration")):
        if isinstance(value, int | float) and 0 <= value < 2**53:
            return int(value)
    return max((int(group.options.get("step", 0)) for group in groups), default=0)


def _samples(common: Mapping[Any, Any]) -> int:
    arguments = common.get("args")
    value = arguments.get("consumed_train_samples") if isinstance(arguments, PickledObject) else 0
    return value if isinstance(value, int) and 0 <= value < 2**53 else 0
