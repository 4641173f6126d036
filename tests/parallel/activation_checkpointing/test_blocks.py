"""Blocks that run again in backward in full."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.parallel.activation_checkpointing.blocks import recompute_blocks
from engine.parallel.model.forward_patch import ForwardPatches


@dataclass(frozen=True, slots=True)
class Policy:
    """Every block, as the configuration's ``activation_checkpointing`` says it."""

    mode: str = "full"
    save: tuple[str, ...] | None = None
    every: int | None = None
    others: str = "none"
    inputs: str = "device"


class Blocks(nn.Module):
    """Two blocks whose dropout follows their layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def gradients(model: nn.Module) -> list[Tensor]:
    """Of a step whose masks follow from one seed, while other numbers are drawn between forward and backward."""
    torch.manual_seed(5)
    loss = model(torch.ones(4, 16)).square().sum()
    torch.rand(7)
    return list(torch.autograd.grad(loss, list(model.parameters())))


def test_a_recomputed_block_draws_the_masks_of_its_forward_again() -> None:
    model, patches = Blocks(), ForwardPatches()
    kept = gradients(model)
    runs: list[int] = []
    model.layers[0].register_forward_hook(lambda *_: runs.append(1))
    recompute_blocks(model, Policy(), patches)
    again = gradients(model)
    patches.remove()
    assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))
