"""Modules that stack experts, called in every form, and some that only look like it."""

from typing import Any

import torch
from torch import Tensor, nn

EXPERTS, WIDTH, INNER = 4, 6, 10


class Stacked(nn.Module):
    """Two matrices of each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH))


class Counted(Stacked):
    """Experts with a tensor of counts, as torchtitan calls them."""

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        parts = torch.split(x, num_tokens_per_expert.tolist())
        return torch.cat(
            [part.mm(up).relu().mm(down) for part, up, down in zip(parts, self.up, self.down, strict=True)]
        )


class Listed(Stacked):
    """Experts with a list of counts after the rows, as JetMoE calls them, to another width."""

    def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
        return torch.cat([part.mm(up) for part, up in zip(torch.split(x, sizes), self.up, strict=True)])


class Major(Stacked):
    """Experts with a dim for the experts, as GShard calls them."""

    def forward(self, dispatched: Tensor) -> Tensor:
        hidden = torch.einsum("ech,ehm->ecm", dispatched, self.up).relu()
        return torch.einsum("ecm,emh->ech", hidden, self.down)


class FlatMajor(Major):
    """Experts with equally many rows, as Llama 4 calls them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(len(self.up), -1, WIDTH)).view(-1, WIDTH)


class Reversed(Stacked):
    """Experts with weights before numbers, which hand their arguments to code with other names."""

    def forward(self, w: Tensor, n: Tensor, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(len(self.up)):
            row, slot = (n == expert).nonzero().unbind(1)
            out = out.index_add(0, row, x[row].mm(self.up[expert]).relu().mm(self.down[expert]) * w[row, slot][:, None])
        return out


class Renamed(Reversed):
    """Experts whose forward has the names of another one, as a decorator makes them."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return Reversed.forward(self, *args, **kwargs)

    forward.__wrapped__ = lambda self, weights, numbers, rows: None  # type: ignore[attr-defined]


class Flattened(nn.Module):
    """Experts with all matrices in one dim, called with batches of rows, as DBRX has them."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.experts, self.inner = WIDTH, EXPERTS, INNER
        self.up = nn.Parameter(torch.randn(EXPERTS * INNER, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS * INNER, WIDTH))

    def forward(self, x: Tensor, n: Tensor, w: Tensor) -> Tensor:
        rows = x.reshape(-1, self.width)
        ups, downs = (each.view(-1, self.inner, self.width) for each in (self.up, self.down))
        out = torch.zeros_like(rows)
        for expert in range(self.experts):
            row, slot = (n == expert).nonzero().unbind(1)
            out = out.index_add(0, row, rows[row].mm(ups[expert].t()).relu().mm(downs[expert]) * w[row, slot][:, None])
        return out.view(x.shape[0], -1, self.width)


class Normed(Stacked):
    """Experts whose results pass one norm, with a scale of each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.rand(EXPERTS)), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, n: Tensor, w: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(len(self.up)):
            row, slot = (n == expert).nonzero().unbind(1)
            made = self.norm(x[row].mm(self.up[expert]).relu().mm(self.down[expert])) * self.scale[expert]
            out = out.index_add(0, row, made * w[row, slot][:, None])
        return out


class Biased(nn.Module):
    """Experts with a fused gate, a bias that is added last, and a factor of each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 12, 8)), nn.Parameter(torch.randn(4, 8, 6))
        self.bias, self.factor = nn.Parameter(torch.rand(4, 8)), nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        """Returns the weighted sum of each row's experts."""
        y = torch.zeros_like(x)
        for expert in range(len(self.up)):
            row, slot = (numbers == expert).nonzero().unbind(1)
            gate, value = (x[row] @ self.up[expert].T).chunk(2, -1)
            y = y.index_add(0, row, self.ended(gate.sigmoid() * value, expert) * weights[row, slot, None])
        return y

    def ended(self, hidden: Tensor, expert: int) -> Tensor:
        """Returns the results of an expert."""
        return (hidden @ self.down[expert].T + self.bias[expert]) * self.factor[expert]


class Centred(Counted):
    """Experts that subtract the mean of their rows."""

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        parts = [part - part.mean(0) for part in torch.split(x, num_tokens_per_expert.tolist())]
        return super().forward(torch.cat(parts), num_tokens_per_expert)


class Capacity(Major):
    """Experts that drop all rows but two."""

    def forward(self, dispatched: Tensor) -> Tensor:
        keep = (torch.arange(dispatched.shape[1]) < 2)[:, None]
        return super().forward(dispatched) * keep
