"""Modules that are an RMSNorm or a LayerNorm, whatever their class is called."""

from collections.abc import Callable, Iterator
from itertools import permutations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.kernels.dispatch import REFERENCE, Kernels, is_autocast
from engine.kernels.ops.norm import Norm, norm
from engine.parallel.kernel_injection.equivalence import agrees, own_forward, random, twin

_SCALES = (1.0, 1e-3, 1e2, 0.0)
"""Scales of the trial's rows: among small values one eps differs from another."""


class NormModule(NamedTuple):
    """The norm that a module computes, and the names of its parameters."""

    form: Norm
    weight: str
    bias: str | None

    @property
    def words(self) -> str:
        """The description for reports."""
        kind = "LayerNorm" if self.form.centered else "RMSNorm"
        return f"{kind}, eps {self.form.eps:g}{', weights from 1' * bool(self.form.offset)}"


def find_norm(module: nn.Module) -> NormModule | None:
    """The norm that ``module`` computes, or None."""
    forward, sizes = own_forward(module), [tuple(p.shape) for p in module._parameters.values() if p is not None]
    small = 0 < len(sizes) <= 2 and len(set(sizes)) == 1 and len(sizes[0]) == 1 and sizes[0][0] > 1
    if forward is None or not small or module._modules or module._buffers:
        return None
    names = [name for name, p in module._parameters.items() if p is not None]
    parameters = {name: random(*sizes[0], seed=number) for number, name in enumerate(names)}
    copy = twin(module, parameters, {})
    x = random(len(_SCALES), 2, *sizes[0], seed=3) * torch.tensor(_SCALES, dtype=torch.float64)[:, None, None]
    for form in _forms(module, names):
        operator = _operator(copy, form)
        if agrees(lambda x: forward(copy, x), operator, [x], list(copy.parameters())):
            return form if _rounds_alike(copy, forward, x) else None
    return None


def _forms(module: nn.Module, names: list[str]) -> Iterator[NormModule]:
    named = vars(module).items()
    numbers = {value for name, value in named if "eps" in name and type(value) is float and 0 < value < 0.01}
    for eps, centered, offset in product(sorted(numbers), (False, True), (0.0, 1.0)):
        for weight, *bias in permutations(names):
            yield NormModule(Norm(eps, centered, offset), weight, bias[0] if bias else None)


def _operator(module: nn.Module, found: NormModule) -> Callable[[Tensor], Tensor]:
    weight: Any = getattr(module, found.weight)
    bias: Any = None if found.bias is None else getattr(module, found.bias)
    return lambda x: norm(x, weight, bias, found.form, REFERENCE)


def _rounds_alike(copy: nn.Module, forward: Callable[..., Any], x: Tensor) -> bool:
    """Whether a bfloat16 input gives a bfloat16 output."""
    return bool(forward(copy.bfloat16(), x.bfloat16()).dtype == torch.bfloat16)


def injected_norm(found: NormModule, own: Callable[..., Any], kernels: Kernels) -> Callable[..., Any]:
    """The forward of such a module through the operator; inputs that it does not cover run the module's own forward."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        weight = getattr(self, found.weight)
        plain = len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and args[0].dtype == weight.dtype
        if not plain or is_autocast(args[0]):
            return own(self, *args, **kwargs)
        bias = None if found.bias is None else getattr(self, found.bias)
        return norm(args[0], weight, bias, found.form, kernels)

    return forward
