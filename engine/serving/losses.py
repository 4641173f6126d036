"""Built-in losses of the training service, as functions of the log-probabilities of a datum's targets.

p = log-probabilities of the targets under the tenant's weights [n] or [n, k], q = ``logprobs`` under the weights that
sampled them, A = ``advantages``, r = exp(p - q). Losses are sums over tokens.

cross_entropy          -sum p * weights
importance_sampling    -sum r * A
ppo                    -sum min(r * A, clip(r) * A)           clip_low_threshold 0.8, clip_high_threshold 1.2
cispo                  -sum stop_gradient(clip(r)) * p * A
dro                    -sum (p * A - beta / 2 * (p - q)^2)    beta 0.05

Source: documentation of Tinker's ``forward_backward``.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from engine.errors import EngineError

Inputs = Mapping[str, Tensor]
Options = Mapping[str, float | str]
Loss = Callable[[Tensor, Inputs, Options], Tensor]

TARGETS = "target_tokens"
"""Input with the token ids of the log-probabilities; every loss needs it."""


class ServedError(EngineError):
    """Error in a client's request; the client receives the error's text as the request's result."""


class GoneError(ServedError):
    """Error of a backward request for a forward that the service no longer has."""


def _cross_entropy(p: Tensor, inputs: Inputs, options: Options) -> Tensor:
    return -(p * inputs["weights"]).sum()


def _importance_sampling(p: Tensor, inputs: Inputs, options: Options) -> Tensor:
    return -(_ratio(p, inputs) * inputs["advantages"]).sum()


def _ppo(p: Tensor, inputs: Inputs, options: Options) -> Tensor:
    ratio, advantages = _ratio(p, inputs), inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, options) * advantages).sum()


def _cispo(p: Tensor, inputs: Inputs, options: Options) -> Tensor:
    return -(_clipped(_ratio(p, inputs), options).detach() * p * inputs["advantages"]).sum()


def _dro(p: Tensor, inputs: Inputs, options: Options) -> Tensor:
    beta = _number(options, "beta", 0.05)
    return -(p * inputs["advantages"] - 0.5 * beta * (p - inputs["logprobs"]) ** 2).sum()


def _ratio(p: Tensor, inputs: Inputs) -> Tensor:
    return (p - inputs["logprobs"]).exp()


def _clipped(ratio: Tensor, options: Options) -> Tensor:
    low, high = _number(options, "clip_low_threshold", 0.8), _number(options, "clip_high_threshold", 1.2)
    return ratio.clamp(low, high)


def _number(options: Options, name: str, default: float) -> float:
    value = options.get(name, default)
    if isinstance(value, str):
        raise ServedError(f"loss_fn_config[{name!r}] is {value!r}, but it must be a number; send a number.")
    return float(value)


LOSSES: Mapping[str, Loss] = MappingProxyType(
    {
        "cross_entropy": _cross_entropy,
        "importance_sampling": _importance_sampling,
        "ppo": _ppo,
        "cispo": _cispo,
        "dro": _dro,
    }
)
_INPUTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {name: ("weights",) if name == "cross_entropy" else ("logprobs", "advantages") for name in LOSSES}
)
_OPTIONS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "cross_entropy": frozenset(),
        "importance_sampling": frozenset(),
        "ppo": frozenset({"clip_low_threshold", "clip_high_threshold"}),
        "cispo": frozenset({"clip_low_threshold", "clip_high_threshold"}),
        "dro": frozenset({"beta"}),
    }
)


def served_loss(name: str) -> Loss:
    """Returns the function of the built-in loss ``name``.

    It takes one datum's target log-probabilities, inputs and options, and returns the 0-dim sum over tokens.

    Raises:
        ServedError: there is no built-in loss of this name.
    """
    if name not in LOSSES:
        raise ServedError(f"loss_fn is {name!r}, which this server does not have; use {', '.join(LOSSES)} or custom.")
    return LOSSES[name]


def check_inputs(name: str, inputs: Inputs, targets: Tensor, options: Options) -> None:
    """Checks one datum's inputs and the options of the built-in loss ``name``.

    Raises:
        ServedError: an input is missing or has another shape than ``targets``, or an option is unknown.
    """
    for needed in _INPUTS[name]:
        if needed not in inputs:
            raise ServedError(f"loss {name} needs loss_fn_inputs[{needed!r}], which the datum lacks; send it.")
        if inputs[needed].shape != targets.shape:
            raise ServedError(
                f"loss_fn_inputs[{needed!r}] has shape {tuple(inputs[needed].shape)} and target_tokens "
                f"{tuple(targets.shape)}; both need one value per target."
            )
    if unknown := sorted(set(options) - _OPTIONS[name]):
        known = ", ".join(sorted(_OPTIONS[name])) or "no options"
        raise ServedError(f"loss_fn_config has {unknown[0]!r}, which loss {name} does not read; it reads {known}.")
