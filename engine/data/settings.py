"""What a loader is asked for: the order of samples, packing, padding, workers, and what its end is.

And the rows of a step: which samples of the global order a data rank takes, microbatch by microbatch.

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
    """Documents are put one after the other into rows of ``length`` tokens; a document that does not fit is cut.

    A row holds, int64 [length]: ``input_ids``; ``labels``, -100 at the borders of documents and where the row is
    padded; ``position_ids``, which begin at 0 in every document; with ``segments`` also ``segment_ids``, 1, 2, ... by
    document and 0 where padded. Only the last row of an epoch is padded, with ``pad_token``.

    Raises:
        EngineError: a length below 2, or unknown labels.
    """

    length: int
    labels: LabelPlace = "in place"
    """"in place": labels[t] is the token at t, and the model shifts them, as Hugging Face's do; the first token of each
    piece is no target. "shifted": labels[t] is the token after t, so that a cut document loses no target."""
    segments: bool = False
    pad_token: int = 0

    def __post_init__(self) -> None:
        if self.length < 2:
            raise EngineError(f"Packing has length = {self.length}; a row needs at least 2 tokens. Choose 2 or more.")
        _one_of("labels of Packing", self.labels, get_args(LabelPlace))


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """The 1-dim tensors of the samples are padded at their end, to the longest of a microbatch and a multiple.

    ``input_ids`` is padded with ``token``, ``labels`` with -100, all else with 0.

    Raises:
        EngineError: a multiple below 1.
    """

    multiple: int = 1
    token: int = 0

    def __post_init__(self) -> None:
        if self.multiple < 1:
            raise EngineError(f"Padding has multiple = {self.multiple}; lengths are positive. Choose 1 or more.")


class LoaderOptions(TypedDict, total=False):
    """Options of ``engine.data.loader``, as :class:`LoaderSettings` explains them."""

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
    """Settings of one loader.

    Raises:
        EngineError: a value out of its range, or two that exclude each other.
    """

    shuffle: bool = False
    """Another order in every epoch, which follows from the seed; needs a dataset of known length."""
    seed: int = 0
    epochs: int | None = None
    """Passes over the dataset; None: without end."""
    at_end: AtEnd = "refused"
    """What becomes of the last step, if there are fewer samples than it has rows."""
    batches: Readers = "all"
    """"rank0": only the first rank of a replica reads, and sends its batches to the other tensor and pipeline ranks."""
    workers: int = 0
    """Processes that read ahead; 0: this one reads."""
    pack: Packing | None = None
    pad: Padding | None = None
    collate: Callable[[Sequence[Any]], Any] | None = None
    """From the samples of a microbatch to the microbatch."""
    torch: Mapping[str, Any] = field(default_factory=dict)
    """Further options of torch's DataLoader, taken from the one that was given in place of a dataset."""

    def __post_init__(self) -> None:
        _one_of("at_end", self.at_end, get_args(AtEnd))
        _one_of("batches", self.batches, get_args(Readers))
        for name, value, least in (("workers", self.workers, 0), ("epochs", self.epochs, 1), ("seed", self.seed, 0)):
            if value is not None and value < least:
                raise EngineError(f"{name} = {value} is too small; the smallest is {least}. Choose {least} or more.")
        for name, given, kind in (("pack", self.pack, Packing), ("pad", self.pad, Padding)):
            if given is not None and not isinstance(given, kind):
                raise EngineError(
                    f"{name} = {given!r} is a {type(given).__name__}, and sizes have names. Give {kind.__name__}(...) "
                    "of engine.data."
                )
        if self.pack is not None and (self.pad is not None or self.collate is not None):
            other = "pad" if self.pad is not None else "collate"
            raise EngineError(
                f"the loader was given pack and {other}; packed rows have one length and are stacked. Leave one out."
            )


class DataPosition(NamedTuple):
    """Where the next step begins: the same on all ranks, whatever the grid."""

    position: int = 0
    """Samples that all ranks together have taken."""
    epoch: int = 0
    read: int = 0
    """Samples of a stream that were used in this epoch; with packing, documents that were used to their end."""
    used: int = 0
    """Tokens that were used of the document after those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The rows of a step that this data rank takes."""

    micro: int
    accumulation: int
    rank: int = 0
    size: int = 1

    @property
    def batch(self) -> int:
        """Rows of a step, over all data ranks."""
        return self.micro * self.accumulation * self.size

    def microbatches(self, position: int) -> Iterator[range]:
        """Positions of each microbatch of this rank, in the step that begins at ``position``."""
        first = position + self.rank * self.micro * self.accumulation
        return (
            range(start, start + self.micro)
            for start in range(first, first + self.micro * self.accumulation, self.micro)
        )


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise EngineError(f"{name} = {value!r} is unknown. Choose {', '.join(map(repr, known[:-1]))} or {known[-1]!r}.")
