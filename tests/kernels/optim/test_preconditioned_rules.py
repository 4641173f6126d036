"""Shampoo and SOAP beside the formulas of their papers, in fp64, and beside the rules that they contain."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.config.optim_sections import ShampooParams, SOAPParams
from engine.config.reader import stored
from engine.kernels.optim.preconditioned_rules import _FIRST_STEPS, _SHIFT, ShampooRule
from engine.zero.optim.matrix.matrix_optimizers import FlatShampoo, FlatSOAP

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


def params(**options: Any) -> dict[str, Any]:
    return dict(stored(ShampooParams())) | {"lr": 0.1} | options


def power(matrix: Tensor, exponent: float) -> Tensor:
    """Of a symmetric positive definite matrix, by its singular values."""
    left, sizes, _ = torch.linalg.svd(matrix)
    found: Tensor = left @ (sizes**exponent).diag() @ left.T
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_and_no_momentum_are_gupta_2018(shape: tuple[int, int]) -> None:
    options = params(betas=(0.0, 1.0), grafting="none", precondition_frequency=1, epsilon=0.5)
    weight = weight_of(shape)
    expected = weight.detach().clone()
    left, right = (0.5 * torch.eye(n, dtype=torch.float64) for n in shape)
    for g in grads(shape):
        left, right = left + g @ g.T, right + g.T @ g
        expected -= 0.1 * power(left, -1 / 4) @ g @ power(right, -1 / 4)
    torch.testing.assert_close(train(FlatShampoo([weight], **options), weight, grads(shape)), expected)


def test_averages_momentum_grafting_and_seldom_roots() -> None:
    shape, (b1, b2), decay = (6, 4), (0.8, 0.9), 0.3
    options = params(betas=(b1, b2), grafting_beta2=0.95, precondition_frequency=3, epsilon=1e-3, weight_decay=decay)
    weight = weight_of(shape)
    expected = weight.detach().clone()
    left, right = (torch.zeros(n, n, dtype=torch.float64) for n in shape)
    momentum, squares, roots = torch.zeros_like(expected), torch.zeros_like(expected), list[Tensor]()
    for t, g in enumerate(grads(shape), start=1):
        left, right = b2 * left + (1 - b2) * g @ g.T, b2 * right + (1 - b2) * g.T @ g
        momentum = b1 * momentum + (1 - b1) * g
        squares = 0.95 * squares + 0.05 * g**2
        m = momentum / (1 - b1**t)
        update = adam = m / ((squares / (1 - 0.95**t)) ** 0.5 + 1e-8)
        if t % 3 == 0:
            roots = [power(s / (1 - b2**t) + 1e-3 * torch.eye(len(s)).double(), -1 / 4) for s in (left, right)]
        if roots:
            update = roots[0] @ m @ roots[1]
            update = update * adam.norm() / update.norm()
        expected = expected - 0.1 * decay * expected - 0.1 * update
    torch.testing.assert_close(train(FlatShampoo([weight], **options), weight, grads(shape)), expected)


@pytest.mark.parametrize(
    ("grafting", "theirs"),
    [
        ("adam", lambda w: torch.optim.AdamW([w], lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)),
        ("adagrad", lambda w: torch.optim.Adagrad([w], lr=0.1, eps=1e-8)),
        ("rmsprop", lambda w: torch.optim.RMSprop([w], lr=0.1, alpha=0.999, eps=1e-8)),
        ("sgd", lambda w: torch.optim.SGD([w], lr=0.1)),
        ("none", lambda w: torch.optim.SGD([w], lr=0.1)),
    ],
)
def test_before_the_first_roots_it_is_the_simpler_rule(grafting: str, theirs: Any) -> None:
    b1 = 0.9 if grafting == "adam" else 0.0
    one, other = weight_of((5, 7)), weight_of((5, 7))
    options = params(betas=(b1, 0.999), grafting=grafting, start_preconditioning_step=STEPS + 1)
    found = train(FlatShampoo([one], **options), one, grads((5, 7)))
    torch.testing.assert_close(found, train(theirs(other), other, grads((5, 7))))


def test_a_side_that_is_too_long_leaves_the_other_the_root_of_both() -> None:
    g = grads((3, 8))[0]
    rule = ShampooRule.of(params(betas=(0.0, 1.0), grafting="none", precondition_frequency=1, max_preconditioner_dim=5))
    state = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in rule.state_shapes((3, 8)).items()}
    assert sorted(state) == ["shampoo_left", "shampoo_left_root"]
    found = rule.update(g, state, 1)
    torch.testing.assert_close(found, power(g @ g.T, -1 / 2) @ g)  # of one gradient: its nearest orthogonal matrix
    torch.testing.assert_close(found @ found.T, torch.eye(3, dtype=torch.float64))


def test_gradients_of_zeros_leave_the_weights() -> None:
    weight = nn.Parameter(torch.ones(4, 6))
    assert torch.equal(train(FlatShampoo([weight], **params()), weight, [torch.zeros(4, 6)] * 12), torch.ones(4, 6))
