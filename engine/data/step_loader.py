"""``engine.data.loader``: microbatches of any dataset for ``train_batch``, at a position that every grid can resume.

dataset -> step_source     packed or padded microbatches of this rank's rows
        -> StepLoader      yields them; its position advances after the last microbatch of a step
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, Unpack, cast

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from engine.config import Config
from engine.data.settings import DataPosition, LoaderOptions, LoaderSettings, StepRows
from engine.data.step_source import Step, StepSource, is_mapped, own_state, refused, step_source
from engine.data.windows import token_file
from engine.errors import EngineError, first_line
from engine.parallel.comm.agreement import take_from
from engine.parallel.comm.comm import Comm
from engine.parallel.grid import Grid
from engine.program.batch import Batch

_LABEL = "batch"
_SHAPE = "shape"
_KINDS: Mapping[str, type[list[Any]] | type[tuple[Any, ...]]] = MappingProxyType({"list": list, "tuple": tuple})


class ReplicaBatches:
    """Broadcast of batches within a replica (the ranks with one copy of the model). The replica's first rank reads
    them from the dataset.

    Args:
        device: device of the communicated tensors.
    """

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._comm, self._device = comm, device
        self.reads = comm.grid.index("replica") == 0
        """True on the rank that reads."""

    def share(self, read: Callable[[], Any]) -> Any:
        """Calls ``read`` on the replica's first rank, and returns its result on all ranks of the replica. Collective
        over the replica.

        The result consists of tensors, numbers, strings and None in tuples, lists and dicts.

        Raises:
            EngineError: ``read`` has failed on the first rank; raised on the replica's other ranks. The first rank
                raises the original error.
        """
        if self._comm.grid.size("replica") == 1:
            return read()
        made, problem = b"", None
        try:
            made = _encoded(read()) if self.reads else b""
        except Exception as error:  # a dataset may raise anything, and the other ranks wait in the all-reduce
            problem, made = error, first_line(error).encode(errors="backslashreplace")
        head = torch.tensor([len(made), problem is not None], dtype=torch.int64, device=self._device)
        self._comm.all_reduce(head, "replica", _LABEL).wait()
        data = torch.zeros(int(head[0]), dtype=torch.uint8, device=self._device)
        if self.reads:
            data.copy_(torch.frombuffer(bytearray(made), dtype=torch.uint8))
        take_from(data, self.reads, self._comm, "replica", _LABEL)
        if problem is not None:
            raise problem
        received = data.cpu().numpy().tobytes()
        if head[1]:
            reader = self._comm.grid.peers("replica")[0]
            raise EngineError(f"rank {reader} reads the batches of this replica and has failed: {received.decode()}")
        return _decoded(received)


def _encoded(value: Any) -> bytes:
    """Returns tensors as safetensors, with their containers as JSON in its metadata."""
    tensors: dict[str, Tensor] = {}

    def shape_of(tree: Any) -> Any:
        if isinstance(tree, Tensor):
            name = str(len(tensors))
            tensors[name] = tree.detach().cpu().clone(memory_format=torch.contiguous_format)
            return ["tensor", name]
        if isinstance(tree, Mapping):
            return ["dict", [[shape_of(key), shape_of(item)] for key, item in tree.items()]]
        if isinstance(tree, list | tuple):
            return [type(tree).__name__ if type(tree) in _KINDS.values() else "tuple", [*map(shape_of, tree)]]
        if tree is None or isinstance(tree, bool | int | float | str):
            return ["plain", tree]
        raise EngineError(
            f'batches="rank0" sends tensors, numbers and text, but the batch has a {type(tree).__name__}; convert it '
            'in collate, or pass batches="all".'
        )

    return save(tensors, {_SHAPE: json.dumps(shape_of(value))})


def _decoded(data: bytes) -> Any:
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    tensors = load(data)

    def made(shape: Any) -> Any:
        kind, content = shape
        if kind == "dict":
            return {made(key): made(item) for key, item in content}
        if kind in _KINDS:
            return _KINDS[kind](map(made, content))
        return tensors[content] if kind == "tensor" else content

    return made(json.loads(header["__metadata__"][_SHAPE]))


class LoadingEngine(Protocol):
    """Protocol with the attributes of the engine that a data loader uses."""

    @property
    def config(self) -> Config:
        """Configuration with batch sizes and seed."""

    @property
    def grid(self) -> Grid:
        """Grid of ranks, with this rank's coordinates."""

    @property
    def comm(self) -> Comm:
        """Collectives of this rank; with the option ``batches="rank0"``, the loader sends batches to other ranks by
        them.
        """

    @property
    def device(self) -> torch.device:
        """Device of the tensors with which the loader communicates."""


def loader(dataset: Any, eng: LoadingEngine, **options: Unpack[LoaderOptions]) -> "StepLoader":
    """Returns an iterator of this data rank's microbatches, to pass to the engine's ``train_batch``.

    ``eng.register_for_checkpointing(data=iterator)`` saves the iterator's position with the checkpoints.

    Args:
        dataset: a map-style or iterable dataset; a torch DataLoader, from which dataset, workers, shuffling and collate
            function are taken; or the path of a token file, ``.npy`` or Megatron's ``.bin`` and ``.idx``.
        eng: the engine that sets batch sizes, grid and seed.
        options: fields of :class:`engine.data.settings.LoaderSettings`, such as ``shuffle``, ``epochs`` and ``pack``.

    Raises:
        EngineError: an option is unknown, or does not fit the others or the dataset.
    """
    _check_names(options)
    config, grid = eng.config, eng.grid
    given: dict[str, Any] = {"seed": config.seed, **options}
    if isinstance(dataset, DataLoader):
        given = {**given, **_taken(dataset, config.micro), **options}
        dataset = dataset.dataset
    elif isinstance(dataset, str | Path):
        dataset = token_file(dataset)
    settings = LoaderSettings(**given)
    rank, size = grid.row_rank, grid.row_ranks
    rows = StepRows(micro=config.micro, accumulation=config.accumulation, rank=rank, size=size)
    replica = ReplicaBatches(eng.comm, eng.device) if settings.batches == "rank0" else None
    return StepLoader(step_source(dataset, rows, settings), rows, settings, replica)


def _check_names(options: Mapping[str, Any]) -> None:
    known = LoaderOptions.__annotations__
    for name in options.keys() - known.keys():
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}."
        raise EngineError(f"the loader has no option {name!r}; {hint}")


def _taken(given: DataLoader[Any], micro: int) -> dict[str, Any]:
    """Returns the options of a DataLoader, also of torchdata's stateful one; its order must be resumable."""
    if given.batch_size != micro:
        raise EngineError(
            f"the DataLoader has batch_size {given.batch_size}, but train_micro_batch_size_per_gpu is {micro}, and the "
            f"two must be equal; create the DataLoader with batch_size={micro}, or pass its dataset instead."
        )
    if getattr(given, "next_iter_state", None) is not None:  # of torchdata's StatefulDataLoader
        raise own_state(given)
    taken: dict[str, Any] = {"workers": given.num_workers}
    if is_mapped(given.dataset):
        shuffle = _shuffles(given)
        if shuffle is None:
            raise EngineError(
                f"the DataLoader has a {type(given.sampler).__name__}, whose order the loader cannot resume on another "
                "grid; pass the dataset instead, in its own order or with shuffle=True."
            )
        taken["shuffle"] = shuffle
    if given.drop_last:
        taken["at_end"] = "dropped"
    if given.collate_fn is not default_collate:
        taken["collate"] = given.collate_fn
    names = ("pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor")
    taken["torch"] = {name: getattr(given, name) for name in names}
    return taken


def _shuffles(given: DataLoader[Any]) -> bool | None:
    """Returns True if every sample comes once an epoch in random order, False if in dataset order, None if neither."""
    sampler: Any = given.sampler
    # by name, because torchdata's samplers are no subclasses of torch's; of the class that sets the order
    name = next((kind.__name__ for kind in type(sampler).__mro__ if "__iter__" in vars(kind)), "")
    if name not in ("RandomSampler", "SequentialSampler"):  # others may have no length
        return None
    once = len(sampler) == len(cast(Sized, given.dataset)) and not getattr(sampler, "replacement", False)
    return name == "RandomSampler" if once else None


class StepLoader(Iterator[Batch]):
    """Iterator of one data rank's microbatches. With the loader's option ``batches="rank0"``, ``next`` is collective
    over the tensor and pipeline ranks that compute on the same rows.

    The saved position counts whole training steps: a resumed run repeats the microbatches of an interrupted step.
    """

    def __init__(
        self, source: StepSource, rows: StepRows, settings: LoaderSettings, replica: ReplicaBatches | None = None
    ) -> None:
        self._source, self._rows, self._settings, self._replica = source, rows, settings, replica
        self._place = DataPosition()
        self._ahead: Iterator[Step] | None = None
        self._held: deque[Batch] = deque()
        self._behind = self._place
        """Position after the microbatches in ``_held``."""
        self._check_end()

    def __iter__(self) -> "StepLoader":
        return self

    def __next__(self) -> Batch:
        if self.ended:
            raise StopIteration
        microbatch = self._held.popleft()
        if not self._held:
            self._place = self._behind
        return microbatch

    @property
    def position(self) -> int:
        """Number of samples (with packing, rows) that all ranks together have consumed in whole steps."""
        return self._place.position

    @property
    def ended(self) -> bool:
        """True if no training step is left. May load the next step from the dataset.

        With the loader's option ``batches="rank0"``, it is collective over the ranks that compute on the same rows.
        """
        if not self._held:
            step = self._read() if self._replica is None else self._replica.share(self._read)
            if step is None:
                return True
            self._behind, self._held = DataPosition(*step[0]), deque(step[1])
        return False

    @property
    def steps_left(self) -> int:
        """Number of training steps from the current position to the end of the last epoch.

        Raises:
            EngineError: the loader is endless, or the dataset has no length.
        """
        size, epochs = self._source.size, self._settings.epochs
        if size is None or epochs is None:
            why = "the dataset has no length" if size is None else "the loader is endless"
            raise EngineError(f"steps_left of this loader is unknown: {why}. Read loader.ended, or pass epochs=.")
        left, batch = size * epochs - self.position, self._rows.batch
        return left // batch if self._settings.at_end == "dropped" else -(-left // batch)

    def state_dict(self) -> dict[str, int]:
        """Returns the position in the data after the last whole step, and the settings that determine the order of
        samples.

        The values are equal on every rank.
        """
        return {**self._place._asdict(), **self._kind()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at the position in ``state``, a result of ``state_dict``. Batch size and grid of ranks may differ
        from the saved run's.

        Raises:
            EngineError: ``state`` is not from a loader's ``state_dict``, or was saved with another order, dataset or
                packing.
        """
        for key in (*DataPosition._fields, *self._kind()):
            if not isinstance(state.get(key), int) or state[key] < 0:
                raise EngineError(
                    f"the state of the loader has {key} = {state.get(key)!r}; it must be an integer from 0. Pass the "
                    "result of a loader's state_dict()."
                )
        for key, value in self._kind().items():
            if state[key] != value:
                raise EngineError(
                    f"the state of the loader has {key} = {state[key]}, this loader has {value}; positions are "
                    "comparable only with equal values. Make the loader with the same options, or start a fresh run."
                )
        self._place = DataPosition(*(state[key] for key in DataPosition._fields))
        self._ahead = None
        self._held.clear()
        self._check_end()

    def _kind(self) -> dict[str, int]:
        settings = self._settings
        return {
            "seed": settings.seed if settings.shuffle else 0,
            "shuffle": int(settings.shuffle),
            "samples": self._source.size or 0,
            "row_length": settings.pack.length if settings.pack is not None else 0,
        }

    def _read(self) -> tuple[tuple[int, ...], list[Batch]] | None:
        if self._ahead is None:
            self._ahead = self._source.steps(self._place)
        try:
            step = next(self._ahead, None)
        except Exception:
            self._ahead = None  # a second call would otherwise find an exhausted iterator
            raise
        return None if step is None else (tuple(step[0]), step[1])

    def _check_end(self) -> None:
        """Refuses an incomplete last step before anything is read, if the dataset has a length."""
        size, epochs, batch = self._source.size, self._settings.epochs, self._rows.batch
        if size is None or epochs is None or self._settings.at_end != "refused":
            return
        if left := (size * epochs - self.position) % batch:
            raise refused(left, batch)
