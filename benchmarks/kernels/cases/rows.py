"""Cases of row-wise and elementwise operators; cost is the bytes read and written."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.cases.case import Case, Cost, Inputs, Slice, Target, random
from benchmarks.kernels.cases.errors import Operator
from engine.kernels.dispatch import Kernels
from engine.kernels.ops.activations import Activation

EPS = 1e-5
BEATS_TORCH_UP_TO = 4096
"""Maximum width at which norms must be faster than torch's."""
NORM_TARGETS_FROM = 2048
"""Minimum width at which norms must reach their fraction of the copy rate."""

FUSED_RMS = "F.rms_norm"


def norms(where: Slice, dtype: torch.dtype) -> Iterator[Case]:
    """Yields cases of RMSNorm, RMSNorm with residual sum, and LayerNorm."""
    size = dtype.itemsize * where.tokens * where.width
    wide, beaten = where.width >= NORM_TARGETS_FROM, where.width <= BEATS_TORCH_UP_TO
    targets = (Target("forward", "copy", 0.88), Target("backward", "copy", 0.80)) if wide else ()
    eager, fused = ((Target("both", name, 1.0),) * beaten for name in ("eager", FUSED_RMS))
    common = where, dtype, where.width
    shape = f"{where.tokens} x {where.width}"
    yield Case(
        "norm", "rms", *common, partial(_rows, where, dtype, 1, False), where.tokens, _norm, _eager_rms,
        Cost(2 * size), Cost(3 * size), {FUSED_RMS: _fused_rms, "Liger": _liger_rms}, targets + eager + fused,
        shape=shape,
    )  # fmt: skip
    yield Case(
        "norm", "rms + residual", *common, partial(_rows, where, dtype, 2, False), where.tokens, _add_norm, _eager_add,
        Cost(4 * size), Cost(4 * size), targets=targets + eager, shape=shape,
    )  # fmt: skip
    yield Case(
        "norm", "layer", *common, partial(_rows, where, dtype, 1, True), where.tokens, _layer, _eager_layer,
        Cost(2 * size), Cost(3 * size), {"Liger": _liger_layer}, targets + eager, shape=shape,
    )  # fmt: skip


def gated(where: Slice, dtype: torch.dtype) -> Iterator[Case]:
    """Yields cases of SwiGLU and GeGLU."""
    size = dtype.itemsize * where.tokens * where.hidden
    kinds: tuple[tuple[Activation, Operator, Callable[[], Operator]], ...] = (
        ("silu", _eager_swiglu, _liger_swiglu),
        ("gelu_tanh", _eager_geglu, _liger_geglu),
    )
    for kind, eager, peer in kinds:
        yield Case(
            "gated", kind, where, dtype, where.hidden,
            make=partial(_plain, dtype, (where.hidden, where.hidden)), rows=where.tokens,
            ours=partial(_gated, kind), eager=eager, forward=Cost(3 * size), backward=Cost(5 * size),
            peers={"Liger": peer}, shape=f"{where.tokens} x {where.hidden}",
            targets=(Target("forward", "copy", 0.9), Target("backward", "copy", 0.9)),
        )  # fmt: skip


def activations(where: Slice, dtype: torch.dtype) -> Iterator[Case]:
    """Yields cases of bias and activation after a product."""
    size = dtype.itemsize * where.tokens * where.hidden

    def make(device: torch.device, rows: int) -> Inputs:
        values = random(device, dtype)
        return values.normal(rows, where.hidden), values.normal(where.hidden)

    yield Case(
        "activation", "bias, gelu_tanh", where, dtype, where.hidden, make, where.tokens,
        ours=_activate, eager=_eager_activate, forward=Cost(2 * size), backward=Cost(3 * size),
        shape=f"{where.tokens} x {where.hidden}",
        targets=(Target("forward", "copy", 0.9), Target("backward", "copy", 0.9)),
    )  # fmt: skip


def _rows(where: Slice, dtype: torch.dtype, tensors: int, biased: bool, device: torch.device, rows: int) -> Inputs:
    values = random(device, dtype)
    affine = [values.normal(where.width) for _ in range(1 + biased)]
    return (*(values.normal(rows, where.width) for _ in range(tensors)), *affine)


def _plain(dtype: torch.dtype, widths: tuple[int, ...], device: torch.device, rows: int) -> Inputs:
    values = random(device, dtype)
    return tuple(values.normal(rows, width) for width in widths)


def _norm(kernels: Kernels) -> Operator:
    from engine.kernels.ops.norm import Norm, norm

    return lambda x, weight: norm(x, weight, None, Norm(EPS), kernels)


def _add_norm(kernels: Kernels) -> Operator:
    from engine.kernels.ops.norm import Norm, add_norm

    return lambda x, residual, weight: add_norm(x, residual, (weight, None), Norm(EPS), kernels)


def _layer(kernels: Kernels) -> Operator:
    from engine.kernels.ops.norm import Norm, norm

    return lambda x, weight, bias: norm(x, weight, bias, Norm(EPS, centered=True), kernels)


def _gated(kind: Activation, kernels: Kernels) -> Operator:
    from engine.kernels.ops.activations import gated as operator

    return lambda gate, up: operator(gate, up, kind, kernels)


def _activate(kernels: Kernels) -> Operator:
    from engine.kernels.ops.activations import activate

    return lambda x, bias: activate(x, bias, "gelu_tanh", kernels)


def _eager_rms(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def _eager_add(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    stream = x + residual
    return _eager_rms(stream, weight), stream


def _eager_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def _eager_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def _eager_geglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.gelu(gate, approximate="tanh") * up


def _eager_activate(x: Tensor, bias: Tensor) -> Tensor:
    return functional.gelu(x + bias, approximate="tanh")


def _fused_rms() -> Operator:
    return lambda x, weight: functional.rms_norm(x, x.shape[-1:], weight, EPS)


def _liger_rms() -> Operator:
    from liger_kernel.transformers.functional import liger_rms_norm

    return lambda x, weight: liger_rms_norm(x, weight, EPS)


def _liger_layer() -> Operator:
    from liger_kernel.transformers.functional import liger_layer_norm

    return lambda x, weight, bias: liger_layer_norm(x, weight, bias, EPS)


def _liger_swiglu() -> Operator:
    from liger_kernel.transformers.functional import liger_swiglu

    return lambda gate, up: liger_swiglu(gate, up)


def _liger_geglu() -> Operator:
    from liger_kernel.transformers.functional import liger_geglu

    return lambda gate, up: liger_geglu(gate, up)
