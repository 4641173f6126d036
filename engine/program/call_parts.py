"""Arguments of one call of the model, split into parts by their rows, and the joined outputs of the parts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from engine.errors import EngineError
from engine.parallel.trace.model_trace import FreeTensor, FromParameter, FromValue, ModelTrace
from engine.program.batch import map_tensors, tensors_by_path
from engine.program.batch_rows import BatchRows

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of the model."""


def cut_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], cut: BatchRows, rows: int | None) -> list[Arguments]:
    """Splits the arguments into parts of ``rows`` rows; the last part may have fewer. ``rows`` None: one part.

    Mappings become plain dicts.

    Raises:
        EngineError: tensors with different numbers of rows.
    """
    if rows is None:
        return [(map_tensors(args, _same), map_tensors(kwargs, _same))]
    if args and kwargs:
        return [(tuple(part[0]), part[1]) for part in cut.split((args, kwargs), rows)]
    if kwargs:
        return [((), part) for part in cut.split(kwargs, rows)]
    if len(args) == 1:
        return [((part,), {}) for part in cut.split(args[0], rows)]
    return [(tuple(part), {}) for part in cut.split(args, rows)]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def check_joins(trace: ModelTrace, part: Arguments) -> None:
    """Refuses outputs that are not rows of the part: a mean over it, or a tensor that all rows share.

    Raises:
        EngineError: there is such an output.
    """
    rows = {tensor.shape[0] for _, tensor in tensors_by_path(part) if tensor.ndim}
    for leaf in trace.result.leaves:
        if isinstance(leaf, FromValue):
            shape = trace.values[leaf.value].shape
        elif isinstance(leaf, FreeTensor):
            shape = leaf.shape
        elif isinstance(leaf, FromParameter):
            shape = ()
        else:
            continue
        if not shape or shape[0] not in rows:
            what = f"a tensor of shape {shape}" if shape else "a number, such as the mean of a loss,"
            raise EngineError(
                f"the model returns {what} for a part of a batch, but outputs of parts are joined by their rows; "
                "compute the loss from the joined outputs, or leave train_micro_batch_size_per_gpu out of "
                "engine_config, so that a batch is one part."
            )


def joined_parts(outputs: Sequence[Any]) -> Any:
    """Joins the outputs of the parts: tensors along dim 0; all other values are those of the first part."""
    if len(outputs) == 1:
        return outputs[0]
    spec = pytree.tree_structure(outputs[0])
    columns = zip(*(pytree.tree_leaves(output) for output in outputs), strict=True)
    return pytree.tree_unflatten([_joined(column) for column in columns], spec)


def _joined(column: tuple[Any, ...]) -> Any:
    return torch.cat(column) if isinstance(column[0], Tensor) else column[0]
