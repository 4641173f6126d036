"""SOAP beside the paper's formulas, in fp64, and beside Adam where no side has a basis."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.config.optim_sections import SOAPParams
from engine.config.reader import stored
from engine.kernels.optim.preconditioned_rules import _FIRST_STEPS, _SHIFT
from engine.zero.optim.matrix.matrix_optimizers import FlatSOAP

SHAPES = ((6, 10), (10, 6), (7, 7), (1, 5))
STEPS = 9


class PaperSoap:
    """Algorithm 3 of Vyas et al. 2024 for one matrix, its momentum in the space of the weights.

    The first gradient makes no update. Its eigenvectors are approached by some steps of the power method from the
    coordinates; then, every ``f`` updates, one more, of columns that are ordered by their estimated eigenvalues.
    """

    def __init__(self, weight: Tensor, p: dict[str, Any]) -> None:
        self.w, self.p, self.t = weight, p, 0
        self.m, self.v = torch.zeros_like(weight), torch.zeros_like(weight)
        self.squares = [torch.zeros(n, n, dtype=weight.dtype) for n in weight.shape]
        self.bases: list[Tensor] = [torch.eye(n, dtype=weight.dtype) for n in weight.shape]

    def turn(self, x: Tensor) -> Tensor:
        return self.bases[0].T @ x @ self.bases[1]

    def step(self, g: Tensor) -> None:
        (b1, b2), lr = self.p["betas"], self.p["lr"]
        own = self.p["shampoo_beta"]
        b = b2 if own is None else own
        if self.t:
            self.w -= lr * self.p["weight_decay"] * self.w
            self.m = b1 * self.m + (1 - b1) * g
            self.v = b2 * self.v + (1 - b2) * self.turn(g) ** 2
            n = self.bases[0] @ (self.turn(self.m) / (self.v**0.5 + self.p["eps"])) @ self.bases[1].T
            n = n / (n**2).mean() ** 0.5 if self.p["normalize_grads"] else n
            correction = (1 - b2**self.t) ** 0.5 / (1 - b1**self.t) if self.p["correct_bias"] else 1
            self.w -= lr * correction * n
        for side, gram in enumerate((g @ g.T, g.T @ g)):
            self.squares[side] = b * self.squares[side] + (1 - b) * gram
            if len(gram) > self.p["max_precond_dim"]:
                continue
            if not self.t:
                for _ in range(_FIRST_STEPS):
                    self.bases[side] = self.power(side, self.bases[side])
            elif self.t % self.p["precondition_frequency"] == 0:
                self.refresh(side)
        self.t += 1

    def refresh(self, side: int) -> None:
        basis = self.bases[side]
        sizes = (basis.T @ self.squares[side] @ basis).diagonal()
        order = sizes.argsort(descending=True)
        self.v = self.v[order] if side == 0 else self.v[:, order]
        self.bases[side] = self.power(side, basis[:, order])

    def power(self, side: int, basis: Tensor) -> Tensor:
        largest = (basis.T @ self.squares[side] @ basis).diagonal().max()
        shifted = self.squares[side] + _SHIFT * largest * torch.eye(len(basis), dtype=torch.float64)
        found: Tensor = torch.linalg.qr(shifted @ basis).Q
        return found


def grads(shape: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def train(optimizer: torch.optim.Optimizer, weight: nn.Parameter, gradients: list[Tensor]) -> Tensor:
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach()


def weight_of(shape: tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "options",
    [
        {"precondition_frequency": 2},
        {"precondition_frequency": 3, "max_precond_dim": 6, "shampoo_beta": 0.8, "betas": (0.8, 0.9)},
        {"precondition_frequency": 1, "normalize_grads": True, "correct_bias": False},
    ],
)
def test_a_matrix_trains_as_the_paper_has_it(shape: tuple[int, int], options: dict[str, Any]) -> None:
    params = dict(stored(SOAPParams())) | {"lr": 0.1, "weight_decay": 0.3} | options
    weight = weight_of(shape)
    paper = PaperSoap(weight.detach().clone(), params)
    found = train(FlatSOAP([weight], **params), weight, grads(shape))
    for gradient in grads(shape):
        paper.step(gradient)
    assert not torch.equal(found, weight_of(shape))
    torch.testing.assert_close(found, paper.w, rtol=0, atol=1e-9)


def test_without_bases_it_is_adam_from_the_second_gradient_on() -> None:
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.2, "eps": 1e-30}
    one, other, given = weight_of((6, 4)), weight_of((6, 4)), grads((6, 4))
    flat = FlatSOAP([one], **(dict(stored(SOAPParams())) | options | {"max_precond_dim": 3}))
    found = train(flat, one, given)
    assert sorted(flat.state[one]) == ["soap_exp_avg", "soap_exp_avg_sq"]
    torch.testing.assert_close(found, train(torch.optim.AdamW([other], **options), other, given[1:]))


def test_bases_come_to_the_eigenvectors_of_the_averages() -> None:
    options = dict(stored(SOAPParams())) | {"precondition_frequency": 1}
    weight, scales = weight_of((6, 10)), torch.logspace(0, 2, 6, dtype=torch.float64)
    flat = FlatSOAP([weight], **options)
    train(flat, weight, [scales[:, None] * gradient for seed in range(12) for gradient in grads((6, 10), seed)])
    state = flat.state[weight]
    turned = state["soap_left_basis"].T @ state["soap_left"] @ state["soap_left_basis"]
    values = torch.linalg.eigvalsh(state["soap_left"]).flip(0)
    torch.testing.assert_close(turned.diagonal(), values, rtol=0.02, atol=0)


def test_rounding_of_a_gradient_of_low_rank_does_not_choose_the_basis() -> None:
    """Two runs in fp32 whose gradients differ in their last bits; a gradient has rank 2, and the longer side 30."""
    generator = torch.Generator().manual_seed(8)
    given = [torch.randn(30, 2, generator=generator) @ torch.randn(2, 6, generator=generator) for _ in range(STEPS)]
    other = [gradient * (1 + 1e-7 * torch.randn(30, 6, generator=generator)) for gradient in given]
    params = dict(stored(SOAPParams())) | {"precondition_frequency": 2, "eps": 1e-2}
    found = []
    for gradients in (given, other):
        weight = nn.Parameter(torch.zeros(30, 6))
        found.append(train(FlatSOAP([weight], **params), weight, gradients))
    assert found[0].abs().max() > 1e-2
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=5e-6)


def test_bases_stay_orthonormal_in_fp32_without_a_gradient() -> None:
    weight = nn.Parameter(torch.randn(6, 9, generator=torch.Generator().manual_seed(1)))
    flat = FlatSOAP([weight], **(dict(stored(SOAPParams())) | {"precondition_frequency": 1}))
    found = train(flat, weight, [torch.zeros(6, 9) for _ in range(5)])
    assert found.isfinite().all()
    basis = flat.state[weight]["soap_right_basis"]
    torch.testing.assert_close(basis.T @ basis, torch.eye(9), rtol=0, atol=1e-6)
