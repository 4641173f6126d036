"""Batches: how the argument of ``train_batch`` is split into microbatches.

A batch is a tensor, a tuple or list, or a mapping; every tensor in it with at least one dim has
micro x accumulation rows. 0-dim tensors and values of other types go to every microbatch unchanged.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import EngineError

Batch = Any
"""A tensor, or a tuple, list or mapping of batches."""


def map_tensors(tree: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Apply ``change`` to every tensor of a nested batch; mappings become plain dicts."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(value, change) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return _like(tree, [map_tensors(value, change) for value in tree])
    return tree


def _like(tree: Any, parts: list[Any]) -> Any:
    return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)  # a namedtuple takes its parts singly


def named_tensors(tree: Batch, name: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a nested batch with the expression that reaches it."""
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from named_tensors(value, f"{name}[{key!r}]")
    elif isinstance(tree, tuple | list):
        for index, value in enumerate(tree):
            yield from named_tensors(value, f"{name}[{index}]")


def take_microbatches(batch: Batch | Iterator[Batch], micro: int, count: int) -> list[Batch]:
    """Split a batch into ``count`` microbatches of ``micro`` rows, or pull them from an iterator.

    Raises:
        EngineError: a wrong number of rows (names the tensor), a batch without tensors, an iterable that is not an
            iterator, or an iterator that ends before ``count`` items.
    """
    if isinstance(batch, Iterator):
        return _pull(batch, micro, count)
    if not isinstance(batch, Tensor | Mapping | tuple | list):
        raise EngineError(
            f"the batch is a {type(batch).__name__}; give a tensor, tuple, dict or iterator of microbatches "
            "(of a DataLoader: iter(loader), made once)."
        )
    rows = micro * count
    _check_rows(batch, rows, f"micro x accumulation = {micro} x {count} = {rows}")
    return [take_rows(batch, index * micro, micro) for index in range(count)]


def _pull(items: Iterator[Batch], micro: int, count: int) -> list[Batch]:
    pulled: list[Batch] = []
    for item in items:
        _check_rows(item, micro, f"train_micro_batch_size_per_gpu = {micro}")
        pulled.append(item)
        if len(pulled) == count:
            return pulled
    raise EngineError(
        f"the iterator ended after {len(pulled)} of {count} microbatches; a step needs "
        f"gradient_accumulation_steps = {count} of them: give a longer iterator or a new one."
    )


def _check_rows(batch: Batch, rows: int, rule: str) -> None:
    tensors = [(name, tensor) for name, tensor in named_tensors(batch) if tensor.ndim]
    if not tensors:
        raise EngineError(f"the batch holds no tensor with a leading dim; give tensors of {rule} rows.")
    for name, tensor in tensors:
        if tensor.shape[0] != rows:
            raise EngineError(
                f"{name} has leading dim {tensor.shape[0]}, but a data rank's share has {rule} rows; "
                "change the loader or the sizes in the configuration."
            )


def take_rows(batch: Batch, start: int, count: int) -> Batch:
    """Rows ``start`` to ``start + count`` of every tensor; scalars and values of other types stay unchanged."""
    return map_tensors(batch, lambda tensor: tensor[start : start + count] if tensor.ndim else tensor)


def count_tokens(microbatch: Batch) -> int:
    """Elements of ``input_ids``, or rows if the batch has no ``input_ids``."""
    if is_text(microbatch):
        return int(microbatch["input_ids"].numel())
    return next((tensor.shape[0] for _, tensor in named_tensors(microbatch) if tensor.ndim), 1)


def is_text(microbatch: Batch) -> bool:
    """The batch has ``input_ids``, so its tokens can be counted."""
    return isinstance(microbatch, Mapping) and isinstance(microbatch.get("input_ids"), Tensor)


def call_model(model: nn.Module, microbatch: Batch) -> Any:
    """``model(**batch)``, ``model(*batch)`` or ``model(batch)``, by the type of the batch."""
    if isinstance(microbatch, Mapping):
        return model(**microbatch)
    if isinstance(microbatch, tuple | list):
        return model(*microbatch)
    return model(microbatch)


def join_outputs(outputs: list[Any]) -> Any:
    """Join the outputs of microbatches into one: tensors along dim 0, scalars stacked."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(outputs) if first.ndim else torch.stack(outputs)
    if isinstance(first, Mapping):
        joined = {key: join_outputs([output[key] for output in outputs]) for key in first}
        return type(first)(**joined) if is_dataclass(first) else joined  # Hugging Face's outputs are both
    if isinstance(first, tuple | list):
        return _like(first, [join_outputs(list(parts)) for parts in zip(*outputs, strict=True)])
    return outputs
