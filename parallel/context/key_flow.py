"""Ways of keys and values to the ranks that have queries for them, in parcels that arrive one after another.

    own       one parcel: keys of this rank                    all queries of a head are here (method "heads")
    gather    one parcel: all keys                             all-gather, reduce-scatter
    need      one parcel: keys that some query here sees       one exchange
    ring      n parcels: the keys of rank i, i-1, i-2, ...     the next one travels while a block computes

Backward brings the parcels again, so no rank stores keys of others between forward and backward, and sends the
gradient of each parcel to the ranks that own its keys, where they are added.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.parallel.comm.backend import Wait
from engine.parallel.context.recut import Boxes, Way, boxes_of, expect, put, start_send, take
from engine.parallel.tensor.global_tensor.index_runs import Runs, one_run
from engine.parallel.tensor.global_tensor.index_sets import Index, Sets, held_once, replaced
from engine.parallel.tensor.tp_axis import TensorAxis

KEYS, KEY_GRADIENTS = "keys", "key gradients"


class Parcel(NamedTuple):
    """Keys and values that a rank receives in one communication, or the keys and values that it stores itself.

    ``boxes``: slices that are sent and received; None: the rank's own keys and values, without communication.
    """

    keys: Runs
    """Positions of the keys."""
    boxes: Boxes | None = None
    shards: Index | None = None
    """Equal shards of all ranks, which one all-gather brings; None: an exchange."""


class KeyFlow(NamedTuple):
    """Ordered communications in which a rank receives the keys and values of one attention."""

    parcels: tuple[Parcel, ...]
    axis: TensorAxis

    def bring(self, local: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Receives keys and values in order; yields pairs (number of the communication, keys joined with values).

        The second element is a tensor [.., K, D + E] of K keys of size D and values of size E. ``local``: this rank's
        keys and values, for the other ranks. The next communication overlaps with the caller's computation.
        """
        coming = self._start(0, local)
        for number in range(len(self.parcels)):
            made, wait = coming
            wait()
            if number + 1 < len(self.parcels):
                coming = self._start(number + 1, local)
            yield number, made

    def _start(self, number: int, local: Tensor) -> tuple[Tensor, Wait]:
        parcel = self.parcels[number]
        if parcel.boxes is None:
            return local, _nothing
        if parcel.shards is None:
            return start_send(local, Way(parcel.boxes), self.axis, KEYS)
        boxes = parcel.boxes
        full, pending = self.axis.start_all_gather(local.contiguous(), KEYS)
        made = local.new_empty(boxes.made)

        def place() -> None:
            pending.wait()
            for part, box in zip(full, boxes.gets, strict=True):
                put(made, box, part)

        return made, place

    def take_home(self, number: int, grad: Tensor) -> tuple[Tensor, Wait]:
        """Starts to send ``grad``, the gradient of the keys and values received in communication ``number``, back to
        their ranks.

        Returns a tensor and a function that waits. After the wait, the tensor is the sum of all ranks' gradients for
        this rank's keys and values, without gradients of other communications.
        """
        parcel = self.parcels[number]
        if parcel.boxes is None:
            return grad, _nothing
        if parcel.shards is None:
            shared = not held_once(parcel.boxes.ways[2])
            return start_send(grad, Way(parcel.boxes.back, add=shared), self.axis, KEY_GRADIENTS)
        parts = torch.stack([take(grad, box) for box in parcel.boxes.gets])
        made, pending = self.axis.start_reduce_scatter(parts, KEY_GRADIENTS)
        return made, pending.wait

    def expect_backward(self, local: Tensor, made: Tensor) -> None:
        """Reports to ``self.axis.listener`` the collectives of attention's backward; does nothing unless
        ``self.axis.dry``.

        ``local``: keys and values of this rank. ``made``: output of the attention.
        """
        for parcel in self.parcels if self.axis.dry else ():
            if parcel.boxes is None:
                continue
            whole = local.new_empty(parcel.boxes.made)
            if parcel.shards is not None:
                self.axis.expect("all_gather", KEYS, whole, made)
                self.axis.expect("reduce_scatter", KEY_GRADIENTS, whole, made)
                continue
            expect((local,), (parcel.boxes,), self.axis, KEYS, made)
            expect((local,), (parcel.boxes.back,), self.axis, KEY_GRADIENTS, made)


def _nothing() -> None:
    """Waits for nothing."""


def own_keys(length: int, axis: TensorAxis) -> KeyFlow:
    """Returns a key flow without communication, for ranks that store all ``length`` positions of their heads."""
    return KeyFlow((Parcel(one_run(0, length)),), axis)


def gathered_keys(shape: Sequence[int], have: Sets, axis: TensorAxis) -> KeyFlow:
    """Returns a key flow that gathers all keys and values on every rank.

    Communicates one all-gather, or one exchange if the shards are unequal.

    ``shape``: full shape [.., S, D + E] of the keys joined with values: S positions, keys of size D, values of size E.
    ``have``: sharding of this full tensor.
    """
    boxes = boxes_of(shape, have, (None,) * len(have), axis.index, axis.size)
    index = have[-2]
    even = index if index is not None and index.even else None
    return KeyFlow((Parcel(one_run(0, shape[-2]), boxes, even),), axis)


def needed_flow(shape: Sequence[int], have: Sets, wanted: Index, axis: TensorAxis) -> KeyFlow:
    """Returns a key flow that sends the keys at positions ``wanted.ranks[r]`` to each rank r, in one exchange.

    ``shape``: full shape [.., S, D + E] of the keys joined with values: S positions, keys of size D, values of size E.
    ``have``: sharding of this full tensor.
    """
    boxes = boxes_of(shape, have, replaced(have, len(have) - 2, wanted), axis.index, axis.size)
    return KeyFlow((Parcel(wanted.runs[axis.index], boxes),), axis)


def ring_of_keys(shape: Sequence[int], have: Sets, axis: TensorAxis) -> KeyFlow:
    """Returns the key flow of ring attention: rank i first uses its own keys, then the keys of rank i - 1, i - 2, ...

    ``shape``: full shape [.., S, D + E] of the keys joined with values: S positions, keys of size D, values of size E.
    ``have``: sharding of this full tensor.
    """
    index = have[-2]
    assert index is not None, "the keys of a ring are sharded"
    ranks, parcels = axis.size, [Parcel(index.runs[axis.index])]
    for step in range(1, ranks):
        wanted = Index.of_runs((index.runs[(rank - step) % ranks] for rank in range(ranks)), index.size)
        boxes = boxes_of(shape, have, replaced(have, len(have) - 2, wanted), axis.index, ranks)
        parcels.append(Parcel(wanted.runs[axis.index], boxes))
    return KeyFlow(tuple(parcels), axis)
