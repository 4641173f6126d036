"""Casts of operands where an operation of a 16-bit run meets two dtypes: the wider ones take the 16-bit dtype.

    q * cos          bf16 * fp32   torch promotes to fp32, and so it stays
    softmax(..) @ v  fp32 @ bf16   torch refuses; here the product is that of bf16 operands, as under torch.autocast

Models hold rotary tables and masks as fp32 buffers, and get fp32 inputs. Whether a model needs such casts shows in its
first whole forward; where it does not, the mode is off from then on.
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


class OperandCasts(TorchFunctionMode):
    """The casts of one engine's forwards."""

    def __init__(self, compute: torch.dtype) -> None:
        super().__init__()
        self._compute = compute
        self._needed: dict[bool, bool] = {}
        """Whether forwards with and without gradients need casts, as far as that is known."""
        self._casts = 0

    @contextmanager
    def forward(self, whole: bool) -> Iterator[None]:
        """Context of a forward; ``whole``: it is that of the whole model, and shows whether casts are needed."""
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
        """Result of ``func``, with operands of one dtype where it needs that."""
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
    """Returns True if a function mode other than these casts is on, such as a tracer."""
    if (
        not torch._C._len_torch_function_stack()
    ):  # as in every run without a mode; this is asked at each call of a layer
        return False
    return any(not isinstance(mode, OperandCasts) for mode in _get_current_function_mode_stack())  # type: ignore[no-untyped-call]
