"""A row layer's product whose sum over the ranks is made inside its kernels (without sequence parallelism).

    one-shot    product to all ranks │ sum                      two ranks: each sends what a ring would
    two-shot    product of each part to its owner │ sum │ to all ranks │ collect

The choice is made from the number of ranks, so that the bytes are those of the plan.

Shape suffixes: P this rank's shard of the features, O outputs, M rows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.kernels.ops.linear import product
from engine.parallel.comm.symmetric.symmetric_buffer import SymmetricBuffer
from engine.parallel.tensor.collectives import ROW_OUTPUTS, refuse_second_derivatives
from engine.parallel.tensor.deferred_linear import is_conv1d, unless_added, weight_gradient
from engine.parallel.tensor.overlap.fused_moves import completion, fits, fuses, in_shape
from engine.parallel.tensor.tp_axis import TensorAxis

_ONE_SHOT = 2
"""Ranks for which sending everything to everybody sends no more than a ring."""


def sums_in_kernel(layer: nn.Module, x: Tensor, axis: TensorAxis) -> bool:
    """Whether :func:`multiply_and_sum` can take the layer's product of ``x`` [.., P]; the same on all ranks."""
    weight = layer._parameters.get("weight")
    if not fuses(axis) or weight is None or "multiply" in vars(layer):  # parametrized, or its backward is split
        return False
    if weight.dtype != x.dtype or torch.is_autocast_enabled(x.device.type) or not x.numel():
        return False
    buffer, matrix = axis.symmetric, weight if is_conv1d(layer) else weight.t()
    parts = 1 if axis.size == _ONE_SHOT else axis.size
    rows, rest = divmod(x.numel() // x.shape[-1], parts)
    if buffer is None or rest:
        return False
    return fits(buffer, x.reshape(1, -1, x.shape[-1])[:, :rows], matrix, rows * matrix.shape[1] * x.element_size())


def multiply_and_sum(layer: nn.Module, x: Tensor, axis: TensorAxis) -> Tensor:
    """x [.., P] -> y [.., O], the sum of x W' over the ranks, without the bias."""
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
            found.append((_one_shot if axis.size == _ONE_SHOT else _two_shot)(x_MP, matrix_PO, axis.symmetric))
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


def _one_shot(x_MP: Tensor, matrix_PO: Tensor, buffer: SymmetricBuffer) -> Tensor:
    from engine.kernels.gpu.overlap.launches import KernelCall, launch_product_scatter, launch_sum_slots

    at = KernelCall(buffer.mailbox, buffer.next_epoch())
    launch_product_scatter(x_MP[None], matrix_PO, None, at, x_MP.dtype)
    return launch_sum_slots(1, x_MP.shape[0], matrix_PO.shape[1], at, x_MP.dtype)


def _two_shot(x_MP: Tensor, matrix_PO: Tensor, buffer: SymmetricBuffer) -> Tensor:
    from engine.kernels.gpu.overlap.launches import (
        KernelCall,
        launch_collect_slots,
        launch_forward_slots,
        launch_product_scatter,
        launch_sum_slots,
    )

    ranks, at = buffer.mailbox.ranks, KernelCall(buffer.mailbox, buffer.next_epoch())
    rows = x_MP.shape[0] // ranks
    launch_product_scatter(x_MP.view(1, ranks, rows, -1), matrix_PO, None, at, x_MP.dtype)
    part = launch_sum_slots(1, rows, matrix_PO.shape[1], at, x_MP.dtype)[0]
    at = KernelCall(buffer.mailbox, buffer.next_epoch())
    launch_forward_slots(part, at)
    return launch_collect_slots(part, at).flatten(0, 1)
