"""Views and products of a weight stored as a sum of thin products, in time and memory that grow with rows plus columns.

    W[o, i]    = sum over terms and z of left[o, 1, z] right[1, i, z]
    W[e, o, i] = sum over terms and z of left[e, o, 1, z] right[1, 1, i, z], or left[1, o, 1, z] right[e, 1, i, z]

    view        a view of the factors, if every dim of the result is in the same factors as before
    product     x @ right, then @ left: no tensor of the weight's size exists
    the rest    :meth:`Factors.full`, the full weight

Everything runs in autograd: a gradient of the weight is a gradient of the factors. Shape suffix: Z the columns of both
factors.
"""

import math
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.parallel.tensor.global_tensor.index_sets import NoRuleError
from engine.parallel.tensor.global_tensor.layout import dim_groups, positive_dim

LEFT, RIGHT, BOTH, NEITHER = "LREN"
Term = tuple[Tensor, Tensor]
"""Pair (left, right) of factors; each has the weight's dims, size one for dims of the other factor, and a last dim
Z.
"""


@dataclass(frozen=True, slots=True)
class Factors:
    """Weight, or view of a weight, as a sum of products of two low-rank factors."""

    terms: tuple[Term, ...]
    kinds: str
    """For each dim, the factors that have it: LEFT, RIGHT, BOTH or NEITHER (size one, or expanded)."""
    twin: Tensor
    """Meta tensor with the weight's shape, strides and offset in the full parameter."""
    rows: dict[int, tuple[Term, ...]] = field(default_factory=dict)
    """Terms by expert index, cached, so that backward joins the gradients of all experts once."""

    # ---- values

    def full(self) -> Tensor:
        """Returns the full weight, the sum of all products of factors."""
        letters = string.ascii_letters[: len(self.kinds)]
        left, right = ("".join(self._letters(letters, side)) for side in (LEFT, RIGHT))
        out = "".join(one for one, kind in zip(letters, self.kinds, strict=True) if kind != NEITHER)
        full = _total(torch.einsum(f"{left}Z,{right}Z->{out}", *pair) for pair in self._thin())
        for dim, kind in enumerate(self.kinds):
            if kind == NEITHER:
                full = full.unsqueeze(dim)
        return full.expand(self.twin.shape)

    def _letters(self, letters: str, side: str) -> list[str]:
        return [one for one, kind in zip(letters, self.kinds, strict=True) if kind in (side, BOTH)]

    def _thin(self) -> Iterator[Term]:
        """Yields the terms with each factor squeezed to its own dims."""
        lacking = [
            tuple(dim for dim, kind in enumerate(self.kinds) if kind not in (side, BOTH)) for side in (LEFT, RIGHT)
        ]
        return ((left.squeeze(lacking[0]), right.squeeze(lacking[1])) for left, right in self.terms)

    # ---- views

    def _changed(self, left: Callable[[Tensor], Tensor], right: Callable[[Tensor], Tensor]) -> tuple[Term, ...]:
        return tuple((left(a), right(b)) for a, b in self.terms)

    def permuted(self, dims: Sequence[int]) -> "Factors":
        """Returns the weight with its dims in the order ``dims``, as ``Tensor.permute``."""
        order = [positive_dim(dim, len(self.kinds)) for dim in dims]
        kinds = "".join(self.kinds[dim] for dim in order)

        def change(factor: Tensor) -> Tensor:
            return factor.permute(*order, len(order))

        return Factors(self._changed(change, change), kinds, self.twin.permute(order))

    def transposed(self, first: int, second: int) -> "Factors":
        """Returns the weight with the dims ``first`` and ``second`` swapped."""
        dims = list(range(len(self.kinds)))
        dims[first], dims[second] = dims[second], dims[first]
        return self.permuted(dims)

    def unsqueezed(self, dim: int) -> "Factors":
        """Returns the weight with a new dim of size one at position ``dim``."""
        place = positive_dim(dim, len(self.kinds) + 1)
        return self.indexed((*(slice(None),) * place, None))

    def expanded(self, sizes: Sequence[int]) -> "Factors":
        """Returns the weight expanded to ``sizes``, as ``Tensor.expand``.

        Raises:
            NoRuleError: a factor has an expanded dim; only dims in neither factor can be expanded.
        """
        new = len(sizes) - len(self.kinds)
        twin, made = self.twin.expand(tuple(sizes)), self
        for _ in range(new):
            made = made.unsqueezed(0)
        if any(a != b and k != NEITHER for a, b, k in zip(made.twin.shape, twin.shape, made.kinds, strict=True)):
            raise NoRuleError("a dim of a factor cannot be expanded; the full weight is used.")
        return Factors(made.terms, made.kinds, twin)

    def reshaped(self, twin: Tensor) -> "Factors":
        """Returns the weight in the shape of ``twin``, the weight's meta tensor after the reshape.

        Raises:
            NoRuleError: dims of different factors would become one.
        """
        kinds, sizes = "", {LEFT: list[int](), RIGHT: list[int]()}
        for old, new in dim_groups(tuple(self.twin.shape), tuple(twin.shape)):
            found = {self.kinds[dim] for dim in old if self.twin.shape[dim] != 1} or {NEITHER}
            if len(found) > 1 or (found == {NEITHER} and math.prod(twin.shape[dim] for dim in new) > 1):
                raise NoRuleError("dims of different factors cannot become one; the full weight is used.")
            (kind,) = found
            kinds += kind * len(new)
            for side, made in sizes.items():
                made += [twin.shape[dim] if kind in (side, BOTH) else 1 for dim in new]
        left, right = sizes[LEFT], sizes[RIGHT]
        return Factors(self._changed(lambda a: a.reshape(*left, -1), lambda b: b.reshape(*right, -1)), kinds, twin)

    def indexed(self, index: Any) -> "Factors":
        """Returns ``weight[index]`` for an index of whole numbers, slices, None and at most one list of positions.

        Raises:
            NoRuleError: the index has other entries, or a whole number together with a list of positions.
        """
        entries = _entries(index, len(self.kinds))
        places = [entry for entry in entries if isinstance(entry, Tensor)]
        if places and (len(places) > 1 or any(isinstance(entry, int) for entry in entries)):
            raise NoRuleError("an index has several lists of positions; the full weight is used.")
        kinds, mine, dim = "", {LEFT: list[Any](), RIGHT: list[Any]()}, 0
        for entry in entries:
            kind = NEITHER if entry is None else self.kinds[dim]
            dim += entry is not None
            kinds += "" if isinstance(entry, int) else kind
            for side, made in mine.items():
                absent = entry is not None and kind not in (side, BOTH)
                made.append((0 if isinstance(entry, int) else slice(None)) if absent else entry)
        twin = self.twin[tuple(entry.to("meta") if isinstance(entry, Tensor) else entry for entry in entries)]
        if self._is_stack and isinstance(entries[0], int) and not any(e != slice(None) for e in entries[1:]):
            return Factors(self._row(entries[0]), kinds, twin)
        left, right = tuple(mine[LEFT]), tuple(mine[RIGHT])
        return Factors(self._changed(lambda a: a[left], lambda b: b[right]), kinds, twin)

    @property
    def _is_stack(self) -> bool:
        return len(self.kinds) > 2 and self.kinds[0] != NEITHER

    def _row(self, place: int) -> tuple[Term, ...]:
        if not self.rows:
            apart = [zip(self._apart(left, LEFT), self._apart(right, RIGHT), strict=True) for left, right in self.terms]
            self.rows.update(enumerate(zip(*apart, strict=True)))
        return self.rows[place % len(self.rows)]

    def _apart(self, factor: Tensor, side: str) -> Sequence[Tensor]:
        """Returns one factor for each matrix of a stack."""
        return factor.unbind(0) if self.kinds[0] in (side, BOTH) else (factor.squeeze(0),) * self.twin.shape[0]

    def plus(self, left: Tensor, right: Tensor) -> "Factors":
        """Returns the weight plus the product of ``left`` [.., O, Z] and ``right`` [.., Z, I], stored as factors.

        Raises:
            NoRuleError: the dims form no matrix [O, I] or stack [E, O, I].
        """
        if self.kinds[-2:] != LEFT + RIGHT or len(self.kinds) > 3:
            raise NoRuleError("only a matrix [O, I] or a stack [E, O, I] takes another term; the full weight is used.")
        more = left.unsqueeze(-2), right.mT.unsqueeze(-3)
        twin, stack = torch.empty(self.twin.shape, device="meta"), tuple(self.twin.shape[:-2])
        if not stack:
            return Factors((*self.terms, more), self.kinds, twin)
        terms = self._changed(lambda a: a.expand(*stack, *a.shape[1:]), lambda b: b.expand(*stack, *b.shape[1:]))
        return Factors((*terms, more), BOTH + LEFT + RIGHT, twin)

    # ---- products

    def between(self, summed: int, kept: int) -> list[Term]:
        """Returns the two factors of each low-rank term as matrices (inner [.., I, Z], outer [.., O, Z]).

        A product that sums over dim ``summed`` of the weight, of size I, multiplies a tensor by inner, then by the
        transpose of outer. ``kept``: the weight's other dim, of size O. Z: rank of the term.

        Raises:
            NoRuleError: both dims are in one factor, or one dim is in both factors.
        """
        summed, kept = positive_dim(summed, len(self.kinds)), positive_dim(kept, len(self.kinds))
        if {self.kinds[summed], self.kinds[kept]} != {LEFT, RIGHT}:
            raise NoRuleError("the product needs its two dims in different factors; the full weight is used.")
        inner = 0 if self.kinds[summed] == LEFT else 1
        return [(term[inner].squeeze(kept), term[1 - inner].squeeze(summed)) for term in self.terms]

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns ``x`` [.., I] times the transpose of the weight [O, I], plus ``bias`` [O]: a tensor [.., O]."""
        (first, last), *more = self.between(1, 0)
        y = functional.linear(x @ first, last, bias)
        return _total((y, *((x @ inner_IZ) @ outer_OZ.mT for inner_IZ, outer_OZ in more)))

    def after(self, x: Tensor) -> Tensor:
        """Returns ``x`` @ weight: [.., S, O] for ``x`` [.., S, I] and the weight [.., I, O]."""
        return _total((x @ inner_IZ) @ outer_OZ.mT for inner_IZ, outer_OZ in self.between(-2, -1))

    def before(self, x: Tensor) -> Tensor:
        """Returns weight @ ``x``: [.., O, S] or [O] for the weight [.., O, I] and ``x`` [.., I, S] or [I]."""
        columns = x.unsqueeze(-1) if x.ndim == 1 else x
        y = _total(outer_OZ @ (inner_IZ.mT @ columns) for inner_IZ, outer_OZ in self.between(-1, -2))
        return y.squeeze(-1) if x.ndim == 1 else y

    def grouped(self, x_SI: Tensor, groups: Tensor) -> Tensor:
        """Multiplies row s of ``x_SI`` [S, I] by expert ``groups[s]`` of the weight [E, I, O]; returns [S, O]."""
        inner, outer = zip(*self.between(1, 2), strict=True)
        if self._stacks(1):
            thin_SZ = torch.cat([_by_group(x_SI, factor, groups) for factor in inner], -1)
        else:
            thin_SZ = x_SI @ _joined(inner)
        if not self._stacks(2):
            return thin_SZ @ _joined(outer).mT
        parts = torch.split(thin_SZ, [factor.shape[-1] for factor in inner], -1)
        return _total(_by_group(part, factor.mT, groups) for part, factor in zip(parts, outer, strict=True))

    def _stacks(self, dim: int) -> bool:
        """Returns True if the factor with ``dim`` differs between the matrices of the stack."""
        return self.kinds[0] in (self.kinds[dim], BOTH)

    def embedding(self, ids: Tensor) -> Tensor:
        """Returns the rows of the weight [V, H] at the integer positions ``ids``, as ``functional.embedding``."""
        return _total(functional.embedding(ids, outer_VZ) @ inner_HZ.mT for inner_HZ, outer_VZ in self.between(1, 0))

    def einsum(self, x: Tensor, letters: tuple[str, str], out: str) -> Tensor:
        """Returns the einsum of ``x`` with the weight.

        ``letters``: einsum letters of the dims of ``x`` and of the weight; ``out``: letters of the result.

        Raises:
            NoRuleError: an operand has one letter twice, or a dim of the weight is in no factor.
        """
        of_x, of_w = letters
        if len(set(of_w)) < len(of_w) or len(set(of_x)) < len(of_x) or NEITHER in self.kinds:
            raise NoRuleError("einsum takes a diagonal; the full weight is used.")
        z = next(one for one in string.ascii_letters if one not in of_x + of_w + out)
        sides = ["".join(self._letters(of_w, side)) for side in (LEFT, RIGHT)]
        first = next((place for place, side in enumerate(sides) if any(one not in out for one in side)), 1)
        inner, outer = sides[first], sides[1 - first]
        kept = "".join(one for one in dict.fromkeys(of_x + inner) if one in out or one in outer)
        parts = (torch.einsum(f"{of_x},{inner}{z}->{kept}{z}", x, pair[first]) for pair in self._thin())
        others = (pair[1 - first] for pair in self._thin())
        return _total(
            torch.einsum(f"{kept}{z},{outer}{z}->{out}", part, other) for part, other in zip(parts, others, strict=True)
        )


def _joined(factors: Sequence[Tensor]) -> Tensor:
    """Concatenates factors [1, .., Z] of several terms along Z."""
    return torch.cat([factor.squeeze(0) for factor in factors], -1)


def _by_group(rows_SA: Tensor, stack_EAB: Tensor, groups: Tensor) -> Tensor:
    """Multiplies each row with the matrix of its group."""
    if stack_EAB.stride(0) == 0:  # one matrix for all
        return rows_SA @ stack_EAB[0]
    if bool((groups.diff() < 0).any()):
        return (rows_SA.unsqueeze(1) @ stack_EAB.index_select(0, groups)).squeeze(1)
    parts = torch.split(rows_SA, groups.bincount(minlength=len(stack_EAB)).tolist())
    return torch.cat([part @ matrix_AB for part, matrix_AB in zip(parts, stack_EAB.unbind(), strict=True)])


def _total(parts: Iterator[Tensor] | Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, parts)


def _entries(index: Any, dims: int) -> list[Any]:
    """Returns one entry for each dim, and None for each new dim."""
    given = list(index) if isinstance(index, tuple) else [index]
    entries = [_entry(entry) for entry in given]
    missing = dims - sum(entry is not None and entry is not Ellipsis for entry in entries)
    if missing < 0 or sum(entry is Ellipsis for entry in entries) > 1:
        raise NoRuleError("the index has too many entries; torch raises its own error.")
    place = next((number for number, entry in enumerate(entries) if entry is Ellipsis), len(entries))
    return [*entries[:place], *(slice(None),) * missing, *entries[place + 1 :]]


def _entry(entry: Any) -> Any:
    if isinstance(entry, Tensor) and not entry.is_floating_point() and entry.dtype != torch.bool and entry.ndim < 2:
        return entry if entry.ndim else int(entry)
    if entry is None or entry is Ellipsis or isinstance(entry, slice) or type(entry) is int:
        return entry
    raise NoRuleError("an index has an entry other than a number, slice, None or positions; the full weight is used.")
