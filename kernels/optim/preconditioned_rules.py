"""Rules of whole matrices that precondition both sides: Shampoo and SOAP.

Shampoo (Gupta et al. 2018), with averages and grafting as in Shi et al. 2023.

    L <- b2 L + (1 - b2) G G'      R <- b2 R + (1 - b2) G' G      sums if b2 is 1
    M <- b1 M + (1 - b1) G
    N  = L^(-1/4) M R^(-1/4)                                      roots of (L + epsilon I), of a corrected average
    N <- N |P| / |N|                                              grafting: P is the update of a simpler rule

If one side is too long for a preconditioner, the exponent of the other is -1/2. Eigenvalue decompositions in the dtype
of the state, fp32 or fp64, compute the roots every ``precondition_frequency`` updates. Before
``start_preconditioning_step`` the update is the simpler rule's update.

SOAP (Vyas et al. 2024): Adam in the eigenbasis of Shampoo's preconditioners.

    L <- b L + (1 - b) G G'      R <- b R + (1 - b) G' G       averages of squares, of each side
    G' = QL' G QR                                              the gradient in the basis
    N' = Adam(G')                                              moments in the basis
    N  = QL N' QR'                                             the update

The bases approach the eigenvectors of L and R by steps of the power method, each with a QR decomposition. The first
gradient makes no update: several steps start from the identity. Later there is one step every
``precondition_frequency`` updates, with columns in descending order of eigenvalues. Everything is in the dtype of the
state, fp32 or fp64, on the device of the matrix.

L or R is singular at first, because a gradient's rank is lower than its longer side. Rounding would choose the basis of
the null space, and two grids would train differently. Steps therefore use L plus a small multiple of the identity,
which has the same eigenvectors.

Shape suffixes: A rows, B columns of the full matrix.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.kernels.optim.matrix_rule import MatrixState, add_gram_, both_sides, eigen, side_shapes, transposed
from engine.kernels.optim.update_rules import rule_of

LEFT, RIGHT, LEFT_ROOT, RIGHT_ROOT = "shampoo_left", "shampoo_right", "shampoo_left_root", "shampoo_right_root"
MOMENTUM, SQUARES = "shampoo_exp_avg", "shampoo_grafting_sq"
SHAMPOO_STATE = frozenset({LEFT, RIGHT, LEFT_ROOT, RIGHT_ROOT, MOMENTUM, SQUARES})
_OF_SQUARES = ("adagrad", "rmsprop", "adam")
"""Simpler rules with squares of gradients as state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShampooRule:
    """Hyperparameters of Shampoo for one update."""

    lr: float
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    precondition_frequency: int
    start_preconditioning_step: int
    max_preconditioner_dim: int
    use_bias_correction: bool
    grafting: str
    """Simpler rule that determines the update's length: "none", "sgd", "adagrad", "rmsprop" or "adam"."""
    grafting_beta2: float
    grafting_epsilon: float

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "ShampooRule":
        """Returns the rule with the hyperparameters in ``group``, a parameter group of the optimizer Shampoo."""
        begin = group["start_preconditioning_step"]
        begin = group["precondition_frequency"] if begin is None else begin
        return rule_of(cls, group, start_preconditioning_step=begin)

    def cost(self, shape: tuple[int, ...]) -> int:
        """Returns the average number of scalar multiplications for one update of a matrix of ``shape``.

        Eigendecompositions count only in part, because they run once in ``precondition_frequency`` updates.
        """
        elements, every = shape[0] * shape[1], self.precondition_frequency
        sides = [size for size in shape if size <= self.max_preconditioner_dim]
        return sum(2 * elements * size + 10 * size**3 // every for size in sides) + elements

    def state_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Returns the names and shapes of the state tensors of a matrix of ``shape``.

        They are a statistic and its inverse root for each dim of size up to ``max_preconditioner_dim``, and the
        momentum and second moments if the options need them.
        """
        sums = side_shapes(shape, self.max_preconditioner_dim, LEFT, RIGHT)
        roots = side_shapes(shape, self.max_preconditioner_dim, LEFT_ROOT, RIGHT_ROOT)
        momentum = {MOMENTUM: shape} if self.betas[0] else {}
        squares = {SQUARES: shape} if self.grafting in _OF_SQUARES else {}
        return {**momentum, **squares, **sums, **roots}

    def update(self, direction_AB: Tensor, state: MatrixState, step: int) -> Tensor:
        """Returns the update [A, B] for the gradient ``direction_AB``, preconditioned by the statistics of all
        gradients.

        ``state``: state tensors by name, written in place. Before ``start_preconditioning_step`` the update is not
        preconditioned.
        """
        if step == 1:
            for kept in state.values():
                kept.zero_()
        b1, b2 = self.betas
        add_gram_(state.get(LEFT), state.get(RIGHT), direction_AB, b2, _part(b2))
        momentum = direction_AB
        if b1:
            momentum = state[MOMENTUM].lerp_(direction_AB, 1 - b1) / self._corrected(b1, step)
        simple = self._simple(direction_AB, momentum, state, step)
        if step < self.start_preconditioning_step or not (LEFT in state or RIGHT in state):
            return simple
        if step == self.start_preconditioning_step or step % self.precondition_frequency == 0:
            self._make_roots(state, step)
        found = both_sides(state.get(LEFT_ROOT), momentum, state.get(RIGHT_ROOT))
        return found if self.grafting == "none" else found * (simple.norm() / found.norm().clamp(min=1e-30))

    def apply_(self, weights: Tensor, update: Tensor, shape: tuple[int, ...], step: int) -> None:
        """Applies weight decay and ``update`` to ``weights`` in place; ``shape`` and ``step`` have no effect."""
        weights.mul_(1 - self.lr * self.weight_decay).add_(update, alpha=-self.lr)

    def _simple(self, grad_AB: Tensor, momentum_AB: Tensor, state: MatrixState, step: int) -> Tensor:
        """Returns the update of the simpler rule; without grafting, the momentum."""
        if SQUARES not in state:
            return momentum_AB.clone() if momentum_AB is grad_AB else momentum_AB
        b = 1.0 if self.grafting == "adagrad" else self.grafting_beta2
        squares = state[SQUARES].mul_(b).addcmul_(grad_AB, grad_AB, value=_part(b))
        corrected = 1 - b**step if self.grafting == "adam" else 1.0
        return momentum_AB / (squares / corrected).sqrt_().add_(self.grafting_epsilon)

    def _make_roots(self, state: MatrixState, step: int) -> None:
        sides = [(s, r) for s, r in ((LEFT, LEFT_ROOT), (RIGHT, RIGHT_ROOT)) if s in state]
        for name, root in sides:
            sums = state[name] / self._corrected(self.betas[1], step)
            values, vectors = eigen(sums)
            # -1/4 on each of two sides or -1/2 on one: the size of an update does not depend on the gradient's size
            powers = (values.clamp_(min=0) + self.epsilon).pow_(-0.5 / len(sides))
            state[root].copy_((vectors * powers) @ vectors.T)

    def _corrected(self, beta: float, step: int) -> float:
        """Returns the bias correction of an average, 1 - beta^step; 1 for sums."""
        return 1 - beta**step if self.use_bias_correction and beta < 1 else 1.0


def _part(beta: float) -> float:
    """Returns the weight of a new square; 1 if squares are summed."""
    return 1 - beta if beta < 1 else 1.0


SOAP_LEFT, SOAP_RIGHT, LEFT_BASIS, RIGHT_BASIS = "soap_left", "soap_right", "soap_left_basis", "soap_right_basis"
FIRST, SECOND = "soap_exp_avg", "soap_exp_avg_sq"
SOAP_STATE = frozenset({SOAP_LEFT, SOAP_RIGHT, LEFT_BASIS, RIGHT_BASIS, FIRST, SECOND})

_SHIFT = 3e-3
"""Fraction of the largest eigenvalue added to all; rounding in fp32 is about ten thousand times smaller."""
_FIRST_STEPS = 4
"""Steps of the power method on the first gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoapRule:
    """Hyperparameters of SOAP for one update."""

    lr: float
    betas: tuple[float, float]
    shampoo_beta: float
    """Decay rate of the averages of G G' and G' G."""
    eps: float
    weight_decay: float
    precondition_frequency: int
    max_precond_dim: int
    normalize_grads: bool
    correct_bias: bool

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "SoapRule":
        """Returns the rule with the hyperparameters in ``group``, a parameter group with SOAP's options."""
        own = group["shampoo_beta"]
        return rule_of(cls, group, shampoo_beta=group["betas"][1] if own is None else own)

    def cost(self, shape: tuple[int, ...]) -> int:
        """Returns the average number of scalar multiplications for one update of a matrix of ``shape``.

        New eigenbases count only in part, because they are computed once in ``precondition_frequency`` updates.
        """
        elements, every = shape[0] * shape[1], self.precondition_frequency
        sides = [size for size in shape if size <= self.max_precond_dim]
        return sum(3 * elements * size + (4 * size**3 + 2 * elements * size) // every for size in sides) + elements

    def state_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Returns the names and shapes of the state tensors of a matrix of ``shape``.

        They are two moments, and a statistic and an eigenbasis for each dim of size up to ``max_precond_dim``.
        """
        averages = side_shapes(shape, self.max_precond_dim, SOAP_LEFT, SOAP_RIGHT)
        bases = side_shapes(shape, self.max_precond_dim, LEFT_BASIS, RIGHT_BASIS)
        return {FIRST: shape, SECOND: shape, **averages, **bases}

    def update(self, direction_AB: Tensor, state: MatrixState, step: int) -> Tensor:
        """Returns the update [A, B] for the gradient ``direction_AB``: Adam's update in an eigenbasis.

        ``state``: state tensors by name, written in place. The first gradient only initializes the bases, and its
        update is zero.
        """
        grad = direction_AB
        if step == 1:
            for kept in state.values():
                kept.zero_()
            self._accumulate(grad, state)
            for average, basis in ((SOAP_LEFT, LEFT_BASIS), (SOAP_RIGHT, RIGHT_BASIS)):
                if average in state:
                    _begin(state[average], state[basis])
            return torch.zeros_like(grad)
        # before the average takes the gradient in, so that no gradient is preconditioned by itself
        found = self._adam(grad, state, step - 1)
        self._accumulate(grad, state)
        if (step - 1) % self.precondition_frequency == 0:
            _refresh(state)
        return found

    def apply_(self, weights: Tensor, update: Tensor, shape: tuple[int, ...], step: int) -> None:
        """Applies weight decay and ``update`` to ``weights`` in place; does nothing in the first step. ``shape`` has no
        effect.
        """
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
        add_gram_(state.get(SOAP_LEFT), state.get(SOAP_RIGHT), grad_AB, b, 1 - b)


def _begin(average: Tensor, basis: Tensor) -> None:
    """Starts a basis: power steps from the identity towards the eigenvectors of the first average."""
    basis.copy_(torch.eye(len(basis), dtype=basis.dtype, device=basis.device))
    for _ in range(_FIRST_STEPS):
        basis.copy_(torch.linalg.qr(_grown(average, basis)[0]).Q)


def _grown(average: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the columns of a basis after a step of the power method, and estimates of their eigenvalues."""
    grown = average @ basis
    sizes = (basis * grown).sum(0)
    return grown.addcmul_(basis, _SHIFT * sizes.max()), sizes


def _refresh(state: MatrixState) -> None:
    """Makes a power step of both bases towards the eigenvectors, and transforms the moments into the new bases."""
    left, right = state.get(LEFT_BASIS), state.get(RIGHT_BASIS)
    first = both_sides(left, state[FIRST], transposed(right))
    for dim, average, basis in ((0, state.get(SOAP_LEFT), left), (1, state.get(SOAP_RIGHT), right)):
        if average is not None and basis is not None:
            grown, sizes = _grown(average, basis)
            # squares cannot be rotated: they only follow the order of the columns, largest eigenvalue first
            order = sizes.argsort(descending=True, stable=True)
            state[SECOND].copy_(state[SECOND].index_select(dim, order))
            basis.copy_(torch.linalg.qr(grown[:, order]).Q)
    state[FIRST].copy_(both_sides(transposed(left), first, right))
