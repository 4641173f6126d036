"""Sources of a loader's steps: map-style and iterable datasets.

MappedSteps      a rank reads only its own rows, with any number of workers
StreamedSteps    every data rank reads all samples and discards others' rows; at most one worker

torch's DataLoader runs the workers, but positions do not depend on them.
"""

import os
import select
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import parent_process
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad as pad_tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker

from engine.data.packed_rows import PackedRows, SampleOrder, no_tokens, pack_epoch, packed_row
from engine.data.settings import DataPosition, LoaderSettings, Padding, StepRows
from engine.data.windows import IGNORED_LABEL, Documents
from engine.errors import EngineError
from engine.program.batch import Batch


def collated(samples: Sequence[Any], settings: LoaderSettings, absent: int = 0) -> Batch:
    """Returns ``samples`` as one microbatch, made by ``settings.collate``.

    Without ``collate``, samples are padded as ``settings.pad`` sets, and collated by torch's ``default_collate``.

    Args:
        absent: number of samples, at the end of ``samples``, that only fill up the microbatch; their labels become
            -100.

    Raises:
        EngineError: samples differ in length, or a microbatch with ``absent`` samples has no labels.
    """
    if settings.collate is not None:
        batch = settings.collate(samples)
    else:
        rows = [_tensors(sample) for sample in samples]
        batch = default_collate(_padded(rows, settings.pad) if settings.pad is not None else _equal(rows))
    return _without_labels(batch, absent, len(samples)) if absent else batch


def _tensors(sample: Any) -> Any:
    """Returns arrays and lists of numbers as tensors; unsigned integers become int64, which torch can compute in."""
    if isinstance(sample, Mapping):
        return {key: _tensors(value) for key, value in sample.items()}
    if isinstance(sample, tuple):
        return tuple(_tensors(value) for value in sample)
    if isinstance(sample, np.ndarray | np.generic) and sample.dtype.kind in "biuf":
        array = np.asarray(sample)
        return torch.from_numpy(array.astype(np.int64) if array.dtype.kind == "u" else array.copy())
    if isinstance(sample, list) and _holds_numbers(sample):
        return torch.tensor(sample) if sample else torch.empty(0, dtype=torch.int64)
    return sample


def _holds_numbers(value: Any) -> bool:
    """Returns True if nested lists end in numbers, like columns of Hugging Face datasets; an empty list counts."""
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, int | float | list | np.number)


def _padded(rows: Sequence[Any], padding: Padding) -> list[Any]:
    if not all(isinstance(row, Mapping) for row in rows):
        raise EngineError(
            f"pad: a sample is a {type(rows[0]).__name__}; only the keys of a dict tell tokens from labels. Return "
            "dicts from the dataset, or pass collate=."
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
    """Returns the rows, if each of their tensors has one shape."""
    for name in rows[0] if isinstance(rows[0], Mapping) else ():
        shapes = sorted({tuple(row[name].shape) for row in rows if isinstance(row.get(name), Tensor)})
        if len(shapes) > 1:
            raise EngineError(
                f"samples of a microbatch have {name!r} of shapes {shapes[0]} and {shapes[-1]}; a batch needs one "
                "shape. Pass pad=Padding(), pack=Packing(length=...) or collate=."
            )
    return rows


def _without_labels(batch: Batch, absent: int, rows: int) -> Batch:
    named = isinstance(batch, Mapping)
    labels = batch.get("labels") if named else batch[-1] if isinstance(batch, tuple | list) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        raise EngineError(
            'at_end = "joined" fills the last step up with rows whose labels are -100, but this batch has no integer '
            'labels (key "labels", or the last of a tuple). Choose "dropped", or return samples with labels.'
        )
    if labels.shape[:1] != (rows,):
        raise EngineError(
            f'at_end = "joined" fills the last step up with rows whose labels are -100, but labels of {rows} samples '
            f'have shape {list(labels.shape)}, not a row for each. Choose "dropped", or collate rows.'
        )
    labels = labels.clone()  # a collate function may return one tensor as input and labels
    labels[-absent:] = IGNORED_LABEL
    if named:
        return {**batch, "labels": labels}
    made: Callable[[Any], Batch] = getattr(type(batch), "_make", type(batch))  # a named tuple takes one value a field
    return made([*batch[:-1], labels])


Step = tuple[DataPosition, list[Batch]]
"""Position after a step, and the step's microbatches."""


class StepSource(Protocol):
    """Protocol of a source of training steps for one data rank."""

    size: int | None
    """Number of samples of an epoch (with packing, rows); None: unknown."""

    def steps(self, start: DataPosition) -> Iterator[Step]:
        """Yields for each training step from ``start`` on: (position in the data after it, list of microbatches)."""


def step_source(dataset: Any, rows: StepRows, settings: LoaderSettings) -> StepSource:
    """Returns the source of this rank's training steps: ``MappedSteps`` if samples (with packing, rows) can be looked
    up by position, otherwise ``StreamedSteps``.

    Args:
        rows: division of a step's rows among data ranks and microbatches.

    Raises:
        EngineError: the dataset is neither map-style nor iterable, is empty, or can only be read in order although
            ``settings`` have ``shuffle`` or several workers.
    """
    mapped = is_mapped(dataset)
    if mapped and not len(dataset):
        raise EngineError("the dataset is empty; a step needs at least one sample. Pass a dataset with samples.")
    if mapped and settings.pack is None:
        return MappedSteps(_Indexed(dataset, SampleOrder(len(dataset), settings)), len(dataset), rows, settings)
    if settings.pack is not None and isinstance(dataset, Documents):
        packed = PackedRows(dataset, settings.pack, settings)
        return MappedSteps(packed, packed.size, rows, settings)
    if not mapped and not isinstance(dataset, Iterable):
        raise EngineError(
            f"the dataset is a {type(dataset).__name__}, which has neither __getitem__ with __len__ nor __iter__. Add "
            "__len__, or pass another dataset or the path of a token file."
        )
    _check_stream(dataset, mapped, settings)
    return StreamedSteps(_Read(dataset, settings, mapped), rows, settings)


def is_mapped(dataset: Any) -> bool:
    """Returns True for a map-style dataset (``__getitem__`` and ``__len__``), False for an iterable one."""
    found = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return found and not isinstance(dataset, IterableDataset)


def _check_stream(dataset: Any, mapped: bool, settings: LoaderSettings) -> None:
    if getattr(dataset, "_starting_state_dict", None) is not None:  # of Hugging Face's streams
        raise own_state(dataset)
    if settings.shuffle and not mapped:
        raise EngineError(
            f"shuffle = True needs the length of the dataset, and {type(dataset).__name__} is read in order, without "
            "one. Shuffle the dataset before you pass it, or remove shuffle."
        )
    if settings.workers > 1:
        why = "pack reads documents without lengths" if mapped else f"{type(dataset).__name__} is read"
        wanted = "lengths and tokens(index)" if mapped else "__getitem__ and __len__"
        raise EngineError(
            f"workers = {settings.workers}, but {why} in order, which one worker does. Choose 0 or 1, or pass a "
            f"dataset with {wanted}."
        )


class _Indexed:
    """Lookup of the sample at a position."""

    def __init__(self, dataset: Any, order: SampleOrder) -> None:
        self._dataset, self._order = dataset, order

    def __call__(self, position: int) -> Any:
        return self._dataset[self._order.at(position)]


class _Rows(Dataset[Batch]):
    """Microbatches by their positions; positions past the end repeat the last sample, without labels."""

    def __init__(self, sample_at: Callable[[int], Any], settings: LoaderSettings, limit: int | None) -> None:
        self._sample_at, self._settings, self._limit = sample_at, settings, limit

    def __getitem__(self, positions: range) -> Batch:
        limit = positions.stop if self._limit is None else self._limit
        samples = [self._sample_at(min(position, limit - 1)) for position in positions]
        return collated(samples, self._settings, absent=min(len(positions), max(0, positions.stop - limit)))


class MappedSteps:
    """Source of training steps that looks each sample up by its position.

    Args:
        sample_at: function from a position to its sample or packed row.
        size: number of samples in an epoch.
    """

    def __init__(self, sample_at: Callable[[int], Any], size: int, rows: StepRows, settings: LoaderSettings) -> None:
        self.size: int | None = size
        self._rows, self._settings = rows, settings
        self._limit = None if settings.epochs is None else settings.epochs * size
        self._dataset = _Rows(sample_at, settings, self._limit)

    def steps(self, start: DataPosition) -> Iterator[Step]:
        """Yields for each training step from ``start`` on: (position in the data after it, list of microbatches)."""
        microbatches = (each for first in self._firsts(start.position) for each in self._rows.microbatches(first))
        ahead = iter(_torch_loader(self._dataset, self._settings, sampler=microbatches))
        for first in self._firsts(start.position):
            behind = first + self._rows.batch
            end = behind if self._limit is None else min(behind, self._limit)
            yield DataPosition(end), list(islice(ahead, self._rows.accumulation))

    def _firsts(self, position: int) -> Iterator[int]:
        """Yields the position at which each step begins."""
        batch, whole = self._rows.batch, self._settings.at_end == "dropped"
        while self._limit is None or position + (batch if whole else 1) <= self._limit:
            yield position
            position += batch


class _Read:
    """Reader of the samples of an epoch from one sample on, in the order of the settings."""

    def __init__(self, dataset: Any, settings: LoaderSettings, mapped: bool) -> None:
        self._dataset = dataset
        self._order = SampleOrder(len(dataset), settings) if mapped else None

    def __call__(self, epoch: int, skip: int) -> Iterator[Any]:
        dataset, done = self._dataset, skip
        if self._order is not None:
            samples: Iterator[Any] = (dataset[int(index)] for index in self._order.of_epoch(epoch)[skip:])
        else:
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(epoch)
            samples = _behind(dataset, skip)
        for sample in samples:
            yield sample
            done += 1
        if not done:
            raise EngineError(
                f"the dataset returned no sample in epoch {epoch}; a loader reads it once an epoch. Pass a dataset "
                "that can be iterated again, or the number of epochs."
            )


def _behind(dataset: Any, skip: int) -> Iterator[Any]:
    """Returns the samples after the first ``skip``. A dataset's own ``skip`` may change the order of its files."""
    samples: Iterator[Any] = iter(dataset)
    found = sum(1 for _ in islice(samples, skip))
    if found < skip:
        raise EngineError(
            f"the loader continues after {skip} samples of an epoch, but the dataset has {found}. Pass the dataset of "
            "the saved state."
        )
    return samples


class StreamedSteps(IterableDataset[Step]):
    """Source of training steps that reads and, if configured, packs samples one after another.

    Every data rank reads all samples, and uses only its own rows.
    """

    size: int | None = None

    def __init__(self, read: _Read, rows: StepRows, settings: LoaderSettings) -> None:
        self._read, self._rows, self._settings = read, rows, settings
        self._start = DataPosition()

    def steps(self, start: DataPosition) -> Iterator[Step]:
        """Yields for each training step from ``start`` on: (position in the data after it, list of microbatches)."""
        self._start = start  # a worker gets a copy of this object
        return iter(_torch_loader(self, self._settings))

    def __iter__(self) -> Iterator[Step]:
        """Yields the steps, read by this process."""
        if get_worker_info() is not None:
            worker._worker_info = None  # streams that divide themselves among workers would read another order here
        held: list[Any] = []
        own = {position for each in self._rows.microbatches(0) for position in each}
        behind, last = self._start, None
        for behind, last in self._samples(self._start):
            held.append(last if len(held) in own else None)
            if len(held) == self._rows.batch:
                yield behind, self._microbatches(held, self._rows.batch)
                held = []
        if held and self._settings.at_end == "refused":
            raise refused(len(held), self._rows.batch)
        if held and self._settings.at_end == "joined":
            there = len(held)
            yield behind, self._microbatches([*held, *[last] * (self._rows.batch - there)], there)

    def _microbatches(self, held: list[Any], there: int) -> list[Batch]:
        pack = self._settings.pack
        made = partial(packed_row, packing=pack) if pack is not None else _same
        return [
            collated(
                [made(held[position]) for position in each], self._settings,
                absent=min(len(each), max(0, each.stop - there)),
            )
            for each in self._rows.microbatches(0)
        ]  # fmt: skip

    def _samples(self, start: DataPosition) -> Iterator[tuple[DataPosition, Any]]:
        """Yields the samples from a position on, each with the position after it."""
        epochs, pack = self._settings.epochs, self._settings.pack
        while epochs is None or start.epoch < epochs:
            samples = self._read(start.epoch, start.read)
            rows = _counted(samples, start) if pack is None else pack_epoch(samples, start, pack.length)
            position = start.position
            for behind, sample in rows:
                yield behind, sample
                position = behind.position
            if epochs is None and position == start.position and not start.read:  # it would read them for ever
                raise no_tokens()
            start = DataPosition(position, start.epoch + 1)


def _counted(samples: Iterable[Any], start: DataPosition) -> Iterator[tuple[DataPosition, Any]]:
    position, epoch, read, _ = start
    for number, sample in enumerate(samples, start=1):
        yield DataPosition(position + number, epoch, read + number), sample


def own_state(given: Any) -> EngineError:
    """Returns the error for ``given``, a dataset or DataLoader on which the script called ``load_state_dict``."""
    kind = type(given).__name__
    return EngineError(
        f"the {kind} was loaded with load_state_dict, but engine.data.loader counts samples from the beginning. Pass a "
        f"new {kind}, and restore the position with batches = engine.data.loader(...), "
        "eng.register_for_checkpointing(data=batches) and eng.load_checkpoint(...)."
    )


def refused(left: int, batch: int) -> EngineError:
    """Returns the error that the data end with ``left`` rows, too few for a training step of ``batch`` rows."""
    return EngineError(
        f"the data end with {left} of the {batch} rows of a step, so some ranks would have fewer than others. Choose "
        'at_end = "joined", which fills it up with rows of no weight, or "dropped", or another batch size.'
    )


def _torch_loader(dataset: Dataset[Any], settings: LoaderSettings, sampler: Iterable[Any] | None = None) -> Any:
    # a separate generator: torch would draw from the global one, whose state belongs to the user
    own = torch.Generator().manual_seed(settings.seed % 2**63)
    further = {name: value for name, value in settings.torch.items() if settings.workers or name == "pin_memory"}
    if settings.workers:
        further["worker_init_fn"] = EndsWithRank(further.get("worker_init_fn"))
    return DataLoader[Any](
        dataset, batch_size=None, sampler=sampler, num_workers=settings.workers, collate_fn=_same, generator=own,
        **further,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class EndsWithRank:
    """``worker_init_fn`` of a torch DataLoader that ends a worker process as soon as its rank is killed.

    It also calls ``users``, the user's own ``worker_init_fn``.
    """

    users: Callable[[int], object] | None

    def __call__(self, number: int) -> None:
        parent = parent_process()
        if parent is not None and parent.pid is not None:
            threading.Thread(target=_end_after, args=(parent.pid,), daemon=True).start()
        if self.users is not None:
            self.users(number)


def _end_after(rank: int) -> None:
    """Waits for the end of the process ``rank``, then ends this one."""
    with suppress(ProcessLookupError):  # it has ended already
        try:
            select.select([os.pidfd_open(rank)], [], [])
        except (AttributeError, PermissionError):  # no pidfd on this system, or a sandbox that forbids it
            return
    os._exit(1)


def _same(value: Any) -> Any:
    return value
