"""Loaders of ranks that are not there: what a loader reads of an engine, and datasets that count what is read."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from engine.data import StepLoader, loader
from engine.data.settings import LoaderOptions
from engine.parallel.grid import Grid


def made_for(dp: int, micro: int, accumulation: int, seed: int = 5) -> list[Any]:
    """What a loader reads of the engines of ``dp`` data ranks."""
    config = SimpleNamespace(micro=micro, accumulation=accumulation, seed=seed)
    return [SimpleNamespace(config=config, grid=Grid(dp=dp, rank=rank), comm=None, device=None) for rank in range(dp)]


def loaders(dataset: Any, dp: int, micro: int, accumulation: int, options: LoaderOptions) -> list[StepLoader]:
    """One loader a data rank."""
    return [loader(dataset, eng, **options) for eng in made_for(dp, micro, accumulation)]


def step_of(ranks: Sequence[StepLoader], accumulation: int) -> list[Any]:
    """The microbatches of a step, of all ranks in the order of the global batch."""
    return [next(rank) for rank in ranks for _ in range(accumulation)]


class Numbers:
    """Samples that are their own index."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        self.read.append(index)
        return {"number": index, "labels": torch.tensor([index])}


class Stream(IterableDataset[dict[str, Any]]):
    """The same, read in order."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"number": index, "labels": torch.tensor([index])} for index in range(self.size))


class Texts:
    """Documents of consecutive tokens: document i has ``lengths[i]`` of them, and no token stands in two."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.ends = np.concatenate([[0], np.cumsum(lengths)])

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": list(range(*self.ends[index : index + 2]))}


class MeasuredTexts(Texts):
    """The same, with their lengths."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self.lengths = np.array(lengths)

    def tokens(self, index: int) -> NDArray[Any]:
        return np.arange(*self.ends[index : index + 2])


class TextStream(IterableDataset[list[int]]):
    """The same, read in order."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.texts = Texts(lengths)

    def __iter__(self) -> Iterator[list[int]]:
        return (self.texts[index]["input_ids"] for index in range(len(self.texts)))
