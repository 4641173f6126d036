"""Muon beside torch's own, to the bit, and its Newton-Schulz steps in fp32 beside fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.config.optim_sections import MuonParams
from engine.config.reader import stored
from engine.kernels.optim.matrix_rule import MuonRule, orthogonal
from engine.zero.optim.matrix.matrix_optimizers import FlatMuon

SHAPES = ((6, 10), (10, 6), (7, 7), (1, 5))


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


@pytest.mark.parametrize(
    "options",
    [{}, {"nesterov": False, "momentum": 0.5}, {"adjust_lr_fn": "match_rms_adamw"}, {"ns_steps": 2, "eps": 1e-3}],
)
def test_whole_matrices_train_to_the_bits_of_torch(options: dict[str, Any]) -> None:
    ours, theirs = weights(), weights()
    params = dict(stored(MuonParams())) | {"lr": 0.02} | options
    flat = FlatMuon(ours, **params)
    torchs = torch.optim.Muon(theirs, lr=0.02, **options)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        flat.step()
        torchs.step()  # type: ignore[no-untyped-call]
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def in_fp64(direction: Tensor, rule: MuonRule) -> Tensor:
    """The polynomial on the singular values, which leaves the singular vectors as they are."""
    left, sizes, right = torch.linalg.svd(direction.double(), full_matrices=False)
    sizes = sizes / sizes.norm()
    a, b, c = rule.coefficients
    for _ in range(rule.steps):
        sizes = a * sizes + b * sizes**3 + c * sizes**5
    found: Tensor = left @ sizes.diag() @ right
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_in_fp32_are_the_polynomial_of_the_singular_values(shape: tuple[int, int]) -> None:
    rule = MuonRule.of(dict(stored(MuonParams(ns_dtype="fp32"))))
    direction = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = orthogonal(direction, rule)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), in_fp64(direction, rule), rtol=0, atol=2e-5)
