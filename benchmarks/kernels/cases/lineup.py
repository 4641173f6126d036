"""Lists of the kernel cases to measure, the most important of every operator first, and to check."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from types import MappingProxyType
from typing import Literal

import torch

from benchmarks.kernels.cases.case import Case, Slice, llama
from benchmarks.kernels.cases.loss import cross_entropies, linear_cross_entropies
from benchmarks.kernels.cases.matmul import every_linear, linears
from benchmarks.kernels.cases.optimizer import adamw, adamw_8bit, squared_norms
from benchmarks.kernels.cases.rotary import rotary
from benchmarks.kernels.cases.rows import activations, gated, norms
from benchmarks.kernels.cases.wire import block_codecs

Maker = Callable[[Slice, torch.dtype], Iterator[Case]]

MAKERS: Mapping[str, Maker] = MappingProxyType(
    {
        "norm": norms,
        "gated": gated,
        "activation": activations,
        "rotary": rotary,
        "linear": linears,
        "cross_entropy": cross_entropies,
        "linear_cross_entropy": linear_cross_entropies,
        "adamw": adamw,
        "adamw_8bit": adamw_8bit,
        "squared_norm": squared_norms,
        "block_codec": block_codecs,
    }
)

SQUARE = Slice("8192^3", 8192, 8192, 8192, 64, 8, 128, 128256)
"""Square product of side 8192, as published by others."""
NARROW = Slice("width 2048", 8192, 2048, 8192, 32, 8, 64, 32000)
_CUT = tuple(llama(size, ranks) for size in ("8B", "70B") for ranks in (1, 8, 2, 4))
_SMALL_CUT = _CUT[:4]
"""Logits are as wide in both models."""
_WHOLE = (llama("8B", 1), llama("70B", 1), NARROW)
_SLICES: Mapping[str, tuple[Slice, ...]] = MappingProxyType(
    {
        "norm": _WHOLE,
        "linear": (SQUARE, *_CUT),
        "cross_entropy": _SMALL_CUT,
        "adamw": _WHOLE[:1],
        "adamw_8bit": _WHOLE[:1],
        "squared_norm": _WHOLE[:1],
        "block_codec": _WHOLE[:1],
    }
)
"""Slices of an operator; those of the vocabulary and of the perceptron are cut by tensor ranks, norms are not."""

RAGGED = Slice("ragged", 301, 1096, 1400, 6, 2, 64, 3001, 100_003)
EVEN = Slice("even", 512, 1024, 2048, 8, 8, 128, 4096, 1 << 18)
WIDE = Slice("wide", 40, 8192, 14336, 16, 2, 128, 128256, 3_000_000)
TINY = Slice("tiny", 5, 24, 40, 2, 1, 16, 67, 1000)
"""Small sizes for the interpreter."""
ROW_OPERATORS = frozenset(
    {"norm", "gated", "activation", "rotary", "cross_entropy", "adamw", "adamw_8bit", "squared_norm", "block_codec"}
)
Scale = Literal["tiny", "some", "all"]
"""Number of checks: in the interpreter, before a measurement, or alone."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class Order:
    """Options of the command line."""

    device: str = "cuda"
    quick: bool = False
    """True: only the first slice of each operator."""
    operators: tuple[str, ...] = tuple(MAKERS)

    @property
    def tiny(self) -> bool:
        """True on a CPU, where kernels are interpreted."""
        return self.device == "cpu"


def measured(order: Order) -> list[Case]:
    """Returns the cases to measure in bf16, the first slice of all operators first."""
    by_operator = []
    for operator in order.operators:
        slices = (TINY,) if order.tiny else _SLICES.get(operator, _CUT)[: 1 if order.quick else None]
        by_operator.append([list(MAKERS[operator](where, torch.bfloat16)) for where in slices])
    first, *rest = zip_longest(*by_operator, fillvalue=[])
    later = (replace(case, compiled=False) for turn in rest for cases in turn for case in cases)
    return [*(case for cases in first for case in cases), *later]


def checked(operator: str, dtype: torch.dtype, scale: Scale) -> list[Case]:
    """Returns the cases to check: ragged shapes, several programs, rows as long as a vocabulary."""
    wide = [WIDE] if operator in ROW_OPERATORS else []
    slices = {"tiny": [TINY], "some": [RAGGED, *wide], "all": [RAGGED, EVEN, *wide]}[scale]
    maker = every_linear if operator == "linear" and scale == "all" else MAKERS[operator]
    return [replace(case, peers={}) for where in slices for case in maker(where, dtype)]
