"""What an update of a whole matrix has to say of itself: its work, what it keeps, and the update.

Shape suffixes: A rows, B columns of the full matrix.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

MatrixState = Mapping[str, Tensor]
"""What is kept of one matrix, by name; an update writes it in place."""


class MatrixRule(Protocol):
    """The rule of a group of parameters, each of which is updated as a whole."""

    def cost(self, shape: tuple[int, ...]) -> int:
        """Multiplications of an update on average, by which the owners of matrices are balanced."""

    def state_shapes(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """What is kept of a whole matrix, by name; without what is kept of every part of it."""

    def update(self, direction_AB: Tensor, state: MatrixState, step: int) -> Tensor:
        """Return the update [A, B] of a matrix, and write its state.

        ``step``: the number of this update, from 1; the state of the first one is zeros.
        """

    def apply_(self, weights: Tensor, update: Tensor, shape: tuple[int, ...], step: int) -> None:
        """Decay the weights and step along the update, both of any equal shape; ``shape`` is that of the matrix."""


def add_gram_(left: Tensor | None, right: Tensor | None, grad_AB: Tensor, keep: float, add: float) -> None:
    """``keep`` times the sums of G G' [A, A] and G' G [B, B], and ``add`` times those of a gradient, in place."""
    if left is not None:
        left.addmm_(grad_AB, grad_AB.T, beta=keep, alpha=add)
    if right is not None:
        right.addmm_(grad_AB.T, grad_AB, beta=keep, alpha=add)


def both_sides(left: Tensor | None, matrix_AB: Tensor, right: Tensor | None) -> Tensor:
    """``left`` matrix ``right``; None stands for the identity."""
    found = matrix_AB if left is None else left @ matrix_AB
    return found if right is None else found @ right


def transposed(matrix: Tensor | None) -> Tensor | None:
    """The transpose of what may be the identity."""
    return None if matrix is None else matrix.T


def eigen(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """Ascending eigenvalues, and eigenvectors as columns, in the dtype of the matrix."""
    try:
        values, vectors = torch.linalg.eigh(symmetric)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # solvers give up on some matrices of fp32
        values, vectors = torch.linalg.eigh(symmetric.double())
    return values.to(symmetric.dtype), vectors.to(symmetric.dtype)


def side_shapes(shape: tuple[int, ...], largest: int, left: str, right: str) -> dict[str, tuple[int, ...]]:
    """A square for each side of a matrix that is not longer than ``largest``; longer ones have the identity."""
    rows, columns = shape
    sides = {left: (rows, rows), right: (columns, columns)}
    return {name: square for name, square in sides.items() if square[0] <= largest}
