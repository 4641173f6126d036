"""Running a copy of a module with other weights, to see what it computes."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from engine.parallel.model.user_code import call_user_code, is_own_mistake
from engine.parallel.tensor.deferred_linear import is_conv1d, is_linear
from engine.parallel.tensor.layers.linear import has_plain_forward

Function = Callable[..., Any]

SCALES = (1.0, 30.0, 1e4)
"""Of inputs: what is clamped agrees with what is not among small values."""


INJECTION_TOLERANCE = 1e-5
"""Relative to the largest value. Modules that compute in fp32 whatever they are given err by 1e-7."""


def twin(module: nn.Module, parameters: Mapping[str, Tensor], children: Mapping[str, nn.Module]) -> nn.Module:
    """``module`` with these parameters and children in place of its own; everything else is shared."""
    other = copy.copy(module)
    vars(other)["_parameters"] = {name: nn.Parameter(value) for name, value in parameters.items()}
    vars(other)["_modules"] = dict(children)
    return other


def parameterless_copy(child: nn.Module) -> nn.Module:
    """A copy of a child without parameters; dropout in it, at any depth, becomes something that commutes with nothing,
    so that a trial sees where it stands."""
    if isinstance(child, _DropoutNd):
        return _Bent()
    other = copy.deepcopy(child)
    for name, inner in list(other.named_modules()):
        if isinstance(inner, _DropoutNd):
            other.set_submodule(name, _Bent())
    return other


class _Bent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.tanh() / 4


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody looks at the calls of this module or of one in it."""
    return any(
        inner._forward_hooks or inner._forward_pre_hooks or inner._backward_hooks or inner._backward_pre_hooks
        for inner in module.modules()
    )


def own_forward(module: nn.Module) -> Callable[..., Any] | None:
    """The forward of the module's class, without hooks; None where the object has one of its own."""
    return None if "forward" in vars(module) else type(module).forward


def is_linear_layer(child: nn.Module | None) -> bool:
    """Whether this is a matrix product and nothing else."""
    return child is not None and is_linear(child) and has_plain_forward(child) and own_forward(child) is not None


def random(*shape: int, seed: int = 0) -> Tensor:
    """float64 from a generator of its own: the user's random numbers stay what they are."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sizes_of(layer: Any) -> tuple[int, int]:
    """(inputs, outputs) of a linear layer."""
    return tuple(layer.weight.shape) if is_conv1d(layer) else tuple(reversed(layer.weight.shape))


def small_linear(inputs: int, outputs: int, like: Any, seed: int) -> nn.Linear:
    """A layer of these sizes and random weights, with a bias if ``like`` has one."""
    layer = nn.Linear(inputs, outputs, like.bias is not None, device="meta", dtype=torch.float64)
    for place, (name, parameter) in enumerate(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(random(*parameter.shape, seed=2 * seed + place)))
    return layer


def agrees_in_use(module: nn.Module, forward: Function, operator: Function, width: int) -> bool:
    """Whether the twin ``module`` and ``operator`` agree for inputs of all scales, in training and in evaluation."""
    parameters = list(module.parameters())
    for training in (True, False):
        module.train(training)
        if not all(agrees(forward, operator, [random(2, 3, width) * scale], parameters) for scale in SCALES):
            return False
    return True


def agrees(module: Function, operator: Function, inputs: Sequence[Tensor], parameters: Sequence[Tensor] = ()) -> bool:
    """Whether both give the same output and the same gradients of ``inputs`` and ``parameters``.

    Random numbers are drawn anew by each, so that what draws any agrees with nothing; the user's stay what they are.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            found = _outcome(module, inputs, parameters)
        except Exception:  # whatever this module does with such inputs, it is not what the operator does
            return False
        try:
            expected = _outcome(operator, inputs, parameters)
        except Exception as error:  # operators call parts of the module too, which may refuse what others give them
            if is_own_mistake(error):
                raise
            return False
    return len(found) == len(expected) and all(map(_close, found, expected))


def _outcome(function: Function, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    given = tuple(x.detach().clone().requires_grad_() for x in inputs)
    with torch.enable_grad():
        found = call_user_code(function, given, {})
        outputs = list(found) if isinstance(found, tuple) else [found]
        if not all(isinstance(output, Tensor) for output in outputs):
            raise ValueError("what is compared gives something else than tensors")
        directions = [random(*output.shape, seed=7).to(output.dtype) for output in outputs]
        wanted = [*given, *parameters]
        grads = torch.autograd.grad(outputs, wanted, directions, allow_unused=True)
    return [*outputs, *(torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True))]


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or not one.numel():
        return False
    return bool((one - other).abs().max() <= INJECTION_TOLERANCE * other.abs().max())
