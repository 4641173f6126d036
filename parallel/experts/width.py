"""Experts that tensor ranks cut along their width, and the proof that the results of their parts are summed.

    rank (ep 0, tp 0)   experts 0 to 3, first half of their width  ---+  sum over "tp" of results of all tokens,
    rank (ep 0, tp 1)   experts 0 to 3, other half of their width  ---+  after those of all expert ranks are back

The tensor plan names the cuts of the parameters; a trial shows that the results of the parts add up to those of whole
experts. A parameter without a cut is either used by every rank, such as a factor, or added to the sum, such as the last
bias, which the first tensor rank adds alone.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor, nn

from engine.parallel.experts.forms import RoutedExperts, Stack
from engine.parallel.experts.proof import LARGE, MOST, Trial, make_twin
from engine.parallel.model.parametrized_weights import adapter_chain
from engine.parallel.tensor.layers.apply_plan import local_shard
from engine.parallel.tensor.plan.tensor_plan import AttributeChange, ParameterCut

MOST_UNCUT = 3
"""Maximum number of unsharded parameters for which every way to use them is tried."""


@dataclass(frozen=True, slots=True)
class WidthCut:
    """Result of :func:`prove_width`: the parameters of a module of experts that stay whole if tensor ranks shard the
    experts' width.
    """

    whole: tuple[str, ...]
    """Names, in the module, of unsharded parameters; each tensor rank has a part of their gradient."""
    added: tuple[str, ...]
    """Parameters of ``whole`` that only the first tensor rank adds to its result."""


def prove_width(
    module: nn.Module,
    found: RoutedExperts,
    cuts: Mapping[str, ParameterCut],
    changes: tuple[AttributeChange, ...],
    tp: int,
) -> WidthCut | str:
    """Tests numerically whether ``tp`` tensor ranks can shard the experts' width: their results must add up to the
    full result.

    Returns a :class:`WidthCut` if they can, otherwise the reason as text.

    Args:
        found: description of the module of experts.
        cuts: sharding of parameters, by their names in ``module``.
        changes: attributes with another value on a tensor rank, such as a width.
    """
    if len(adapter_chain(module)) > 1:
        return "they have adapters"
    if not cuts:
        return "the tensor plan does not cut them"
    if any(len(part.holders) > 1 for cut in cuts.values() for part in cut.ranges):
        return f"their width does not divide among {tp} tensor ranks"
    if any(cut.dim == 0 for cut in cuts.values()) or not cuts.keys() <= found.own.keys():
        return "the tensor plan cuts them along another dim than their width"
    largest = max(parameter.numel() for parameter in module.parameters())
    experts = min(found.experts, MOST if largest < LARGE else 2)
    stack = Stack(found.experts, found.own, found.common, found.counts)
    twin = make_twin(module, stack, experts, False)
    for change in changes:
        if change.attribute.startswith("config."):
            return "their code reads numbers of a configuration that tensor ranks divide"
    trial = Trial(twin, stack, found.call, found.width, experts)
    whole = tuple(name for name, _ in module.named_parameters() if name not in cuts)
    for size in range(len(whole) + 1 if len(whole) <= MOST_UNCUT else 1):
        for added in combinations([name for name in whole if "." not in name], size):
            parts = [_part(twin, cuts, added, changes, rank) for rank in range(tp)]
            if trial.is_sum_of(parts):
                return WidthCut(whole, added)
    return "the results of their parts do not add up to those of whole experts"


def _part(
    twin: nn.Module,
    cuts: Mapping[str, ParameterCut],
    added: tuple[str, ...],
    changes: tuple[AttributeChange, ...],
    rank: int,
) -> nn.Module:
    """Returns the twin as tensor rank ``rank`` holds it."""
    fresh = dict[int, nn.Parameter]()
    for name, each in twin.named_parameters():
        content: Tensor = each.detach()
        if name in cuts:
            content = local_shard(content, cuts[name], rank)
        elif name in added and rank:
            content = torch.zeros_like(content)
        fresh[id(each)] = nn.Parameter(content)
    made = copy.deepcopy(twin, dict(fresh))
    for change in changes:
        setattr(made, change.attribute, change.value)
    return made
