"""SOAP (Vyas et al. 2024): Adam in the eigenbasis of Shampoo's preconditioners, of a whole matrix.

    L <- b L + (1 - b) G G'      R <- b R + (1 - b) G' G       averages of squares, of each side
    G' = QL' G QR                                              the gradient in the basis
    N' = Adam(G')                                              moments in the basis
    N  = QL N' QR'                                             the update

The bases approach the eigenvectors of L and R by steps of the power method, each with a QR decomposition: some on the
first gradient, from the coordinates themselves, which makes no update, and from then on one every
``precondition_frequency`` updates, its columns in the order of falling eigenvalues. All of it is in the dtype of the
state, fp32 or fp64, on the device of the matrix.

A gradient has a lower rank than its longer side, so L or R is singular at first, and any basis of its null space would
be one of eigenvectors. A full decomposition lets rounding choose it, and later gradients are not zero there: no two
grids would train alike. So steps are those of L plus a small multiple of the identity, which has the same eigenvectors
and leaves directions without a gradient as they were.

Shape suffixes: A rows, B columns of the full matrix.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.kernels.optim.matrix_rule import MatrixState, add_gram_, both_sides, side_shapes, transposed

LEFT, RIGHT, LEFT_BASIS, RIGHT_BASIS = "soap_left", "soap_right", "soap_left_basis", "soap_right_basis"
FIRST, SECOND = "soap_exp_avg", "soap_exp_avg_sq"
SOAP_STATE = frozenset({LEFT, RIGHT, LEFT_BASIS, RIGHT_BASIS, FIRST, SECOND})

_SHIFT = 3e-3
"""Part of the largest eigenvalue that is added to all; rounding in fp32 is some ten thousand times smaller."""
_FIRST_STEPS = 4
"""Steps of the power method on the first gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoapRule:
    """Hyperparameters of one SOAP update."""

    lr: float
    betas: tuple[float, float]
    shampoo_beta: float
    """Decay rate of the averages of both sides."""
    eps: float
    weight_decay: float
    precondition_frequency: int
    max_precond_dim: int
    normalize_grads: bool
    correct_bias: bool

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "SoapRule":
        """The rule of a group of the optimizer, by the names of the authors' implementation."""
        own = group["shampoo_beta"]
        return cls(
            lr=float(group["lr"]),
            betas=tuple(group["betas"]),
            shampoo_beta=group["betas"][1] if own is None else own,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            precondition_frequency=group["precondition_frequency"],
            max_precond_dim=group["max_precond_dim"],
            normalize_grads=group["normalize_grads"],
            correct_bias=group["correct_bias"],
        )

    def cost(self, shape: tuple[int, ...]) -> int:
        """Three products for each side that has a basis, and its share of a refresh of that."""
        elements, every = shape[0] * shape[1], self.precondition_frequency
        sides = [size for size in shape if size <= self.max_precond_dim]
        return sum(3 * elements * size + (4 * size**3 + 2 * elements * size) // every for size in sides) + elements

    def state_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Both moments, and an average and a basis for each side that is not too long."""
        averages = side_shapes(shape, self.max_precond_dim, LEFT, RIGHT)
        bases = side_shapes(shape, self.max_precond_dim, LEFT_BASIS, RIGHT_BASIS)
        return {FIRST: shape, SECOND: shape, **averages, **bases}

    def update(self, direction_AB: Tensor, state: MatrixState, step: int) -> Tensor:
        """Return the update [A, B] of a gradient; that of the first one is zero, and makes the bases."""
        grad = direction_AB
        if step == 1:
            for kept in state.values():
                kept.zero_()
            self._accumulate(grad, state)
            for average, basis in ((LEFT, LEFT_BASIS), (RIGHT, RIGHT_BASIS)):
                if average in state:
                    _begin(state[average], state[basis])
            return torch.zeros_like(grad)
        found = self._adam(grad, state, step - 1)
        self._accumulate(grad, state)
        if (step - 1) % self.precondition_frequency == 0:
            _refresh(state)
        return found

    def apply_(self, weights: Tensor, update: Tensor, shape: tuple[int, ...], step: int) -> None:
        """Decay the weights and step along the update; the first gradient leaves them as they are."""
        if step > 1:
            weights.mul_(1 - self.lr * self.weight_decay).add_(update, alpha=-self.lr)

    def _adam(self, grad_AB: Tensor, state: MatrixState, step: int) -> Tensor:
        left, right = state.get(LEFT_BASIS), state.get(RIGHT_BASIS)
        turned, (b1, b2) = both_sides(transposed(left), grad_AB, right), self.betas
        first, second = state[FIRST].lerp_(turned, 1 - b1), state[SECOND].mul_(b2)
        second.addcmul_(turned, turned, value=1 - b2)
        found = both_sides(left, first / second.sqrt().add_(self.eps), transposed(right))
        if self.normalize_grads:
            found /= found.square().mean().sqrt().add_(1e-30)
        return found.mul_((1 - b2**step) ** 0.5 / (1 - b1**step)) if self.correct_bias else found

    def _accumulate(self, grad_AB: Tensor, state: MatrixState) -> None:
        b = self.shampoo_beta
        add_gram_(state.get(LEFT), state.get(RIGHT), grad_AB, b, 1 - b)


def _begin(average: Tensor, basis: Tensor) -> None:
    """Bring the coordinates near to the eigenvectors of the first average."""
    basis.copy_(torch.eye(len(basis), dtype=basis.dtype, device=basis.device))
    for _ in range(_FIRST_STEPS):
        basis.copy_(torch.linalg.qr(_grown(average, basis)[0]).Q)


def _grown(average: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """The columns of a basis after a step of the power method, and estimates of their eigenvalues."""
    grown = average @ basis
    sizes = (basis * grown).sum(0)
    return grown.addcmul_(basis, _SHIFT * sizes.max()), sizes


def _refresh(state: MatrixState) -> None:
    """Bring both bases nearer to the eigenvectors of the averages, and the moments into the new ones."""
    left, right = state.get(LEFT_BASIS), state.get(RIGHT_BASIS)
    first = both_sides(left, state[FIRST], transposed(right))
    for dim, average, basis in ((0, state.get(LEFT), left), (1, state.get(RIGHT), right)):
        if average is not None and basis is not None:
            grown, sizes = _grown(average, basis)
            order = sizes.argsort(descending=True, stable=True)
            state[SECOND].copy_(state[SECOND].index_select(dim, order))
            basis.copy_(torch.linalg.qr(grown[:, order]).Q)
    state[FIRST].copy_(both_sides(transposed(left), first, right))
