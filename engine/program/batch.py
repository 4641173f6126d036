"""Batches: a tensor, tuple, list or mapping, nested; values of other types are left unchanged."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

Batch = Any
"""A tensor, or a tuple, list or mapping of batches."""


BatchPath = tuple[str | int, ...]
"""Keys and positions that lead to one tensor of a nested batch."""


def map_tensors(tree: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Returns a copy of the nested batch ``tree`` with every tensor replaced by ``change(tensor)``.

    Mappings become plain dicts; other values stay.
    """
    return change_tensors(tree, lambda _, tensor: change(tensor))


def cast_floats(tree: Batch, dtype: torch.dtype | None) -> Batch:
    """Returns a copy of the nested batch ``tree`` with floating-point tensors cast to ``dtype``; None: no cast."""
    return map_tensors(tree, lambda one: one if dtype is None or not one.is_floating_point() else one.to(dtype))


def change_tensors(tree: Batch, change: Callable[[BatchPath, Tensor], Tensor], path: BatchPath = ()) -> Batch:
    """Returns a copy of the nested batch ``tree`` with every tensor replaced by ``change(path, tensor)``.

    The path is the tuple of keys and indices of the tensor, such as ("key", 0). ``path``: a prefix for all paths.
    """
    if isinstance(tree, Tensor):
        return change(path, tree)
    if isinstance(tree, Mapping):
        return {key: change_tensors(value, change, (*path, key)) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return _like(tree, [change_tensors(value, change, (*path, i)) for i, value in enumerate(tree)])
    return tree


def _like(tree: Any, parts: list[Any]) -> Any:
    return (
        type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    )  # a namedtuple takes its parts as separate arguments


def tensors_by_path(tree: Batch, path: BatchPath = ()) -> Iterator[tuple[BatchPath, Tensor]]:
    """Yields (path, tensor) for every tensor of the nested batch ``tree``.

    The path is the tuple of keys and indices of the tensor, such as ("key", 0). ``path``: a prefix for all paths.
    """
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from tensors_by_path(value, (*path, key))
    elif isinstance(tree, tuple | list):
        for index, value in enumerate(tree):
            yield from tensors_by_path(value, (*path, index))


def named_tensors(tree: Batch) -> Iterator[tuple[str, Tensor]]:
    """Yields (Python expression, tensor) for every tensor of a nested batch, such as ``batch['key'][0]``."""
    return ((expression(path), tensor) for path, tensor in tensors_by_path(tree))


def expression(path: BatchPath) -> str:
    """Formats the path of a tensor as a Python expression: ('key', 0) becomes ``batch['key'][0]``."""
    return "batch" + "".join(f"[{key!r}]" for key in path)


def count_tokens(microbatch: Batch) -> int:
    """Returns the number of tokens in ``microbatch``: the elements of ``input_ids``, or the number of rows if there is
    no ``input_ids``.
    """
    if is_text(microbatch):
        return int(microbatch["input_ids"].numel())
    return next((tensor.shape[0] for _, tensor in named_tensors(microbatch) if tensor.ndim), 1)


def is_text(microbatch: Batch) -> bool:
    """Returns True if ``microbatch`` is a mapping with a tensor ``input_ids``."""
    return isinstance(microbatch, Mapping) and isinstance(microbatch.get("input_ids"), Tensor)


def call_model(model: nn.Module, microbatch: Batch) -> Any:
    """Calls the model: ``model(**microbatch)`` for a mapping, ``model(*microbatch)`` for a tuple or list, otherwise
    ``model(microbatch)``.
    """
    if isinstance(microbatch, Mapping):
        return model(**microbatch)
    if isinstance(microbatch, tuple | list):
        return model(*microbatch)
    return model(microbatch)


def join_outputs(outputs: list[Any]) -> Any:
    """Joins the model outputs of several microbatches into one output of the same structure.

    Tensors are concatenated along dim 0; 0-dim tensors are stacked. Lists and tuples are joined by item, or
    concatenated if lengths differ. None stays None; other values become a list.
    """
    first = outputs[0]
    if first is None and all(output is None for output in outputs):  # such as the loss of a batch without labels
        return None
    if isinstance(first, Tensor):
        return torch.cat(outputs) if first.ndim else torch.stack(outputs)
    if isinstance(first, Mapping):
        joined = {key: join_outputs([output[key] for output in outputs]) for key in first}
        return type(first)(**joined) if is_dataclass(first) else joined  # Hugging Face's outputs are both
    if isinstance(first, tuple | list):
        if len(set(map(len, outputs))) > 1:
            return _like(first, list(chain.from_iterable(outputs)))
        return _like(first, [join_outputs(list(parts)) for parts in zip(*outputs, strict=True)])
    return outputs
