"""RMSNorm and LayerNorm in Triton, with an optional residual sum; one program a row.

    forward    s = x + residual     y = (s - mean) rstd (offset + weight) + bias       mean, rstd saved, fp32
    backward   g = dy (offset + weight), n = (s - mean) rstd
               ds = (g - mean(g) - n mean(g n)) rstd + ds of the stream                 mean terms only if centered
               the next row of a program is loaded while one is computed
               dweight, dbias: a fixed number of programs loops over the rows and accumulates in fp32; the partial sums
               are then added in a fixed order, so that equal inputs have equal bits. If a row and these sums do not
               fit in registers together, a second kernel reads everything again to compute the sums

Rows belong to contiguous tensors with any leading dims. Shape suffixes: N rows, H width, P programs.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.launch_shapes import ceil_div, processors, row_shape

_WIDEST_WITH_SUMS = 8192
"""Widest row with free registers for the sums of parameter gradients."""
_WIDEST_AHEAD = 16384
"""Most bytes of a row for loads of the next row into shared memory during its computation.

Three rows of each of two programs then fit on a processor of an A100 as well.
"""
_COLUMNS = 1024
_BACKWARD_PROGRAMS = 2
"""Programs per processor of the backward."""


@triton.jit
def norm_forward_kernel(
    x, residual, weight, bias, y, stream, mean, rstd, width, eps,
    OFFSET: tl.constexpr, CENTERED: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes RMSNorm, or LayerNorm with CENTERED, of one row of x + residual; writes the result to ``y``.

    ``stream`` gets x + residual. For RMSNorm, ``rstd`` gets 1 / root mean square of this sum. For LayerNorm, ``mean``
    gets the mean of the sum, and ``rstd`` gets 1 / standard deviation. OFFSET is added to the weight.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = row * width + column
    s = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        s += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        narrow = s.to(stream.dtype.element_ty)
        tl.store(stream + place, narrow, mask=inside)
        s = narrow.to(tl.float32)  # round first: the backward reads the rounded stream
    if CENTERED:
        middle = tl.sum(s, axis=0) / width
        tl.store(mean + row, middle)
        s = tl.where(inside, s - middle, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(s * s, axis=0) / width + eps)
    tl.store(rstd + row, scale)
    out = s * scale * (tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + OFFSET)
    if BIAS:
        out += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + place, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward_kernel(
    dy, dstream, stream, weight, mean, rstd, dx, dweight, dbias, rows, width, rows_each,
    OFFSET: tl.constexpr, CENTERED: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes the gradient ``dx`` of a norm's input for ``rows_each`` consecutive rows, from the output's gradient
    ``dy``.

    With RESIDUAL, it adds ``dstream``, the gradient of x + residual, to ``dx``. With WEIGHT and BIAS, it also writes
    the gradients of weight and bias, summed over the program's rows, to one row of ``dweight`` and ``dbias`` [programs,
    width].
    """
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + OFFSET
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    first = program * rows_each
    for row in tl.range(first, tl.minimum(first + rows_each, rows), num_stages=STAGES):
        place = row * width + column
        g = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(stream + place, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row)
        if CENTERED:
            s = tl.where(inside, s - tl.load(mean + row), 0.0)
        n = s * scale
        if BIAS:
            db += g
        if WEIGHT:
            dw += g * n
        g *= w
        d = g - n * (tl.sum(g * n, axis=0) / width)
        if CENTERED:
            d -= tl.sum(g, axis=0) / width
        d *= scale
        if RESIDUAL:
            d += tl.load(dstream + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + place, d.to(dx.dtype.element_ty), mask=inside)
    if WEIGHT:
        tl.store(dweight + program * width + column, dw, mask=inside)
    if BIAS:
        tl.store(dbias + program * width + column, db, mask=inside)


@triton.jit
def norm_parameters_kernel(
    dy, stream, mean, rstd, dweight, dbias, rows, width, rows_each,
    CENTERED: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of a norm's weight and bias, for rows too wide for :func:`norm_backward_kernel`.

    Each program sums BLOCK columns over ``rows_each`` rows, and writes the sums to one row of ``dweight`` and ``dbias``
    [programs, width].
    """
    program = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    first = program * rows_each
    for row in range(first, tl.minimum(first + rows_each, rows)):
        place = row * width + column
        g = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(stream + place, mask=inside, other=0.0).to(tl.float32)
        if CENTERED:
            s -= tl.load(mean + row)
        dw += g * (s * tl.load(rstd + row))
        if BIAS:
            db += g
    tl.store(dweight + program * width + column, dw, mask=inside)
    if BIAS:
        tl.store(dbias + program * width + column, db, mask=inside)


def norm_forward(
    x: Tensor, residual: Tensor | None, affine: tuple[Tensor, Tensor | None], eps: float, offset: float,
    centered: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """Computes LayerNorm (``centered``) or RMSNorm of x + residual over the last dim.

    ``affine`` is (weight, bias or None); ``offset`` is added to the weight.

    Returns:
        (the norm, x + residual or None without residual, mean, 1 / standard deviation); for RMSNorm an empty mean, and
            1 / root mean square.
    """
    width = x.shape[-1]
    rows = x.numel() // width
    weight_H, bias_H = affine
    y = torch.empty_like(x)
    stream = None if residual is None else torch.empty_like(x)
    rstd_N = x.new_empty(rows, dtype=torch.float32)
    mean_N = torch.empty_like(rstd_N) if centered else rstd_N.new_empty(0)
    shape = row_shape(width)
    if rows:
        norm_forward_kernel[(rows,)](
            x, residual, weight_H, bias_H, y, stream, mean_N, rstd_N, width, eps,
            OFFSET=offset, CENTERED=centered, RESIDUAL=residual is not None, BIAS=bias_H is not None,
            BLOCK=shape.block, num_warps=shape.warps,
        )  # fmt: skip
    return y, stream, mean_N, rstd_N


def norm_backward(
    dy: Tensor, dstream: Tensor | None, stream: Tensor, weight_H: Tensor, statistics: tuple[Tensor, Tensor],
    form: tuple[float, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients (dx, dweight, dbias) of a norm's input, weight and bias, the last two in fp32.

    Args:
        dy: gradient of the norm's result.
        dstream: gradient of ``stream`` from its other uses, added to dx; None: there is none.
        stream: input of the norm, x + residual.
        statistics: the last two results of :func:`norm_forward`.
        form: (constant added to the weight, True for LayerNorm, True if the norm has a bias).
    """
    width, device = stream.shape[-1], stream.device
    rows = stream.numel() // width
    offset, centered, biased = form
    programs = max(1, min(rows, _BACKWARD_PROGRAMS * processors(device)))
    dx = torch.empty_like(stream)
    # every program writes its row of sums; without rows no program runs
    make = torch.empty if rows else torch.zeros
    dweight_PH = make((programs, width), dtype=torch.float32, device=device)
    dbias_PH = make((programs if biased else 0, width), dtype=torch.float32, device=device)
    each, shape = ceil_div(rows, programs), row_shape(width, elements_per_thread=8)
    at_once = width <= _WIDEST_WITH_SUMS
    if rows:
        norm_backward_kernel[(programs,)](
            dy, dstream, stream, weight_H, *statistics, dx, dweight_PH, dbias_PH, rows, width, each,
            OFFSET=offset, CENTERED=centered, RESIDUAL=dstream is not None, WEIGHT=at_once, BIAS=biased and at_once,
            BLOCK=shape.block, STAGES=2 if width * stream.element_size() <= _WIDEST_AHEAD else 1,
            num_warps=shape.warps,
        )  # fmt: skip
    if rows and not at_once:
        norm_parameters_kernel[programs, ceil_div(width, _COLUMNS)](
            dy, stream, *statistics, dweight_PH, dbias_PH, rows, width, each,
            CENTERED=centered, BIAS=biased, BLOCK=_COLUMNS, num_warps=4,
        )  # fmt: skip
    return dx, dweight_PH.sum(0), dbias_PH.sum(0) if biased else dbias_PH.view(0)


_BLOCK = 2048
_PROGRAMS_EACH = 4
"""Programs per processor."""


@triton.jit(do_not_specialize=["sums", "blocks_each"])
def squared_norm_kernel(values, sums, count, blocks_each, weight, BLOCK: tl.constexpr):
    """Writes the sum of squares of ``blocks_each`` consecutive blocks, times ``weight``, to an element of ``sums``,
    fp64.

    ``count``: number of values. BLOCK: values per block.
    """
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float64)
    first = program * blocks_each * BLOCK
    for number in range(0, blocks_each):
        place = first + number * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(values + place, mask=place < count, other=0.0).to(tl.float32).to(tl.float64)
        total += x * x
    tl.store(sums + program, tl.sum(total, axis=0) * weight)


def squared_norm(parts: Sequence[tuple[Tensor, bool]]) -> Tensor:
    """Returns the sum of squares over the tensors marked True in ``parts``, as an fp64 scalar on their device.

    ``parts``: one or more pairs (values, True to include them), all on one device.
    """
    device = parts[0][0].device
    shapes = [_shape(values.numel(), device) for values, _ in parts]
    sums = torch.empty(sum(programs for programs, _ in shapes), dtype=torch.float64, device=device)
    places = torch.split(sums, [programs for programs, _ in shapes])
    for (values, counts), (programs, blocks_each), place in zip(parts, shapes, places, strict=True):
        squared_norm_kernel[(programs,)](
            values, place, values.numel(), blocks_each, 1.0 if counts else 0.0, BLOCK=_BLOCK, num_warps=8
        )
    return sums.sum()


def _shape(count: int, device: torch.device) -> tuple[int, int]:
    """Returns (programs, blocks of each program)."""
    blocks = ceil_div(count, _BLOCK)
    each = ceil_div(blocks, _PROGRAMS_EACH * processors(device))
    return ceil_div(blocks, each), each
