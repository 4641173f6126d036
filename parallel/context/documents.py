"""Documents that are packed in the rows of a batch, as position ids or numbers of documents show them.

    0 1 2 3 0 1 0 1 2    position ids [B, S]: a document begins where they restart
    1 1 1 1 2 2 3 3 3    numbers of documents [B, S]: a document begins where they grow

A wrong guess costs balance alone: any sharding of positions gives the same result.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from engine.parallel.tensor.global_tensor.index_sets import Indices

_NAMES = ("position", "document", "segment", "seq_idx", "doc_id")
"""Parts of the names of batch tensors that are read on the host."""


def work_of_documents(batch: Iterable[tuple[str, Tensor]]) -> Mapping[int, Indices]:
    """Returns the pairs of the query at each position with the keys of its document, [S] summed over rows, by length S.

    ``batch``: tensors by name. Only lengths of which a row has several documents; the host waits for tensors that have
    the name of position ids or of numbers of documents.
    """
    found: dict[int, Indices] = {}
    for name, tensor in batch:
        if not _may_show(name, tensor) or tensor.shape[-1] in found:
            continue
        begins = _begins(tensor.detach().cpu())
        if begins is not None:
            places = np.arange(begins.shape[1])
            first = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
            found[tensor.shape[-1]] = (places - first + 1).sum(0)
    return found


def _may_show(name: str, tensor: Tensor) -> bool:
    if type(tensor) is not Tensor or tensor.is_meta or isinstance(tensor, FakeTensor) or tensor.ndim != 2:
        return False
    whole = tensor.dtype in (torch.int64, torch.int32) and tensor.shape[1] > 1 and tensor.shape[0] > 0
    return whole and any(part in name.lower() for part in _NAMES)


def _begins(tensor: Tensor) -> np.ndarray | None:
    """Returns True [B, S] at the first position of each later document; None if the tensor shows no documents."""
    values = tensor.numpy()
    steps = np.diff(values, axis=1)
    restarts = (steps != 1) & (values[:, 1:] == 0)
    if bool((restarts | (steps == 1)).all()):
        later = restarts
    elif bool(((steps == 0) | (steps == 1)).all()):
        later = steps == 1
    else:
        return None
    return np.pad(later, ((0, 0), (1, 0))) if bool(later.any()) and not bool(later.all()) else None
