"""Equivalence trials: runs a copy of a module with other weights against an operator, and compares their results."""

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
"""Factors that scale the random inputs of a trial; large inputs reveal clamps."""


INJECTION_TOLERANCE = 1e-5
"""Largest error of an accepted operator, relative to the largest value; modules in fp32 have errors of 1e-7."""


def twin(module: nn.Module, parameters: Mapping[str, Tensor], children: Mapping[str, nn.Module]) -> nn.Module:
    """Returns a shallow copy of ``module`` with the given ``parameters`` and ``children``; it shares all other
    attributes.
    """
    other = copy.copy(module)
    vars(other)["_parameters"] = {name: nn.Parameter(value) for name, value in parameters.items()}
    vars(other)["_modules"] = dict(children)
    return other


def parameterless_copy(child: nn.Module) -> nn.Module:
    """Returns a deep copy of ``child`` with a nonlinear function in place of each dropout.

    The outputs of the copy thus depend on the position of each dropout.
    """
    if isinstance(child, _DropoutNd):
        return _Bent()
    other = copy.deepcopy(child)
    for name, inner in list(other.named_modules()):
        if isinstance(inner, _DropoutNd):
            other.set_submodule(name, _Bent())
    return other


class _Bent(nn.Module):
    """A nonlinear function that stands for dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.tanh() / 4


def is_hooked(module: nn.Module) -> bool:
    """Returns True if ``module`` or a module inside it has forward or backward hooks."""
    return any(
        inner._forward_hooks or inner._forward_pre_hooks or inner._backward_hooks or inner._backward_pre_hooks
        for inner in module.modules()
    )


def own_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Returns the forward of the class of ``module``; None if the object itself has another forward."""
    return None if "forward" in vars(module) else type(module).forward


def is_linear_layer(child: nn.Module | None) -> bool:
    """Returns True if ``child`` is an ``nn.Linear`` or Hugging Face ``Conv1D`` with an unmodified forward."""
    return child is not None and is_linear(child) and has_plain_forward(child) and own_forward(child) is not None


def random(*shape: int, seed: int = 0) -> Tensor:
    """Returns a float64 tensor of ``shape`` with random numbers from a new generator with ``seed``."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sizes_of(layer: Any) -> tuple[int, int]:
    """Returns (number of input features, number of output features) of ``layer``, an ``nn.Linear`` or ``Conv1D``."""
    return tuple(layer.weight.shape) if is_conv1d(layer) else tuple(reversed(layer.weight.shape))


def small_linear(inputs: int, outputs: int, like: Any, seed: int) -> nn.Linear:
    """Returns a random float64 linear layer from ``inputs`` to ``outputs`` features, with a bias if layer ``like`` has
    one.
    """
    layer = nn.Linear(inputs, outputs, like.bias is not None, device="meta", dtype=torch.float64)
    for place, (name, parameter) in enumerate(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(random(*parameter.shape, seed=2 * seed + place)))
    return layer


def agrees_in_use(module: nn.Module, forward: Function, operator: Function, width: int) -> bool:
    """Returns True if ``forward`` and ``operator`` have equal outputs and gradients, in train and eval mode.

    It tries random inputs with ``width`` features, scaled by 1, 30 and 1e4. ``module``: owner of ``forward``. The mode
    of ``module`` is not restored.
    """
    parameters = list(module.parameters())
    for training in (True, False):
        module.train(training)
        if not all(agrees(forward, operator, [random(2, 3, width) * scale], parameters) for scale in SCALES):
            return False
    return True


def agrees(module: Function, operator: Function, inputs: Sequence[Tensor], parameters: Sequence[Tensor] = ()) -> bool:
    """Returns True if ``module`` and ``operator`` have equal outputs and gradients for ``inputs``, up to a tolerance.

    Gradients of ``parameters`` are compared too. An error or a dropout in either function counts as a difference, but a
    bug of the engine in ``operator`` raises. The user's random generators are restored.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            found = _outcome(module, inputs, parameters)
        except Exception:  # the module refuses inputs that the operator takes, so they differ
            return False
        try:
            expected = _outcome(operator, inputs, parameters)
        except Exception as error:  # an operator may call children of the module, which may refuse their inputs
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
            raise ValueError("a compared function returned an object other than tensors")
        directions = [random(*output.shape, seed=7).to(output.dtype) for output in outputs]
        wanted = [*given, *parameters]
        grads = torch.autograd.grad(outputs, wanted, directions, allow_unused=True)
    return [*outputs, *(torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True))]


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or not one.numel():
        return False
    return bool((one - other).abs().max() <= INJECTION_TOLERANCE * other.abs().max())
