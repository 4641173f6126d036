"""Float64 blocks with random weights, for the search and the proof of tensor plans.

Matrices of at least LARGE entries become low-rank products, so that time and memory grow with the widths of a block,
not with its parameters. A weight that code reads in another way is drawn in full.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from engine.errors import first_line
from engine.parallel.model.user_code import is_own_mistake
from engine.parallel.tensor.auto.coupled_parameters import Given
from engine.parallel.tensor.auto.equivalence import exactly
from engine.parallel.tensor.auto.low_rank_weight import LowRankWeight, WholeWeightError, low_rank_parameter
from engine.parallel.trace.model_trace import Arguments, Sample
from engine.planning.isolated_block import copy_block, is_sample
from engine.precision.dtypes import Precision

LARGE = 2**18
"""Smallest number of entries of a low-rank matrix."""
MOST_WHOLE = 2**27
"""Most entries (1 GiB) of low-rank weights that are drawn in full, if a block does not run with factors."""
Result = TypeVar("Result")


class IsolatedRunError(Exception):
    """Error of a copied module that cannot run outside its model."""


@contextmanager
def alone() -> Iterator[None]:
    """Opens a context in which exceptions of user code become :class:`IsolatedRunError`.

    Errors of the engine's own code, and ``WholeWeightError``, pass through unchanged.
    """
    try:
        yield
    except WholeWeightError:
        raise
    except Exception as error:
        if is_own_mistake(error):
            raise
        raise IsolatedRunError(first_line(error)) from error


@dataclass(frozen=True, slots=True)
class MaterializedBlock:
    """Float64 copy of a module with random weights, for the search or proof of a tensor-parallel plan."""

    block: nn.Module
    givens: list[Given]
    """Arguments of the module's calls."""
    refused: set[str]
    """Names of low-rank weights that code has read in a way that needs all entries; see
    ``tensor.auto.low_rank_weight``.
    """
    low_rank: frozenset[str]
    """Names of the low-rank weights."""

    @property
    def fits_whole(self) -> bool:
        """True if the block has weights stored as low-rank products, and they would fit in 1 GiB as full matrices."""
        sizes = [parameter.numel() for name, parameter in self.block.named_parameters() if name in self.low_rank]
        return 0 < sum(sizes) <= MOST_WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class MaterializedUnit:
    """Module with its recorded calls, from which float64 copies with random weights are made."""

    model: nn.Module
    name: str
    precision: Precision
    calls: Sequence[Arguments]
    low_rank: bool = True
    """True if large matrices are low-rank; False: all entries are drawn."""
    other_values: bool = False
    """True if calls read values that are not arguments, which a copy does not have."""

    def run(self, body: Callable[[MaterializedBlock], Result]) -> Result:
        """Makes a float64 copy of the module with random weights, and returns ``body(copy)``.

        Large weights are products of two thin matrices. If ``body`` reads all elements of such a weight, calls ``body``
        again with the full weight; so ``body`` must have no side effects.

        Raises:
            IsolatedRunError: the module cannot be copied, or uses values of the model that are not among its arguments.
        """
        if self.other_values:
            raise IsolatedRunError("it reads values of the model that are not among its arguments")
        whole = set[str]()
        while True:
            with exactly(), alone():
                drawn = self._draw(whole)
            try:
                result = body(drawn)
            except Exception as error:
                if not drawn.refused and not (isinstance(error, IsolatedRunError) and drawn.fits_whole):
                    raise
                whole |= drawn.refused or drawn.low_rank  # code below torch may take dense weights only
            else:
                if not drawn.refused:
                    return result
                whole |= drawn.refused

    def _draw(self, whole: Collection[str]) -> MaterializedBlock:
        named = self.model.get_submodule(self.name).named_parameters()
        thin = {local for local, parameter in named if self.low_rank and local not in whole and _is_large(parameter)}
        block = copy_block(self.model, self.name, self.precision, torch.device("cpu"), left_out=thin).double()
        generator = torch.Generator().manual_seed(0)
        refused = _draw_low_rank(block, thin, generator)
        with torch.no_grad():
            for parameter in block.parameters():
                if not isinstance(parameter, LowRankWeight):
                    _fill(parameter, generator)
        givens = [_float64_content(arguments, generator) for arguments in self.calls]
        return MaterializedBlock(block, givens, refused, frozenset(thin))


def _is_large(parameter: Tensor) -> bool:
    return parameter.is_floating_point() and parameter.ndim in (2, 3) and parameter.numel() >= LARGE


def _fill(parameter: nn.Parameter, generator: torch.Generator) -> None:
    scale = 0.1 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5
    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    parameter.copy_(noise * scale + (1.0 if parameter.dim() < 2 else 0.0))
    parameter.requires_grad_(True)


def _draw_low_rank(block: nn.Module, names: Collection[str], generator: torch.Generator) -> set[str]:
    """Replaces the parameters ``names`` by low-rank weights; returns the refused ones."""
    refused = set[str]()
    made: dict[int, LowRankWeight] = {}
    for name, parameter in block.named_parameters():
        if name in names:
            made[id(parameter)] = low_rank_parameter(parameter.shape, name, generator, refused)
    for module in block.modules():
        for local, own in module._parameters.items():
            if id(own) in made:
                module._parameters[local] = made[id(own)]  # type: ignore[assignment]
    return refused


def in_float64(arguments: Arguments) -> Arguments:
    """Returns recorded call arguments with every floating-point tensor described as float64."""

    def widen(leaf: Any) -> Any:
        drawn = isinstance(leaf, Sample) and leaf.dtype.is_floating_point
        return leaf._replace(dtype=torch.float64) if drawn else leaf

    widened: Arguments = pytree.tree_map(widen, arguments, is_leaf=is_sample)
    return widened


def _float64_content(arguments: Arguments, generator: torch.Generator) -> Given:
    def fill(leaf: Any) -> Any:
        if isinstance(leaf, Sample):
            if not leaf.dtype.is_floating_point:
                return torch.zeros(leaf.shape, dtype=leaf.dtype)
            content = torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
            return content.requires_grad_(leaf.grad)
        if isinstance(leaf, Tensor):
            tensor = torch.zeros(leaf.shape, dtype=leaf.dtype) if leaf.is_meta else leaf.detach().cpu()
            return tensor.double() if tensor.is_floating_point() else tensor.clone()
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    args, kwargs = pytree.tree_map(fill, arguments, is_leaf=is_sample)
    return args, kwargs
