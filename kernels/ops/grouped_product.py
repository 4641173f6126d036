"""Products of experts: rows sorted by expert, one matrix per expert (a grouped GEMM; torch: ``grouped_mm``).

    y[rows of e] = x[rows of e] W_e      dx[rows of e] = dy[rows of e] W_e'      dW_e = x[rows of e]' dy[rows of e]

An expert without rows gets a gradient of zeros. ``tuned.json`` has no row for the Triton kernels ("grouped"), because
they have not been measured: "auto" uses the reference.

Shape suffixes: R rows, X experts, K inputs, N outputs.
"""

from typing import Any

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.kernels.dispatch import Kernels, fused_operator, is_narrow

_ALIGNED = 16
"""Rows of all operands are a multiple of this number of bytes."""


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor, kernels: Kernels) -> Tensor:
    """Multiplies each row of ``x`` [R, K] by the matrix of its expert in ``weight`` [X, K, N]; returns [R, N].
    Differentiable.

    The rows are sorted by expert.

    Args:
        weight: contiguous, or the transpose of a contiguous [X, N, K].
        ends: end index of each expert's rows, integers [X] on the device of ``x``.

    Raises:
        EngineError: the shapes do not match.
    """
    if x.dim() != 2 or weight.dim() != 3 or ends.shape != weight.shape[:1] or x.shape[1] != weight.shape[1]:
        raise EngineError(
            f"rows {tuple(x.shape)}, matrices {tuple(weight.shape)} and ends {tuple(ends.shape)} do not match; "
            "pass rows [R, K], a matrix for each expert [X, K, N] and the end of its rows [X]."
        )
    if not _fits(x, weight) or not kernels.triton("grouped", x, x.shape[1]):
        return grouped_product_reference(x, weight, ends)
    y: Tensor = _grouped_product(x.contiguous(), weight, ends)
    return y


def grouped_product_reference(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Computes :func:`grouped_product` in PyTorch; returns [R, N].

    The host reads ``ends``, so it waits for the device.
    """
    parts = zip(torch.tensor_split(x, ends[:-1].cpu().long()), weight, strict=True)
    return torch.cat([part @ matrix for part, matrix in parts])


def grouped_weight_gradient(x: Tensor, dy: Tensor, weight: Tensor, ends: Tensor, kernels: Kernels) -> Tensor:
    """Returns the gradient [X, K, N] of ``weight`` in :func:`grouped_product`, in the memory order of ``weight``.

    ``dy`` [R, N] is the gradient of the result. ``ends`` [X] has the end index of each expert's rows.
    """
    order = weight.is_contiguous()
    if not _fits(x, weight) or dy.dtype != x.dtype or not kernels.triton("grouped", x, x.shape[1]):
        splits = [torch.tensor_split(rows, ends[:-1].cpu().long()) for rows in ((x, dy) if order else (dy, x))]
        stack = torch.stack([left.t() @ right for left, right in zip(*splits, strict=True)])
        return stack if order else stack.transpose(1, 2)
    return _weight_gradient(x.contiguous(), dy.contiguous(), ends, order)


def _weight_gradient(x: Tensor, dy: Tensor, ends: Tensor, order: bool) -> Tensor:
    left, right = (x, dy) if order else (dy, x)
    found: Tensor = _grouped_weight_gradient(left, right, ends)
    return found if order else found.transpose(1, 2)


def _fits(x: Tensor, weight: Tensor) -> bool:
    if not is_narrow(x) or x.dtype != weight.dtype or not weight.numel():
        return False
    if any(size * x.element_size() % _ALIGNED for size in weight.shape[1:]):
        return False
    return weight.is_contiguous() or weight.transpose(1, 2).is_contiguous()


@fused_operator("trine::grouped_product")
def _grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    from engine.kernels.gpu.grouped_matmul import launch_grouped_product

    return launch_grouped_product(x, weight, ends)


@fused_operator("trine::grouped_weight_gradient")
def _grouped_weight_gradient(x: Tensor, dy: Tensor, ends: Tensor) -> Tensor:
    from engine.kernels.gpu.grouped_matmul import launch_grouped_weight_gradient

    return launch_grouped_weight_gradient(x, dy, ends)


@_grouped_product.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@_grouped_weight_gradient.register_fake
def _(x: Tensor, dy: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], dy.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, ends = ctx.saved_tensors
    needs_x, needs_weight, _ = ctx.needs_input_grad
    dy = dy.contiguous()
    dx = _grouped_product(dy, weight.transpose(1, 2), ends) if needs_x else None
    return dx, _weight_gradient(x, dy, ends, weight.is_contiguous()) if needs_weight else None, None


_grouped_product.register_autograd(_gradients, setup_context=_keep)
