"""Recomputed blocks inside which a pipeline stage begins: their units are recomputed one by one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from engine.verify import verify
from tests import models
from tests.engine.parity.launches import settings

WIDTH = 8


class Counting(nn.Module):
    """State in a buffer, an attribute and a batch norm, which each forward changes and reads."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.calls += 1
        mixed = torch.tanh(self.mix(self.norm(x.flatten(0, 1)).view_as(x)))
        out: Tensor = x + mixed * self.seen.clone() * (1 + self.calls / 8)
        return out


class Perceptron(nn.Module):
    """A layer and an activation that one kernel computes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.act(self.up(x)))
        return out


class Scaled(nn.Module):
    """A layer of twice its input; ``writes``: the module writes its input in place."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.writes, self.mix = writes, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mix(x.mul_(2) if self.writes else x * 2)
        return out


class Writing(nn.Module):
    """Two parts that read one value; the second one writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.reads, self.writes = nn.Linear(WIDTH, WIDTH), Scaled(False), Scaled(True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        out: Tensor = x + self.reads(hidden) + self.writes(hidden)
        return out


class Pair(nn.Module):
    """Two layers; the outputs of both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.first(x)
        return out, self.second(torch.relu(out))


class Written(nn.Module):
    """A part with an output that the code after it writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.down = Pair(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.pair(x)
        first.mul_(1.5)
        out: Tensor = x + self.down(first + second)
        return out


class Sines(TorchFunctionMode):
    """Sine in place of the hyperbolic tangent."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.sin(*args) if func is torch.tanh else func(*args, **(kwargs or {}))


class Bent(nn.Module):
    """A layer and ``torch.tanh``."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.mix(x))


class InMode(nn.Module):
    """Parts in a function mode, one of them with an output that the code after it writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.mix = Bent(), Bent(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with Sines():
            hidden = self.mix(self.one(x))
            hidden.mul_(1.5)
            out: Tensor = x + self.two(hidden)
        return out


class Seeded(nn.Module):
    """Dropout from a seed of the user's, after a layer at whose end the engine seeds by position."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            out: Tensor = x + self.drop(torch.tanh(self.mix(x)))
        return out


class Attention(nn.Module):
    """Attention of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.mix(x).unflatten(-1, (2, -1)).transpose(1, 2)
        out: Tensor = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(-2)
        return out


class InBackend(nn.Module):
    """Attention for which the code around it chooses the backend."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.down = Attention(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            out: Tensor = x + self.down(self.attention(x))
        return out


class Block(nn.Module):
    """Three parts; ``own``: the code of the block recomputes them itself."""

    def __init__(self, kind: type[nn.Module], own: bool) -> None:
        super().__init__()
        self.own, self.parts = own, nn.Sequential(kind(), kind(), kind())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self._run, x, use_reentrant=False) if self.own else self._run(x)
        return out

    def _run(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class Words(nn.Module):
    """Two blocks over words."""

    def __init__(self, kind: type[nn.Module], own: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.head = nn.Embedding(models.VOCABULARY, WIDTH), nn.Linear(WIDTH, models.VOCABULARY)
        self.blocks = nn.ModuleList([Block(kind, own), Block(kind, own)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize(
    ("kind", "split", "mode"),
    [
        (Counting, "1", "full"),
        (Counting, "1", "selective"),
        (Perceptron, "1.down", "full"),
        (Perceptron, "1.down", "selective"),
        (Perceptron, "1.down", None),
        (Writing, "1.reads", "full"),
        (Writing, "1.reads", None),
        (Written, "1.down", "selective"),
        (InMode, "1.two", "full"),
        (Seeded, "1", "full"),
        (InBackend, "1.down", "full"),
    ],
)
def test_units_are_recomputed_with_the_state_of_their_forward(
    kind: type[nn.Module], split: str, mode: str | None
) -> None:
    config = settings(
        2,
        parallel={"pipeline": 2, "split": [f"blocks.0.parts.{split}"]},
        kernels="reference",
        activation_checkpointing={"mode": mode or "none"},
    )
    result = verify(lambda: Words(kind, mode is None), config, models.token_batches(8, 2), threads=2)
    assert result is not None and result.holds(), str(result)


def test_no_tile_goes_around_the_calls_of_another_stage() -> None:
    """A block of positions, inside which a stage begins, has tiles in its parts."""
    config = settings(
        2,
        parallel={"pipeline": 2, "split": ["blocks.0.parts.1"]},
        kernels="reference",
        activation_checkpointing={"tile_tokens": 7},
    )
    result = verify(lambda: Words(Perceptron, False), config, models.token_batches(8, 2), threads=2)
    assert result is not None and result.holds(), str(result)
