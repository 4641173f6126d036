"""Shampoo beside the formulas of both papers, in fp64, and beside the rules that it grafts."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.config.optim_sections import ShampooParams
from engine.config.reader import stored
from engine.kernels.optim.preconditioned_rules import ShampooRule
from engine.zero.optim.matrix.matrix_optimizers import FlatShampoo
from tests.kernels.optim.test_soap_rule import SHAPES, STEPS, grads, train, weight_of


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
