"""Cases of the rotary embedding; cost is the bytes of queries and keys, read and written.

Shape suffixes: B batch, H heads, L length, D head width.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.cases.case import Case, Cost, Inputs, Slice, Target, random
from benchmarks.kernels.cases.errors import Operator
from engine.kernels.dispatch import Kernels

BASE = 500000.0
"""Base of the rotary wavelengths, as in Llama 3."""


def rotary(where: Slice, dtype: torch.dtype) -> Iterator[Case]:
    """Yields cases of rotary embedding of one sequence's queries and keys, by halves as in Hugging Face's Llama."""
    size = 2 * dtype.itemsize * where.tokens * (where.heads + where.key_heads) * where.head
    yield Case(
        "rotary", "halves", where, dtype, where.head, partial(_make, where, dtype), where.tokens,
        ours=_ours, eager=_eager, forward=Cost(size), backward=Cost(size), peers={"Liger": _liger},
        targets=(Target("forward", "copy", 0.85), Target("backward", "copy", 0.85)),
        shape=f"{where.tokens} x ({where.heads} + {where.key_heads}) x {where.head}",
    )  # fmt: skip


def _make(where: Slice, dtype: torch.dtype, device: torch.device, rows: int) -> Inputs:
    """As projections give them: [B, L, H, D] in memory, [B, H, L, D] in shape."""
    values = random(device, dtype)
    q, k = (values.normal(1, rows, heads, where.head).transpose(1, 2) for heads in (where.heads, where.key_heads))
    rates = BASE ** (-torch.arange(0, where.head, 2, device=device, dtype=torch.float64) / where.head)
    angles = torch.arange(rows, device=device)[:, None] * torch.cat((rates, rates))
    return q, k, angles.cos()[None].to(dtype), angles.sin()[None].to(dtype)


def _ours(kernels: Kernels) -> Operator:
    from engine.kernels.ops.rotary import Rotary, rotary

    return lambda q, k, cos, sin: rotary(q, k, cos.detach(), sin.detach(), Rotary(), kernels)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-right, left), -1) * sin[:, None]


def _eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.detach(), sin.detach()
    return _turned(q, cos, sin), _turned(k, cos, sin)


def _liger() -> Operator:
    from liger_kernel.transformers.functional import liger_rope

    def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        given: tuple[Tensor, Tensor] = liger_rope(q, k, cos.detach(), sin.detach())
        return given

    return turn
