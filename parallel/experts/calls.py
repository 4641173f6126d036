"""Calls of modules that stack experts: the arguments that say which rows each expert gets, read and written.

    routed    f(x [T, H], numbers [T, k], weights [T, k])    transformers; x [B, S, H] and the same numbers: DBRX
    counted   f(x [T, H], counts [E])                        x in the order of experts: JetMoE, torchtitan
    major     f(x [E * C, H]) or f(x [E, C, H])              the same number of rows for each expert: Llama 4, GShard

Every form is read as rows with numbers of experts and weights, and written for the rows and the experts of one rank.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn


class Rows(NamedTuple):
    """Arguments of an expert layer in a form common to all calling conventions: token rows, with their experts and
    weights.
    """

    x: Tensor
    """Token rows [T, H]."""
    numbers: Tensor
    """Indices of the k experts of each row [T, k]; integers."""
    weights: Tensor
    """Weight of each expert of each row [T, k]."""


class Written(NamedTuple):
    """Arguments for a module of experts. ``back`` puts the module's result into the row order of :class:`Rows`."""

    arguments: Mapping[str, Any]
    """Arguments by name."""
    back: Callable[[Tensor], Tensor]
    """Returns the results in the order of the rows."""


class ExpertCall(Protocol):
    """Interface that converts the arguments of one calling convention for experts to :class:`Rows` and back."""

    slots: ClassVar[int]
    """Number of experts per row in a trial."""
    described: ClassVar[str]
    """Description of the arguments, for messages."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the expert module's forward arguments, in order."""
        ...

    def read(self, given: Mapping[str, Any], experts: int) -> Rows | None:
        """Converts ``given``, the arguments by name, to :class:`Rows`; returns None if they do not fit this convention.

        ``experts``: number of experts of the module.
        """
        ...

    def write(self, rows: Rows, experts: int, given: Mapping[str, Any]) -> Written:
        """Converts ``rows`` to arguments for a module with ``experts`` experts.

        ``given``: arguments of the original call, by name. New row counts, if any, get the type of the original ones,
        such as a list.
        """
        ...


@dataclass(frozen=True, slots=True)
class RoutedCall:
    """Calling convention: T token rows, with the indices [T, k] and weights [T, k] of the k experts of each row."""

    rows: str
    numbers: str
    weights: str
    batched: bool = False
    """Rows are [B, S, H], and not [T, H]."""
    slots: ClassVar[int] = 2
    described: ClassVar[str] = "rows [T, H] or [B, S, H], numbers of experts [T, k] and their weights [T, k]"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the expert module's forward arguments: rows, expert indices, weights."""
        return self.rows, self.numbers, self.weights

    def read(self, given: Mapping[str, Any], experts: int) -> Rows | None:
        """Converts the arguments ``given``, by name, to :class:`Rows`; returns None if they do not fit."""
        found: list[Any] = [given.get(name) for name in self.names]
        dims = [each.dim() for each in found if isinstance(each, Tensor)]
        if dims != [3 if self.batched else 2, 2, 2]:
            return None
        x, numbers, weights = found[0].reshape(-1, found[0].shape[-1]), *found[1:]
        return Rows(x, numbers, weights) if numbers.shape == weights.shape and len(x) == len(numbers) else None

    def write(self, rows: Rows, experts: int, given: Mapping[str, Any]) -> Written:
        """Converts ``rows`` to arguments for the module; ``experts`` and ``given`` have no effect."""
        x = rows.x[None] if self.batched else rows.x
        back = _first if self.batched else _same
        return Written(dict(zip(self.names, (x, *rows[1:]), strict=True)), back)


@dataclass(frozen=True, slots=True)
class CountedCall:
    """Calling convention: rows sorted by expert, and the number of rows of each expert as a tensor or list."""

    rows: str
    counts: str
    listed: bool
    """Counts are a list of integers."""
    slots: ClassVar[int] = 1
    described: ClassVar[str] = "rows [T, H] in the order of experts and the number of rows of each expert [E]"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the expert module's forward arguments: rows, row counts."""
        return self.rows, self.counts

    def read(self, given: Mapping[str, Any], experts: int) -> Rows | None:
        """Converts ``given``, the arguments by name, to :class:`Rows`; returns None if they do not fit this convention.

        ``experts``: number of experts of the module.
        """
        x, counts = given.get(self.rows), given.get(self.counts)
        if not isinstance(x, Tensor) or x.dim() != 2 or not isinstance(counts, Tensor | list | tuple):
            return None
        counted = torch.as_tensor(counts, device=x.device)
        if counted.shape != (experts,) or int(counted.sum()) != len(x):
            return None
        return _one_expert_each(x, torch.arange(experts, device=x.device).repeat_interleave(counted))

    def write(self, rows: Rows, experts: int, given: Mapping[str, Any]) -> Written:
        """Converts ``rows``, each with one expert, to two arguments of the call: the rows, sorted by expert, and the
        number of rows of each expert.

        The counts get the type of the counts in ``given``, the arguments of the original call.
        """
        numbers = rows.numbers[:, 0]
        order = numbers.argsort(stable=True)
        counts: Any = torch.bincount(numbers, minlength=experts)
        like = given.get(self.counts, [] if self.listed else counts)
        counts = counts.to(like.dtype) if isinstance(like, Tensor) else type(like)(counts.tolist())
        place = order.argsort()
        return Written({self.rows: rows.x[order], self.counts: counts}, lambda result: result[place])


@dataclass(frozen=True, slots=True)
class MajorCall:
    """Calling convention: rows sorted by expert, with the same number of rows for every expert."""

    rows: str
    flat: bool
    """Rows are [E * C, H], and not [E, C, H]."""
    slots: ClassVar[int] = 1
    described: ClassVar[str] = "rows [E * C, H] or [E, C, H], equally many for each of E experts"

    @property
    def names(self) -> tuple[str, ...]:
        """Name of the expert module's only forward argument, the rows."""
        return (self.rows,)

    def read(self, given: Mapping[str, Any], experts: int) -> Rows | None:
        """Converts ``given``, the arguments by name, to :class:`Rows`; returns None if they do not fit this convention.

        ``experts``: number of experts of the module.
        """
        x = given.get(self.rows)
        if not isinstance(x, Tensor) or x.dim() != (2 if self.flat else 3) or x.shape[0] % experts:
            return None
        if not self.flat and x.shape[0] != experts:
            return None
        flat = x.reshape(-1, x.shape[-1])
        return _one_expert_each(flat, torch.arange(experts, device=x.device).repeat_interleave(len(flat) // experts))

    def write(self, rows: Rows, experts: int, given: Mapping[str, Any]) -> Written:
        """Converts ``rows``, each with one expert, to rows sorted by expert. Zero rows pad all experts to the same row
        count.
        """
        numbers, width = rows.numbers[:, 0], rows.x.shape[-1]
        counts = torch.bincount(numbers, minlength=experts)
        most = max(1, int(counts.max()))
        order = numbers.argsort(stable=True)
        first = counts.cumsum(0) - counts
        position = torch.empty_like(order)
        position[order] = torch.arange(len(order), device=order.device)
        place = numbers * most + position - first[numbers]
        x = rows.x.new_zeros(experts * most, width).index_copy(0, place, rows.x)
        made = x if self.flat else x.view(experts, most, width)
        return Written({self.rows: made}, lambda result: result.reshape(experts * most, -1)[place])


def _same(result: Tensor) -> Tensor:
    return result


def _first(result: Tensor) -> Tensor:
    return result.squeeze(0)


def _one_expert_each(x: Tensor, numbers: Tensor) -> Rows:
    return Rows(x, numbers[:, None], x.new_ones(len(x), 1))


def possible_calls(module: nn.Module) -> Iterator[ExpertCall]:
    """Yields the calling conventions that the signature of ``module.forward`` allows, in the order in which to test
    them.
    """
    try:
        given = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return
    names = [each.name for each in given if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    required = sum(each.default is each.empty and each.kind not in (4, 2) for each in given)
    if len(names) >= 3 >= required:
        for rows, numbers, weights in permutations(names[:3]):
            yield from (RoutedCall(rows, numbers, weights, batched) for batched in (False, True))
    if len(names) >= 2 >= required:
        for rows, counts in permutations(names[:2]):
            yield from (CountedCall(rows, counts, listed) for listed in (False, True))
    if len(names) >= 1 >= required:
        yield from (MajorCall(names[0], flat) for flat in (True, False))
