"""Views and products of a weight that is kept as two thin factors, in time and memory that grow with its edges only.

    W[e, o, i] = sum over z of left[e, o, 1, z] right[e, 1, i, z]

    view        a view of the factors, if every dim of the result lies in the same factors as before
    product     x @ right, then @ left: no tensor of the weight's size exists
    the rest    :meth:`Factors.full`, the weight with all of its numbers

All of it runs in autograd: a gradient of the weight is one of its factors. Shape suffix: Z the columns of both factors.
"""

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.parallel.tensor.global_tensor.index_sets import NoRuleError
from engine.parallel.tensor.global_tensor.layout import dim_groups, positive_dim

LEFT, RIGHT, BOTH, NEITHER = "LREN"


@dataclass(frozen=True, slots=True)
class Factors:
    """A weight, or a view of one. Each factor has the weight's dims, of size one where it lacks them, and Z."""

    left: Tensor
    right: Tensor
    kinds: str
    """For each dim, which factors have it: LEFT, RIGHT, BOTH (experts) or NEITHER (size one, or expanded)."""
    twin: Tensor
    """A meta tensor with the weight's shape, strides and place in the full parameter."""
    rows: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    """The factors taken apart along dim 0: the gradient of all experts is then put together once."""

    # ---- numbers

    def full(self) -> Tensor:
        """All numbers."""
        letters = string.ascii_letters[: len(self.kinds)]
        left, right = ("".join(self._letters(letters, side)) for side in (LEFT, RIGHT))
        out = "".join(one for one, kind in zip(letters, self.kinds, strict=True) if kind != NEITHER)
        full = torch.einsum(f"{left}Z,{right}Z->{out}", self._thin(LEFT), self._thin(RIGHT))
        for dim, kind in enumerate(self.kinds):
            if kind == NEITHER:
                full = full.unsqueeze(dim)
        return full.expand(self.twin.shape)

    def _letters(self, letters: str, side: str) -> list[str]:
        return [one for one, kind in zip(letters, self.kinds, strict=True) if kind in (side, BOTH)]

    def _thin(self, side: str) -> Tensor:
        """A factor without the dims that it lacks."""
        lacking = tuple(dim for dim, kind in enumerate(self.kinds) if kind not in (side, BOTH))
        factor = self.left if side == LEFT else self.right
        return factor.squeeze(lacking) if lacking else factor

    # ---- views

    def permuted(self, dims: Sequence[int]) -> "Factors":
        """The dims in another order."""
        order = [positive_dim(dim, len(self.kinds)) for dim in dims]
        kinds = "".join(self.kinds[dim] for dim in order)
        left, right = (factor.permute(*order, len(order)) for factor in (self.left, self.right))
        return Factors(left, right, kinds, self.twin.permute(order))

    def transposed(self, first: int, second: int) -> "Factors":
        """Two dims swapped."""
        dims = list(range(len(self.kinds)))
        dims[first], dims[second] = dims[second], dims[first]
        return self.permuted(dims)

    def unsqueezed(self, dim: int) -> "Factors":
        """A new dim of size one."""
        place = positive_dim(dim, len(self.kinds) + 1)
        return self.indexed((*(slice(None),) * place, None))

    def expanded(self, sizes: Sequence[int]) -> "Factors":
        """Dims of size one that neither factor has, repeated without memory."""
        new = len(sizes) - len(self.kinds)
        twin, made = self.twin.expand(tuple(sizes)), self
        for _ in range(new):
            made = made.unsqueezed(0)
        if any(a != b and k != NEITHER for a, b, k in zip(made.twin.shape, twin.shape, made.kinds, strict=True)):
            raise NoRuleError("a dim of a factor")
        return Factors(made.left, made.right, made.kinds, twin)

    def reshaped(self, twin: Tensor) -> "Factors":
        """The elements in row-major order in the shape of ``twin``, its view.

        Raises:
            NoRuleError: dims of different factors become one.
        """
        kinds, sizes = "", {LEFT: list[int](), RIGHT: list[int]()}
        for old, new in dim_groups(tuple(self.twin.shape), tuple(twin.shape)):
            found = {self.kinds[dim] for dim in old if self.twin.shape[dim] != 1} or {NEITHER}
            if len(found) > 1 or (found == {NEITHER} and math.prod(twin.shape[dim] for dim in new) > 1):
                raise NoRuleError("dims of different factors")
            (kind,) = found
            kinds += kind * len(new)
            for side, made in sizes.items():
                made += [twin.shape[dim] if kind in (side, BOTH) else 1 for dim in new]
        left, right = self.left.reshape(*sizes[LEFT], -1), self.right.reshape(*sizes[RIGHT], -1)
        return Factors(left, right, kinds, twin)

    def indexed(self, index: Any) -> "Factors":
        """``weight[index]`` with whole numbers, slices, new dims and at most one list of places.

        Raises:
            NoRuleError: another kind of index.
        """
        entries = _entries(index, len(self.kinds))
        places = [entry for entry in entries if isinstance(entry, Tensor)]
        if places and (len(places) > 1 or any(isinstance(entry, int) for entry in entries)):
            raise NoRuleError("several lists of places")
        kinds, mine, dim = "", {LEFT: list[Any](), RIGHT: list[Any]()}, 0
        for entry in entries:
            kind = NEITHER if entry is None else self.kinds[dim]
            dim += entry is not None
            kinds += "" if isinstance(entry, int) else kind
            for side, made in mine.items():
                absent = entry is not None and kind not in (side, BOTH)
                made.append((0 if isinstance(entry, int) else slice(None)) if absent else entry)
        twin = self.twin[tuple(entry.to("meta") if isinstance(entry, Tensor) else entry for entry in entries)]
        if isinstance(entries[0], int) and self.kinds[0] == BOTH and not any(e != slice(None) for e in entries[1:]):
            return Factors(self._row(LEFT, entries[0]), self._row(RIGHT, entries[0]), kinds, twin)
        return Factors(self.left[tuple(mine[LEFT])], self.right[tuple(mine[RIGHT])], kinds, twin)

    def _row(self, side: str, place: int) -> Tensor:
        if side not in self.rows:
            self.rows[side] = (self.left if side == LEFT else self.right).unbind(0)
        return self.rows[side][place]

    # ---- products

    def between(self, summed: int, kept: int) -> tuple[Tensor, Tensor]:
        """The factor [.., I, Z] of the dim that a product sums over, and that [.., O, Z] of the dim that it keeps.

        Raises:
            NoRuleError: both dims lie in one factor, or one in both.
        """
        summed, kept = positive_dim(summed, len(self.kinds)), positive_dim(kept, len(self.kinds))
        if {self.kinds[summed], self.kinds[kept]} != {LEFT, RIGHT}:
            raise NoRuleError("dims of one factor")
        inner, outer = (self.left, self.right) if self.kinds[summed] == LEFT else (self.right, self.left)
        return inner.squeeze(kept), outer.squeeze(summed)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [.., I] W' + b, for W [O, I]."""
        inner_IZ, outer_OZ = self.between(1, 0)
        return functional.linear(x @ inner_IZ, outer_OZ, bias)

    def after(self, x: Tensor) -> Tensor:
        """x [.., S, I] W [.., I, O]."""
        inner_IZ, outer_OZ = self.between(-2, -1)
        return torch.matmul(torch.matmul(x, inner_IZ), outer_OZ.mT)

    def before(self, x: Tensor) -> Tensor:
        """W [.., O, I] x [.., I, S]."""
        inner_IZ, outer_OZ = self.between(-1, -2)
        if x.ndim == 1:
            return torch.matmul(outer_OZ, torch.matmul(inner_IZ.mT, x).unsqueeze(-1)).squeeze(-1)
        return torch.matmul(outer_OZ, torch.matmul(inner_IZ.mT, x))

    def embedding(self, ids: Tensor) -> Tensor:
        """The rows of W [V, H] at ``ids``."""
        inner_HZ, outer_VZ = self.between(1, 0)
        return functional.embedding(ids, outer_VZ) @ inner_HZ.mT

    def einsum(self, x: Tensor, letters: tuple[str, str], out: str) -> Tensor:
        """The product of x with W, whose dims have ``letters``.

        Raises:
            NoRuleError: a letter stands twice in one operand.
        """
        of_x, of_w = letters
        if len(set(of_w)) < len(of_w) or len(set(of_x)) < len(of_x) or NEITHER in self.kinds:
            raise NoRuleError("a diagonal")
        z = next(one for one in string.ascii_letters if one not in of_x + of_w + out)
        sides = {side: "".join(self._letters(of_w, side)) for side in (LEFT, RIGHT)}
        summed = [side for side in sides if any(one not in out for one in sides[side])]
        first = summed[0] if summed else RIGHT
        last = LEFT if first == RIGHT else RIGHT
        kept = "".join(one for one in dict.fromkeys(of_x + sides[first]) if one in out or one in sides[last])
        inner = torch.einsum(f"{of_x},{sides[first]}{z}->{kept}{z}", x, self._thin(first))
        return torch.einsum(f"{kept}{z},{sides[last]}{z}->{out}", inner, self._thin(last))


def _entries(index: Any, dims: int) -> list[Any]:
    """One entry for each dim, and None for each new dim."""
    given = list(index) if isinstance(index, tuple) else [index]
    entries = [_entry(entry) for entry in given]
    missing = dims - sum(entry is not None and entry is not Ellipsis for entry in entries)
    if missing < 0 or sum(entry is Ellipsis for entry in entries) > 1:
        raise NoRuleError("too many indices")
    place = next((number for number, entry in enumerate(entries) if entry is Ellipsis), len(entries))
    return [*entries[:place], *(slice(None),) * missing, *entries[place + 1 :]]


def _entry(entry: Any) -> Any:
    if isinstance(entry, Tensor) and not entry.is_floating_point() and entry.dtype != torch.bool and entry.ndim < 2:
        return entry if entry.ndim else int(entry)
    if entry is None or entry is Ellipsis or isinstance(entry, slice) or type(entry) is int:
        return entry
    raise NoRuleError("another kind of index")
