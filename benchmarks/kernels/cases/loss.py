"""Cases of cross-entropy from logits and from hidden states, with the vocabulary shard of one tensor rank."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.cases.case import Case, Cost, Inputs, Slice, Target, random
from benchmarks.kernels.cases.errors import Operator
from engine.kernels.dispatch import Kernels

NARROW = "F.cross_entropy"


def cross_entropies(where: Slice, dtype: torch.dtype) -> Iterator[Case]:
    """Yields cases of cross-entropy from logits: forward reads them, backward writes their gradient."""
    size = dtype.itemsize * where.tokens * where.vocabulary
    yield Case(
        "cross_entropy", "mean", where, dtype, where.vocabulary, partial(_logits, where, dtype), where.tokens,
        ours=_cross_entropy, eager=_eager, forward=Cost(size), backward=Cost(2 * size),
        peers={NARROW: lambda: functional.cross_entropy, "Liger": _liger}, targets=(Target("both", "copy", 0.8),),
        shape=f"{where.tokens} x {where.vocabulary}",
    )  # fmt: skip


def linear_cross_entropies(where: Slice, dtype: torch.dtype) -> Iterator[Case]:
    """Yields cases of cross-entropy from hidden states; the forward also computes the gradients."""
    yield Case(
        "linear_cross_entropy", "mean", where, dtype, where.vocabulary, partial(_hidden, where, dtype), where.tokens,
        ours=_linear_cross_entropy, eager=_eager_linear, backward=Cost(), peers={"Liger": _liger_linear},
        forward=Cost(flops=6 * where.tokens * where.width * where.vocabulary),
        targets=(Target("both", "product", 0.75),), memory_limit=_memory(where, dtype),
        shape=f"{where.tokens} x {where.width} x {where.vocabulary}",
    )  # fmt: skip


def _memory(where: Slice, dtype: torch.dtype) -> int:
    """Bytes: the logits of a chunk, the weight's gradient in fp32, both gradients as they are given out."""
    from engine.kernels.ops.linear_cross_entropy import chunk_tokens

    chunk = min(where.tokens, chunk_tokens(where.tokens, where.width, where.vocabulary))
    hidden, weight = where.tokens * where.width, where.vocabulary * where.width
    return dtype.itemsize * (chunk * where.vocabulary + 2 * hidden + weight) + 4 * weight


def _logits(where: Slice, dtype: torch.dtype, device: torch.device, rows: int) -> Inputs:
    values = random(device, dtype)
    return values.normal(rows, where.vocabulary, scale=2.0), _targets(where, device, rows)


def _hidden(where: Slice, dtype: torch.dtype, device: torch.device, rows: int) -> Inputs:
    values = random(device, dtype)
    weight = values.normal(where.vocabulary, where.width, scale=2.0 * where.width**-0.5)
    return values.normal(rows, where.width), weight, _targets(where, device, rows)


def _targets(where: Slice, device: torch.device, rows: int) -> Tensor:
    """Every eighth is left out."""
    target = random(device, torch.int64, seed=1).integers(where.vocabulary, rows)
    target[::8] = -100
    return target


def _cross_entropy(kernels: Kernels) -> Operator:
    from benchmarks.kernels.cases.whole_logits import cross_entropy
    from engine.kernels.ops.cross_entropy import CrossEntropy

    return lambda logits, target: cross_entropy(logits, target, CrossEntropy(), kernels)


def _linear_cross_entropy(kernels: Kernels) -> Operator:
    from engine.kernels.ops.cross_entropy import CrossEntropy
    from engine.kernels.ops.linear_cross_entropy import linear_cross_entropy

    return lambda hidden, weight, target: linear_cross_entropy(hidden, weight, None, target, CrossEntropy(), kernels)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _eager(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(_wide(logits), target).to(logits.dtype)


def _eager_linear(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(_wide(functional.linear(hidden, weight)), target)


def _liger() -> Operator:
    from liger_kernel.transformers.functional import liger_cross_entropy

    return lambda logits, target: liger_cross_entropy(logits, target)


def _liger_linear() -> Operator:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return lambda hidden, weight, target: liger_fused_linear_cross_entropy(hidden, weight, target)
