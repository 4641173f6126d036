"""Trace of one run of a block: its products of activations with parameters.

A function mode records the products and changes some functions, so that a gradient is zero only if a row is not needed:

    relu          leaks; otherwise the rows of a dead unit would have no gradient
    norms         do not differentiate their statistics; a norm over a sharded width then counts as elementwise

A parameter plus a tensor of the same shape counts as that parameter.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from engine.parallel.tensor.auto.low_rank_weight import memory_of
from engine.parallel.tensor.global_tensor.rules.attention import multi_head_in_steps


@dataclass(frozen=True, slots=True)
class MatmulRecord:
    """Record of one product of the activation ``x`` with a parameter or a view of it.

    ``weight`` and ``bias`` are parameter names; ``bias`` may be None.
    """

    weight: str
    bias: str | None
    x: Tensor
    x_dim: int
    """Dim of x that is summed over."""
    weight_dim: int
    """Dim of the full parameter that is summed over."""
    dropped: bool = False
    """True if x is the direct output of a dropout."""
    made: Tensor | None = None
    """Sum of the parameter and another tensor of the same shape, if the product reads this sum; else None."""


_LEAK = 0.3
DROPOUTS = frozenset(
    (functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d, functional.alpha_dropout,
     functional.feature_alpha_dropout, torch.dropout, torch.alpha_dropout, torch.feature_dropout)
)  # fmt: skip


class _Form(NamedTuple):
    """Positions of a function's operands, and the summed dims."""

    x: int
    weight: int
    bias: int | None
    x_dim: int
    weight_dim: int


_MATMUL = _Form(0, 1, None, -1, -2)
_ADDMM = _Form(1, 2, 0, -1, -2)
_BY_FUNCTION: Mapping[Any, _Form] = MappingProxyType(
    {functional.linear: _Form(0, 1, 2, -1, -1), torch.addmm: _ADDMM, torch.baddbmm: _ADDMM}
    | dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm), _MATMUL)
    | dict.fromkeys((Tensor.bmm, torch._grouped_mm, getattr(functional, "grouped_mm", torch._grouped_mm)), _MATMUL)
)
_SUMS: Mapping[Any, tuple[int, ...]] = MappingProxyType(
    dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), (0, 1))
    | dict.fromkeys((torch.addmm, torch.baddbmm, Tensor.addmm, Tensor.baddbmm), (0,))
)
"""Functions that add to a parameter, and the possible positions of the parameter."""
_RELUS = frozenset((functional.relu, torch.relu, Tensor.relu, torch.relu_, Tensor.relu_))
_STATISTICS = frozenset((Tensor.mean, torch.mean, Tensor.var, torch.var, Tensor.sum, torch.sum))
_NORMS = frozenset((functional.layer_norm, functional.rms_norm, torch.layer_norm))


class MatmulTrace(TorchFunctionMode):
    """Torch function mode that records the products of activations with parameters of ``block`` in its list ``seen``.

    ``cut_off``: names of parameters; products with them are detached from the graph. Each ReLU inside the mode computes
    leaky ReLU.
    """

    def __init__(self, block: nn.Module, cut_off: Collection[str] = ()) -> None:
        super().__init__()
        self.seen: list[MatmulRecord] = []
        self._cut_off = cut_off
        self._dropped: list[Tensor] = []
        self._owner = {memory_of(p): (name, p) for name, p in block.named_parameters()}
        self._made: dict[int, Tensor] = {}
        """Sums of a parameter and another tensor of the same shape, by memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.multi_head_attention_forward:
            with self:
                return multi_head_in_steps(*args, **kwargs)
        if func in _BY_FUNCTION and self._note(_BY_FUNCTION[func], args, kwargs):
            return func(*args, **kwargs).detach()
        if func in DROPOUTS and (args[1] if len(args) > 1 else kwargs.get("p", 0.5)):
            # eval mode drops nothing; a new tensor object marks the result
            self._dropped.append(func(*args, **kwargs).view_as(args[0]))
            return self._dropped[-1]
        if func in _RELUS:
            return functional.leaky_relu(args[0], _LEAK)
        if func in _STATISTICS and kwargs.get("keepdim"):
            return func(*args, **kwargs).detach()
        if func in _NORMS and args[0].requires_grad:
            return _without_statistics(func, args, kwargs)
        out = func(*args, **kwargs)
        if func in _SUMS:
            self._note_sum([args[place] for place in _SUMS[func] if place < len(args)], out)
        return out

    def _note(self, form: _Form, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Records a product with a parameter; returns True if the product is to be detached."""
        weight = args[form.weight] if len(args) > form.weight else kwargs.get("weight", kwargs.get("mat2"))
        found = self._owner_of(weight)
        if found is None or weight is None or weight.dim() < 2:
            return False
        name, parameter = found
        stride, size = weight.stride(form.weight_dim), weight.shape[form.weight_dim]
        dims = [d for d in range(parameter.dim()) if parameter.stride(d) == stride and parameter.shape[d] == size]
        if not dims:
            return False
        bias = None
        if form.bias is not None:
            bias = self._owner_of(args[form.bias] if len(args) > form.bias else kwargs.get("bias"))
        is_vector = bias is not None and bias[1].dim() == 1
        x, dropped = args[form.x], any(args[form.x] is one for one in self._dropped)
        made = self._made.get(memory_of(weight))
        given = bias[0] if bias and is_vector else None
        self.seen.append(MatmulRecord(name, given, x, form.x_dim, dims[-1], dropped, made))
        return name in self._cut_off

    def _note_sum(self, terms: Sequence[Any], made: Tensor) -> None:
        """Records a sum of a parameter and another tensor of the same shape as a weight of that parameter."""
        for name, parameter in filter(None, map(self._owner_of, terms)):
            if parameter.dim() > 1 and made.shape == parameter.shape and made.stride() == parameter.stride():
                self._owner[memory_of(made)], self._made[memory_of(made)] = (name, parameter), made

    def _owner_of(self, tensor: Any) -> tuple[str, nn.Parameter] | None:
        return self._owner.get(memory_of(tensor)) if isinstance(tensor, Tensor) else None


def _without_statistics(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the value of the norm, with the gradient of an elementwise product with the norm's weight."""
    weight = args[2] if len(args) > 2 else kwargs.get("weight")
    bias = args[3] if len(args) > 3 else kwargs.get("bias")
    x = args[0]
    with torch.no_grad():
        plain = func(*args, **kwargs)
    moved = x - x.detach()
    out = plain + (moved if weight is None else moved * weight.detach())
    for parameter in (weight, bias):
        if parameter is not None:
            out = out + (parameter - parameter.detach())
    return out
