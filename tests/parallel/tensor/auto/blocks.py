"""Blocks for the search: one for every layout that attention and perceptrons have, in float64 with random content.

Shape suffixes: B rows, L length, H heads, D width of a head, E width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.parallel.tensor.auto.coupled_parameters import CoupledParameters, Given, GradientSparsity
from engine.parallel.tensor.auto.equivalence import BlockReference, exactly

WIDTH, HEADS, LENGTH = 16, 4, 6
HEAD = WIDTH // HEADS


def attend(q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor, bias: Tensor | None = None) -> Tensor:
    """Causal attention without fused kernels; [B, L, H x D]."""
    q, k, v = (t.transpose(1, 2) for t in (q_BLHD, k_BLHD, v_BLHD))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    scores = scores if bias is None else scores + bias
    out: Tensor = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    return out


class Thirds(nn.Module):
    """q | k | v in one layer; the numbers of heads and of widths are read from attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.width = HEADS, WIDTH
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).split(self.width, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in parts)
        out: Tensor = x + self.out(attend(q, k, v))
        return out


class Interleaved(nn.Module):
    """Head by head, q, k and v of one head side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, HEAD)).unbind(-2)
        out: Tensor = x + self.out(attend(q, k, v))
        return out


class Grouped(nn.Module):
    """``kv`` key heads for four query heads; a norm for every head, and a bias by heads that is a parameter."""

    def __init__(self, kv: int, norm: bool = False, relative: bool = False) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, kv * HEAD), nn.Linear(WIDTH, kv * HEAD)
        self.norm = nn.LayerNorm(HEAD) if norm else nn.Identity()
        self.bias = nn.Parameter(torch.zeros(HEADS, 1, 1)) if relative else None
        self.repeats = HEADS // kv

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)) for layer in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(self.repeats, 2) for t in (self.norm(k), v))
        distance = torch.arange(x.shape[1]).unsqueeze(0) - torch.arange(x.shape[1]).unsqueeze(1)
        bias = None if self.bias is None else self.bias * distance.to(x.dtype)
        out: Tensor = x + self.out(attend(self.norm(q), k, v, bias))
        return out


class Gated(nn.Module):
    """gate | up in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 48), nn.Linear(24, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        out: Tensor = x + self.down(F.relu(gate) * up)
        return out


class Experts(nn.Module):
    """Three matrices in one parameter, every row through each of them, weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.zeros(3, WIDTH, 8)), nn.Parameter(torch.zeros(3, 8, WIDTH))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        hidden = F.gelu(torch.matmul(x.unsqueeze(0), self.up.unsqueeze(1)))
        return (torch.matmul(hidden, self.down.unsqueeze(1)) * weights[:, None, None, None]).sum(0)


class Torch(nn.Module):
    """nn.MultiheadAttention, which reads the weights of its layers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.attention(x, x, x, need_weights=False)[0]
        return out


class Residuals(nn.Module):
    """Two layers in a row, but what the first gives also leaves the block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        out: Tensor = x + self.second(F.gelu(x))
        return out


class LowRank(nn.Module):
    """Queries by way of a narrow layer; keys that all heads share beside keys of their own, both from one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a, self.q_b = nn.Linear(WIDTH, 6), nn.Linear(6, 2 * WIDTH)
        self.kv_a, self.kv_b = nn.Linear(WIDTH, 6 + HEAD), nn.Linear(6, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_b(self.q_a(x)).unflatten(-1, (HEADS, -1))
        narrow, shared = self.kv_a(x).split([6, HEAD], -1)
        k, v = self.kv_b(narrow).unflatten(-1, (HEADS, -1)).chunk(2, -1)
        k = torch.cat([k, shared.unsqueeze(2).expand(-1, -1, HEADS, -1)], -1)
        out: Tensor = x + self.out(attend(q, k, v))
        return out


class Perceptron(nn.Module):
    """``wide`` hidden units; dropout, and a second output that nobody may want."""

    def __init__(self, wide: int = 24, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(WIDTH, wide), nn.Linear(wide, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.relu(self.up(self.norm(x)))
        return x + self.dropout(self.down(hidden)), hidden


def filled(block: nn.Module) -> nn.Module:
    """float64 and random, norms about one."""
    generator = torch.Generator().manual_seed(0)
    block.double()
    with torch.no_grad():
        for parameter in block.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise * 0.3 + (parameter.dim() < 2))
    return block


def stream(length: int = LENGTH) -> Tensor:
    """Hidden states [2, length, WIDTH] whose gradient is asked for."""
    generator = torch.Generator().manual_seed(length)
    return torch.randn(2, length, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()


def given_for(block: nn.Module, length: int = LENGTH) -> Given:
    """What ``block`` is called with."""
    more: tuple[Any, ...] = ()
    if any(isinstance(module, Experts) for module in block.modules()):
        more = (torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64, requires_grad=True),)
    return (stream(length), *more), {}


def patterns_of(block: nn.Module, **more: Any) -> GradientSparsity:
    """Its products, observed."""
    with exactly():
        return GradientSparsity(filled(block).eval(), given_for(block), **more)


def groups_of(block: nn.Module, tp: int = 2, **more: Any) -> tuple[CoupledParameters, ...]:
    """Its groups."""
    patterns = patterns_of(block, **more)
    with exactly():
        return patterns.groups(tp)


def truth_of(block: nn.Module, *lengths: int, **more: Any) -> BlockReference:
    """What it gives, at each length."""
    filled(block).train()
    return BlockReference(block, [given_for(block, length) for length in lengths or (LENGTH,)], **more)
