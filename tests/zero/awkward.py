"""Models whose modules use, share, hide or skip parameters in ways that gathering has to get right. For ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, VOCABULARY, LAYERS = 16, 23, 4


class Block(nn.Module):
    """Two matrices and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Chain(nn.Module):
    """Embedding, blocks, head; a loss. Others change one thing each."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.loss(self.run(self.embed(ids)), ids)

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, -2), (ids * 7 + 1).flatten() % VOCABULARY)


class ReadsOutside(Chain):
    """The loss reads the embedding's weight, and a norm's, without calling their modules."""

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        aside: Any = self.blocks[1].norm
        logits = F.linear(self.norm(x), self.embed.weight) + self.head(x) + aside.weight.sum()
        return F.cross_entropy(logits.flatten(0, -2), ids.flatten())


class HeadFirst(Chain):
    """Defined in another order than it runs."""

    def __init__(self) -> None:
        super().__init__()
        modules = dict(self._modules)
        self._modules.clear()
        self._modules.update(dict(reversed(modules.items())))


class Repeats(Chain):
    """Each block runs three times, and so do all of them together."""

    def run(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for block in self.blocks:
                x = block(block(x))
        return x


class Skips(Chain):
    """Each rank skips another block in each microbatch, as layer dropout may."""

    def run(self, x: Tensor) -> Tensor:
        skipped = int(torch.randint(0, LAYERS, ())) if self.training else -1
        for index, block in enumerate(self.blocks):
            x = x if index == skipped else block(x)
        return x


class Segments(Chain):
    """The user's own checkpointing, of two blocks at a time."""

    reentrant = False

    def run(self, x: Tensor) -> Tensor:
        for start in range(0, LAYERS, 2):
            pair = nn.Sequential(*self.blocks[start : start + 2])
            x = checkpoint(pair, x, use_reentrant=self.reentrant)
        return x


class SegmentsAgain(Segments):
    """The older kind, which runs a backward inside backward."""

    reentrant = True


class EachReentrant(Chain):
    """Hugging Face's habit of old: every block, re-entrant."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class PassesOn(Chain):
    """Blocks return what they were given beside what they made, as T5 does with its position bias."""

    class block(Block):  # noqa: N801
        def forward(self, x: Any) -> Any:
            x, first = x if isinstance(x, tuple) else (x, None)
            out = super().forward(x)
            return out, out if first is None else first

    def run(self, x: Tensor) -> Tensor:
        pair: Any = x
        for block in self.blocks:
            pair = block(pair)
        out: Tensor = pair[0] + pair[1]
        return out


@dataclass
class _Box:
    inner: Tensor


class ReturnsObjects(Chain):
    """Blocks return objects that torch does not know."""

    class block(Block):  # noqa: N801
        def forward(self, x: Any) -> Any:
            return _Box(super().forward(x.inner if isinstance(x, _Box) else x))

    def run(self, x: Tensor) -> Tensor:
        out: Any = super().run(x)
        inner: Tensor = out.inner
        return inner


class Hides(Chain):
    """A block returns its tensor inside a closure, where nobody finds it."""

    class block(Block):  # noqa: N801
        def forward(self, x: Any) -> Any:
            out = super().forward(x() if callable(x) and not isinstance(x, Tensor) else x)
            return lambda: out

    def run(self, x: Tensor) -> Tensor:
        out: Any = super().run(x)
        inner: Tensor = out()
        return inner


class FrozenStart(Chain):
    """Embedding and first blocks are frozen, so that no backward reaches them."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.embed, *self.blocks[:2]):
            part.requires_grad_(False)


class FrozenMiddle(Chain):
    """Frozen blocks with trained ones before and behind, a quantised table, and norms that are trained all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks[2].up.requires_grad_(False)
        self.table = nn.Parameter(torch.arange(VOCABULARY, dtype=torch.uint8), requires_grad=False)
        self.flags = nn.Parameter(torch.ones(VOCABULARY, dtype=torch.bool), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(self.table[ids].long() * self.flags[ids])


class WritesInPlace(Chain):
    """What a block returns is written over by the next."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x += 0.5
            x.mul_(0.9)
        return x


class Side(Chain):
    """Blocks leave a second loss behind as an attribute."""

    class block(Block):  # noqa: N801
        def forward(self, x: Any) -> Any:
            out = super().forward(x)
            self.aside = out.square().mean()
            return out

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        asides: list[Any] = [block.aside for block in self.blocks]
        return super().loss(x, ids) + 0.1 * torch.stack(asides).sum()


class _Positions(nn.Module):
    """Returns a part of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, WIDTH))

    def forward(self, length: int) -> Tensor:
        return self.table[:length].unsqueeze(0)


class ReturnsViews(Chain):
    """A module returns a view of its parameter, and every block reads that (DETR)."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = _Positions()

    def run(self, x: Tensor) -> Tensor:
        positions = self.positions(x.shape[1])
        for block in self.blocks:
            x = block(x * positions)
        return x


class Penalty(Chain):
    """The loss holds a gradient, so that backward goes twice through the blocks."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        y = self.run(x)
        if not torch.is_grad_enabled():
            return self.loss(y, ids)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        loss: Tensor = self.loss(y, ids) + 0.01 * grad.square().mean()
        return loss


AWKWARD: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in (
        Chain, ReadsOutside, HeadFirst, Repeats, Segments, SegmentsAgain, EachReentrant, PassesOn, ReturnsObjects,
        Hides, FrozenStart, FrozenMiddle, WritesInPlace, Side, ReturnsViews,
        Penalty,
    )
}  # fmt: skip
