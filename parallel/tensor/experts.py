"""A module whose own code computes with the parts of its parameters that a rank holds (fused experts of an MoE).

    whole tokens ─ f ─┐
    whole routing ─ f ┴── the module on its part of every expert ── g ── whole y

Cutting every expert by its hidden width needs no routing between ranks: all see all tokens.
"""

from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from engine.parallel.tensor.region import Region


class ExpertsLayer(nn.Module):
    """Whole inputs -> whole outputs, both equal on all ranks; what the module gives is a part, and is summed.

    Forward sums every float output over "tp" (label "row outputs"), backward the gradients of its float inputs
    (label "column inputs").
    """

    tensor_region: Region

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Enter with all inputs, run the module's own forward, sum."""
        region = self.tensor_region
        device = next(self.parameters()).device

        def enter(leaf: Any) -> Any:
            return region.enter(self, leaf, again=True).copy if _is_float(leaf) else leaf

        region.leave(device)
        args, kwargs = pytree.tree_map(enter, (args, kwargs), is_leaf=_is_float)
        out = super().forward(*args, **kwargs)
        out = pytree.tree_map(lambda leaf: region.combine(leaf) if _is_float(leaf) else leaf, out)
        region.leave(device)
        return out


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def prepare_experts(module: nn.Module, region: Region) -> None:
    """Give a module whose parameters are cut its region."""
    region.add(module, plain=False)
    module.tensor_region = region  # type: ignore[assignment]
