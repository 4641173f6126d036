"""``deepspeed.runtime.dataloader``: an endless loader, and the loader of a data rank."""

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from engine.deepspeed.utils.tensor_fragment import RepeatingLoader
from engine.parallel.grid import Grid

__all__ = ["RepeatingLoader", "loader_of_a_rank"]


def loader_of_a_rank(
    data: Dataset[Any], grid: Grid, micro: int, collate: Callable[[list[Any]], Any] | None, shuffle: bool,
    sampler: Sampler[Any] | None = None, **options: Any,
) -> DataLoader[Any]:  # fmt: skip
    """Returns a DataLoader over this data rank's rows of ``data``, with ``micro`` rows per batch.

    Args:
        grid: grid of ranks, with this rank's position.
        collate: callback that makes a batch from a list of rows.
        shuffle: True: the default sampler shuffles the rows.
        sampler: sampler of this rank's rows; None: torch's DistributedSampler, or no sampler for an iterable dataset.
        options: further keyword arguments of the DataLoader.
    """
    if sampler is None and not isinstance(data, IterableDataset):
        sampler = DistributedSampler[Any](data, num_replicas=grid.row_ranks, rank=grid.row_rank, shuffle=shuffle)
    return DataLoader(data, batch_size=micro, sampler=sampler, collate_fn=collate, **options)
