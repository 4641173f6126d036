"""Interface of matrix products that gather or scatter rows, and its implementation with collectives.

Shape suffixes: T tensor ranks, S the sequence, I inputs, O outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.ops.linear import LinearForm, linear
from engine.parallel.comm.comm import Pending
from engine.parallel.tensor.collectives import join_parts, split_parts
from engine.parallel.tensor.tp_axis import TensorAxis


@dataclass(frozen=True, slots=True)
class Route:
    """Axis, label and number of chunks for the communication of a matrix product."""

    axis: TensorAxis
    label: str
    pieces: int = 1


def gather_product(part: Tensor, matrix: Tensor, bias: Tensor | None, route: Route) -> tuple[Tensor, Tensor]:
    """Gathers ``part``, this rank's rows, in chunks, and multiplies each chunk by ``matrix`` [I, O] while the next is
    sent. Returns (product plus ``bias``, in the dtype of the matrix; gathered rows). ``route``: axis, label and
    number of chunks.
    """
    axis, label = route.axis, route.label
    if route.pieces == 1:
        whole = join_parts(axis.all_gather(part.contiguous(), label), part.ndim - 2)
        return _product(whole, matrix, bias, route), whole
    pieces = part.chunk(route.pieces, -2)
    whole = part.new_empty((*part.shape[:-2], axis.size * part.shape[-2], part.shape[-1]))
    out = whole.new_empty((*whole.shape[:-1], matrix.shape[-1]), dtype=matrix.dtype)
    coming = axis.start_all_gather(pieces[0].contiguous(), label)
    for index in range(route.pieces):
        rows, pending = coming
        if index + 1 < route.pieces:
            coming = axis.start_all_gather(pieces[index + 1].contiguous(), label)
        pending.wait()
        _piece(out, index, route).copy_(_product(rows, matrix, bias, route))
        _piece(whole, index, route).copy_(rows)
    return out, whole


def product_scatter(
    whole: Tensor, matrix: Tensor, plus: Tensor | None, dtype: torch.dtype, route: Route
) -> Callable[[], Tensor]:
    """Multiplies ``whole``, the rows of the full sequence, by ``matrix``, and adds ``plus`` (this rank's addend in the
    product's shape, or None). Reduce-scatters the result over all ranks, in chunks. Returns a function that waits for
    this rank's rows and returns them in ``dtype``. ``route``: axis, label and number of chunks.
    """
    sent: list[tuple[Tensor, Pending]] = []
    for index in range(route.pieces):
        rows = _product(_piece(whole, index, route), matrix, None, route).to(dtype)
        if plus is not None:
            rows += _piece(plus, index, route)
        sent.append(route.axis.start_reduce_scatter(rows.contiguous(), route.label))

    def wait() -> Tensor:
        for _, pending in sent:
            pending.wait()
        if len(sent) > 1:
            return torch.cat([part for part, _ in sent], -2)
        part = sent[0][0]
        return part.clone() if part._is_view() else part  # a dry run returns a view of the rows

    return wait


def _piece(whole: Tensor, index: int, route: Route) -> Tensor:
    """Returns chunk ``index`` of [.., S, n] as [T, .., S/T/pieces, n], a view."""
    return split_parts(whole, route.axis, whole.ndim - 2).chunk(route.pieces, -2)[index]


def _product(rows: Tensor, matrix: Tensor, bias: Tensor | None, route: Route) -> Tensor:
    return linear(rows.to(matrix.dtype), matrix, bias, LinearForm(transposed=True), route.axis.kernels)


class Moves(NamedTuple):
    """Pair of functions for matrix products with sequence shards: ``gather`` gathers rows, then multiplies them;
    ``scatter`` multiplies, then reduce-scatters the product.
    """

    gather: Callable[[Tensor, Tensor, Tensor | None, Route], tuple[Tensor, Tensor]]
    """As :func:`gather_product`."""
    scatter: Callable[[Tensor, Tensor, Tensor | None, torch.dtype, Route], Callable[[], Tensor]]
    """As :func:`product_scatter`."""


PLAIN_MOVES = Moves(gather_product, product_scatter)
"""Implementation with collectives of the axis."""
