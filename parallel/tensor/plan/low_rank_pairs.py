"""Low-rank pairs of PEFT (LoRA, Hu et al. 2021) inside the region of the sharded layer that they adapt.

    column, head   x ── f ─┬─ W ────── + ── y sharded        A whole, with a partial gradient; B sharded as W
                           └─ A ── B ──┘
    row            x sharded ─┬─ W ────── + ── g ── y        A sharded as W; B whole, with a partial gradient
                              └─ A ── B ──┘

f and g are the layer's own, so a pair adds no collective to forward and backward. Partial gradients are summed once a
step. Adapters that compute more than a sum of products (DoRA) stay sharded as layers of their own.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from engine.parallel.model.forward_patch import goes_through_class
from engine.parallel.tensor.plan.tensor_plan import LayerCut, ParameterCut

BASE = ".base_layer"
"""Attribute path of the wrapped layer in PEFT's layers."""
_LORA = ("peft.tuners.lora.layer", "Linear")
_WHOLE_HALVES = {"column": "lora_A", "column+gather": "lora_A", "head": "lora_A", "row": "lora_B"}
"""Kind of a layer -> the half of its pairs that every rank stores."""


def join_pairs(
    modules: Mapping[str, nn.Module],
    layers: Mapping[str, LayerCut],
    parameters: Mapping[str, ParameterCut],
    first_name: Callable[[nn.Parameter], str],
) -> tuple[dict[str, LayerCut], frozenset[str]]:
    """Assigns low-rank adapter pairs (PEFT) to the parallel regions of the sharded layers that they adapt, without
    changing modules. For column layers, the pair's second matrix (B) is sharded with the layer and the first (A)
    replicated; for row layers, the reverse.

    ``modules``, ``layers`` and ``parameters`` are keyed by name. ``first_name``: callback that returns a parameter's
    name in ``parameters``.

    Returns:
        (layers, names). ``layers``: a changed copy of the argument. The entry of an adapted layer names the PEFT layer
            in ``around``, and entries of sharded halves are removed. ``names``: parameters of the replicated halves,
            with a partial gradient on each rank.
    """
    found, partial = dict(layers), set[str]()
    for name, cut in layers.items():
        around, whole = name.removesuffix(BASE), _WHOLE_HALVES.get(cut.kind)
        if whole is None or around == name or not _adds_products(modules[around]):
            continue
        halves = dict(_halves(modules, around, whole))
        joined = {part: other for part, other in halves.items() if part in layers}
        same = (_split(modules[part], parameters, first_name) for part in joined)
        if not joined or any(split != _split(modules[name], parameters, first_name) for split in same):
            continue
        if cut.kind == "row" and any(modules[other].bias is not None for other in joined.values()):
            continue  # every rank would add it to the sum
        for part, other in joined.items():
            del found[part]
            partial.update(first_name(parameter) for parameter in modules[other].parameters())
        found[name] = replace(cut, around=around)
    return found, frozenset(partial)


def _adds_products(module: nn.Module) -> bool:
    """Returns True for PEFT's LoRA layer whose output is the layer's plus the products of its pairs."""
    owner = next((base for base in type(module).__mro__ if "forward" in vars(base)), nn.Module)
    plain = (owner.__module__, owner.__name__) == _LORA and not getattr(module, "lora_variant", None)
    return plain and goes_through_class(module)


def _halves(modules: Mapping[str, nn.Module], around: str, whole: str) -> Iterator[tuple[str, str]]:
    """Yields the names of the sharded and of the whole half of each pair of a PEFT layer."""
    sharded = "lora_B" if whole == "lora_A" else "lora_A"
    for adapter in dict(modules[f"{around}.{sharded}"].named_children()):
        yield f"{around}.{sharded}.{adapter}", f"{around}.{whole}.{adapter}"


def _split(module: Any, parameters: Mapping[str, ParameterCut], first_name: Callable[[nn.Parameter], str]) -> object:
    cut = parameters.get(first_name(module.weight))
    return None if cut is None else cut.ranges
