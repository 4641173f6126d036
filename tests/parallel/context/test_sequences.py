"""Batch tensors become sharded sequences where a layer reads them; other tensors do not."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.parallel.context.cuts import zigzag
from engine.parallel.context.recurrence.halo import POSITIONS
from engine.parallel.context.sequences import ContextOfSequences, SequenceEntry
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.tp_axis import DryAxis

LENGTH, WIDTH = 8, 4


def _product(entry: SequenceEntry, rows: Tensor) -> Tensor:
    with entry:
        return functional.linear(rows, torch.ones(3, WIDTH))


def test_memory_of_a_freed_batch_belongs_to_another_tensor() -> None:
    content = np.zeros((2, LENGTH, WIDTH), np.float32)
    batch = torch.from_numpy(content)
    entry = SequenceEntry(ContextOfSequences(DryAxis(2, name="cp")), [batch])
    assert type(_product(entry, batch)) is GlobalTensor
    assert type(_product(entry, batch.view(2, LENGTH, WIDTH))) is GlobalTensor
    del batch
    assert type(_product(entry, torch.from_numpy(content))) is Tensor  # such as an activation of a recomputed block


def test_ids_made_of_batch_ids_are_a_sequence() -> None:
    ids = torch.arange(LENGTH)[None]
    entry = SequenceEntry(ContextOfSequences(DryAxis(2, name="cp")), [ids])
    with entry:
        shifted = ids + 1
        assert type(functional.embedding(shifted, torch.ones(LENGTH + 1, WIDTH))) is GlobalTensor
        other = torch.arange(LENGTH - 1)[None] + 1
        assert type(functional.embedding(other, torch.ones(LENGTH + 1, WIDTH))) is Tensor


@pytest.mark.parametrize("shape", [(2,), (6,), (2, 1), (2, 1, WIDTH)])
def test_one_number_or_vector_for_each_row_is_no_sequence(shape: tuple[int, ...]) -> None:
    given = torch.ones(shape) if len(shape) == 3 else torch.ones(shape, dtype=torch.int64)
    ids = torch.arange(LENGTH)[None]
    with SequenceEntry(ContextOfSequences(DryAxis(2, name="cp")), [ids, given]):
        for tensor in (given, ids[:, 0], ids[:, :1]):
            rows = tensor if tensor.ndim == 3 else functional.embedding(tensor, torch.ones(LENGTH, WIDTH))
            assert type(functional.linear(rows, torch.ones(3, WIDTH))) is Tensor
        assert type(functional.embedding(ids, torch.ones(LENGTH, WIDTH))) is GlobalTensor


def _look_up(context: ContextOfSequences, ids: Tensor, batch: Tensor | None = None) -> Tensor:
    with SequenceEntry(context, [] if batch is None else [batch]):
        return functional.embedding(ids, torch.ones(LENGTH, WIDTH))


def test_a_table_of_positions_is_sharded_after_a_sequence_of_the_same_forward() -> None:
    context, ids, places = ContextOfSequences(DryAxis(2, name="cp")), torch.arange(LENGTH)[None], torch.arange(LENGTH)
    context.begin({})
    assert type(_look_up(context, places)) is Tensor, "an encoder without a sharded input"
    assert type(_look_up(context, ids, ids)) is GlobalTensor
    assert type(_look_up(context, places)) is GlobalTensor
    context.begin({})
    assert type(_look_up(context, places)) is Tensor, "the next forward begins as the first one"


def test_a_table_of_distances_is_read_in_full() -> None:
    context, ids, places = ContextOfSequences(DryAxis(2, name="cp")), torch.arange(LENGTH)[None], torch.arange(LENGTH)
    _look_up(context, ids, ids)
    assert type(_look_up(context, places.expand(3, -1))) is GlobalTensor
    assert type(_look_up(context, (places - places[:, None]).abs())) is Tensor


def test_caches_of_documents_end_with_their_batch() -> None:
    context, ids = ContextOfSequences(DryAxis(2, name="cp")), torch.arange(LENGTH)[None]
    context.begin({})
    _look_up(context, ids, ids)
    before = dict(context._found)
    context.find(("function", "proven"), lambda: 1)
    for first in (2, 3, 5):
        work = np.append(np.arange(first), np.arange(LENGTH - first)) + 1
        context.begin({LENGTH: work})
        assert context.found(("function", "proven")) == 1
        _look_up(context, ids, ids)
        assert context.found((POSITIONS, LENGTH)) is context.shared[LENGTH]
        assert not any("documents" in str(key) for key in context._found)
        context.find(("documents", first), lambda: 1)
    context.begin({})
    _look_up(context, ids, ids)
    assert context.found((POSITIONS, LENGTH)) == zigzag(LENGTH, 2) and context._found.keys() >= before.keys()
    assert context.found(("function", "proven")) == 1 and context.found(("documents", 5)) is None


@pytest.mark.parametrize("length", [3, LENGTH - 1])
def test_documents_that_cannot_be_sharded_keep_the_error(length: int) -> None:
    context = ContextOfSequences(DryAxis(2, name="cp"), unit=2)
    context.begin({length: np.ones(length, np.int64)})
    assert not context.shared
