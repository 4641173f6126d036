"""How far an operator is from the truth: against float64, and against what eager torch loses in the same dtype."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_ULP = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}

Operator = Callable[..., Any]


def results(operator: Operator, inputs: Sequence[Tensor], narrow: torch.dtype | None = None) -> list[Tensor]:
    """Outputs of ``operator`` and the gradients of its floating inputs, for random gradients of the outputs.

    ``narrow``: the dtype that the gradients of the outputs are rounded to first, so that runs in several dtypes get
    equal ones.
    """
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    outputs = operator(*leaves)
    outputs = [out for out in (outputs if isinstance(outputs, tuple) else (outputs,)) if out.requires_grad]
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(out.shape, generator=generator).to(narrow or out.dtype).to(out.dtype) for out in outputs]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    found = torch.autograd.grad(outputs, wanted, grads, allow_unused=True)
    return [*(out.detach() for out in outputs), *(g for g in found if g is not None)]


def check_error(ours: Operator, eager: Operator, inputs: Sequence[Tensor]) -> None:
    """Assert that each output and gradient of ``ours`` errs at most twice as much as ``eager`` in the same dtype.

    The error is the root mean square difference from ``eager`` in float64 on the same inputs and gradients; a floor of
    one unit in the last place of the result's scale stands for results that eager torch happens to hit exactly.
    """
    narrow = next(x.dtype for x in inputs if x.is_floating_point())
    truth = results(eager, [x.double() if x.is_floating_point() else x for x in inputs], narrow)
    mine, its = results(ours, inputs, narrow), results(eager, inputs, narrow)
    assert len(truth) == len(mine) == len(its)
    for number, (true, own, eagers) in enumerate(zip(truth, mine, its, strict=True)):
        assert own.shape == true.shape and own.dtype == eagers.dtype, number
        error, allowed = _rms(own.double() - true), 2 * _rms(eagers.double() - true)
        floor = _ULP[own.dtype] * _rms(true)
        assert error <= max(allowed, floor), f"result {number}: error {error:.3g}, allowed {allowed:.3g}"


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0
