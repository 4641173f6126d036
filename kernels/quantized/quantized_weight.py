"""A weight that is held as codes and scales, and that every operation sees as the matrix that they stand for.

    y = x W'     forward    W is dequantized, multiplied, freed;  autograd saves the codes
                 backward   W is dequantized again: dx = dy W

A view of it (a transpose, a cast) is noted and made of the values once an operation needs them, so that what autograd
saves for a backward is never a matrix of values. Of a stack (experts) one matrix can be taken alone. It has no gradient
and cannot be written.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from engine.errors import EngineError
from engine.kernels.dispatch import REFERENCE, Kernels
from engine.kernels.quantized.weight_format import QuantizedShape, dequantize

_aten = torch.ops.aten
_VIEWS = frozenset({
    _aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.view.default, _aten._unsafe_view.default,
    _aten.expand.default, _aten.unsqueeze.default, _aten.squeeze.dim, _aten._to_copy.default,
})  # fmt: skip
_SAME = frozenset({_aten.detach.default, _aten.alias.default})
_SET = _aten.set_.source_Tensor
View = Callable[[Tensor], Tensor]


class QuantizedWeight(Tensor):
    """The values [shape] of ``packed``, in ``dtype``; nothing but ``packed`` has memory."""

    packed: Tensor
    """Codes and scales, uint8 [bytes]."""
    form: QuantizedShape
    held: tuple[torch.dtype, Kernels]
    """Dtype of the values before ``views``, and what makes them."""
    views: tuple[View, ...]
    """What is made of the values."""
    number: int | None
    """Of the matrix of a stack that ``views`` begin with; None: all of them."""
    _like: Tensor
    """On the meta device: shape and dtype of what all ``views`` together give."""
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, packed: Tensor, form: QuantizedShape, held: tuple[torch.dtype, Kernels], like: Tensor,
        views: tuple[View, ...] = (),
    ) -> "QuantizedWeight":  # fmt: skip
        """A tensor of the shape and dtype of ``like``, without memory."""
        self: QuantizedWeight = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=packed.device, storage_size=0
        )
        self.packed, self.form, self.held, self._like, self.views, self.number = packed, form, held, like, views, None
        return self

    @classmethod
    def of(
        cls, packed: Tensor, form: QuantizedShape, dtype: torch.dtype, kernels: Kernels = REFERENCE
    ) -> "QuantizedWeight":
        """The matrix of codes and scales in ``packed``."""
        with _disable_current_modes():
            like = torch.empty(form.shape, dtype=dtype, device="meta")
        made = cls(packed, form, (dtype, kernels), like)
        made._is_param = True  # isinstance(made, nn.Parameter), as code around layers asks
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        weight = args[0] if args else None
        if isinstance(weight, cls):
            if func in _SAME:
                return weight._with(weight._like, weight.views)
            if func in _VIEWS and kwargs.get("device") is None:
                return weight._viewed(func, args[1:], kwargs)
            if func is _aten.select.int and args[1] == 0 and weight.ndim == 3 and not weight.views:
                return weight._matrix(args[2])
            if func is _aten._to_copy.default and kwargs["device"].type == "meta":
                return torch.empty_like(weight._like, dtype=kwargs.get("dtype"))
        if func is _SET and args[0] is args[1]:  # as torch.nn.utils.parametrize does
            return weight
        _refuse_writes(func, args)
        args, kwargs = tree_map_only(cls, cls.dequantized, (args, kwargs))
        return func(*args, **kwargs)

    def dequantized(self) -> Tensor:
        """The matrix, in memory of its own."""
        values = dequantize(self.packed, self.form, *self.held, self.number)
        for view in self.views:
            values = view(values)
        return values

    def _viewed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "QuantizedWeight":
        def view(values: Tensor) -> Tensor:
            made: Tensor = func(values, *args, **kwargs)
            return made

        with _disable_current_modes():
            like = view(self._like)
        return self._with(like, (*self.views, view))

    def _matrix(self, index: int) -> "QuantizedWeight":
        """One matrix of a stack, such as that of an expert, without the values of the others."""
        with _disable_current_modes():
            made = self._with(self._like.select(0, index), ())
        made.number = index % len(self._like)
        return made

    def _with(self, like: Tensor, views: tuple[View, ...]) -> "QuantizedWeight":
        made = QuantizedWeight(self.packed, self.form, self.held, like, views)
        made.number = self.number
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"QuantizedWeight({self.form.format.kind}, shape={tuple(self.shape)}, dtype={self.dtype})"


def _refuse_writes(func: Any, args: tuple[Any, ...]) -> None:
    for argument, given in zip(func._schema.arguments, args, strict=False):
        if argument.is_write and isinstance(given, QuantizedWeight):
            raise EngineError(
                f"a frozen weight of shape {list(given.shape)} is held in {given.form.format.kind} (quantize_frozen) "
                f"and was written by {func._schema.name}; write the model before engine.initialize, or name the weight "
                "in quantize_frozen.skip."
            )
