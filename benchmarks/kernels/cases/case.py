"""Types of a kernel test case: operator, sizes, minimal cost and target.

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
"""Tokens of a microbatch: two sequences of 4096."""

Direction = Literal["forward", "backward", "both"]
Inputs = tuple[Tensor, ...]
Peers = Mapping[str, Callable[[], Operator]]


@dataclass(frozen=True, slots=True)
class Slice:
    """Sizes of one tensor rank's share of a model."""

    name: str
    tokens: int
    width: int
    hidden: int
    """Hidden size of the MLP on this rank."""
    heads: int
    key_heads: int
    head: int
    """Width of a head."""
    vocabulary: int
    parameters: int = 500_000_000
    """Number of parameters in an optimizer shard."""


_LLAMA = MappingProxyType({"8B": (4096, 14336, 32), "70B": (8192, 28672, 64)})


def llama(size: str, ranks: int) -> Slice:
    """Returns the sizes of one of ``ranks`` tensor ranks of Llama 3 ``size``."""
    width, hidden, heads = _LLAMA[size]
    name = f"Llama-{size} tp{ranks}"
    return Slice(name, TOKENS, width, hidden // ranks, heads // ranks, 8 // ranks, 128, 128256 // ranks)


@dataclass(frozen=True, slots=True)
class Cost:
    """Minimum bytes and FLOPs of one direction of an operator."""

    bytes: int = 0
    flops: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.bytes + other.bytes, self.flops + other.flops)


@dataclass(frozen=True, slots=True)
class Target:
    """Minimum fraction of the measured copy rate, product rate, or a contender's speed."""

    direction: Direction
    against: str
    """Reference: "copy", "product", or the name of a contender."""
    least: float


def _nothing() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Case:
    """Test case: one operator in one form on one model slice."""

    operator: str
    """Name of the operator in ``tuned.json``."""
    form: str
    where: Slice
    dtype: torch.dtype
    width: int
    """Width for the lookup in ``tuned.json``."""
    make: Callable[[torch.device, int], Inputs]
    """Function (device, number of rows) that returns random inputs; ``rows`` is the full case."""
    rows: int
    ours: Callable[[Kernels], Operator]
    eager: Operator
    """Plain torch reference, written as in models."""
    forward: Cost
    backward: Cost | None = None
    """Cost of the backward; None: the operator has no gradient."""
    peers: Peers = field(default_factory=_nothing)
    """Functions that make peers on demand; an import may fail."""
    targets: tuple[Target, ...] = ()
    memory_limit: int | None = None
    """Maximum bytes besides the inputs, in a forward and a backward; None: no limit."""
    compiled: bool = True
    """True if torch.compile is a contender."""
    shape: str = ""
    """Tensor sizes as text."""
    winners: Mapping[str, Direction] = field(default_factory=_nothing)
    """Rows of ``tuned.json`` that the case determines, with the direction; empty: the operator, both directions."""

    @property
    def name(self) -> str:
        """Unique name: operator, form, slice and dtype."""
        return f"{self.operator} [{self.form}] {self.where.name} {short(self.dtype)}"

    @property
    def decides(self) -> Mapping[str, Direction]:
        """Rows of ``tuned.json`` that the case determines, with the direction."""
        return self.winners or {self.operator: "both"}

    @property
    def both(self) -> Cost:
        """Cost of forward and backward together."""
        return self.forward + (self.backward or Cost())


def short(dtype: torch.dtype) -> str:
    """Returns the name of ``dtype`` without the module."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Random:
    """Generator of random inputs on a device: fp32 from a seed, rounded to ``dtype``."""

    generator: torch.Generator
    dtype: torch.dtype

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Returns normal random numbers of standard deviation ``scale``."""
        device = self.generator.device
        return torch.randn(shape, generator=self.generator, device=device).mul_(scale).to(self.dtype)

    def integers(self, below: int, *shape: int) -> Tensor:
        """Returns uniform random int64 numbers in [0, ``below``)."""
        return torch.randint(below, shape, generator=self.generator, device=self.generator.device)


def random(device: torch.device, dtype: torch.dtype, seed: int = 0) -> Random:
    """Returns a generator with ``seed``."""
    return Random(torch.Generator(device).manual_seed(seed), dtype)
