"""Random histories of a loader, for the tests of its place: kills within steps, other grids, batches and workers.

What counts is what the final weights have seen: whole steps up to each checkpoint that was resumed from.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from engine.data import Packing, StepLoader, loader
from engine.data.settings import LoaderOptions
from tests.engine.data.loaders import MeasuredTexts, Numbers, Stream, Texts, TextStream, loaders, made_for

PAD = -1


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of dataset."""

    make: Callable[[Any], Any]
    """From the number of samples, or the lengths of documents."""
    texts: bool = False
    """It holds documents, which are packed."""
    mapped: bool = False
    """It is read by index, so that the loader may shuffle it."""
    ordered: bool = False
    """It is read in order, by one worker at most."""


KINDS = (
    Kind(make=Numbers, mapped=True),
    Kind(make=Stream, ordered=True),
    Kind(make=MeasuredTexts, texts=True, mapped=True),
    Kind(make=Texts, texts=True, mapped=True, ordered=True),
    Kind(make=TextStream, texts=True, ordered=True),
)


@dataclass
class Run:
    """A run as its checkpoints know it."""

    make: Callable[[], Any]
    """Its dataset; each rank has its own, as processes have. Hugging Face's streams share the number of their epoch."""
    options: LoaderOptions
    size: int
    """Numbers of an epoch: samples, or with packing tokens."""
    ordered: bool = False
    saved: str = ""
    counted: list[list[int]] = field(default_factory=list)
    """The numbers of each row, in the order of the global batches, up to the newest checkpoint."""
    since: list[list[int]] = field(default_factory=list)
    replayed: int = 0
    grids: set[tuple[int, ...]] = field(default_factory=set)

    def start(self, dp: int, micro: int, accumulation: int, workers: int) -> list[StepLoader]:
        """One loader a data rank, where the newest checkpoint was."""
        self.replayed += len(self.since)
        self.since = []
        self.grids.add((dp, micro, accumulation, workers))
        options: LoaderOptions = {**self.options, "workers": workers}
        ranks = [loader(self.make(), eng, **options) for eng in made_for(dp, micro, accumulation)]
        for rank in ranks if self.saved else ():
            rank.load_state_dict(json.loads(self.saved))
        return ranks

    def step(self, ranks: list[StepLoader], accumulation: int) -> None:
        for rank in ranks:
            for _ in range(accumulation):
                self.since += rows_of(next(rank))

    def save(self, ranks: list[StepLoader]) -> None:
        """A checkpoint; every rank has the same to save."""
        states = {json.dumps(rank.state_dict()) for rank in ranks}
        assert len(states) == 1, f"ranks disagree on the place: {states}"
        (self.saved,) = states
        self.counted, self.since = self.counted + self.since, []
        assert json.loads(self.saved)["position"] == len(self.counted)


def rows_of(microbatch: dict[str, Any]) -> list[list[int]]:
    """The numbers of each row; what pads it is left out."""
    if "number" in microbatch:
        return [[number] for number in microbatch["number"].tolist()]
    return [[token for token in row if token != PAD] for row in microbatch["input_ids"].tolist()]


def drawn(rng: np.random.Generator, kinds: Sequence[Kind]) -> Run:
    """A run over a random dataset."""
    kind = kinds[int(rng.integers(len(kinds)))]
    options: LoaderOptions = {"shuffle": bool(rng.integers(2)) and kind.mapped}
    if not kind.texts:
        size = int(rng.integers(1, 40))
        return Run(partial(kind.make, size), options, size, kind.ordered)
    lengths = rng.integers(0, 12, size=int(rng.integers(1, 10))).tolist()
    lengths[0] += 1
    options["pack"] = Packing(length=int(rng.integers(2, 8)), pad_token=PAD)
    return Run(partial(kind.make, lengths), options, sum(lengths), kind.ordered)


def live(rng: np.random.Generator, processes: bool, kinds: Sequence[Kind]) -> Run:
    """A random history, to its end."""
    run = drawn(rng, kinds)
    for _ in range(int(rng.integers(1, 5))):
        dp, micro, accumulation = (int(rng.integers(1, most)) for most in (5, 4, 3))
        workers = int(rng.integers(0, 2 if run.ordered else 3)) if processes else 0
        ranks = run.start(dp, micro, accumulation, workers)
        every = int(rng.integers(1, 4))
        for step in range(int(rng.integers(0, 5))):
            run.step(ranks, accumulation)
            if (step + 1) % every == 0:
                run.save(ranks)
        if rng.integers(2):  # killed within a step, when ranks have come differently far
            for rank in ranks:
                for _ in range(int(rng.integers(0, accumulation + 1))):
                    run.since += rows_of(next(rank))
            continue
        run.save(ranks)
    return run


def wrong(run: Run) -> list[str]:
    """What was repeated or skipped, epoch by epoch."""
    found, left = [], [number for row in run.counted for number in row]
    while left:
        epoch, left = left[: run.size], left[run.size :]
        seen = Counter(epoch)
        if max(seen.values()) > 1 or (len(epoch) == run.size and len(seen) != run.size) or max(seen) >= run.size:
            found.append(f"{seen}")
    return found


def uninterrupted(run: Run, rows: int) -> list[list[int]]:
    """The same many rows on one rank, one row a step, never stopped."""
    (alone,) = loaders(run.make(), 1, 1, 1, run.options)
    return [row for _ in range(rows) for row in rows_of(next(alone))]


def check(histories: range, processes: bool = False, kinds: Sequence[Kind] = KINDS) -> tuple[int, int, int]:
    """Live these histories; returns replayed rows, most grids of one, epochs."""
    replayed = grids = epochs = 0
    for index in histories:
        run = live(np.random.default_rng(index), processes, kinds)
        assert not wrong(run), f"history {index}: {wrong(run)}"
        assert run.counted == uninterrupted(run, len(run.counted)), f"history {index} has another order"
        replayed, grids = replayed + run.replayed, max(grids, len(run.grids))
        epochs += sum(map(len, run.counted)) // run.size
    return replayed, grids, epochs
