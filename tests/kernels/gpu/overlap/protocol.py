"""The protocol of kernels that communicate, as a model whose every interleaving can be tried.

A rank is a list of actions. ``program`` gives those of the kernels, in their order (``test_conformance`` holds them
against what the kernels do); a defect or a fault changes them. Memory is weak: what a rank has written reaches the
others at any moment until its next signal, which it precedes.

    write     a tile into a slot: buffered, applied at any time                reads see what has been applied
    signal    applies all that this rank has written, then the epoch
    look      waits for an arrival, as ``arrived`` does
    read      a tile of a slot; it has to be that of this epoch, or the proof fails

A rank that waits for ever ends in a time-out, which a kernel reports; that is no wrong result. Where hosts watch
(``watched``), a rank that has done its last action may be known to have ended at any time from then on, and a look that
has found nothing is the last one once that is known: no rank then waits for ever.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple


class Place(NamedTuple):
    """A tile of a slot, or its arrival: what ``writer`` leaves with ``owner`` in calls of a parity."""

    kind: str
    """slot or arrival."""
    owner: int
    writer: int
    tile: int
    parity: int


class Action(NamedTuple):
    """One step of a rank."""

    what: str
    """write, signal, look or read."""
    place: Place
    epoch: int
    last: int = 0
    """Of a look: more than this is an error."""


class End(Enum):
    """How an interleaving has ended."""

    RIGHT = "right"
    REPORTED = "reported"
    """A rank says that something cannot come, since its writer has ended, or that calls differ."""
    TIMED_OUT = "timed out"
    """Ranks wait for ever, and say so when their time is over."""
    WRONG = "wrong"
    """A rank has read something else than it should, and nobody knows."""


Program = tuple[Action, ...]
Tiles = int | tuple[tuple[int, ...], ...]
"""Tiles that each rank sends to each, or by source and target; without any, a signal goes all the same."""


def program(rank: int, ranks: int, tiles: Tiles, epochs: int, kind: str = "gather") -> Program:
    """The actions of a rank in ``epochs`` calls of one kind: "gather" or "scatter" of equal parts, "dispatch" of rows
    to the owners of their experts, "return" to the ranks of the rows, whose ``tiles`` are those of the dispatch, or a
    sum by a "switch", whose calls have two epochs each."""
    kinds = [kind] * (epochs // 2 if kind == "switch" else epochs)
    return mixed(rank, ranks, tiles, kinds)


def mixed(rank: int, ranks: int, tiles: Tiles, kinds: Sequence[str]) -> Program:
    """The actions of a rank in calls of several kinds, one after another."""
    found, epoch = list[Action](), 1
    for kind in kinds:
        call = _switched(rank, ranks, tiles, epoch) if kind == "switch" else _call(rank, ranks, tiles, epoch, kind)
        found += call
        epoch += 2 if kind == "switch" else 1
    return tuple(found)


def _switched(rank: int, ranks: int, tiles: Tiles, epoch: int) -> Iterator[Action]:
    """Each rank keeps its tiles, their owner adds those of all ranks, and gives all of them the sum."""
    assert isinstance(tiles, int)
    now, later, after = epoch % 2, (epoch + 1) % 2, [(rank + 1 + step) % ranks for step in range(ranks)]
    for owner in after:
        for tile in range(tiles):
            yield Action("write", Place("slot", rank, owner, tile, now), epoch)
            yield Action("signal", Place("arrival", owner, rank, tile, now), epoch)
    for tile in range(tiles):
        for source in range(ranks):
            yield Action("look", Place("arrival", rank, source, tile, now), epoch, epoch)
        for source in range(ranks):
            yield Action("read", Place("slot", source, rank, tile, now), epoch)
        for target in range(ranks):
            yield Action("write", Place("slot", target, rank, tile, later), epoch + 1)
        for target in after:
            yield Action("signal", Place("arrival", target, rank, tile, later), epoch + 1)
    for source in ((rank + ranks - step) % ranks for step in range(ranks)):
        for tile in range(tiles):
            yield Action("look", Place("arrival", rank, source, tile, later), epoch + 1, epoch + 1)
            yield Action("read", Place("slot", rank, source, tile, later), epoch + 1)


def _call(rank: int, ranks: int, tiles: Tiles, epoch: int, kind: str) -> Iterator[Action]:
    parity = epoch % 2

    def count(source: int, target: int) -> int:
        if isinstance(tiles, int):
            return tiles
        return tiles[target][source] if kind == "return" else tiles[source][target]

    for target in ((rank + 1 + step) % ranks for step in range(ranks)):
        for tile in range(max(1, count(rank, target))):
            if tile < count(rank, target):
                yield Action("write", Place("slot", target, rank, tile, parity), epoch)
            yield Action("signal", Place("arrival", target, rank, tile, parity), epoch)
    if kind == "scatter":
        order = [(source, tile) for tile in range(count(rank, rank)) for source in range(ranks)]
    else:
        sources = [(rank + ranks - step) % ranks for step in range(ranks)]
        order = [(source, tile) for source in sources for tile in range(max(1, count(source, rank)))]
    for source, tile in order:
        yield Action("look", Place("arrival", rank, source, tile, parity), epoch, epoch)
        if tile < count(source, rank):
            yield Action("read", Place("slot", rank, source, tile, parity), epoch)


@dataclass(frozen=True)
class State:
    """All ranks at one moment."""

    at: tuple[int, ...]
    """Index of the next action, by rank."""
    buffered: tuple[tuple[tuple[Place, int], ...], ...]
    """What each rank has written and nobody need have seen yet."""
    memory: frozenset[tuple[Place, int]]
    ended: frozenset[int] = frozenset()
    """Ranks that are known to have ended, or closed their end."""
    missed: frozenset[int] = frozenset()
    """Ranks whose last look has found nothing."""


@dataclass
class Model:
    """Runs programs; ``released``: a signal applies what its rank has written before."""

    programs: tuple[Program, ...]
    released: bool = True
    watched: bool = False
    """Hosts write down who has ended."""
    looks_again: bool = True
    """A look follows the news that a writer has ended."""
    strays: tuple[Action, ...] = ()
    """Signals that come once more, or from nowhere, at any moment."""

    def start(self) -> State:
        """Nobody has done anything."""
        ranks = len(self.programs) + bool(self.strays)
        return State((0,) * ranks, ((),) * ranks, frozenset())

    def _programs(self) -> tuple[Program, ...]:
        return (*self.programs, self.strays) if self.strays else self.programs

    def steps(self, state: State) -> Iterator[State | End]:
        """All that can happen next."""
        values = dict(state.memory)
        for rank, actions in enumerate(self._programs()):
            for index in range(len(state.buffered[rank])):
                yield self._drain(state, rank, index, values)
            if state.at[rank] < len(actions):
                found = self._act(state, rank, actions[state.at[rank]], values)
                if found is not None:
                    yield found
            elif self.watched and rank < len(self.programs) and rank not in state.ended:
                yield replace(state, ended=state.ended | {rank})

    def _drain(self, state: State, rank: int, index: int, values: dict[Place, int]) -> State:
        place, value = state.buffered[rank][index]
        rest = state.buffered[rank][:index] + state.buffered[rank][index + 1 :]
        memory = frozenset((values | {place: value}).items())
        return replace(state, buffered=_with(state.buffered, rank, rest), memory=memory)

    def _act(self, state: State, rank: int, action: Action, values: dict[Place, int]) -> State | End | None:
        going = replace(state, at=_with(state.at, rank, state.at[rank] + 1))
        if action.what == "look":
            return self._look(state, going, rank, action, values.get(action.place, 0))
        if action.what == "read":
            return going if values.get(action.place, 0) == action.epoch else End.WRONG
        if action.what == "write":
            return replace(
                going, buffered=_with(state.buffered, rank, (*state.buffered[rank], (action.place, action.epoch)))
            )
        values = dict(values)
        kept = state.buffered
        if self.released:
            values.update(state.buffered[rank])
            kept = _with(kept, rank, ())
        values[action.place] = action.epoch
        return replace(going, buffered=kept, memory=frozenset(values.items()))

    def _look(self, state: State, going: State, rank: int, action: Action, value: int) -> State | End | None:
        going = replace(going, missed=state.missed - {rank})
        known = rank in state.missed and action.place.writer in state.ended
        if known and not self.looks_again:
            return End.REPORTED
        if value > action.last:
            return End.REPORTED
        if value >= action.epoch:
            return going
        if known:
            return End.REPORTED
        return replace(state, missed=state.missed | {rank}) if self.watched and rank not in state.missed else None

    def ended(self, state: State) -> bool:
        """All ranks have done everything."""
        return all(at == len(actions) for at, actions in zip(state.at, self._programs(), strict=True))

    def ends(self) -> dict[End, int]:
        """How interleavings end, and after how few steps one ends so."""
        seen, now, steps, ends = {self.start()}, [self.start()], 0, dict[End, int]()
        while now:
            steps += 1
            later = list[State]()
            for state in now:
                following = list(self.steps(state))
                if not following:
                    ends.setdefault(End.RIGHT if self.ended(state) else End.TIMED_OUT, steps - 1)
                for found in following:
                    if isinstance(found, End):
                        ends.setdefault(found, steps)
                    elif found not in seen:
                        seen.add(found)
                        later.append(found)
            now = later
        return ends

    def every(self) -> set[End]:
        """How all interleavings end."""
        return set(self.ends())

    def one(self, chance: random.Random) -> End:
        """How one interleaving ends that chance chooses."""
        state = self.start()
        while True:
            possible = list(self.steps(state))
            if not possible:
                return End.RIGHT if self.ended(state) else End.TIMED_OUT
            found = chance.choice(possible)
            if isinstance(found, End):
                return found
            state = found


def _with(values: tuple, index: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*values[:index], value, *values[index + 1 :])


def programs(ranks: int, tiles: Tiles, epochs: int, kind: str = "gather") -> tuple[Program, ...]:
    """Those of all ranks."""
    return tuple(program(rank, ranks, tiles, epochs, kind) for rank in range(ranks))


def without(programs: Sequence[Program], what: str, kind: str) -> tuple[Program, ...]:
    """The programs with all actions of one sort left out."""
    return tuple(tuple(a for a in each if (a.what, a.place.kind) != (what, kind)) for each in programs)
