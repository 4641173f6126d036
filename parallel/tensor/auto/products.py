"""Which parameters a block multiplies its activations with: a function mode around one run of it.

Some functions are changed while it looks, so that the gradients of what it finds are zero only where nothing is
needed:

    relu          leaks, or a dead unit would look as if nobody needed it
    norms         do not differentiate their statistics: a norm over a cut width is then taken element by element
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from engine.parallel.tensor.views.attention import multi_head_in_steps

_LEAK = 0.3


class _Form(NamedTuple):
    """Where a function has its operands, and the dims that it sums over."""

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
_RELUS = frozenset((functional.relu, torch.relu, Tensor.relu, torch.relu_, Tensor.relu_))
_STATISTICS = frozenset((Tensor.mean, torch.mean, Tensor.var, torch.var, Tensor.sum, torch.sum))
_NORMS = frozenset((functional.layer_norm, functional.rms_norm, torch.layer_norm))


@dataclass(frozen=True, slots=True)
class Product:
    """An activation times a parameter, or a view of one."""

    weight: str
    bias: str | None
    x: Tensor
    x_dim: int
    """The dim of x that is summed over."""
    weight_dim: int
    """The dim of the whole parameter that is summed over."""


class Products(TorchFunctionMode):
    """Records the products of ``block``. ``cut_off``: parameters whose products are detached."""

    def __init__(self, block: nn.Module, cut_off: Collection[str] = ()) -> None:
        super().__init__()
        self.seen: list[Product] = []
        self._cut_off = cut_off
        self._owner = {p.untyped_storage().data_ptr(): (name, p) for name, p in block.named_parameters()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.multi_head_attention_forward:
            with self:
                return multi_head_in_steps(*args, **kwargs)
        if func in _BY_FUNCTION and self._note(_BY_FUNCTION[func], args, kwargs):
            return func(*args, **kwargs).detach()
        if func in _RELUS:
            return functional.leaky_relu(args[0], _LEAK)
        if func in _STATISTICS and kwargs.get("keepdim"):
            return func(*args, **kwargs).detach()
        if func in _NORMS and args[0].requires_grad:
            return _without_statistics(func, args, kwargs)
        return func(*args, **kwargs)

    def _note(self, form: _Form, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the product is to be detached."""
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
        self.seen.append(Product(name, bias[0] if bias and is_vector else None, args[form.x], form.x_dim, dims[-1]))
        return name in self._cut_off

    def _owner_of(self, tensor: Any) -> tuple[str, nn.Parameter] | None:
        return self._owner.get(tensor.untyped_storage().data_ptr()) if isinstance(tensor, Tensor) else None


def _without_statistics(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The norm's value, with the gradient of a product with its weight."""
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
