"""Softmax of rows of logits in Triton, for losses: one pass in the forward, one in the backward; one program per row.

    forward    largest = max x      total = sum exp(x - largest)      picked = x at the target, if on this rank
               weighted = sum w (x - largest)
               computed online: a new maximum rescales the sums so far (Milakov and Gimelshein 2018)
    backward   dx = d_log_sum exp(x - largest - log_sum) + d_picked at the target + d_weighted w
               recomputes the softmax; a row with three gradients of 0 gets dx = 0 and is not read

A row is read in blocks, so the width of the vocabulary is unlimited. With an infinite maximum, differences are relative
to 0.

Shape suffixes: N rows, W columns of this rank.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.launch_shapes import power_of_two

_BLOCK = 4096
_ELEMENTS_PER_THREAD = 16


@triton.jit
def statistics_kernel(
    logits, target, weight, largest, total, picked, weighted, stride, width, start,
    TARGET: tl.constexpr, WEIGHTED: tl.constexpr, WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes the softmax statistics of one row of logits: one element of each output tensor.

    ``largest`` is the maximum, and ``total`` the sum of exp(logit - maximum). With TARGET, ``picked`` is the logit at
    ``target``. With WEIGHTED, ``weighted`` is the sum of w (logit - maximum), where w is 1, or with WEIGHT the column's
    element of ``weight``. ``start``: index of the first column in the full vocabulary.
    """
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    lane = tl.arange(0, BLOCK)
    high = tl.full((), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    weights = tl.zeros((BLOCK,), tl.float32)
    products = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, width, BLOCK):
        column = first + lane
        inside = column < width
        x = tl.load(base + column, mask=inside, other=float("-inf")).to(tl.float32)
        # With an infinite maximum, differences are relative to 0: inf - inf would be NaN.
        higher = tl.maximum(high, tl.max(x, axis=0))
        shift = tl.where(tl.abs(higher) == float("inf"), 0.0, higher)
        sums = sums * tl.exp(tl.where(high == float("inf"), 0.0, high) - shift) + tl.exp(x - shift)
        if WEIGHTED:
            before = tl.where(tl.abs(high) == float("inf"), 0.0, high)
            w = inside.to(tl.float32)
            if WEIGHT:
                w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
            products += weights * (before - shift) + w * tl.where(inside, x - shift, 0.0)
            weights += w
        high = higher
    tl.store(largest + row, high)
    tl.store(total + row, tl.sum(sums, axis=0))
    if WEIGHTED:
        tl.store(weighted + row, tl.sum(products, axis=0))
    if TARGET:
        place = tl.load(target + row) - start
        here = (place >= 0) & (place < width)
        tl.store(picked + row, tl.load(base + place, mask=here, other=0.0).to(tl.float32))


@triton.jit
def gradient_kernel(
    logits, target, weight, largest, log_sum, d_log_sum, d_picked, d_weighted, out, stride, out_stride, width, start,
    TARGET: tl.constexpr, WEIGHTED: tl.constexpr, WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of one row of logits to ``out``, which may be the memory of ``logits``.

    ``log_sum``: log of the sum of exp(logit - ``largest``). ``d_log_sum``, ``d_picked``, ``d_weighted``: loss gradients
    of ``log_sum``, target logit and weighted logit sum.
    """
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    out_base = out + row * out_stride
    lane = tl.arange(0, BLOCK)
    high = tl.load(largest + row)
    log_total = tl.load(log_sum + row)
    slope = tl.load(d_log_sum + row)
    size = tl.abs(slope)
    place = tl.full((), -1, tl.int64)
    at_target = tl.full((), 0.0, tl.float32)
    by_weight = tl.full((), 0.0, tl.float32)
    if TARGET:
        place = tl.load(target + row) - start
        at_target = tl.load(d_picked + row)
        size += tl.abs(at_target)
    if WEIGHTED:
        by_weight = tl.load(d_weighted + row)
        size += tl.abs(by_weight)
    # A row without gradients is not read, and 0 times a softmax that is NaN stays 0.
    read = tl.where(size != 0.0, width, 0)
    for first in range(0, width, BLOCK):
        column = first + lane
        inside = column < width
        wanted = column < read
        x = tl.load(base + column, mask=wanted, other=0.0).to(tl.float32)
        d = slope * tl.exp(x - high - log_total)
        if TARGET:
            d += tl.where(column == place, at_target, 0.0)
        if WEIGHTED:
            if WEIGHT:
                d += by_weight * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
            else:
                d += by_weight
        d = tl.where(wanted, d, 0.0)
        tl.store(out_base + column, d.to(out.dtype.element_ty), mask=inside)


class Asked(NamedTuple):
    """Request for two optional softmax statistics: the logit at ``target``, and the logits' sum weighted by ``weight``.

    ``even``: weights of 1 in place of ``weight``. ``start``: index of this rank's first column in the full vocabulary.
    """

    target: Tensor | None
    weight: Tensor | None
    even: bool
    start: int

    @property
    def weighted(self) -> bool:
        """True if a weighted sum of the logits is requested."""
        return self.even or self.weight is not None


class SlopeBuffers(NamedTuple):
    """Loss gradients of log-sum-exp, target logit and weighted logit sum of N rows, fp32 [N] each; None: unused."""

    log_sum: Tensor
    picked: Tensor | None
    weighted: Tensor | None


def softmax_statistics(logits_NW: Tensor, asked: Asked) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes softmax statistics of N rows over the W columns of this rank, fp32 [N] each.

    Returns:
        (maximum, sum of exp(logit - maximum), logit at the target or 0 if another rank has it, weighted sum of (logit -
            maximum)); the last two are empty if ``asked`` does not request them.
    """
    rows, width = logits_NW.shape
    largest_N = logits_NW.new_empty(rows, dtype=torch.float32)
    total_N = torch.empty_like(largest_N)
    picked_N = torch.empty_like(largest_N) if asked.target is not None else largest_N.new_empty(0)
    weighted_N = torch.empty_like(largest_N) if asked.weighted else largest_N.new_empty(0)
    block, warps = _shape(width)
    if rows:
        statistics_kernel[(rows,)](
            logits_NW, _dense(asked.target), _dense(asked.weight), largest_N, total_N, picked_N, weighted_N,
            logits_NW.stride(0), width, asked.start,
            TARGET=asked.target is not None, WEIGHTED=asked.weighted, WEIGHT=asked.weight is not None,
            BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return largest_N, total_N, picked_N, weighted_N


def softmax_gradient(
    logits_NW: Tensor, asked: Asked, softmax: tuple[Tensor, Tensor], slopes: SlopeBuffers, out_NW: Tensor
) -> None:
    """Writes the gradient of ``logits_NW`` to ``out_NW``, which may be the same tensor.

    ``softmax`` is (largest logit, log of the sum of exp(logit - largest)) of each row over the full vocabulary.
    ``slopes`` are the loss's gradients with respect to this log and to the statistics that ``asked`` requests.
    """
    rows, width = logits_NW.shape
    block, warps = _shape(width)
    if rows:
        gradient_kernel[(rows,)](
            logits_NW, _dense(asked.target), _dense(asked.weight), *map(_dense, (*softmax, *slopes)), out_NW,
            logits_NW.stride(0), out_NW.stride(0), width, asked.start,
            TARGET=slopes.picked is not None, WEIGHTED=slopes.weighted is not None,
            WEIGHT=asked.weight is not None, BLOCK=block, num_warps=warps,
        )  # fmt: skip


def _dense(values: Tensor | None) -> Tensor | None:
    """Makes ``values`` contiguous for kernels: labels may be a matrix column, gradients an expanded scalar."""
    return None if values is None else values.contiguous()


def _shape(width: int) -> tuple[int, int]:
    block = min(_BLOCK, power_of_two(max(width, 16)))
    return block, max(1, block // (32 * _ELEMENTS_PER_THREAD))
