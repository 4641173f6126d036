"""Biases that choose experts and weigh nothing, found by structure and proven by trial.

A router with such a bias adds it to the scores before it chooses the experts of a row; the weights come from the scores
alone (DeepSeek-V3, section 2.1.2: auxiliary-loss-free load balancing).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.parallel.experts.proof import random_copy, required_argument


@dataclass(frozen=True, slots=True)
class RouterBias:
    """Bias buffer of a router, one value per expert, that affects only the choice of experts, not their weights."""

    experts: str
    """Name of the module that owns the experts."""
    buffer: str
    """Name of the buffer in the model."""


def find_router_bias(model: nn.Module, experts: str, count: int) -> RouterBias | None:
    """Finds a router's bias buffer, as in DeepSeek-V3's load balancing without auxiliary loss; None if there are none
    or several.

    ``experts``: name of the module with the experts; its parent is searched. ``count``: number of its experts.
    """
    block_name = experts.rpartition(".")[0]
    block, owner = model.get_submodule(block_name), model.get_submodule(experts)
    inside = {id(buffer) for buffer in owner.buffers()}
    own = [
        name
        for name, buffer in block.named_buffers()
        if buffer.shape == (count,) and buffer.is_floating_point() and id(buffer) not in inside
    ]
    found = [name for name in own if _only_chooses(block, experts.rpartition(".")[2], name, count)]
    return RouterBias(experts, f"{block_name}.{found[0]}" if block_name else found[0]) if len(found) == 1 else None


class _Seen(nn.Module):
    """Experts of a twin: they note what they are called with, and return their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Tensor] = []

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """Notes the arguments."""
        self.given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        return self.given[0]


@torch.no_grad()
def _only_chooses(block: nn.Module, child: str, bias: str, count: int) -> bool:
    """Returns True if adding a constant to the bias changes nothing, and a large entry makes every row choose it."""
    argument = required_argument(block)
    if argument is None:
        return False
    draw, seen = torch.Generator().manual_seed(1), _Seen()
    twin = random_copy(block, {id(block.get_submodule(child)): seen}, draw)
    widths = sorted({size for each in twin.parameters() if each.dim() == 2 for size in each.shape})
    for width in widths:
        x = torch.randn(2, 6, width, generator=draw)

        def routing(values: Tensor, x: Tensor = x) -> list[Tensor] | None:
            twin.get_buffer(bias).copy_(values)
            seen.given = []
            try:
                twin(**{argument: x})
            except Exception:  # any: it is code of the user with rows that it may not be made for
                return None
            return seen.given[1:] or None

        plain = torch.linspace(0, 0.1, count)
        before, shifted, forced = routing(plain), routing(plain + 1), routing(plain.index_fill(0, torch.tensor(1), 9.0))
        if before is None or shifted is None or forced is None:
            continue
        same = all(torch.allclose(a.double(), b.double(), atol=1e-5) for a, b in zip(before, shifted, strict=True))
        numbers = next((each for each in forced if not each.is_floating_point()), None)
        return same and numbers is not None and bool((numbers == 1).any(-1).all())
    return False
