"""Matrices that lie in pieces on the ranks of an axis are put together by their owners, and taken apart again.

    rank 0   | a a a b |          owner of a: 0, of b: 1         a a a a
    rank 1   | a b b b |    --->                         --->            b b b b

A rank sends each owner one message, which has its pieces of all matrices of that owner in their order. Messages have
one size, the largest that any two ranks exchange, so that both ways are one all-to-all each. Pieces that their owner
holds itself are not sent.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from engine.parallel.comm.comm import Comm
from engine.parallel.comm.traffic import Traffic, sent_bytes
from engine.parallel.grid import Axis

LABEL = "matrices"
"""Label of both ways."""


@dataclass(frozen=True)
class OwnerRoute:
    """Who owns which matrix, and which rank holds how much of it; the same on all ranks of the axis."""

    axis: Axis
    members: tuple[int, ...]
    """Indices of the axis that take part, in the order of the pieces of a matrix."""
    owners: Mapping[str, int]
    """Matrix -> place of its owner among the members; in one order on all of them."""
    sizes: Mapping[str, tuple[int, ...]]
    """Matrix -> elements that each member holds."""

    def owned(self, place: int) -> list[str]:
        """The matrices of an owner, in order."""
        return [name for name, owner in self.owners.items() if owner == place]

    @cached_property
    def message(self) -> int:
        """Elements of the largest message between two members; 0: nothing is sent."""
        places = range(len(self.members))
        sums = [
            sum(self.sizes[name][source] for name in self.owned(owner))
            for owner in places
            for source in places
            if source != owner
        ]
        return max(sums, default=0)

    def traffic(self, counted: Axis, itemsize: int) -> tuple[Traffic, ...]:
        """Both ways of a step, over the axis as it is counted."""
        if not self.message:
            return ()
        ranks = len(self.members)
        return (Traffic(counted, LABEL, 2, 2 * sent_bytes("all_to_all", ranks * self.message * itemsize, ranks)),)


def balanced_owners(costs: Mapping[str, int], held: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The owner of each matrix: who holds most of it, among those whose work stays within a fair share.

    No owner has more than a fair share of the work and the largest matrix. ``held``: elements of each rank.
    """
    ranks = len(next(iter(held.values()), ()))
    loads = [0] * ranks
    fair = max(max(costs.values(), default=0), math.ceil(sum(costs.values()) / max(1, ranks)))
    owners: dict[str, int] = {}
    for name in sorted(costs, key=lambda each: (-costs[each], each)):
        within = [rank for rank in range(ranks) if loads[rank] + costs[name] <= fair]
        chosen = (
            max(within, key=lambda rank: (held[name][rank], -loads[rank], -rank))
            if within
            else min(range(ranks), key=lambda rank: (loads[rank], rank))
        )
        loads[chosen] += costs[name]
        owners[name] = chosen
    return {name: owners[name] for name in costs}


class OwnerExchange:
    """The two ways of one route on this rank; an all-to-all each, label "matrices"."""

    def __init__(self, route: OwnerRoute, comm: Comm) -> None:
        self._route, self._comm = route, comm
        self._here = route.members.index(comm.grid.index(route.axis))

    def gather(self, pieces: Mapping[str, Tensor], blank: Tensor) -> dict[str, list[Tensor]]:
        """The pieces of all members, flat and in order, of each matrix that this rank owns.

        ``pieces``: those of this rank. ``blank``: no elements, in the dtype and on the device of the pieces.
        """
        own = {name: pieces.get(name, blank).reshape(-1) for name in self._route.owners}
        places = range(len(self._route.members))
        received = self._swap([[own[name] for name in self._route.owned(owner)] for owner in places], blank)
        mine = self._route.owned(self._here)
        found: dict[str, list[Tensor]] = {name: [] for name in mine}
        for source in places:
            sizes = [self._route.sizes[name][source] for name in mine]
            parts = [own[name] for name in mine] if source == self._here else _split(received[source], sizes)
            for name, part in zip(mine, parts, strict=True):
                found[name].append(part)
        return found

    def scatter(self, results: Mapping[str, Sequence[Tensor]], blank: Tensor) -> dict[str, Tensor]:
        """This rank's piece of each matrix, flat; ``results``: the pieces of all members of matrices it owns."""
        places, mine = range(len(self._route.members)), self._route.owned(self._here)
        received = self._swap([[results[name][place] for name in mine] for place in places], blank)
        found: dict[str, Tensor] = {}
        for owner in places:
            names = self._route.owned(owner)
            sizes = [self._route.sizes[name][self._here] for name in names]
            own = [results[name][owner] for name in mine] if owner == self._here else None
            found.update(zip(names, own if own is not None else _split(received[owner], sizes), strict=True))
        return found

    def _swap(self, messages: Sequence[Sequence[Tensor]], blank: Tensor) -> Tensor:
        """Send message i to member i, but for this rank's own; returns what has come [members, message]."""
        given = blank.new_zeros(len(messages), self._route.message)
        if not self._route.message:
            return given
        for place, parts in enumerate(messages):
            if place != self._here and parts:
                whole = torch.cat([part.reshape(-1) for part in parts])
                given[place, : whole.numel()].copy_(whole)
        received = torch.empty_like(given)
        self._comm.all_to_all(received, given, self._route.members, LABEL, self._route.axis).wait()
        return received


def _split(message: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return list(torch.split(message[: sum(sizes)], list(sizes))) if sizes else []
