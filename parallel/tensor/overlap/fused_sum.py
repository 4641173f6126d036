"""Product of a row layer that sums over the ranks inside its kernels (without sequence parallelism).

    one-shot    product to all ranks │ sum                      two ranks: as many bytes as a ring sends
    two-shot    product of each part to its owner │ sum │ to all ranks │ collect
    by switch   product stays │ the switch sums, and sends to all ranks │ collect      if the GPUs have multicast

The choice depends on the number of ranks, so that the bytes equal the bytes of the plan.

Shape suffixes: P this rank's shard of the features, O outputs, M rows.
"""

from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine.kernels.ops.linear import product
from engine.kernels.overlap import ProductSizes
from engine.parallel.comm.symmetric_memory import SymmetricBuffer
from engine.parallel.tensor.collectives import ROW_OUTPUTS, refuse_second_derivatives
from engine.parallel.tensor.deferred_linear import is_conv1d, unless_added, weight_gradient
from engine.parallel.tensor.overlap.fused_moves import (
    completion,
    fits,
    fuses,
    in_shape,
    measured_row,
    runs_in_kernel,
    tile_for,
)
from engine.parallel.tensor.tp_axis import TensorAxis

if TYPE_CHECKING:
    from engine.kernels.gpu.launch_shapes import Tile  # needs Triton
    from engine.kernels.gpu.overlap.launches import KernelCall

_ONE_SHOT = 2
"""Ranks up to which an exchange of all data sends no more bytes than a ring."""


def sums_in_kernel(layer: nn.Module, x: Tensor, axis: TensorAxis) -> bool:
    """Returns True if :func:`multiply_and_sum` can compute the product of ``layer`` and ``x`` [.., P]. The answer is
    the same on all ranks.
    """
    weight = layer._parameters.get("weight")
    if not fuses(axis) or weight is None or "multiply" in vars(layer):  # parametrized, or the backward is split
        return False
    if weight.dtype != x.dtype or torch.is_autocast_enabled(x.device.type) or not x.numel():
        return False
    buffer, matrix = axis.symmetric, weight if is_conv1d(layer) else weight.t()
    parts = 1 if axis.size == _ONE_SHOT else axis.size
    rows, rest = divmod(x.numel() // x.shape[-1], parts)
    sizes = ProductSizes(parts * rows, *matrix.shape[::-1])
    if buffer is None or rest or not runs_in_kernel(axis, "product_sum", sizes, x.dtype):
        return False
    row, size = measured_row(axis, "product_sum", sizes, x.dtype), rows * matrix.shape[1] * x.element_size()
    return fits(buffer, x.reshape(1, -1, x.shape[-1])[:, :rows], matrix, size, row)


def multiply_and_sum(layer: nn.Module, x: Tensor, axis: TensorAxis) -> Tensor:
    """Returns y [.., O], the product of ``layer`` and ``x`` [.., P] without the bias, summed over the ranks of
    ``axis``. P: this rank's features.

    Communicating kernels replace the all-reduce.
    """
    weight = layer._parameters["weight"]
    y: Tensor = _MultiplyAndSum.apply(x, weight, axis, is_conv1d(layer))  # type: ignore[no-untyped-call]
    return y


class _MultiplyAndSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: TensorAxis, transposed: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.transposed, ctx.main = axis, transposed, axis.kernels.main.use(weight)
        matrix_PO = weight if transposed else weight.t()
        x_MP, found = x.reshape(-1, x.shape[-1]).contiguous(), list[Tensor]()
        full = torch.empty((x_MP.shape[0], matrix_PO.shape[1]), dtype=x.dtype, device="meta")

        def call() -> Callable[[], None]:
            assert axis.symmetric is not None
            sizes = ProductSizes(x_MP.shape[0], *matrix_PO.shape[::-1])
            tile = tile_for(measured_row(axis, "product_sum", sizes, x.dtype), x.dtype)
            found.append(last_turn(sum_in_turns(x_MP, matrix_PO, partial(_next_call, axis.symmetric, tile))))
            return completion(axis.symmetric, x.device)

        axis.in_kernel("all_reduce", full, ROW_OUTPUTS, call).wait()
        return in_shape(found[0], (*x.shape[:-1], matrix_PO.shape[1]))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        refuse_second_derivatives()
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        kernels = ctx.axis.kernels
        dx = product(dy, weight.t() if ctx.transposed else weight, kernels) if needs_x else None
        if not needs_weight:
            return dx, None, None, None
        compute = partial(weight_gradient, x, dy, weight.dtype, ctx.transposed, kernels)
        return dx, unless_added(compute, ctx.main, ctx.next_functions[1][0]), None, None


def _next_call(buffer: SymmetricBuffer, tile: "Tile") -> "KernelCall":
    from engine.kernels.gpu.overlap.launches import KernelCall

    return KernelCall(buffer.mailbox, buffer.next_epoch(), tile)


def sum_in_turns(
    x_MP: Tensor, matrix_PO: Tensor, next_call: "Callable[[], KernelCall]"
) -> Generator[None, None, Tensor]:
    """Computes the sum over the ranks of ``x_MP @ matrix_PO`` [M, O], as a generator that returns the sum.

    Yields before each kernel launch that waits for other ranks. ``next_call``: callback that returns the settings of
    the next kernel call.
    """
    from engine.kernels.gpu.overlap.launches import (
        launch_collect_slots,
        launch_forward_slots,
        launch_multicast_sum,
        launch_product_scatter,
        launch_sum_slots,
    )

    at, columns = next_call(), matrix_PO.shape[1]
    ranks = at.mailbox.ranks
    if ranks == _ONE_SHOT:
        launch_product_scatter(x_MP[None], matrix_PO, None, at, x_MP.dtype)
        yield
        return launch_sum_slots(1, x_MP.shape[0], columns, at, x_MP.dtype)
    rows, switches = x_MP.shape[0] // ranks, bool(at.mailbox.multicast)
    launch_product_scatter(x_MP.view(1, ranks, rows, -1), matrix_PO, None, at, x_MP.dtype, stays=switches)
    yield
    if switches:
        part = x_MP.new_empty((rows, columns))
        launch_multicast_sum(rows, columns, at, x_MP.dtype)
        at = next_call()
    else:
        part = launch_sum_slots(1, rows, columns, at, x_MP.dtype)[0]
        at = next_call()
        launch_forward_slots(part, at)
    yield
    return launch_collect_slots(part, at).flatten(0, 1)


def last_turn(turns: Generator[None, None, Tensor]) -> Tensor:
    """Runs the generator ``turns`` of :func:`sum_in_turns` to its end and returns its return value, the sum."""
    while True:
        try:
            next(turns)
        except StopIteration as end:
            result: Tensor = end.value
            return result
