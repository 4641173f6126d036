"""Quantized frozen weights: by ``quantize_frozen``, as in QLoRA (Dettmers et al. 2023), or by bitsandbytes.

``quantize_frozen`` quantizes linear layers and stacks of experts, but no heads, embeddings, weights tied to one, and
adapters. Weights quantized by bitsandbytes can be read only by its layers, so they must be full on every rank: data
parallelism up to ZeRO 2.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from engine.config import Config
from engine.errors import ConfigError, PlanError
from engine.kernels.codecs.weight_format import QuantizedShape, WeightFormat, dequantize, quantize
from engine.parallel.kernel_injection.inject import find_heads
from engine.parallel.model.name_patterns import refuse_unmatched
from engine.parallel.shard_table import ShardTable
from engine.parallel.tensor.deferred_linear import is_linear
from engine.precision.dtypes import Precision

_ADAPTERS = ("*.lora_*", "*.modules_to_save.*", "*.original_module.*")
"""PEFT's names of trained weights, and of weights that have a trained copy."""


def find_quantized(model: nn.Module, config: Config) -> dict[str, WeightFormat]:
    """Returns name and format (such as nf4) of the frozen weights that ``quantize_frozen`` stores in few bits.

    Returns {} if ``quantize_frozen`` is off.

    Raises:
        ConfigError: a pattern of ``quantize_frozen.skip`` matches no frozen parameter, or ``checkpoint.frozen`` is on.
        PlanError: no weight can be quantized.
    """
    settings = config.quantize_frozen
    if settings is None:
        return {}
    if config.checkpoint.frozen:
        raise ConfigError(
            "quantize_frozen with checkpoint.frozen true, but a checkpoint has no exact copy of weights that are "
            "stored as codes; set checkpoint.frozen to false, which stores only trained parameters."
        )
    frozen = [name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad]
    given = [(f"quantize_frozen.skip[{index}]", pattern) for index, pattern in enumerate(settings.skip)]
    refuse_unmatched(given, frozen, "frozen parameter")
    heads, form = _heads(model), WeightFormat(settings.dtype, settings.block_size)
    found = {
        names[0]: form
        for names, holders in _holders(model)
        if all(_fits(*holder, heads) for holder in holders)
        and not any(fnmatchcase(name, pattern) for name in names for pattern in (*settings.skip, *_ADAPTERS))
    }
    if not found:
        raise PlanError(
            f"quantize_frozen.dtype {settings.dtype!r}, but the model has no frozen weight of a linear layer except "
            "heads, embeddings and adapters; freeze the base (requires_grad_(False), or PEFT's get_peft_model), or "
            "leave quantize_frozen out."
        )
    return found


def refuse_outside_reads(table: ShardTable) -> None:
    """Raises if a weight that ``quantize_frozen`` stores in few bits is read by code outside its layer.

    Args:
        table: one row for each parameter, with its format and use.

    Raises:
        PlanError: the message names the first weight.
    """
    for row in table:
        if row.quantized is not None and row.in_glue:
            raise PlanError(
                f"quantize_frozen: code outside its layer reads {row.name!r}, but only the layer dequantizes it; "
                f'name it in skip: {{"quantize_frozen": {{"skip": [{row.name!r}]}}}}.'
            )


def round_frozen(model: nn.Module, config: Config) -> None:
    """Quantizes and dequantizes the weights that ``quantize_frozen`` selects in an unsharded ``model``, in place."""
    parameters = dict(model.named_parameters())
    for name, weight_format in find_quantized(model, config).items():
        values = parameters[name].data
        form = QuantizedShape(format=weight_format, shape=tuple(values.shape))
        parameters[name].data = dequantize(quantize(values, form), form, values.dtype)


def quantized_note(model: nn.Module, found: Mapping[str, WeightFormat], precision: Precision) -> list[str]:
    """Returns one line for the startup log about quantized weights, as a list; [] if ``found`` is empty.

    Args:
        found: format of each quantized weight, by name.
    """
    if not found:
        return []
    named, form = dict(model.named_parameters()), next(iter(found.values()))
    before = sum(named[name].numel() * precision.frozen(name, named[name].dtype).itemsize for name in found)
    after = sum(QuantizedShape(format=form, shape=tuple(named[name].shape)).bytes for name in found)
    return [
        f"quantize_frozen: {len(found)} frozen weights in {form.kind}, blocks of {form.block} columns: {after:,} bytes "
        f"in place of {before:,}, from {next(iter(found))}; a layer dequantizes its own in forward and in backward"
    ]


def _holders(model: nn.Module) -> Iterator[tuple[list[str], list[tuple[nn.Module, str]]]]:
    """Yields all names and owning modules of every frozen floating parameter of at least two dims."""
    found: dict[int, tuple[list[str], list[tuple[nn.Module, str]]]] = {}
    for path, module in model.named_modules():
        for local, parameter in module._parameters.items():
            if parameter is not None and _is_frozen(parameter):
                names, holders = found.setdefault(id(parameter), ([], []))
                names.append(f"{path}.{local}" if path else local)
                holders.append((module, local))
    yield from found.values()


def _is_frozen(parameter: nn.Parameter) -> bool:
    return not parameter.requires_grad and parameter.dtype.is_floating_point and parameter.ndim > 1


def _fits(module: nn.Module, local: str, heads: frozenset[int]) -> bool:
    if is_linear(module):
        return local == "weight" and id(module) not in heads
    parameter, name = module._parameters[local], type(module).__name__.lower()
    return parameter is not None and parameter.ndim == 3 and ("experts" in name or name.endswith("moe"))


def _heads(model: nn.Module) -> frozenset[int]:
    found = {id(model.get_submodule(name)) for name in find_heads(model)}
    named: Any = getattr(model, "get_output_embeddings", None)
    head = named() if callable(named) else None
    return frozenset(found | {id(head)} if isinstance(head, nn.Module) else found)


_FORMATS = {"Params4bit": "nf4", "Int8Params": "int8"}
"""bitsandbytes' class of a parameter -> the format of ``quantize_frozen`` with as many bits."""


class _Held(NamedTuple):
    """Weight that bitsandbytes stores as codes."""

    name: str
    parameter: nn.Parameter
    instead: str
    """The format of ``quantize_frozen`` that replaces it."""


def refuse_foreign_codes(model: nn.Module, config: Config) -> None:
    """Refuses settings that do not work with weights quantized by bitsandbytes, if ``model`` has such weights.

    Raises:
        ConfigError: the configuration shards, gathers, quantizes or checkpoints these weights.
        PlanError: a weight of bitsandbytes has a floating dtype, so that its data may be codes or plain values.
    """
    weight = next(_found(model), None)
    if weight is None:
        return
    if weight.parameter.dtype.is_floating_point:
        raise PlanError(
            f"the bitsandbytes weight {weight.name!r} has dtype {str(weight.parameter.dtype).removeprefix('torch.')}, "
            "so the engine cannot tell whether it is quantized already; load the model with "
            "bnb_4bit_quant_storage=torch.uint8 and with device_map set to this rank's device."
        )
    asked = _asked(config)
    if asked is not None:
        raise ConfigError(
            f"{asked}, but bitsandbytes has quantized the weight {weight.name!r}, and such a weight cannot be sharded; "
            "load the model without quantization_config or call model.dequantize() before adapters are added, and in "
            f'both cases set "quantize_frozen": {{"dtype": "{weight.instead}"}}.'
        )
    if config.checkpoint.frozen:
        raise ConfigError(
            f"checkpoint.frozen is true, but the weight {weight.name!r} is stored as codes of bitsandbytes, and a "
            'checkpoint has no scales for them; give "checkpoint": {"frozen": false}, which stores only trained '
            "parameters."
        )


def _asked(config: Config) -> str | None:
    """Returns the setting that needs more than whole weights at their original place; None if there is none."""
    if config.tp > 1:
        return f"parallel.tensor is {config.tp}"
    if config.pp > 1:
        return f"parallel.pipeline is {config.pp}"
    if config.parallel.expert > 1:
        return f"parallel.expert is {config.parallel.expert}"
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
