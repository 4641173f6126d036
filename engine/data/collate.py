"""From samples to a microbatch: numbers become tensors, lengths are padded, rows past the end lose their labels."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad as pad_tensor
from torch.utils.data import default_collate

from engine.data.settings import LoaderSettings, Padding
from engine.data.windows import IGNORED_LABEL
from engine.errors import EngineError
from engine.program.batch import Batch


def collated(samples: Sequence[Any], settings: LoaderSettings, absent: int = 0) -> Batch:
    """The microbatch of these samples, of which the last ``absent`` only fill the step up: their labels are -100.

    Raises:
        EngineError: samples differ in length and are not padded, or have no labels and one would have to be left out.
    """
    if settings.collate is not None:
        batch = settings.collate(samples)
    else:
        rows = [_tensors(sample) for sample in samples]
        batch = default_collate(_padded(rows, settings.pad) if settings.pad is not None else _equal(rows))
    return _without_labels(batch, absent) if absent else batch


def _tensors(sample: Any) -> Any:
    """Arrays and lists of numbers as tensors; unsigned integers as int64, in which torch can compute."""
    if isinstance(sample, Mapping):
        return {key: _tensors(value) for key, value in sample.items()}
    if isinstance(sample, tuple):
        return tuple(_tensors(value) for value in sample)
    if isinstance(sample, np.ndarray) and sample.dtype.kind in "biuf":
        return torch.from_numpy(sample.astype(np.int64) if sample.dtype.kind == "u" else sample.copy())
    if isinstance(sample, list) and _holds_numbers(sample):
        return torch.tensor(sample) if sample else torch.empty(0, dtype=torch.int64)
    return sample


def _holds_numbers(value: Any) -> bool:
    """Whether nested lists end in numbers, as the columns of Hugging Face datasets do; an empty list counts."""
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, int | float | list)


def _padded(rows: Sequence[Any], padding: Padding) -> list[Any]:
    if not all(isinstance(row, Mapping) for row in rows):
        raise EngineError(
            f"pad: a sample is a {type(rows[0]).__name__}, and only a dict says which tensor holds tokens and which "
            "labels. Give samples as dicts, or collate=."
        )
    lengths = [tensor.shape[0] for row in rows for tensor in row.values() if _is_sequence(tensor)]
    length = -(-max(lengths, default=0) // padding.multiple) * padding.multiple
    fill = {"labels": IGNORED_LABEL, "input_ids": padding.token}

    def padded(name: str, value: Any) -> Any:
        return pad_tensor(value, (0, length - len(value)), value=fill.get(name, 0)) if _is_sequence(value) else value

    return [{name: padded(name, value) for name, value in row.items()} for row in rows]


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 1


def _equal(rows: list[Any]) -> list[Any]:
    """The rows, if each of their tensors has one shape."""
    for name in rows[0] if isinstance(rows[0], Mapping) else ():
        shapes = sorted({tuple(row[name].shape) for row in rows if isinstance(row.get(name), Tensor)})
        if len(shapes) > 1:
            raise EngineError(
                f"samples of a microbatch have {name!r} of shapes {shapes[0]} and {shapes[-1]}; a batch has one. Give "
                "pad=Padding(), pack=Packing(length=...) or collate=."
            )
    return rows


def _without_labels(batch: Batch, absent: int) -> Batch:
    named = isinstance(batch, Mapping)
    labels = batch.get("labels") if named else batch[-1] if isinstance(batch, tuple | list) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        raise EngineError(
            'at_end = "joined" fills the last step up with rows whose labels are -100, and this batch has no integer '
            'labels (key "labels", or the last of a tuple). Choose "dropped", or give samples with labels.'
        )
    labels = labels.clone()  # a collate function may give one tensor as input and labels
    labels[-absent:] = IGNORED_LABEL
    if named:
        return {**batch, "labels": labels}
    return type(batch)([*batch[:-1], labels])
