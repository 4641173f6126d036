"""Settings of a data loader: order, packing, padding, workers, last step.

``StepRows`` assigns the samples of the global order to data ranks and microbatches:

    position   0 1 2 3 | 4 5 6 7 | 8 ...         2 data ranks, 2 microbatches of 1 row each
    rank 0     0 1     | 4 5     |
    rank 1         2 3 |     6 7 |
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypedDict, get_args

from engine.errors import EngineError

AtEnd = Literal["joined", "dropped", "refused"]
Readers = Literal["all", "rank0"]
LabelPlace = Literal["in place", "shifted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Settings to pack documents, one after another, into rows of ``length`` tokens; a document that does not fit
    continues in the next row.

    A row has int64 tensors [length]. Its ``labels`` are the row's tokens "in place" or "shifted" to the next token, and
    -100 at document borders and in padding. ``position_ids`` begin at 0 in each part of a document. With ``segments``,
    ``segment_ids`` number the row's documents from 1, and are 0 in padding. Only an epoch's last row is padded.

    Raises:
        EngineError: ``length`` is below 2, or the option ``labels`` is neither "in place" nor "shifted".
    """

    length: int
    labels: LabelPlace = "in place"
    """"in place": labels[t] is the token at t and the model shifts them, as Hugging Face models do; the first token of
    each piece is no target. "shifted": labels[t] is the token after t, so a cut document loses no target."""
    segments: bool = False
    pad_token: int = 0

    def __post_init__(self) -> None:
        if self.length < 2:
            raise EngineError(f"Packing has length = {self.length}; a row needs at least 2 tokens. Choose 2 or more.")
        _one_of("labels of Packing", self.labels, get_args(LabelPlace))


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """Settings to pad the 1-D tensors of a microbatch at their end, to the longest length, rounded up to a multiple of
    ``multiple``.

    ``input_ids`` are padded with ``token``, ``labels`` with -100, other tensors with 0.

    Raises:
        EngineError: ``multiple`` is below 1.
    """

    multiple: int = 1
    token: int = 0

    def __post_init__(self) -> None:
        if self.multiple < 1:
            raise EngineError(f"Padding has multiple = {self.multiple}; lengths are positive. Choose 1 or more.")


class LoaderOptions(TypedDict, total=False):
    """Keyword arguments of ``engine.data.loader``, which :class:`LoaderSettings` describes."""

    shuffle: bool
    seed: int
    epochs: int | None
    at_end: AtEnd
    batches: Readers
    workers: int
    pack: Packing | None
    pad: Padding | None
    collate: Callable[[Sequence[Any]], Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """Settings of a data loader: order of the samples, epochs, the ranks and worker processes that read, and packing or
    padding of token sequences.

    Raises:
        EngineError: a value is out of range, or two values exclude each other, such as ``pack`` and ``pad``.
    """

    shuffle: bool = False
    """True for a new random order in each epoch, by the seed; needs a dataset of known length."""
    seed: int = 0
    epochs: int | None = None
    """Number of passes over the dataset; None: endless."""
    at_end: AtEnd = "refused"
    """Treatment of a last step with too few samples: fill up, leave out, or raise."""
    batches: Readers = "all"
    """"rank0": the first rank of a replica reads, and sends batches to its other tensor and pipeline ranks."""
    workers: int = 0
    """Number of processes that read ahead; 0: this process reads."""
    pack: Packing | None = None
    pad: Padding | None = None
    collate: Callable[[Sequence[Any]], Any] | None = None
    """Function from the list of samples of a microbatch to the microbatch."""
    torch: Mapping[str, Any] = field(default_factory=dict)
    """Further options of torch's DataLoader, from a DataLoader passed as the dataset."""

    def __post_init__(self) -> None:
        _one_of("at_end", self.at_end, get_args(AtEnd))
        _one_of("batches", self.batches, get_args(Readers))
        for name, value, least in (("workers", self.workers, 0), ("epochs", self.epochs, 1), ("seed", self.seed, 0)):
            if value is not None and value < least:
                raise EngineError(f"{name} = {value} is too small; the smallest is {least}. Choose {least} or more.")
        for name, given, kind in (("pack", self.pack, Packing), ("pad", self.pad, Padding)):
            if given is not None and not isinstance(given, kind):
                raise EngineError(
                    f"{name} = {given!r} is a {type(given).__name__}, not a {kind.__name__}. Pass {kind.__name__}(...) "
                    "of engine.data."
                )
        if self.pack is not None and (self.pad is not None or self.collate is not None):
            other = "pad" if self.pad is not None else "collate"
            raise EngineError(
                f"the loader was given pack and {other}; packed rows have one length and are stacked. Remove one."
            )


class DataPosition(NamedTuple):
    """Position in the data at which the next training step begins; equal on all ranks.

    It counts consumed samples. With packing, it counts consumed rows, documents and tokens.
    """

    position: int = 0
    """Number of samples that all ranks together have consumed."""
    epoch: int = 0
    read: int = 0
    """Samples of a stream consumed in this epoch; with packing, documents consumed to their end."""
    used: int = 0
    """Number of tokens consumed of the next document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """Division of a training step's rows: each of ``size`` data ranks gets ``accumulation`` microbatches of ``micro``
    rows.

    ``rank`` is the index of this data rank.
    """

    micro: int
    accumulation: int
    rank: int = 0
    size: int = 1

    @property
    def batch(self) -> int:
        """Number of rows of a training step over all data ranks and microbatches."""
        return self.micro * self.accumulation * self.size

    def microbatches(self, position: int) -> Iterator[range]:
        """Yields a range for each microbatch of this data rank: the positions of its rows in the sequence of rows that
        all data ranks consume, counted over all epochs.

        Args:
            position: number of rows in this sequence before the training step.
        """
        first = position + self.rank * self.micro * self.accumulation
        return (
            range(start, start + self.micro)
            for start in range(first, first + self.micro * self.accumulation, self.micro)
        )


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise EngineError(f"{name} = {value!r} is unknown. Choose {', '.join(map(repr, known[:-1]))} or {known[-1]!r}.")
