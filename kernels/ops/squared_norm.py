"""Sum of squares of flat tensors, in fp64: 1e30 does not overflow, 1e-30 does not underflow, and runs are bitwise
equal.

Parts that do not count, because another rank counts them, add 0; if such a part has a non-finite value, the sum is NaN.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.dispatch import Kernels

_PIECE = 1 << 20
"""Elements that the reference sums at a time, because torch converts all of its input to fp64 before it sums."""


def squared_norm(parts: Sequence[tuple[Tensor, bool]], kernels: Kernels) -> Tensor:
    """Return one fp64 scalar on the device of ``parts``: pairs of (values, whether they count), flat and contiguous.

    The sum is neither differentiated nor compiled with a model, so this is a plain function and no custom operator.
    """
    ours = [_fits(values, kernels) for values, _ in parts]
    rest = [part for part, yes in zip(parts, ours, strict=True) if not yes]
    total = squared_norm_reference(rest) if rest or not parts else None
    if not any(ours):
        assert total is not None
        return total
    from engine.kernels.gpu.squared_norm import squared_norm as launch

    found = launch([part for part, yes in zip(parts, ours, strict=True) if yes])
    return found if total is None else found + total


def squared_norm_reference(parts: Sequence[tuple[Tensor, bool]]) -> Tensor:
    """PyTorch reference of :func:`squared_norm`."""
    norms = [
        torch.linalg.vector_norm(piece, dtype=torch.float64) * (1.0 if counts else 0.0)
        for values, counts in parts
        for piece in torch.split(values, _PIECE)
    ]
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)


def _fits(values: Tensor, kernels: Kernels) -> bool:
    narrow = values.dtype in (torch.float32, torch.bfloat16, torch.float16) and values.is_contiguous()
    if not narrow or not values.numel() or not kernels.replaces(values.device):
        return False
    return kernels.triton("squared_norm", values, 1 << (values.numel().bit_length() - 1))
