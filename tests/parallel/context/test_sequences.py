"""Batch tensors become sharded sequences where a layer reads them; other tensors do not."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

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
