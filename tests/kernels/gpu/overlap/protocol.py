"""The protocol of kernels that communicate, as a model whose every interleaving can be tried.

A rank is a list of actions. ``program`` gives those of the kernels, in their order (``test_conformance`` holds them
against what the kernels do); a defect or a fault changes them. Memory is weak: what a rank has written reaches the
others at any moment until its next signal, which it precedes.

    write     a tile into a slot: buffered, applied at any time                reads see what has been applied
    signal    applies all that this rank has written, then the epoch
    look      waits for an arrival, as ``arrived`` does
    read      a tile of a slot; it has to be that of this epoch, or the proof fails

A rank that waits for ever ends in a time-out, which a kernel reports; that is no wrong result.
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
    """A rank says that something did not come, or that calls differ."""
    WRONG = "wrong"
    """A rank has read something else than it should, and nobody knows."""


Program = tuple[Action, ...]


def program(rank: int, ranks: int, tiles: int, epochs: int, kind: str = "gather") -> Program:
    """The actions of a rank in ``epochs`` calls of one kind, "gather" or "scatter"."""
    return tuple(action for epoch in range(1, epochs + 1) for action in _call(rank, ranks, tiles, epoch, kind))


def _call(rank: int, ranks: int, tiles: int, epoch: int, kind: str) -> Iterator[Action]:
    parity = epoch % 2
    for target in ((rank + 1 + step) % ranks for step in range(ranks)):
        for tile in range(tiles):
            yield Action("write", Place("slot", target, rank, tile, parity), epoch)
            yield Action("signal", Place("arrival", target, rank, tile, parity), epoch)
    if kind == "gather":
        order = [((rank + ranks - step) % ranks, tile) for step in range(ranks) for tile in range(tiles)]
    else:
        order = [(source, tile) for tile in range(tiles) for source in range(ranks)]
    for source, tile in order:
        yield Action("look", Place("arrival", rank, source, tile, parity), epoch, epoch)
        yield Action("read", Place("slot", rank, source, tile, parity), epoch)


@dataclass(frozen=True)
class State:
    """All ranks at one moment."""

    at: tuple[int, ...]
    """Index of the next action, by rank."""
    buffered: tuple[tuple[tuple[Place, int], ...], ...]
    """What each rank has written and nobody need have seen yet."""
    memory: frozenset[tuple[Place, int]]


@dataclass
class Model:
    """Runs programs; ``released``: a signal applies what its rank has written before."""

    programs: tuple[Program, ...]
    released: bool = True
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

    def _drain(self, state: State, rank: int, index: int, values: dict[Place, int]) -> State:
        place, value = state.buffered[rank][index]
        rest = state.buffered[rank][:index] + state.buffered[rank][index + 1 :]
        memory = frozenset((values | {place: value}).items())
        return replace(state, buffered=_with(state.buffered, rank, rest), memory=memory)

    def _act(self, state: State, rank: int, action: Action, values: dict[Place, int]) -> State | End | None:
        going = replace(state, at=_with(state.at, rank, state.at[rank] + 1))
        if action.what == "look":
            value = values.get(action.place, 0)
            if value > action.last:
                return End.REPORTED
            return going if value >= action.epoch else None
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

    def ended(self, state: State) -> bool:
        """All ranks have done everything."""
        return all(at == len(actions) for at, actions in zip(state.at, self._programs(), strict=True))

    def every(self) -> set[End]:
        """How all interleavings end."""
        seen, todo, ends = {self.start()}, [self.start()], set[End]()
        while todo:
            state, alive = todo.pop(), False
            for found in self.steps(state):
                alive = True
                if isinstance(found, End):
                    ends.add(found)
                elif found not in seen:
                    seen.add(found)
                    todo.append(found)
            if not alive:
                ends.add(End.RIGHT if self.ended(state) else End.REPORTED)
        return ends

    def one(self, chance: random.Random) -> End:
        """How one interleaving ends that chance chooses."""
        state = self.start()
        while True:
            possible = list(self.steps(state))
            if not possible:
                return End.RIGHT if self.ended(state) else End.REPORTED
            found = chance.choice(possible)
            if isinstance(found, End):
                return found
            state = found


def _with(values: tuple, index: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*values[:index], value, *values[index + 1 :])


def programs(ranks: int, tiles: int, epochs: int, kind: str = "gather") -> tuple[Program, ...]:
    """Those of all ranks."""
    return tuple(program(rank, ranks, tiles, epochs, kind) for rank in range(ranks))


def without(programs: Sequence[Program], what: str, kind: str) -> tuple[Program, ...]:
    """The programs with all actions of one sort left out."""
    return tuple(tuple(a for a in each if (a.what, a.place.kind) != (what, kind)) for each in programs)
