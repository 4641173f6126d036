"""What a kernel is measured and checked on: an operator, the slice of a model that gives its sizes, what it must cost.

Slice    sizes of a model's share on one tensor rank: Llama 8B and 70B at 1, 2, 4 and 8 ranks
Case     one operator in one form on one slice: inputs, our operator, eager torch's, peers
Cost     fewest bytes through memory, each input read once and each output written once, and operations
Target   what the case has to reach
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.kernels.cases.errors import Operator
from engine.kernels.dispatch import Kernels

TOKENS = 8192
"""Of a microbatch: two sequences of 4096."""

Direction = Literal["forward", "backward", "both"]
Inputs = tuple[Tensor, ...]
Peers = Mapping[str, Callable[[], Operator]]


@dataclass(frozen=True, slots=True)
class Slice:
    """Sizes."""

    name: str
    tokens: int
    width: int
    hidden: int
    """Of the perceptron."""
    heads: int
    key_heads: int
    head: int
    """Width of a head."""
    vocabulary: int
    parameters: int = 500_000_000
    """Of an optimizer's shard."""


_LLAMA = MappingProxyType({"8B": (4096, 14336, 32), "70B": (8192, 28672, 64)})


def llama(size: str, ranks: int) -> Slice:
    """The share of one of ``ranks`` tensor ranks of Llama 3."""
    width, hidden, heads = _LLAMA[size]
    name = f"Llama-{size} tp{ranks}"
    return Slice(name, TOKENS, width, hidden // ranks, heads // ranks, 8 // ranks, 128, 128256 // ranks)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one direction."""

    bytes: int = 0
    flops: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.bytes + other.bytes, self.flops + other.flops)


@dataclass(frozen=True, slots=True)
class Target:
    """At least this share of the measured copy rate, of the measured rate of products, or of a contender's speed."""

    direction: Direction
    against: str
    """"copy", "product", or the name of a contender."""
    least: float


def _nothing() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Case:
    """One operator on one slice."""

    operator: str
    """As the table of winners names it."""
    form: str
    where: Slice
    dtype: torch.dtype
    width: int
    """What the table of winners is asked with."""
    make: Callable[[torch.device, int], Inputs]
    """Random inputs with so many rows (``rows``: all)."""
    rows: int
    ours: Callable[[Kernels], Operator]
    eager: Operator
    """As models write it, in plain torch."""
    forward: Cost
    backward: Cost | None = None
    """None: the operator has no gradient."""
    peers: Peers = field(default_factory=_nothing)
    """Made when wanted: a peer that cannot be imported raises."""
    targets: tuple[Target, ...] = ()
    memory_limit: int | None = None
    """Bytes beside the inputs, in a forward and a backward."""
    compiled: bool = True
    """Whether torch.compile is a contender: it takes seconds a case to compile."""
    shape: str = ""
    """Sizes, for people."""
    winners: Mapping[str, Direction] = field(default_factory=_nothing)
    """Rows of the table of winners that the case decides, and by which direction; none: the operator's, by both."""

    @property
    def name(self) -> str:
        """Unique among the cases of a lineup."""
        return f"{self.operator} [{self.form}] {self.where.name} {short(self.dtype)}"

    @property
    def decides(self) -> Mapping[str, Direction]:
        """Rows of the table of winners, by the direction that decides."""
        return self.winners or {self.operator: "both"}

    @property
    def both(self) -> Cost:
        """Of forward and backward."""
        return self.forward + (self.backward or Cost())


def short(dtype: torch.dtype) -> str:
    """As torch calls it, without the module."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Random:
    """Values for inputs: normal, from a seed, made on the device in fp32 and rounded."""

    generator: torch.Generator
    dtype: torch.dtype

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal values of standard deviation ``scale``."""
        device = self.generator.device
        return torch.randn(shape, generator=self.generator, device=device).mul_(scale).to(self.dtype)

    def integers(self, below: int, *shape: int) -> Tensor:
        """Uniform int64 below ``below``."""
        return torch.randint(below, shape, generator=self.generator, device=self.generator.device)


def random(device: torch.device, dtype: torch.dtype, seed: int = 0) -> Random:
    """From ``seed``."""
    return Random(torch.Generator(device).manual_seed(seed), dtype)
