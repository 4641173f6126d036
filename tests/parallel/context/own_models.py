"""Modules as people write them: attention by einsum, ALiBi, windows, latents, recurrent and convolutional layers."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.engine.parity.architectures import Architecture, pairs, seeded
from tests.engine.parity.tensor_models import Text

WIDTH, HEADS = 32, 4


class EinsumAttention(nn.Module):
    """Residual causal attention by two einsums; ``slopes``: with ALiBi; ``window``: over this many keys."""

    def __init__(self, slopes: bool = False, window: int | None = None) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.slopes, self.window = nn.Linear(WIDTH, WIDTH), slopes, window

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, HEADS, -1).unbind(2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        place = torch.arange(length, device=x.device)
        distance = place[:, None] - place
        if self.slopes:
            scores = scores - distance * torch.tensor([0.5, 0.25, 0.125, 0.0625]).view(HEADS, 1, 1)
        hidden = (distance < 0) | (distance >= (self.window or length))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        heads: Tensor = self.out(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))
        return x + heads


class TorchAttention(nn.Module):
    """Residual ``nn.MultiheadAttention`` with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        heads: Tensor = self.attention(x, x, x, attn_mask=hidden, need_weights=False)[0]
        return x + heads


class Latents(nn.Module):
    """Residual attention of all positions to a few latent vectors, that read all positions first."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(5, WIDTH))
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        latents = self.latents.expand(x.shape[0], -1, -1)
        read = functional.scaled_dot_product_attention(latents, self.key(x), self.value(x))
        return x + functional.scaled_dot_product_attention(x, read, read)


class Gru(nn.Module):
    """Residual recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.cell(x)[0]
        return x + states


class DepthwiseConvolution(nn.Module):
    """Residual causal convolution of each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        padded = functional.pad(x.transpose(1, 2), (3, 0))
        mixed: Tensor = self.conv(padded).transpose(1, 2)
        return x + mixed


def _text(block: Callable[..., nn.Module], *arguments: object) -> Architecture:
    return Architecture(seeded(lambda: Text(block(*arguments), block(*arguments))), pairs, "")


OWN: Mapping[str, Architecture] = MappingProxyType({
    "own: einsum": _text(EinsumAttention),
    "own: einsum, ALiBi": _text(EinsumAttention, True),
    "own: einsum, a window": _text(EinsumAttention, False, 5),
    "own: nn.MultiheadAttention": _text(TorchAttention),
    "own: latents": _text(Latents),
    "own: nn.GRU": _text(Gru),
    "own: depthwise convolution": _text(DepthwiseConvolution),
})  # fmt: skip
"""Models by name."""
