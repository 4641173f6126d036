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
"""Label of the exchanges in both directions."""
ROUNDS = 4
"""Maximum number of rounds of a step; the first gather and the last scatter overlap with no computation."""
SURPLUS = 1.25
"""Maximum bytes of all rounds' messages, relative to a single round; padding to equal sizes grows with rounds."""
ROUND_ELEMENTS = 1 << 24
"""Maximum elements that an owner gathers in one round; it also stores those of the neighbouring rounds."""
Arrived = TypeVar("Arrived")


@dataclass(frozen=True)
class OwnerRoute:
    """Route of matrix shards between the ranks along ``axis``: for each matrix, its owner rank and its number of
    elements on every rank.
    """

    axis: Axis
    members: tuple[int, ...]
    """Participating indices on the axis, in the order of a matrix's pieces."""
    owners: Mapping[str, int]
    """Position among the members of each matrix's owner; equal order on all ranks."""
    sizes: Mapping[str, tuple[int, ...]]
    """Number of elements of each matrix on every member."""

    def owned(self, place: int) -> list[str]:
        """Returns the names of the matrices that the rank at position ``place`` in ``members`` owns, in the order of
        ``owners``.
        """
        return [name for name, owner in self.owners.items() if owner == place]

    @cached_property
    def message(self) -> int:
        """Number of elements of the largest message between two ranks, to which all messages are padded. 0 if nothing
        is sent.
        """
        places = range(len(self.members))
        sums = [
            sum(self.sizes[name][source] for name in self.owned(owner))
            for owner in places
            for source in places
            if source != owner
        ]
        return max(sums, default=0)

    def traffic(self, counted: Axis, itemsize: int, ways: int = 2) -> tuple[Traffic, ...]:
        """Returns the bytes and collectives of a step, for the engine's traffic counts; () if nothing is sent.

        Args:
            counted: axis to which the traffic is attributed.
            itemsize: bytes per element.
            ways: number of all-to-alls: 2 (to owners and back), or 3 if owners need the weights too.
        """
        if not self.message:
            return ()
        ranks = len(self.members)
        return (Traffic(counted, LABEL, ways, ways * sent_bytes("all_to_all", ranks * self.message * itemsize, ranks)),)


def balanced_owners(costs: Mapping[str, int], held: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Returns matrix name -> owner rank, with balanced work. Prefers owners that store many of the matrix's elements.

    For N ranks, no owner has more than 1 / N of the work plus one matrix.

    Args:
        costs: work of each matrix's update.
        held: number of elements of each matrix on every rank.
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
    """Divides the matrices into about 4 rounds, so that an owner has about the same work in every round. Returns the
    names in each round.

    There are fewer rounds if padding would enlarge the messages by more than 25 %, and more if an owner would gather
    more than 2^24 elements in one round.

    Args:
        owners: owner rank of each matrix.
        costs: work of each matrix's update.
        held: number of elements of each matrix on every rank.
        order: matrices in bucket order, so that early rounds complete the first buckets.
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
    """Handle of an exchange of matrices between ranks that is in progress."""

    def __init__(self, pending: Pending | None, read: Callable[[], Arrived]) -> None:
        """Takes ``read``, which computes the result from the received messages. ``pending`` None: nothing is sent."""
        self._pending, self._read = pending, read

    def wait(self) -> Arrived:
        """Waits for the messages and returns the tensors that this rank has received."""
        if self._pending is not None:
            self._pending.wait()
        return self._read()


class OwnerExchange:
    """Exchange of matrices between the ranks that store their shards and the ranks that own (update) them. Each
    direction is one asynchronous all-to-all, label "matrices".
    """

    def __init__(self, route: OwnerRoute, comm: Comm) -> None:
        self._route, self._comm = route, comm
        self._here = route.members.index(comm.grid.index(route.axis))

    def gather(self, pieces: Mapping[str, Tensor], blank: Tensor) -> Arriving[dict[str, list[Tensor]]]:
        """Starts the all-to-all that sends this rank's piece (shard) of every matrix to its owner rank. The handle's
        result is a dict from each matrix that this rank owns to its flat pieces from all ranks, in order of rank.

        ``pieces``: matrix name -> this rank's piece. ``blank``: empty tensor with the dtype and device of the pieces.
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
        """Starts the all-to-all that sends updated matrices back from their owners. The handle's result is a dict from
        matrix name to this rank's flat piece.

        ``results``: each matrix that this rank owns -> its pieces for all members of the route, in their order.
        ``blank``: empty tensor with the dtype and device of the pieces.
        """
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
