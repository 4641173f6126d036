"""Exchange of matrices in pieces on the ranks of an axis: owners join the pieces, and scatter the results.

    rank 0   | a a a b |          owner of a: 0, of b: 1         a a a a
    rank 1   | a b b b |    --->                         --->            b b b b

A rank sends each owner one message, which has its pieces of all matrices of that owner in their order. Messages have
one size, the largest that any two ranks exchange, so that both ways are one all-to-all each. Pieces that their owner
holds itself are not sent. Matrices go in rounds, so that one round travels while another is computed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import torch
from torch import Tensor

from engine.parallel.comm.comm import Comm, Pending
from engine.parallel.comm.traffic import Traffic, sent_bytes
from engine.parallel.grid import Axis

LABEL = "matrices"
"""Label of both ways."""
ROUNDS = 4
"""Rounds of a step, where owners have so many matrices: the first gather and the last scatter overlap with no
computation."""
SURPLUS = 1.25
"""Limit of the messages of all rounds, as a factor of a single round's: each message has the size of the largest of its
round."""
ROUND_ELEMENTS = 1 << 24
"""Elements that an owner gathers in a round, which it stores together with the elements of the rounds around it."""
Arrived = TypeVar("Arrived")


@dataclass(frozen=True)
class OwnerRoute:
    """Owners of matrices, and the share of each rank; the same on all ranks of the axis."""

    axis: Axis
    members: tuple[int, ...]
    """Indices of the axis that take part, in the order of the pieces of a matrix."""
    owners: Mapping[str, int]
    """Matrix -> place of its owner among the members; in one order on all of them."""
    sizes: Mapping[str, tuple[int, ...]]
    """Matrix -> elements that each member holds."""

    def owned(self, place: int) -> list[str]:
        """Returns the matrices of an owner, in order."""
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

    def traffic(self, counted: Axis, itemsize: int, ways: int = 2) -> tuple[Traffic, ...]:
        """Returns the traffic of both directions of a step, over the axis as it is counted; of three, if owners need
        weights too."""
        if not self.message:
            return ()
        ranks = len(self.members)
        return (Traffic(counted, LABEL, ways, ways * sent_bytes("all_to_all", ranks * self.message * itemsize, ranks)),)


def balanced_owners(costs: Mapping[str, int], held: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Returns the owner of each matrix: the rank with most of it, among ranks with work below a fair share.

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


def rounds_of(
    owners: Mapping[str, int], costs: Mapping[str, int], held: Mapping[str, Sequence[int]], order: Sequence[str]
) -> list[list[str]]:
    """Returns the matrices in rounds with about equal shares of the updates of every owner.

    There are at most ``ROUNDS``, fewer where owners have fewer matrices, or where messages of one size would be more
    than ``SURPLUS`` times the messages of a single round; more where an owner would gather over ``ROUND_ELEMENTS`` in
    one.

    Args:
        held: elements of each rank.
        order: the matrices as buckets have them, so that early rounds complete the first buckets.
    """
    of_owner: dict[int, list[str]] = {}
    for name in order:
        of_owner.setdefault(owners[name], []).append(name)
    most = max(map(len, of_owner.values()), default=0)
    largest = max((sum(sum(held[name]) for name in own) for own in of_owner.values()), default=0)
    least = min(most, math.ceil(largest / ROUND_ELEMENTS))
    single = _message_elements([order], owners, held)
    for count in range(min(most, max(ROUNDS, least)), least, -1):
        found = _in_rounds(count, of_owner, costs, order)
        if _message_elements(found, owners, held) <= SURPLUS * single:
            return found
    return _in_rounds(least, of_owner, costs, order)


def _in_rounds(
    count: int, of_owner: Mapping[int, Sequence[str]], costs: Mapping[str, int], order: Sequence[str]
) -> list[list[str]]:
    found: list[list[str]] = [[] for _ in range(count)]
    for own in of_owner.values():
        total, before = max(1, sum(costs[name] for name in own)), 0
        for name in own:  # to the round in which the middle of its work lies
            found[min(count - 1, count * (2 * before + costs[name]) // (2 * total))].append(name)
            before += costs[name]
    place = {name: index for index, name in enumerate(order)}
    return [sorted(names, key=place.__getitem__) for names in found if names]


def _message_elements(
    rounds: Sequence[Sequence[str]], owners: Mapping[str, int], held: Mapping[str, Sequence[int]]
) -> int:
    ranks = len(next(iter(held.values()), ()))
    routes = [
        OwnerRoute("", tuple(range(ranks)), {n: owners[n] for n in names}, {n: tuple(held[n]) for n in names})
        for names in rounds
    ]
    return sum(route.message for route in routes)


class Arriving(Generic[Arrived]):
    """Result of an exchange under way."""

    def __init__(self, pending: Pending | None, read: Callable[[], Arrived]) -> None:
        """Takes ``read``, which computes the result from the received messages. ``pending`` None: nothing is sent."""
        self._pending, self._read = pending, read

    def wait(self) -> Arrived:
        """Waits for the messages, once, and returns the result."""
        if self._pending is not None:
            self._pending.wait()
        return self._read()


class OwnerExchange:
    """Gather and scatter of one route on this rank: an all-to-all each, label "matrices", that is started and waited
    for."""

    def __init__(self, route: OwnerRoute, comm: Comm) -> None:
        self._route, self._comm = route, comm
        self._here = route.members.index(comm.grid.index(route.axis))

    def gather(self, pieces: Mapping[str, Tensor], blank: Tensor) -> Arriving[dict[str, list[Tensor]]]:
        """Starts the exchange that returns the pieces of all members, flat and in order, of each matrix of this rank.

        ``pieces``: pieces of this rank. ``blank``: no elements, in the dtype and on the device of the pieces.
        """
        own = {name: pieces.get(name, blank).reshape(-1) for name in self._route.owners}
        places = range(len(self._route.members))
        pending, received = self._swap([[own[name] for name in self._route.owned(owner)] for owner in places], blank)
        mine = self._route.owned(self._here)

        def read() -> dict[str, list[Tensor]]:
            found: dict[str, list[Tensor]] = {name: [] for name in mine}
            for source in places:
                sizes = [self._route.sizes[name][source] for name in mine]
                parts = [own[name] for name in mine] if source == self._here else _split(received[source], sizes)
                for name, part in zip(mine, parts, strict=True):
                    found[name].append(part)
            return found

        return Arriving(pending, read)

    def scatter(self, results: Mapping[str, Sequence[Tensor]], blank: Tensor) -> Arriving[dict[str, Tensor]]:
        """Starts the exchange that returns this rank's piece of each matrix, flat; ``results``: pieces of all members,
        of matrices of this rank."""
        places, mine = range(len(self._route.members)), self._route.owned(self._here)
        pending, received = self._swap([[results[name][place] for name in mine] for place in places], blank)
        kept = [results[name][self._here] for name in mine]

        def read() -> dict[str, Tensor]:
            found: dict[str, Tensor] = {}
            for owner in places:
                names = self._route.owned(owner)
                sizes = [self._route.sizes[name][self._here] for name in names]
                found.update(zip(names, kept if owner == self._here else _split(received[owner], sizes), strict=True))
            return found

        return Arriving(pending, read)

    def _swap(self, messages: Sequence[Sequence[Tensor]], blank: Tensor) -> tuple[Pending | None, Tensor]:
        """Starts to send message i to member i, except this rank's own; returns the received messages [members,
        message] too."""
        given = blank.new_empty(len(messages), self._route.message)
        if not self._route.message:
            return None, given
        for place, parts in enumerate(messages):
            flat = [part.reshape(-1) for part in parts] if place != self._here else []
            used = sum(part.numel() for part in flat)
            if used:
                torch.cat(flat, out=given[place, :used])
            given[place, used:].zero_()
        received = torch.empty_like(given)
        return self._comm.all_to_all(received, given, self._route.members, LABEL, self._route.axis), received


def _split(message: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return list(torch.split(message[: sum(sizes)], list(sizes))) if sizes else []
