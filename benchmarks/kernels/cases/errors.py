"""Numerical error of an operator against float64, relative to the error of eager torch in the same dtype."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ULP = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}

Operator = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Deviation:
    """Root mean square errors of one output or gradient, relative to float64 on equal inputs."""

    error: float
    eager: float
    """Error of eager torch in the same dtype."""
    scale: float
    """Root mean square of the float64 result."""
    ulp: float
    """Relative size of one unit in the last place."""

    @property
    def allowed(self) -> float:
        """Maximum allowed error: twice eager torch's, or one unit in the last place if that is larger."""
        return max(2 * self.eager, self.ulp * self.scale)

    @property
    def holds(self) -> bool:
        """True if the error is allowed; False for NaN."""
        return self.error <= self.allowed


def results(operator: Operator, inputs: Sequence[Tensor], narrow: torch.dtype | None = None) -> list[Tensor]:
    """Returns the outputs of ``operator``, and the gradients of its float inputs for random output gradients.

    Only outputs if none requires a gradient. ``narrow``: dtype to which output gradients are rounded, so that runs in
    several dtypes get equal ones.
    """
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    given = operator(*leaves)
    every = list(given) if isinstance(given, tuple) else [given]
    outputs = [out for out in every if out.requires_grad]
    if not outputs:
        return every
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(out.shape, generator=generator).to(narrow or out.dtype).to(out) for out in outputs]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    found = torch.autograd.grad(outputs, wanted, grads, allow_unused=True)
    return [*(out.detach() for out in outputs), *(g for g in found if g is not None)]


def deviations(ours: Operator, eager: Operator, inputs: Sequence[Tensor]) -> list[Deviation]:
    """Returns the errors of each result of ``ours`` and ``eager`` relative to ``eager`` in float64."""
    narrow = next(x.dtype for x in inputs if x.is_floating_point())
    truth = results(eager, [x.double() if x.is_floating_point() else x for x in inputs], narrow)
    mine, its = results(ours, inputs, narrow), results(eager, inputs, narrow)
    assert len(truth) == len(mine) == len(its)
    found = []
    for number, (true, own, eagers) in enumerate(zip(truth, mine, its, strict=True)):
        assert own.shape == true.shape and own.dtype == eagers.dtype, number
        error, eager_error = _rms(own.double() - true), _rms(eagers.double() - true)
        found.append(Deviation(error, eager_error, _rms(true), _ULP[own.dtype]))
    return found


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0
