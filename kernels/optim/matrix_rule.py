"""Interface of rules that update whole matrices (cost, state, update), and Muon.

Muon (Jordan et al. 2024): the update is the momentum of a matrix with singular values near one, in three steps.

    momentum     elementwise, on any piece of the matrix
    orthogonal   on the whole matrix, by Newton-Schulz steps: matrix products only
    apply        elementwise, on any piece of the weights

Operations and their order equal ``torch.optim.Muon``, so that all bits are equal with its dtype, bf16. Shape suffixes:
A rows, B columns of the full matrix.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

MatrixState = Mapping[str, Tensor]
"""State tensors of one matrix by name, which an update writes in place."""


class MatrixRule(Protocol):
    """Interface of optimizer rules that update a parameter from its whole matrix, such as Muon."""

    def cost(self, shape: tuple[int, ...]) -> int:
        """Returns the average number of scalar multiplications for one update of a matrix of ``shape``."""

    def state_shapes(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """Returns the names and shapes of the state tensors that :meth:`update` uses for a matrix of ``shape``.

        State from which the caller computes the direction, such as Muon's momentum, is not included.
        """

    def update(self, direction_AB: Tensor, state: MatrixState, step: int) -> Tensor:
        """Returns the update [A, B] of a whole matrix from ``direction_AB``, its gradient or momentum.

        ``state``: state tensors by name, zeros at first, written in place. ``step``: number of the update, from 1.
        """

    def apply_(self, weights: Tensor, update: Tensor, shape: tuple[int, ...], step: int) -> None:
        """Applies weight decay and ``update`` to ``weights`` in place.

        ``weights`` and ``update`` may be shards of a matrix of ``shape``. ``step``: number of the update, from 1.
        """


def add_gram_(left: Tensor | None, right: Tensor | None, grad_AB: Tensor, keep: float, add: float) -> None:
    """Updates ``left`` [A, A] and ``right`` [B, B], the statistics of gradients G = ``grad_AB``, in place.

    ``left`` becomes ``keep`` * left + ``add`` * G G', and ``right`` becomes ``keep`` * right + ``add`` * G' G. A
    statistic of None is skipped.
    """
    if left is not None:
        left.addmm_(grad_AB, grad_AB.T, beta=keep, alpha=add)
    if right is not None:
        right.addmm_(grad_AB.T, grad_AB, beta=keep, alpha=add)


def both_sides(left: Tensor | None, matrix_AB: Tensor, right: Tensor | None) -> Tensor:
    """Returns left @ matrix_AB @ right; None for ``left`` or ``right`` means the identity matrix."""
    found = matrix_AB if left is None else left @ matrix_AB
    return found if right is None else found @ right


def transposed(matrix: Tensor | None) -> Tensor | None:
    """Returns the transpose of ``matrix``; None, which means the identity matrix, is returned unchanged."""
    return None if matrix is None else matrix.T


def eigen(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (eigenvalues in ascending order, eigenvectors as columns) of the matrix ``symmetric``."""
    try:
        values, vectors = torch.linalg.eigh(symmetric)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # solvers fail on some fp32 matrices
        values, vectors = torch.linalg.eigh(symmetric.double())
    return values.to(symmetric.dtype), vectors.to(symmetric.dtype)


def side_shapes(shape: tuple[int, ...], largest: int, left: str, right: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of two state matrices by name: (rows, rows) for ``left``, (columns, columns) for ``right``.

    ``shape`` is (rows, columns). State matrices with more than ``largest`` rows are left out.
    """
    rows, columns = shape
    sides = {left: (rows, rows), right: (columns, columns)}
    return {name: square for name, square in sides.items() if square[0] <= largest}


@dataclass(frozen=True, slots=True)
class MuonRule:
    """Hyperparameters of Muon for one update."""

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    coefficients: tuple[float, float, float]
    eps: float
    steps: int
    dtype: torch.dtype
    """Dtype of the matrix products: bf16 or fp32."""
    match_rms: bool
    """True: the learning rate is 0.2 sqrt(max(A, B)) ``lr``, for updates with the RMS of AdamW (Liu et al. 2025)."""

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "MuonRule":
        """Returns the rule with the hyperparameters in ``group``, a parameter group with the options of
        ``torch.optim.Muon`` and ``ns_dtype`` ("bf16" or "fp32").
        """
        return cls(
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            nesterov=group["nesterov"],
            coefficients=tuple(group["ns_coefficients"]),
            eps=group["eps"],
            steps=group["ns_steps"],
            dtype=torch.bfloat16 if group["ns_dtype"] == "bf16" else torch.float32,
            match_rms=group["adjust_lr_fn"] == "match_rms_adamw",
        )

    def rate(self, shape: tuple[int, ...]) -> float:
        """Returns the learning rate for a matrix of ``shape``, as torch's Muon adjusts ``lr`` to rows and columns."""
        rows, columns = shape
        ratio = 0.2 * math.sqrt(max(rows, columns)) if self.match_rms else math.sqrt(max(1, rows / max(1, columns)))
        return self.lr * ratio

    def cost(self, shape: tuple[int, ...]) -> int:
        """Returns the number of scalar multiplications in the Newton-Schulz steps for a matrix of ``shape``."""
        small, large = sorted(shape)
        return self.steps * small * small * (2 * large + small)

    def state_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Returns an empty dict, because Muon's only state, the momentum, has one number per element."""
        return {}

    def update(self, direction_AB: Tensor, state: MatrixState, step: int) -> Tensor:
        """Returns ``direction_AB`` with all singular values changed to about one."""
        return orthogonal(direction_AB, self)

    def apply_(self, weights: Tensor, update: Tensor, shape: tuple[int, ...], step: int) -> None:
        """Applies weight decay and ``update`` to ``weights`` in place.

        ``weights`` and ``update`` may be shards of a matrix of ``shape``; the learning rate depends on ``shape``.
        """
        weights.mul_(1 - self.lr * self.weight_decay)
        weights.add_(update, alpha=-self.rate(shape))


def momentum_(momentum: Tensor, grad: Tensor, rule: MuonRule) -> Tensor:
    """Averages ``grad``, with weight 1 - ``rule.momentum``, into ``momentum`` in place; returns Muon's direction.

    The direction is the new momentum, or with ``rule.nesterov`` its average with ``grad`` by the same weights.
    """
    momentum.lerp_(grad, 1 - rule.momentum)
    return grad.lerp(momentum, rule.momentum) if rule.nesterov else momentum.clone()


def orthogonal(direction_AB: Tensor, rule: MuonRule) -> Tensor:
    """Returns ``direction_AB`` with all singular values changed to about one, in ``rule.dtype``.

    It runs Newton-Schulz steps.
    """
    a, b, c = rule.coefficients
    tall = direction_AB.size(0) > direction_AB.size(1)
    x = direction_AB.to(rule.dtype)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=rule.eps)
    for _ in range(rule.steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
