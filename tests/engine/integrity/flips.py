"""Flipped bits in a running engine: where, when, and what the engine says of them. For ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import engine
from engine.errors import CorruptionError
from engine.integrity.guard import Integrity
from engine.models.decoder import loss_sum
from tests import models
from tests.resumed_runs import own_rows

GRIDS: dict[str, dict[str, int]] = {
    "dp2": {"data": 2},
    "dp4": {"data": 4},
    "tp2": {"data": 1, "tensor": 2},
    "pp2": {"data": 1, "pipeline": 2},
    "dp2 x tp2": {"data": 2, "tensor": 2},
    "dp2 x pp2": {"data": 2, "pipeline": 2},
}
KINDS = ("weight", "master", "exp_avg", "exp_avg_sq")
MOMENTS = ("between", "forward")
"""Between two steps, or while a forward runs."""


@dataclass(frozen=True, slots=True)
class Setting:
    """An engine in which bits are flipped."""

    grid: str
    stage: int
    bf16: bool
    every: int

    @property
    def ranks(self) -> int:
        size = 1
        for along in GRIDS[self.grid].values():
            size *= along
        return size

    def config(self, **changes: Any) -> dict[str, Any]:
        return {
            "train_batch_size": 4,
            "train_micro_batch_size_per_gpu": 4 // GRIDS[self.grid]["data"],
            "parallel": GRIDS[self.grid],
            "zero_optimization": {"stage": self.stage},
            "bf16": {"enabled": self.bf16},
            "integrity": {"every": self.every},
        } | changes


class Flip(NamedTuple):
    """One flipped bit."""

    kind: str
    moment: str
    rank: int
    after: int
    """Steps before it, after a check."""
    seed: int
    """Of parameter, element and bit."""


class Told(NamedTuple):
    """What a rank saw of a flip."""

    where: tuple[str, int] | None
    """Parameter and bit, on the rank on which it was flipped."""
    steps: int
    """Steps from the flip to the error; 0: there was none."""
    said: str


def held_parts(eng: engine.Engine, kind: str) -> Iterator[tuple[str, Tensor]]:
    """(parameter, this rank's elements of it) of one kind of tensor."""
    runtime = eng._runtime
    for flat in runtime.buckets:
        parts = {"weight": (flat.kept, flat.owned), "master": (flat.master, flat.owned)}
        whole = slice(0, flat.bucket.elements)
        memory, part = (flat.params, whole) if kind == "weight" and not flat.sharded else parts[kind]
        if memory is None:
            continue
        for slot in flat.bucket.slots:
            start, stop = max(slot.start, part.start), min(slot.stop, part.stop)
            if start < stop:
                yield slot.name, memory.data[start - part.start : stop - part.start]


def state_parts(eng: engine.Engine, kind: str) -> Iterator[tuple[str, Tensor]]:
    """The same of a state of the optimizer."""
    optimizer = eng._runtime.optimizer
    for place in optimizer.places:
        for slot, part in place.slots():
            yield slot.name, optimizer.inner.state[place.parameter][kind].data.view(-1)[part]


def flip_one(eng: engine.Engine, flip: Flip) -> tuple[str, int]:
    """Flip a random bit as memory does: torch does not learn of it."""
    chance = Random(flip.seed)
    parts = list((held_parts if flip.kind in ("weight", "master") else state_parts)(eng, flip.kind))
    name, part = chance.choice(parts)
    bit = chance.randrange(8 * part.numel() * part.element_size())
    part.view(torch.uint8).numpy()[bit // 8] ^= 1 << bit % 8
    return name, bit % (8 * part.element_size())


class Once:
    """A hook that acts in the first forward after ``arm``."""

    def __init__(self, eng: engine.Engine) -> None:
        self._eng = eng
        self._flip: Flip | None = None
        self.where: tuple[str, int] | None = None
        for module in eng.module.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(self._act)

    def arm(self, flip: Flip) -> None:
        self._flip, self.where = flip, None

    def act(self) -> None:
        flip, self._flip = self._flip, None
        if flip is not None:
            self.where = flip_one(self._eng, flip)

    def _act(self, *_: object) -> None:
        self.act()


def steps(eng: engine.Engine, batches: Sequence[Any], count: int) -> None:
    """Train ``count`` steps."""
    for index in range(count):
        eng.train_batch(own_rows(eng, batches[index % len(batches)]))


def opened(setting: Setting, batches: Sequence[Any], tied: bool = False, **changes: Any) -> engine.Engine:
    example = models.take_rows(batches[0], 0, 4 // GRIDS[setting.grid]["data"])
    return engine.initialize(models.decoder(tied=tied), setting.config(**changes), loss_sum, example)


def guard_of(eng: engine.Engine) -> Integrity:
    """The engine's guard."""
    guard = eng._runtime.parts.find(Integrity)
    assert guard is not None
    return guard


def flip_all(setting: Setting, wanted: Sequence[Flip], folder: str) -> list[Told]:
    """Body of a rank: one flip after another, each from the same checkpoint; and steps without a flip, before, between
    two of them and after, which raise if there is a false alarm.
    """
    batches, told = models.batches_for("decoder", 4, 3), []
    with opened(setting, batches) as eng:
        once = Once(eng)
        steps(eng, batches, 2)
        saved = eng.save_checkpoint(Path(folder)).wait()
        steps(eng, batches, setting.every - 2 % setting.every)
        for flip in wanted:
            steps(eng, batches, flip.after)
            told.append(_one(eng, flip, once, batches, setting.every))
            if told[-1].steps:
                eng.load_checkpoint(saved)
            steps(eng, batches, -guard_of(eng)._steps % setting.every)
        steps(eng, batches, setting.every)
    return told


def _one(eng: engine.Engine, flip: Flip, once: Once, batches: Sequence[Any], every: int) -> Told:
    if flip.rank == eng.grid.rank:
        once.arm(flip)
        if flip.moment == "between":
            once.act()
    for step in range(1, every + 1):
        try:
            steps(eng, batches, 1)
        except CorruptionError as error:
            return Told(once.where, step, str(error))
    return Told(once.where, 0, "")
