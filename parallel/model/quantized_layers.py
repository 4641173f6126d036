"""Frozen weights of linear layers, stored as codes and scales and read as matrices.

    parameter     stays the user's object and has codes and scales in its memory, uint8 [bytes], so that buckets,
                  gathers (ZeRO 3), digests and copies between devices move these bytes
    layer.weight  a property of the layer's class: a matrix without memory, a new one at each read, because a gather
                  swaps the memory of a parameter between uses (``kernels.quantized.quantized_weight``)

The new class derives from the layer's class, with its forward and hooks, and stays after the engine is closed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import PlanError
from engine.kernels.codecs.weight_format import QuantizedShape, QuantizedWeight, block_scales, quantize
from engine.kernels.dispatch import REFERENCE, Kernels
from engine.parallel.grid import ShardHolder
from engine.parallel.shard_table import ShardRow


class QuantizedLayer(nn.Module):
    """Mixin for a layer class with frozen quantized weights, stored as codes and scales.

    A read of ``weight`` returns a :class:`QuantizedWeight`, which dequantizes it in each operation.
    """


_Held = tuple[QuantizedShape, torch.dtype]
"""The codes and scales of a parameter, and the dtype of the matrix that the layer reads."""


@torch.no_grad()
def quantize_part(full: Tensor, row: ShardRow, holder: ShardHolder) -> Tensor:
    """Returns a rank's shard of ``full``, quantized: codes and scales as a 1-D uint8 tensor.

    ``row``: sharding of the parameter; ``holder``: (pp, tp, ep) indices of the rank. Scales are computed from the full
    matrix, so values do not depend on the number of ranks.
    """
    form = row.quantized_shape(holder)
    assert form is not None
    held, scales_RK = row.local(full, holder), None
    if form.runs:
        full = full if row.dim is None else replace(row, dim=None).local(full, holder)  # all columns of its experts
        whole = QuantizedShape(format=form.format, shape=tuple(full.shape))
        touched = torch.tensor([number for number, _ in form.blocks], device=full.device)
        scales_RK = block_scales(full, whole).index_select(1, touched)
    return quantize(held, form, scales_RK)


def read_quantized(model: nn.Module, held: Mapping[str, _Held], kernels: Kernels = REFERENCE) -> None:
    """Changes the classes of layers with quantized parameters: a read of ``weight`` returns a
    :class:`QuantizedWeight`, which dequantizes it in each operation.

    ``held``: (shape and format of the quantized weight, dtype of the dequantized weight), by parameter name.
    """
    named = {id(parameter): held[name] for name, parameter in model.named_parameters() if name in held}
    classes: dict[tuple[type, tuple[tuple[str, _Held], ...]], type] = {}
    for module in model.modules():
        own = tuple((local, named[id(p)]) for local, p in module._parameters.items() if id(p) in named)
        if own:
            key = type(module), own
            module.__class__ = classes.setdefault(key, _reading(*key, kernels))  # equal layers share a class


def quantized_layers(model: nn.Module) -> list[str]:
    """Returns the names of the layers of ``model`` with quantized weights."""
    return [name for name, module in model.named_modules() if isinstance(module, QuantizedLayer)]


def refuse_quantized(model: nn.Module) -> None:
    """Checks that no layer of ``model`` has quantized weights.

    Raises:
        PlanError: a layer has quantized weights.
    """
    for name in quantized_layers(model):
        raise PlanError(
            f"the weight of {name!r} was quantized by an earlier engine of this model (quantize_frozen); build "
            "a new model."
        )


def _reading(own: type[nn.Module], weights: Sequence[tuple[str, _Held]], kernels: Kernels) -> type:
    properties = {local: _read(local, held, kernels) for local, held in weights}
    return type(f"Quantized{own.__name__}", (QuantizedLayer, own), properties)


def _read(local: str, held: _Held, kernels: Kernels) -> property:
    def read(module: nn.Module) -> Any:
        if local not in module._parameters:  # torch.nn.utils.parametrize has replaced the parameter
            raise AttributeError(local)
        packed = module._parameters[local]
        if packed is None or packed.dtype != torch.uint8:  # a trace has replaced the parameter by values
            return packed
        return QuantizedWeight.of(packed, *held, kernels)

    return property(read)
