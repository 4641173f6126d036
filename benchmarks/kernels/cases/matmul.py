"""Cases of linear layers with fused epilogues; cost is counted in operations, and cuBLAS is the competitor."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.cases.case import Case, Cost, Inputs, Slice, Target, random
from benchmarks.kernels.cases.errors import Operator
from engine.kernels.dispatch import Kernels
from engine.kernels.ops.activations import ACTIVATIONS, Activation

CUBLAS = "cuBLAS"
PUBLISHED = "8192^3"
"""Name of the slice to which the targets apply."""


@dataclass(frozen=True, slots=True)
class Form:
    """Operations after the product: bias, activation, residual."""

    activation: Activation = "none"
    biased: bool = False
    residual: bool = False

    @property
    def name(self) -> str:
        """Name of the form in tables."""
        parts = ["bias"] * self.biased + [self.activation] * (self.activation != "none") + ["residual"] * self.residual
        return ", ".join(parts) or "plain"


_MEASURED = (Form(), Form("gelu_tanh", biased=True), Form(residual=True))
_OTHERS = (
    Form("silu"),
    Form("gelu", biased=True),
    Form("relu2", biased=True),
    Form("relu", biased=True, residual=True),
)


def linears(where: Slice, dtype: torch.dtype) -> Iterator[Case]:
    """Yields cases of the MLP's linear layers: up, plain and with activation, and down with the residual."""
    yield from (_linear(where, dtype, form) for form in _MEASURED)


def every_linear(where: Slice, dtype: torch.dtype) -> Iterator[Case]:
    """Yields cases of linear layers with all activations."""
    yield from (_linear(where, dtype, form) for form in (*_MEASURED, *_OTHERS))


def _linear(where: Slice, dtype: torch.dtype, form: Form) -> Case:
    inputs, outputs = (where.hidden, where.width) if form.residual else (where.width, where.hidden)
    flops = 2 * where.tokens * inputs * outputs
    targets = (Target("forward", CUBLAS, 0.9), Target("backward", CUBLAS, 0.85)) if where.name == PUBLISHED else ()
    return Case(
        "linear", form.name, where, dtype, inputs, partial(_make, (inputs, outputs), form, dtype), where.tokens,
        ours=partial(_ours, form), eager=partial(_eager, form), forward=Cost(flops=flops),
        backward=Cost(flops=2 * flops), peers={CUBLAS: lambda: _product_alone}, targets=targets,
        shape=f"{where.tokens} x {inputs} x {outputs}",
        winners={"linear": "forward", "linear_backward": "backward"},
    )  # fmt: skip


def _make(sizes: tuple[int, int], form: Form, dtype: torch.dtype, device: torch.device, rows: int) -> Inputs:
    inputs, outputs = sizes
    values = random(device, dtype)
    weight = values.normal(outputs, inputs, scale=inputs**-0.5)
    bias = (values.normal(outputs),) if form.biased else ()
    residual = (values.normal(rows, outputs),) if form.residual else ()
    return values.normal(rows, inputs), weight, *bias, *residual


def _parts(form: Form, rest: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
    """(bias, residual)"""
    return rest[0] if form.biased else None, rest[-1] if form.residual else None


def _ours(form: Form, kernels: Kernels) -> Operator:
    from engine.kernels.ops.linear import LinearForm, linear

    def operator(x: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
        bias, residual = _parts(form, rest)
        return linear(x, weight, bias, LinearForm(form.activation), kernels, residual=residual)

    return operator


def _eager(form: Form, x: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
    bias, residual = _parts(form, rest)
    y = ACTIVATIONS[form.activation](functional.linear(x, weight, bias))
    return y if residual is None else y + residual


def _product_alone(x: Tensor, weight: Tensor, *_: Tensor) -> Tensor:
    """What follows is left out: the time that no kernel can beat with the library's product."""
    return functional.linear(x, weight)
