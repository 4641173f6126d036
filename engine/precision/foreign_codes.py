"""Frozen weights that bitsandbytes holds as codes, whose scales and layout are known to its own layers alone.

On data ranks up to ZeRO 2 every rank holds them whole, and its layers compute as they do in one process. Elsewhere
weights are cut, or their memory is replaced between uses, which these layers do not expect.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from engine.config import Config
from engine.errors import ConfigError, PlanError

_FORMATS = {"Params4bit": "nf4", "Int8Params": "int8"}
"""bitsandbytes' class of a parameter -> the format of ``quantize_frozen`` with as many bits."""


class _Held(NamedTuple):
    """A weight that is held as codes."""

    name: str
    parameter: nn.Parameter
    instead: str
    """The format of ``quantize_frozen`` that takes its place."""


def refuse_foreign_codes(model: nn.Module, config: Config) -> None:
    """Refuse what would compute with codes of bitsandbytes as if they were values, or store them without scales.

    Raises:
        ConfigError: the configuration cuts, gathers, quantizes or stores them.
        PlanError: they have a dtype of values.
    """
    held = next(_found(model), None)
    if held is None:
        return
    if held.parameter.dtype.is_floating_point:
        raise PlanError(
            f"the weight {held.name!r} of bitsandbytes is {str(held.parameter.dtype).removeprefix('torch.')}, which "
            "may be codes or values; load the model with bnb_4bit_quant_storage=torch.uint8, onto its device."
        )
    asked = _asked(config)
    if asked is not None:
        raise ConfigError(
            f"{asked}, and the weight {held.name!r} is held as codes of bitsandbytes, which only its own layers read, "
            "whole; load the model without quantization_config, or call model.dequantize() before adapters are added, "
            f'and give "quantize_frozen": {{"dtype": "{held.instead}"}}.'
        )
    if config.checkpoint.frozen:
        raise ConfigError(
            f"checkpoint.frozen is true, and the weight {held.name!r} is held as codes of bitsandbytes, whose scales "
            'no checkpoint has; give "checkpoint": {"frozen": false}, which stores what is trained.'
        )


def _asked(config: Config) -> str | None:
    """What the configuration does with weights that needs more than whole ones in their place."""
    if config.tp > 1:
        return f"parallel.tensor is {config.tp}"
    if config.pp > 1:
        return f"parallel.pipeline is {config.pp}"
    if config.zero_optimization.stage == 3:
        return "zero_optimization.stage is 3"
    if config.quantize_frozen is not None:
        return "quantize_frozen is given"
    return None


def _found(model: nn.Module) -> Iterator[_Held]:
    for name, parameter in model.named_parameters():
        kinds = [base.__name__ for base in type(parameter).__mro__ if base.__name__ in _FORMATS]
        is_values = kinds == ["Int8Params"] and parameter.dtype.is_floating_point  # its has_fp16_weights, trained
        if kinds and not is_values:
            yield _Held(name, parameter, _FORMATS[kinds[0]])
