"""Exchange of a global tensor's elements between ranks: from the indices that they store to those that they want.

    gather      wanted: all                       heads       S sharded -> heads sharded (Ulysses)
    need        wanted: keys that a query sees    halo        wanted: own positions and their neighbours

Every rank computes the boxes of all messages from the index sets, so no sizes are exchanged and no host waits. Backward
sends the same boxes back, and the rank that stores an element adds what it receives.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.parallel.comm.backend import Wait
from engine.parallel.tensor.collectives import refuse_second_derivatives
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.global_tensor.index_runs import Runs, as_slices, indices_of, meet, places_in, run_length
from engine.parallel.tensor.global_tensor.index_sets import Index, NoRuleError, Sets, held_once
from engine.parallel.tensor.global_tensor.operands import FEW_RUNS
from engine.parallel.tensor.tp_axis import TensorAxis

Places = tuple[Runs | None, ...]
"""Box of a local tensor: places of each dim; None: all."""


class Boxes(NamedTuple):
    """Plan of a resharding on one rank: the slices that it sends to each rank, and the places of the slices that it
    receives.
    """

    gives: tuple[Places, ...]
    """Box of the local tensor that each rank wants."""
    gets: tuple[Places, ...]
    """Box of the result that each rank sends."""
    give_sizes: tuple[tuple[int, ...], ...]
    get_sizes: tuple[tuple[int, ...], ...]
    """Shapes of the boxes."""
    given: tuple[int, ...]
    made: tuple[int, ...]
    """Shapes of the local tensor and of the result."""
    ways: tuple[tuple[int, ...], Sets, Sets]
    """Full shape, sharding of the local tensors, and sharding of the results."""

    @property
    def back(self) -> "Boxes":
        """Plan of the reverse resharding."""
        shape, have, want = self.ways
        ways = shape, want, have
        return Boxes(self.gets, self.gives, self.get_sizes, self.give_sizes, self.made, self.given, ways)

    def sent(self, x: Tensor, ranks: int) -> list[int]:
        """Returns the bytes that each of ``ranks`` ranks sends, for the dtype of ``x``."""
        return [count * x.element_size() for count in sent_elements(*self.ways, ranks)]


def boxes_of(shape: Sequence[int], have: Sets, want: Sets, rank: int, ranks: int) -> Boxes:
    """Returns the plan by which rank ``rank`` of ``ranks`` reshards a tensor of full ``shape`` from ``have`` to
    ``want``.

    A sharding has, for each dim, the indices on each rank; None: an unsharded dim. Communicates nothing.

    Raises:
        NoRuleError: several ranks store an element under ``have``.
    """
    if not held_once(have):
        raise NoRuleError("elements that several ranks store have no single sender.")
    sizes = partial(_sizes, shape)
    gives = [_box(have, want, rank, other) for other in range(ranks)]
    gets = [_box(want, have, rank, other) for other in range(ranks)]
    return Boxes(
        tuple(box for box, _ in gives), tuple(box for box, _ in gets),
        tuple(tuple(_counted(met, shape)) for _, met in gives), tuple(tuple(_counted(met, shape)) for _, met in gets),
        sizes(have, rank), sizes(want, rank), (tuple(shape), have, want),
    )  # fmt: skip


def sent_elements(shape: Sequence[int], have: Sets, want: Sets, ranks: int) -> tuple[int, ...]:
    """Returns the number of elements that each of ``ranks`` ranks sends in a resharding from ``have`` to ``want``.

    ``shape``: full shape of the tensor.
    """

    def met(rank: int, other: int) -> int:
        both = [_common(_runs_on(own, rank), _runs_on(its, other)) for own, its in zip(have, want, strict=True)]
        return math.prod(_counted(both, shape))

    return tuple(sum(met(rank, other) for other in range(ranks) if other != rank) for rank in range(ranks))


def _sizes(shape: Sequence[int], sets: Sets, rank: int) -> tuple[int, ...]:
    return tuple(size if index is None else index.counts[rank] for size, index in zip(shape, sets, strict=True))


def _counted(met: Sequence[Runs | None], shape: Sequence[int]) -> list[int]:
    return [size if runs is None else run_length(runs) for size, runs in zip(shape, met, strict=True)]


def _box(own: Sets, theirs: Sets, rank: int, other: int) -> tuple[Places, list[Runs | None]]:
    """Returns the places, in the shard ``own`` of ``rank``, of the indices that ``theirs`` has on ``other``, and these
    indices."""
    places: list[Runs | None] = []
    met: list[Runs | None] = []
    for mine, its in zip(own, theirs, strict=True):
        both = _common(_runs_on(mine, rank), _runs_on(its, other))
        met.append(both)
        if both is None or (mine is not None and both is mine.runs[rank]):
            places.append(None)
        else:
            inside = both if mine is None else places_in(mine.runs[rank], both)
            assert inside is not None, "an intersection is a part of both sets"
            places.append(inside if mine is None or run_length(inside) < mine.counts[rank] else None)
    return tuple(places), met


def _runs_on(index: Index | None, rank: int) -> Runs | None:
    return None if index is None else index.runs[rank]


def _common(a: Runs | None, b: Runs | None) -> Runs | None:
    if a is None or b is None:
        return a if b is None else b
    return meet(a, b)


def take(x: Tensor, box: Places) -> Tensor:
    """Returns the elements of ``x`` at ``box``, the places along each dim; a view if the places are contiguous."""
    for dim, runs in enumerate(box):
        if runs is None:
            continue
        if len(runs) <= FEW_RUNS:
            pieces = [x.narrow(dim, one.start, one.stop - one.start) for one in as_slices(runs)]
            x = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim) if pieces else x.narrow(dim, 0, 0)
        else:
            x = x.index_select(dim, torch.as_tensor(indices_of(runs), device=x.device))
    return x


def put(into: Tensor, box: Places, piece: Tensor, add: bool = False) -> None:
    """Writes ``piece`` to the elements of ``into`` at ``box``, the places along each dim; ``add`` adds it instead."""
    split = next((dim for dim, runs in enumerate(box) if runs is not None), None)
    if split is None:
        _ = into.add_(piece) if add else into.copy_(piece)
        return
    runs, rest = box[split], (*box[:split], None, *box[split + 1 :])
    assert runs is not None
    if len(runs) > FEW_RUNS and all(each is None for each in rest):
        places = torch.as_tensor(indices_of(runs), device=into.device)
        _ = into.index_add_(split, places, piece) if add else into.index_copy_(split, places, piece)
        return
    start = 0
    for one in as_slices(runs):
        length = one.stop - one.start
        put(into.narrow(split, one.start, length), rest, piece.narrow(split, start, length), add)
        start += length


def read(x: Tensor, box: Places, into: Tensor) -> None:
    """Copies the elements of ``x`` at ``box``, the places along each dim, to the tensor ``into``."""
    split = next((dim for dim, runs in enumerate(box) if runs is not None), None)
    if split is None:
        into.copy_(x)
        return
    runs, rest = box[split], (*box[:split], None, *box[split + 1 :])
    assert runs is not None
    if len(runs) > FEW_RUNS:
        read(x.index_select(split, torch.as_tensor(indices_of(runs), device=x.device)), rest, into)
        return
    start = 0
    for one in as_slices(runs):
        length = one.stop - one.start
        read(x.narrow(split, one.start, length), rest, into.narrow(split, start, length))
        start += length


class Way(NamedTuple):
    """Plan of one tensor's resharding in an exchange.

    ``add``: True adds received values to zeros, since several ranks or none may send an element; False: exactly one
    rank sends each.
    """

    boxes: Boxes
    add: bool = False


def start_send(x: Tensor, way: Way, axis: TensorAxis, label: str) -> tuple[Tensor, Wait]:
    """Starts to reshard the local tensor ``x`` by the plan ``way`` over ``axis``.

    Returns this rank's new shard, and a function that waits until the shard is complete. ``label``: name of the
    exchange in traffic counts.
    """
    (made,), wait = start_together((x,), (way,), axis, label)
    return made, wait


def start_together(
    given: Sequence[Tensor], ways: Sequence[Way], axis: TensorAxis, label: str
) -> tuple[list[Tensor], Wait]:
    """Starts to reshard the local tensors ``given``, of one dtype, by the plans ``ways``, in one exchange over
    ``axis``.

    Returns this rank's new shards, and a function that waits until they are complete. ``label``: name of the exchange
    in traffic counts.
    """
    own, others = axis.index, [rank for rank in range(axis.size) if rank != axis.index]
    expect(given, [way.boxes for way in ways], axis, label)
    made = [(x.new_zeros if way.add else x.new_empty)(way.boxes.made) for x, way in zip(given, ways, strict=True)]
    gives, gets = [0] * axis.size, [0] * axis.size
    for rank in others:
        gives[rank] = sum(math.prod(way.boxes.give_sizes[rank]) for way in ways)
        gets[rank] = sum(math.prod(way.boxes.get_sizes[rank]) for way in ways)
    received, pending = axis.start_exchange(_packed(given, ways, others), gives, gets, label)
    for x, into, (boxes, add) in zip(given, made, ways, strict=True):
        here = boxes.gets[own]
        if add or any(runs is not None and len(runs) != 1 for runs in here):
            put(into, here, take(x, boxes.gives[own]), add)
        else:
            read(x, boxes.gives[own], take(into, here))

    def place() -> None:
        pending.wait()
        sizes = [math.prod(way.boxes.get_sizes[rank]) for rank in others for way in ways]
        parts = iter(torch.split(received, sizes))
        for rank in others:  # in the order of ranks, so that sums do not depend on arrival
            for into, (boxes, add) in zip(made, ways, strict=True):
                part = next(parts)
                if part.numel():
                    put(into, boxes.gets[rank], part.view(boxes.get_sizes[rank]), add)

    return made, place


def _packed(given: Sequence[Tensor], ways: Sequence[Way], others: Sequence[int]) -> Tensor:
    """Returns the elements for each of the ``others``, tensor after tensor, in a new tensor; a single one as it is."""
    pieces = [
        (x, way.boxes.gives[rank], way.boxes.give_sizes[rank])
        for rank in others
        for x, way in zip(given, ways, strict=True)
        if math.prod(way.boxes.give_sizes[rank])
    ]
    if len(pieces) == 1:
        x, box, _ = pieces[0]
        return take(x, box).contiguous().view(-1)
    packed = given[0].new_empty(sum(math.prod(size) for *_, size in pieces))
    start = 0
    for x, box, size in pieces:
        stop = start + math.prod(size)
        read(x, box, packed[start:stop].view(size))
        start = stop
    return packed


def expect(
    given: Sequence[Tensor], boxes: Sequence[Boxes], axis: TensorAxis, label: str, made: Tensor | None = None
) -> None:
    """Reports to ``axis.listener``, if ``axis.dry``, the bytes that each rank would send to reshard ``given`` by the
    plans ``boxes``.

    ``made``: result of the forward, if backward runs the exchange, in ``made.grad_fn``; None: forward runs it.
    """
    if axis.dry:
        sizes = (each.sent(x, axis.size) for x, each in zip(given, boxes, strict=True))
        axis.expect_rows(label, tuple(map(sum, zip(*sizes, strict=True))), given[0], made)


def recut(given: Sequence[GlobalTensor], wanted: Sequence[Sets], label: str) -> list[GlobalTensor]:
    """Reshards the global tensors ``given`` to the shardings ``wanted``, in one exchange over their axis.

    All of ``given`` have the same dtype and ``GlobalTensorContext``. In ``wanted``, several ranks may store an element.
    Backward reshards the gradients back.

    Raises:
        NoRuleError: several ranks store an element of a tensor in ``given``.
    """
    context, axis = given[0].views, given[0].views.axis

    def boxes(x: GlobalTensor, sets: Sets) -> Boxes:
        return context.find(
            ("recut", x.full, x.sets, sets), lambda: boxes_of(x.full, x.sets, sets, axis.index, axis.size)
        )

    every = [boxes(x, sets) for x, sets in zip(given, wanted, strict=True)]
    made: tuple[Tensor, ...] = _Recut.apply(every, axis, label, *(x.local for x in given))  # type: ignore[no-untyped-call]
    if torch.is_grad_enabled() and any(x.requires_grad for x in made):
        expect(made, [each.back for each in every], axis, label, made[0])
    pairs = zip(given, made, wanted, strict=True)
    return [GlobalTensor(local, x.full, sets, context) for x, local, sets in pairs]


class _Recut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, every: list[Boxes], axis: TensorAxis, label: str, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.every, ctx.axis, ctx.label = every, axis, label
        made, wait = start_together(given, [Way(boxes) for boxes in every], axis, label)
        wait()
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        refuse_second_derivatives("cp")
        ways = [Way(boxes.back, add=not held_once(boxes.ways[2])) for boxes in ctx.every]
        made, wait = start_together(grads, ways, ctx.axis, ctx.label)
        wait()
        return None, None, None, *made
