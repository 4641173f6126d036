"""A block's arithmetic in float64 and without dropout, whatever its code asks for.

Norms and softmax of many models compute in fp32 by their own word; a proof in float64 would see their rounding.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from engine.parallel.tensor.views.attention import multi_head_in_steps

_GROUPED = frozenset({torch._grouped_mm, getattr(functional, "grouped_mm", torch._grouped_mm)})
_FLOAT = frozenset((Tensor.float,))
_DROPOUTS = frozenset(
    (functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d, functional.alpha_dropout,
     functional.feature_alpha_dropout, torch.dropout, torch.alpha_dropout, torch.feature_dropout)
)  # fmt: skip


_DRAWS = frozenset(
    (torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like, torch.bernoulli,
     torch.normal, torch.multinomial, Tensor.bernoulli, Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_,
     Tensor.random_, Tensor.exponential_, Tensor.multinomial)
)  # fmt: skip


class Exact(TorchFunctionMode):
    """Inside, fp32 means float64 and nothing is dropped; what is drawn is that of ``seed``, in whichever thread."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {key: _widened(value) for key, value in (kwargs or {}).items()}
        args = tuple(map(_widened, args))
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func in _DRAWS:
            kwargs.setdefault("generator", self._generator)
        if func in _FLOAT:
            func = Tensor.double
        if func in _GROUPED and args[0].dtype == torch.float64:  # which it does not take
            return _grouped_mm(*args, **kwargs)
        if func is functional.multi_head_attention_forward:  # whose inner functions this mode would not see
            with self:
                return multi_head_in_steps(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def _grouped_mm(x_SI: Tensor, weight_EIO: Tensor, *, offs: Tensor, **_: Any) -> Tensor:
    """Rows ``offs[e-1]:offs[e]`` of x times matrix e."""
    ends = [0, *offs.tolist()]
    parts = [x_SI[start:stop] @ weight_EIO[e] for e, (start, stop) in enumerate(pairwise(ends))]
    rest = x_SI.new_zeros(x_SI.shape[0] - ends[-1], weight_EIO.shape[-1])
    return torch.cat([*parts, rest])


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
