"""Matrix products of tensors sharded along the sequence, in chunks: one chunk is sent while another is multiplied.

    gather_multiply     x [.., S/T, I] ── gathered ── x W' [.., S, O]     backward: multiply_scatter of dy and W
    multiply_scatter    x [.., S, P] ── x W' ── reduce-scattered [.., S/T, O]      backward: gather_multiply of dy and W

A chunk is the same slice of every rank's rows, so its product has rows of all ranks, written in rank order:

    rank 0  a0 a1 | rank 1  b0 b1      chunk 0: a0 b0      chunk 1: a1 b1      result: a0 a1 b0 b1

One chunk means gather, then multiply, or multiply, then scatter: for devices without overlap and small tensors
(:func:`choose_pieces`, ``TensorAxis.overlap``). The weight gradient is computed while the last sum of the input
gradient is in flight, from the gathered input, which is saved. Results equal those of one chunk up to rounding.

In a region the first column layer gathers its input this way, and the others share the gathered rows
(:class:`SharedInPieces`); the row layer scatters its product (:func:`scatter_product`).

A :class:`~engine.parallel.tensor.overlap.moves.Moves` implements both products: with collectives, or in one kernel that
communicates (:mod:`~engine.parallel.tensor.overlap.fused_moves`) if the axis has symmetric memory.

Shape suffixes: T tensor ranks, S the sequence, I inputs, O outputs, P this rank's shard of the inputs.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import EngineError
from engine.kernels.overlap import Operation
from engine.parallel.tensor.collectives import (
    COLUMN_INPUTS,
    ROW_OUTPUTS,
    check_parts,
    gather_to,
    join_parts,
    refuse_second_derivatives,
    split_parts,
)
from engine.parallel.tensor.deferred_linear import bias_gradient, followed, is_conv1d, unless_added, weight_gradient
from engine.parallel.tensor.overlap.async_input_grad import Shared, has_own_weights
from engine.parallel.tensor.overlap.fused_moves import FUSED_MOVES, fuses
from engine.parallel.tensor.overlap.moves import PLAIN_MOVES, Moves, Route
from engine.parallel.tensor.tp_axis import TensorAxis

MOST_PIECES = 4
"""Maximum number of chunks of a product; more chunks cost launches and hide little more time."""


@dataclass(frozen=True, slots=True)
class Pieced:
    """Settings of a matrix product that communicates over ``axis`` in chunks of rows, to overlap transfers and compute.

    ``label``: label of its collectives.
    """

    axis: TensorAxis
    label: str
    pieces: int | None = None
    """Number of chunks; None: :func:`choose_pieces`."""
    transposed: bool = False
    """True if the weight is stored as [I, O]."""
    chosen: Moves | None = None
    """Implementation of both products; None: communicating kernels if the axis has them, else collectives."""

    @property
    def moves(self) -> Moves:
        """Functions that multiply and communicate: the field ``chosen`` if set, else fused kernels if the axis supports
        them, else collectives.
        """
        return self.chosen or (FUSED_MOVES if fuses(self.axis) else PLAIN_MOVES)

    def route(self, part: Tensor) -> Route:
        """Returns axis, label and number of chunks for the communication of ``part``, this rank's rows."""
        pieces = choose_pieces(part.shape[-2], part.numel() * part.element_size(), part.device.type, self.axis)
        return Route(self.axis, self.label, pieces if self.pieces is None or self.axis.dry else self.pieces)

    def matrix(self, weight: Tensor) -> Tensor:
        """Returns ``weight`` as a view [I, O] (inputs, outputs). ``weight`` is [O, I], or [I, O] if ``transposed`` is
        True.
        """
        return weight if self.transposed else weight.t()

    def back(self, weight: Tensor, dy: Tensor) -> Tensor:
        """Returns ``weight`` as W [O, I] in the dtype of the output gradient ``dy``, for the input gradient dy W."""
        return self.matrix(weight.to(dy.dtype)).t()


def choose_pieces(rows: int, size: int, device: str, axis: TensorAxis) -> int:
    """Returns the number of chunks in which to send this rank's ``rows`` rows, with ``size`` bytes in all.

    It is the largest divisor of ``rows`` up to ``MOST_PIECES`` with at least ``axis.overlap.bytes`` per chunk. It is 1
    in a dry run, on one rank, and if transfers on a device of type ``device`` do not overlap compute.
    """
    devices, least = axis.overlap
    if device not in devices or axis.dry or axis.size == 1:
        return 1
    return next((n for n in range(MOST_PIECES, 1, -1) if rows % n == 0 and size >= n * least), 1)


def gather_multiply(x: Tensor, weight: Tensor, bias: Tensor | None, pieced: Pieced) -> tuple[Tensor, Tensor]:
    """Gathers ``x`` [.., S/T, I] over the T ranks of "tp" in chunks, and multiplies each chunk while the next arrives.
    Returns (product plus ``bias`` [.., S, O], gathered ``x`` [.., S, I]).

    Backward reduce-scatters the gradient of the gathered ``x``.

    Raises:
        EngineError: ``pieced.pieces`` does not divide the rows.
    """
    _check_pieces(x, pieced)
    y, whole = _GatherMultiply.apply(x, weight, bias, pieced)  # type: ignore[no-untyped-call]
    if torch.is_grad_enabled() and x.requires_grad:
        pieced.axis.expect("reduce_scatter", pieced.label, _whole_of(x, pieced.axis), y)
    return y, whole


def multiply_scatter(x: Tensor, weight: Tensor, pieced: Pieced) -> Tensor:
    """Multiplies ``x`` [.., S, P], this rank's P features, in chunks, and reduce-scatters the product over the T ranks
    of "tp". Returns this rank's rows [.., S/T, O] of the sum, without the bias.

    Raises:
        EngineError: the number of ranks does not divide the rows, or ``pieced.pieces`` does not divide a rank's rows.
    """
    check_parts(x, pieced.axis, -2)
    _check_pieces(split_parts(x, pieced.axis, x.ndim - 2)[0], pieced)
    y: Tensor = _MultiplyScatter.apply(x, weight, pieced)  # type: ignore[no-untyped-call]
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        pieced.axis.expect("all_gather", pieced.label, _whole_of(y, pieced.axis), y)
    return y


def _check_pieces(part: Tensor, pieced: Pieced) -> None:
    rows, pieces = part.shape[-2], pieced.pieces or 1
    if rows % pieces:
        raise EngineError(
            f"{pieces} pieces were requested of the {rows} rows of a tensor rank, but {pieces} does not divide {rows}; "
            f"choose a number of pieces that divides {rows}, or pass pieces = None."
        )


def _whole_of(part: Tensor, axis: TensorAxis) -> Tensor:
    return part.expand(axis.size, *part.shape)


class _GatherMultiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, pieced: Pieced) -> Any:
        ctx.pieced, ctx.route, ctx.bias = pieced, pieced.route(x), None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        ctx.main = pieced.axis.kernels.main.use(weight)
        dtype = _computed_in(x)
        with torch.autocast(x.device.type, enabled=False):
            b_O = None if bias is None else bias.to(dtype)
            y, whole = pieced.moves.gather(x, pieced.matrix(weight.to(dtype)), b_O, ctx.route)
        ctx.save_for_backward(whole, weight)
        ctx.shape, ctx.dtypes = y.shape, (x.dtype, y.dtype)
        return y, whole

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dwhole: Tensor | None) -> Any:
        refuse_second_derivatives()
        whole, weight = ctx.saved_tensors
        pieced, route, (dtype_x, dtype_y) = ctx.pieced, ctx.route, ctx.dtypes
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if dy is None:  # only the layers that share the gathered x were used
            dy = weight.new_zeros(ctx.shape, dtype=dtype_y)
        sums = pieced.moves.scatter(dy, pieced.back(weight, dy), dwhole, dtype_x, route) if needs_x else None
        dw, db = None, bias_gradient(dy, ctx.bias) if needs_bias else None
        if needs_weight:
            kernels = pieced.axis.kernels
            compute = partial(weight_gradient, whole.to(dy.dtype), dy, weight.dtype, pieced.transposed, kernels)
            dw = unless_added(compute, ctx.main, ctx.next_functions[1][0])
        return None if sums is None else sums(), dw, db, None


class _MultiplyScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, pieced: Pieced) -> Tensor:
        part = split_parts(x, pieced.axis, x.ndim - 2)[0]
        ctx.pieced, ctx.route, ctx.main = pieced, pieced.route(part), pieced.axis.kernels.main.use(weight)
        ctx.save_for_backward(x, weight)
        dtype = _computed_in(x)
        with torch.autocast(x.device.type, enabled=False):
            matrix = pieced.matrix(weight.to(dtype))
            return pieced.moves.scatter(x.to(dtype), matrix, None, dtype, ctx.route)()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        refuse_second_derivatives()
        x, weight = ctx.saved_tensors
        pieced, route = ctx.pieced, ctx.route
        needs_x, needs_weight, _ = ctx.needs_input_grad
        dx, dw = None, None
        if needs_x:
            dx, whole = pieced.moves.gather(dy, pieced.back(weight, dy), None, route)
            dx = dx.to(x.dtype)
        else:
            whole = join_parts(route.axis.all_gather(dy.contiguous(), route.label), dy.ndim - 2)
        if needs_weight:
            kernels = pieced.axis.kernels
            compute = partial(weight_gradient, x.to(dy.dtype), whole, weight.dtype, pieced.transposed, kernels)
            dw = unless_added(compute, ctx.main, ctx.next_functions[1][0])
        return dx, dw, None


def _computed_in(x: Tensor) -> torch.dtype:
    """Returns the dtype in which a product of x is computed; autocast leaves float64 as it is."""
    casts = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
    return torch.get_autocast_dtype(x.device.type) if casts else x.dtype


class SharedInPieces(Shared):
    """Input of several column layers, sharded along the sequence.

    The first plain linear layer gathers it in chunks while it multiplies; other layers read the gathered rows.
    """

    def __init__(self, part: Tensor, axis: TensorAxis, plain: list[nn.Module]) -> None:
        self._part, self._axis, self._plain = part, axis, plain
        self._whole: Tensor | None = None

    @property
    def copy(self) -> Tensor:  # type: ignore[override]
        """Rows of the input, gathered from all ranks at the first use: [.., S, I]."""
        if self._whole is None:
            self._whole = gather_to(self._part, self._axis, self._part.ndim - 2, COLUMN_INPUTS)
        return self._whole

    def multiply(self, layer: nn.Module) -> Tensor:
        """Returns the product of ``layer`` with the rows of all ranks. The first plain linear layer gathers the rows in
        chunks while it multiplies.
        """
        if self._whole is None and any(layer is other for other in self._plain) and has_own_weights(layer):
            weight, bias = layer._parameters["weight"], layer._parameters["bias"]
            assert weight is not None
            pieced = Pieced(self._axis, COLUMN_INPUTS, transposed=is_conv1d(layer))
            y, self._whole = gather_multiply(self._part, weight, bias, pieced)
            return followed(layer, y, self._axis.kernels)
        own: Any = layer
        product: Tensor = own.multiply(self.copy)
        return product


def is_in_pieces(rows: int, part: Tensor, axis: TensorAxis, operation: Operation) -> bool:
    """Returns True if a product should communicate in chunks or kernel tiles: kernels may communicate for it, or its
    input is large enough to divide. Always False if transfers over ``axis`` are quantized.

    ``part``: one rank's rows of the product's input; ``rows``: their number; ``operation``: kind of product.
    """
    if axis.wire is not None:
        return False
    size = part.numel() * part.element_size()
    return _is_fused(part, axis, operation) or choose_pieces(rows, size, part.device.type, axis) > 1


def _is_fused(part: Tensor, axis: TensorAxis, operation: Operation) -> bool:
    """Returns True if kernels may communicate for a product of ``part`` or its gradient; the other size is unknown."""
    if axis.measured is None or not fuses(axis) or not part.numel():
        return fuses(axis)
    width = part.shape[-1]
    rows = axis.size * part.numel() // width
    backward: Operation = "product_scatter" if operation == "gather_product" else "gather_product"
    return axis.measured.may_fuse(operation, rows, part.dtype, depth=width) or axis.measured.may_fuse(
        backward, rows, part.dtype, columns=width
    )


def scatter_product(layer: nn.Module, x: Tensor, axis: TensorAxis) -> Tensor:
    """Returns the product of the row layer ``layer`` with ``x`` [.., S, P], reduce-scattered over the T ranks of "tp",
    without the bias: this rank's rows [.., S/T, O].
    """
    weight = layer._parameters["weight"]
    assert weight is not None
    return multiply_scatter(x, weight, Pieced(axis, ROW_OUTPUTS, transposed=is_conv1d(layer)))
