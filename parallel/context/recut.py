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
    """Slices of a resharding: elements that a rank sends to and receives from each rank; its own are copied."""

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
        """Boxes of the reverse resharding, from the result to the local tensor."""
        shape, have, want = self.ways
        ways = shape, want, have
        return Boxes(self.gets, self.gives, self.get_sizes, self.give_sizes, self.made, self.given, ways)

    def expect(self, axis: TensorAxis, label: str, x: Tensor, made: Tensor | None = None) -> None:
        """Reports the bytes that each rank sends to the listener of a dry ``axis``; see ``TensorAxis.expect_rows``.

        ``x``: the local tensor, or one of its dtype.
        """
        if axis.dry:
            elements = sent_elements(*self.ways, axis.size)
            axis.expect_rows(label, tuple(count * x.element_size() for count in elements), x, made)


def boxes_of(shape: Sequence[int], have: Sets, want: Sets, rank: int, ranks: int) -> Boxes:
    """Returns the boxes with which ``rank`` reshards a tensor of ``shape`` from ``have`` to ``want``; sends nothing.

    Raises:
        NoRuleError: several ranks store an element of ``have``.
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
    """Returns the number of elements that each rank sends to other ranks when ``have`` is resharded to ``want``."""

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
    """Returns the elements of ``x`` in ``box``: a view if the places of each dim are neighbours."""
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
    """Writes ``piece`` to the places ``box`` of ``into``; with ``add``, adds it."""
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


def start_send(x: Tensor, boxes: Boxes, axis: TensorAxis, label: str, add: bool = False) -> tuple[Tensor, Wait]:
    """Starts a resharding of ``x`` over ``axis``; returns the new shard, and a function that waits for its completion.

    ``add``: sums the values of an element that several ranks send; otherwise one rank sends it.
    """
    own, others = axis.index, [rank for rank in range(axis.size) if rank != axis.index]
    boxes.expect(axis, label, x)
    made = (x.new_zeros if add else x.new_empty)(boxes.made)
    gives = [0 if rank == own else math.prod(size) for rank, size in enumerate(boxes.give_sizes)]
    gets = [0 if rank == own else math.prod(size) for rank, size in enumerate(boxes.get_sizes)]
    sent = [take(x, boxes.gives[rank]).reshape(-1) for rank in others if gives[rank]]
    packed = torch.cat(sent) if len(sent) > 1 else sent[0].contiguous() if sent else x.new_empty(0)
    received, pending = axis.start_exchange(packed, gives, gets, label)
    put(made, boxes.gets[own], take(x, boxes.gives[own]), add)

    def place() -> None:
        pending.wait()
        parts = torch.split(received, gets)
        for rank in others:  # in the order of ranks, so that sums do not depend on arrival
            if gets[rank]:
                put(made, boxes.gets[rank], parts[rank].view(boxes.get_sizes[rank]), add)

    return made, place


def recut(x: GlobalTensor, sets: Sets, label: str) -> GlobalTensor:
    """Reshards ``x`` to ``sets``, in which several ranks may store an element. Communicates over the axis of ``x``.

    Raises:
        NoRuleError: several ranks store an element of ``x``.
    """
    if x.sets == sets:
        return x
    context, axis = x.views, x.views.axis
    key = ("recut", x.full, x.sets, sets)
    boxes = context.find(key, lambda: boxes_of(x.full, x.sets, sets, axis.index, axis.size))
    made: Tensor = _Recut.apply(x.local, boxes, axis, label)  # type: ignore[no-untyped-call]
    if torch.is_grad_enabled() and made.requires_grad:
        boxes.back.expect(axis, label, made, made)
    return GlobalTensor(made, x.full, sets, context)


class _Recut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, boxes: Boxes, axis: TensorAxis, label: str) -> Tensor:
        ctx.boxes, ctx.axis, ctx.label = boxes, axis, label
        made, wait = start_send(x, boxes, axis, label)
        wait()
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_second_derivatives()
        made, wait = start_send(grad, ctx.boxes.back, ctx.axis, ctx.label, add=True)
        wait()
        return made, None, None, None
