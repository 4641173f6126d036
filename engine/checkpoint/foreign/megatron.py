"""Megatron's ``torch`` format: one file for each tensor rank and pipeline stage, with local names and shards.

    latest_checkpointed_iteration.txt         "10"
    iter_0000010/mp_rank_TT/model_optim_rng.pt            a file for each tensor rank
    iter_0000010/mp_rank_TT_PPP/model_optim_rng.pt        the same, with pipeline stages

Shards are joined by layer type, as in Megatron-core and its older GPT:

    sharded along dim 0    embeddings, output layer, query_key_value, first layer of the MLP (gate and up each)
    sharded along dim 1    projection of the attention, second layer of the MLP
    replicated             norms, and biases of the layers that are sharded along dim 1

Layer numbers continue from stage to stage. Optimizer state in these files has no names and is not read.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.checkpoint.foreign.foreign_step import ForeignContents, spanned
from engine.checkpoint.foreign.pickle_values import PickledObject
from engine.checkpoint.foreign.torch_file import TorchTensor, numbers_of, read_torch_file, value_dict
from engine.checkpoint.format.file_spans import SpannedTensor
from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.pieces import Part
from engine.checkpoint.format.safetensors_file import TensorKind
from engine.errors import CheckpointError

MODEL = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?")
_LAYER = re.compile(r"(.*\blayers\.)(\d{1,6})(\..+)")
_FIRST = re.compile(
    r".*\b(?:linear_qkv|query_key_value|linear_fc1|dense_h_to_4h)\.(?:weight|bias)"
    r"|.*\b(?:word_embeddings|output_layer|lm_head)\.(?:weight|bias)"
)
_SECOND = re.compile(r".*\b(?:linear_proj|self_attention\.dense|attention\.dense|linear_fc2|dense_4h_to_h)\.weight")
_GATED = re.compile(r".*\b(?:linear_fc1|dense_h_to_4h)\.(?:weight|bias)")


def is_megatron(names: Sequence[str]) -> bool:
    """Returns True if a folder with these file names is an iteration in Megatron's ``torch`` format."""
    return any(_RANK.fullmatch(name) for name in names)


def read_megatron(files: Files, folder: Path, optimizer: bool = True) -> tuple[ForeignContents, list[str]]:
    """Reads weights and counters of the Megatron checkpoint in ``folder``. Returns them and the list of left-out client
    state, which is always empty here.

    Readers of all formats have this signature. Here ``optimizer`` must be False, because the format stores optimizer
    state without parameter names.

    Raises:
        CheckpointError: ``optimizer`` is True; a rank's file is missing; the shards of a weight do not fit together.
    """
    if optimizer:
        raise CheckpointError(
            f"{folder} is in Megatron's torch format, which stores optimizer state without parameter names; load it "
            "with load_optimizer_states=False, convert it with trine convert --weights-only, or save it with "
            "Megatron's --ckpt-format torch_dist."
        )
    ranks = _ranks(files, folder)
    first = next(iter(ranks.values()))
    arguments = first.get("args")
    gated = isinstance(arguments, PickledObject) and bool(arguments.get("swiglu") or arguments.get("gated_linear_unit"))
    stages = 1 + max(stage for stage, _ in ranks)
    width = len(ranks) // stages
    if set(ranks) != {(stage, rank) for stage in range(stages) for rank in range(width)}:
        raise CheckpointError(f"{folder} lacks the folder of a rank; copy the whole folder.")
    tensors: dict[str, SpannedTensor] = {}
    before = 0
    for stage in range(stages):
        models = [list(_models(ranks[stage, rank], str(folder))) for rank in range(width)]
        if len(models[0]) > 1:
            raise CheckpointError(
                f"{folder} has several model chunks on each stage (virtual stages), which are not read; save it "
                "without virtual stages."
            )
        held = [dict(model[0]) for model in models]
        for name in held[0]:
            parts = [part.get(name) for part in held]
            whole = _through(name, before)
            tensors.setdefault(f"param/{whole}", _joined(whole, parts, gated))
        before += len({found[2] for name in held[0] if (found := _LAYER.fullmatch(name))})
    samples = arguments.get("consumed_train_samples") if isinstance(arguments, PickledObject) else 0
    (iteration,) = numbers_of([first.get("iteration", 0)], str(folder))
    contents = ForeignContents(
        origin=f"Megatron torch, {width} tensor ranks and {stages} stages",
        tensors=tensors,
        made=iteration,
        samples=samples if isinstance(samples, int) and 0 <= samples < 2**53 else 0,
    )
    return contents, []


def _ranks(files: Files, folder: Path) -> dict[tuple[int, int], dict[Any, Any]]:
    """Returns (stage, tensor rank) -> contents of its file."""
    found = {}
    for name in files.names(folder):
        if rank := _RANK.fullmatch(name):
            value = read_torch_file(files, folder / name / MODEL)
            found[int(rank[2] or 0), int(rank[1])] = value_dict(value, str(folder / name))
    return found


def _models(state: Mapping[Any, Any], what: str) -> Iterator[Iterator[tuple[str, TorchTensor]]]:
    """Yields the model chunks of a rank, each as its parameters."""
    for key in [key for key in state if re.fullmatch(r"model\d*", str(key))]:
        yield _flat("", value_dict(state[key], what))


def _flat(prefix: str, value: Mapping[Any, Any]) -> Iterator[tuple[str, TorchTensor]]:
    """Yields tensors by name; older files nest the dicts of ``language_model``, ``encoder`` and so on."""
    for key, item in value.items():
        if isinstance(item, TorchTensor) and item.kind.elements:
            yield f"{prefix}{key}", item
        elif isinstance(item, dict) and prefix.count(".") < 8:
            yield from _flat(f"{prefix}{key}.", item)


def _through(name: str, before: int) -> str:
    """Returns the name with its layer's number in the whole model."""
    found = _LAYER.fullmatch(name)
    return name if found is None else f"{found[1]}{int(found[2]) + before}{found[3]}"


def _joined(name: str, parts: Sequence[TorchTensor | None], gated: bool) -> SpannedTensor:
    dim = 0 if _FIRST.fullmatch(name) else 1 if _SECOND.fullmatch(name) else None
    first = parts[0]
    if first is None or any(part is None or part.kind != first.kind for part in parts):
        raise CheckpointError(
            f"the tensor ranks have shards of {name!r} with different shapes or dtypes: the folder mixes files of two "
            "saves; copy one save into an empty folder."
        )
    if dim is None or len(parts) == 1:
        return spanned(first.kind, [first.span(Part(first.kind.shape).whole(), 0, name)])
    if len(first.kind.shape) <= dim:
        raise CheckpointError(
            f"{name!r} has shape {list(first.kind.shape)}, but Megatron shards a tensor of this name along dim {dim}; "
            "convert the checkpoint to torch_dist with Megatron."
        )
    shape = tuple(size * len(parts) if at == dim else size for at, size in enumerate(first.kind.shape))
    spans = []
    halves = 2 if gated and _GATED.fullmatch(name) else 1
    size = first.kind.shape[dim] // halves
    for rank, part in enumerate(parts):
        starts = [half * size * len(parts) + rank * size for half in range(halves)]
        cut = Part(shape, dim, tuple((start, start + size) for start in starts))
        if part is not None:
            spans.append(part.span(cut.whole(), 0, name))
    return spanned(TensorKind(first.kind.dtype, shape), spans)
