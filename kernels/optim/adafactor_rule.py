"""Adafactor (Shazeer and Stern 2018): the second moments of a matrix as means over its rows and over its columns.

    squares    of gradients, summed over rows and columns              any part of a matrix adds its own
    means      of all updates, newer ones with more weight              small, whole
    update     gradient / root of (row mean x column mean / their mean)  elementwise, from the means
    step       the update, at most ``clip`` in RMS, times a rate relative to the RMS of the weights

The options and their meaning are those of ``torch.optim.Adafactor``. Tensors of more than two dims are stacks of
matrices; those of fewer keep the mean square of each element. Shape suffixes: L matrices of a stack, A rows, B columns;
l lines, which are consecutive rows of a stack.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

ROWS, COLUMNS, SQUARES = "row_var", "col_var", "variance"
"""torch's names of the means: over the columns of each row, over the rows of each column, and of each element."""


@dataclass(frozen=True, slots=True)
class AdafactorRule:
    """Hyperparameters of one Adafactor update."""

    lr: float
    beta2_decay: float
    eps: float | None
    """Least root of a mean square; None: that of the dtype."""
    least_rms: float
    """Least RMS of weights that a step is relative to."""
    clip: float
    weight_decay: float

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "AdafactorRule":
        """The rule of a group of the optimizer, by the names of torch."""
        eps, least = group["eps"]
        return cls(float(group["lr"]), group["beta2_decay"], eps, least, group["d"], group["weight_decay"])

    def newest(self, step: int) -> float:
        """Weight of the squares of update number ``step`` (from 1) in the means."""
        return float(step**self.beta2_decay)

    def rate(self, step: int) -> float:
        """The step relative to the RMS of the weights."""
        return min(self.lr, 1 / math.sqrt(step))

    def least(self, dtype: torch.dtype) -> float:
        """Least root of a mean square."""
        return torch.finfo(dtype).eps if self.eps is None else self.eps


def mean_shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The means that a parameter of a shape has, and their shapes."""
    if len(shape) < 2:
        return {SQUARES: shape}
    return {ROWS: (*shape[:-1], 1), COLUMNS: (*shape[:-2], 1, shape[-1])}


def mean_elements(shape: tuple[int, ...]) -> int:
    """Elements of all means of a parameter."""
    return sum(prod(each) for each in mean_shapes(shape).values())


@dataclass(frozen=True, slots=True)
class MatrixPiece:
    """Elements ``start:stop`` of a tensor of ``shape``, flat."""

    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def columns(self) -> int:
        """Elements of a line."""
        return self.shape[-1]

    @property
    def lines(self) -> slice:
        """The lines that it touches."""
        return slice(self.start // self.columns, -(-self.stop // self.columns))

    def matrices(self, device: torch.device) -> Tensor:
        """Number of the matrix of each line [l]."""
        return torch.arange(self.lines.start, self.lines.stop, device=device) // self.shape[-2]

    def add_squares(self, squares_n: Tensor, sums: Mapping[str, Tensor]) -> None:
        """Add its squares to the sums of the tensor, in the shapes of the means."""
        if SQUARES in sums:
            sums[SQUARES].view(-1)[self.start : self.stop] += squares_n
            return
        lines = self.lines
        whole_lB = squares_n.new_zeros(lines.stop - lines.start, self.columns)
        first = self.start - lines.start * self.columns
        whole_lB.view(-1)[first : first + len(squares_n)] = squares_n
        sums[ROWS].view(-1)[lines] += whole_lB.sum(dim=1)
        columns_LB = sums[COLUMNS].view(-1, self.columns)
        if len(columns_LB) == 1:
            columns_LB[0] += whole_lB.sum(dim=0)
        else:
            columns_LB.index_add_(0, self.matrices(squares_n.device), whole_lB.to(columns_LB.dtype))

    def update(self, grads_n: Tensor, scales: Mapping[str, Tensor], least: float) -> Tensor:
        """The update of its elements [n]; ``scales``: what :func:`scales_of` gives, of the tensor of ``shape``."""
        if SQUARES in scales:
            mean_n = scales[SQUARES].view(-1)[self.start : self.stop].clone()
        else:
            lines, columns_LB = self.lines, scales[COLUMNS].view(-1, self.columns)
            columns = columns_LB if len(columns_LB) == 1 else columns_LB[self.matrices(grads_n.device)]
            first = self.start - lines.start * self.columns
            mean_n = (scales[ROWS].view(-1, 1)[lines] * columns).view(-1)[first : first + len(grads_n)]
        return mean_n.clamp_(min=least * least).rsqrt_().mul_(grads_n)


def take_in(means: Mapping[str, Tensor], sums: Mapping[str, Tensor], newest: float) -> None:
    """Take the squares of an update into the means; ``sums``: over the whole parameter."""
    for name, mean in means.items():
        count = {ROWS: sums[COLUMNS].shape[-1], COLUMNS: sums[ROWS].shape[-2]}[name] if name != SQUARES else 1
        mean.lerp_(sums[name] / count, newest)


def scales_of(means: Mapping[str, Tensor], least: float) -> dict[str, Tensor]:
    """Factors of the mean square of each element: those of its row and its column, or the mean itself."""
    if SQUARES in means:
        return dict(means)
    rows = means[ROWS] / means[ROWS].mean(dim=-2, keepdim=True).clamp(min=least)
    return {ROWS: rows, COLUMNS: means[COLUMNS]}


def step_size(weights_square: Tensor, update_square: Tensor, elements: int, rule: AdafactorRule, step: int) -> Tensor:
    """The factor of an update, a scalar on the device, from the sums of squares of weights and of the update."""
    root = math.sqrt(elements)
    rms = (weights_square.sqrt() / root).clamp(min=rule.least_rms)
    return rms * rule.rate(step) / (update_square.sqrt() / (root * rule.clip)).clamp(min=1.0)
