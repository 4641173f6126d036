"""Says where a gradient is to code that looks for it on its parameter.

    forward            | backward                      | until step(), zero_grad() or the next forward
    plain parameters   | gradients move into buckets,  | guarded: to read, write or delete ``p.grad`` raises,
                       | p.grad is None again          | since None would let clipping find nothing

The objects stay the user's; only their class changes and changes back, so that nothing stands between torch and a
parameter while the model runs.
"""

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from engine.errors import EngineError
from engine.parallel.model.whole_sizes import PartParameter, WholeSizes

_GRAD: Any = Tensor.grad


def plain_grad(parameter: Tensor) -> Tensor | None:
    """The ``grad`` of a parameter, guarded or not."""
    return _GRAD.__get__(parameter)  # type: ignore[no-any-return]


def set_plain_grad(parameter: Tensor, grad: Tensor | None) -> None:
    """Set the ``grad`` of a parameter, guarded or not."""
    _GRAD.__set__(parameter, grad)


def check_own_hooks(name: str, parameter: Tensor, known: int) -> None:
    """Refuse hooks that run after a gradient is accumulated, beyond those of the engine.

    Raises:
        EngineError: there are more than ``known``, and they would find no gradient.
    """
    hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)  # torch leaves it untyped
    if hooks and len(hooks) > known:
        raise EngineError(
            f"parameter {name!r} has a hook for its accumulated gradient (register_post_accumulate_grad_hook), which "
            "the engine keeps in its own buckets; remove the hook, and use register_hook for the gradient of one "
            "backward, or eng.gradients() before step()."
        )


class _TakenGradient(nn.Parameter):
    """Parameter whose gradient the engine has taken."""

    # operations are those of any tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def _refuse(self, *_: object) -> NoReturn:
        raise EngineError(
            f"the gradient of this parameter (shape {list(self.shape)}) is with the engine, which sums and clips it; "
            "read and write it with eng.gradients(), drop it with eng.zero_grad(), and clip with gradient_clipping."
        )

    grad = property(_refuse, _refuse, _refuse)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = memo.get(id(self))
        if copied is None:
            copied = nn.Parameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)
            memo[id(self)] = copied
        return copied


class _TakenPart(WholeSizes, _TakenGradient):
    """The same of a parameter of which this rank holds a part."""


_TAKEN = MappingProxyType({nn.Parameter: _TakenGradient, PartParameter: _TakenPart})


class GradientGuard:
    """Guards the ``grad`` of parameters while their gradients wait for a step."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = tuple(parameters)
        self._guarded: list[nn.Parameter] = []

    def set(self) -> None:
        """Guard every trained parameter of torch's own class, also those of which this rank holds a part."""
        if not self._guarded:
            self._guarded = [p for p in self._parameters if type(p) in _TAKEN and p.requires_grad]
            for parameter in self._guarded:
                parameter.__class__ = _TAKEN[type(parameter)]

    def lift(self) -> None:
        """Give the parameters their class back."""
        guarded, self._guarded = self._guarded, []
        for parameter in guarded:
            parameter.__class__ = PartParameter if isinstance(parameter, WholeSizes) else nn.Parameter
