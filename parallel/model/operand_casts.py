"""Casts of operands in 16-bit runs: operands of a wider dtype get the 16-bit dtype if torch requires equal dtypes.

    q * cos          bf16 * fp32   torch promotes to fp32: no cast
    softmax(..) @ v  fp32 @ bf16   torch refuses: the operands are cast to bf16, as under torch.autocast

Such operands come from fp32 buffers (rotary tables, masks) and inputs. If a model's first whole forward needs no cast,
the mode is disabled.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

_ONE_DTYPE = frozenset((
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "addbmm", "baddbmm", "addmv", "dot",
    "einsum", "tensordot", "multi_dot", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "scaled_dot_product_attention", "layer_norm", "group_norm", "instance_norm", "bilinear",
    "prelu", "lerp", "huber_loss", "binary_cross_entropy",
))  # fmt: skip
"""Functions that torch computes in one floating dtype."""
_WIDE = (torch.float32, torch.float64)


class QuietMode(TorchFunctionMode):
    """Base class of torch function modes that leave the engine's fused kernels enabled.

    Under any other mode, such as a tracer, layers call torch's functions.
    """


class OperandCasts(QuietMode):
    """Torch function mode that casts operands of different dtypes to the compute dtype.

    It affects functions that require operands of one dtype, such as ``matmul``.
    """

    def __init__(self, compute: torch.dtype) -> None:
        super().__init__()
        self._compute = compute
        self._needed: dict[bool, bool] = {}
        """True or False if forwards with (key True) or without gradients are known to need casts or not."""
        self._casts = 0

    @contextmanager
    def forward(self, whole: bool) -> Iterator[None]:
        """Casts operands of different dtypes in the forward inside the context.

        ``whole``: True for a forward of the whole model. If the first such forward needs no cast, later forwards with
        the same grad mode do not cast.
        """
        kind = torch.is_grad_enabled()
        if not self._needed.get(kind, True):
            yield
            return
        before = self._casts
        with self:
            yield
        if whole:
            self._needed[kind] = self._needed.get(kind, False) or self._casts > before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs ``func``, with operands of one dtype if ``func`` requires it."""
        if getattr(func, "__name__", None) in _ONE_DTYPE:
            found = {value.dtype for value in _tensors((*args, *(kwargs or {}).values()))}
            if self._compute in found and not found.isdisjoint(_WIDE):
                self._casts += 1
                args, kwargs = self._narrow(args), {key: self._narrow(value) for key, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))

    def _narrow(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self._compute) if value.dtype in _WIDE else value
        return type(value)(map(self._narrow, value)) if type(value) in (tuple, list) else value


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def is_watched() -> bool:
    """Returns True if a torch function mode other than :class:`QuietMode` is active, such as a tracer."""
    if not torch._C._len_torch_function_stack():  # fast path without any mode: each call of a layer asks
        return False
    return any(not isinstance(mode, QuietMode) for mode in _get_current_function_mode_stack())  # type: ignore[no-untyped-call]
