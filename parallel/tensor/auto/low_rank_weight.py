"""Large weights in a search or proof of a tensor plan: products of two thin random matrices, with the full shape.

A billion parameters, with gradients and a copy for every rank, do not fit into host memory. A proof needs only shapes,
products, and the gradient's product with a random vector. So

    W = A B' + P v' + u Q'        A, B thin and random; u, v random vectors; P, Q zero

is a weight of any size in memory that grows with rows plus columns; each product takes two thin ones. The zero factors
are leaves of the graph, and their gradients equal products with the weight's gradient G: dP = G v, dQ = u' G.

Two gradients are equal if their products with a random vector agree (Freivalds 1977): exceptions have measure zero. Two
programs that agree on such weights agree on all: their difference is a sum of products of entries of weights, and none
with at most RANK factors from one weight vanishes on all matrices of that rank. The experts of a stack [E, O, I] are
one weight: a matrix of E O rows and I columns, or of O rows and E I columns, whichever has the shorter edges.

Functions without a rule get the full weight, so every result equals the result of the dense weight. Code that reads a
weight below torch functions, or without a graph, raises: the caller then draws that weight in full.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map

from engine.parallel.tensor.auto.low_rank_factors import LEFT, RIGHT, Factors, Term
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.global_tensor.index_sets import NoRuleError
from engine.parallel.trace.torch_function import METADATA, function_name, getter, writes_in_place

RANK = 4
"""Number of columns of the random factors A and B."""


class WholeWeightError(Exception):
    """Error of code that needs all elements of a low-rank weight: it writes to the weight, uses it with gradients
    disabled, or bypasses ``__torch_function__``, as a kernel does.

    ``weight``: the parameter's name.
    """

    def __init__(self, weight: str) -> None:
        super().__init__(f"{weight} is read below torch functions or without a graph")
        self.weight = weight


@dataclass(frozen=True, slots=True)
class Parts:
    """Factors of a low-rank parameter A B' + P v' + u Q', in which ' is the transpose.

    A, B, u and v are random; P and Q are zeros, the only autograd leaves. A factor has the dims of the parameter, and a
    last dim for its columns. Dims that only the other factor has are of size one.
    """

    random: tuple[Tensor, Tensor]
    """Factors A [O, 1, RANK] and B [1, I, RANK]; for experts A [E, O, 1, RANK] and B [1, 1, I, RANK], or E in B
    alone.
    """
    vectors: tuple[Tensor, Tensor]
    """Vectors u and v, with the dims of A and B and one column."""
    zeros: tuple[Tensor, Tensor]
    """Zero factors P and Q, leaves of the graph, with the dims of A and B and one column."""
    shape: tuple[int, ...]

    def factors(self) -> Factors:
        """Returns the parameter as a sum of low-rank products."""
        (a, b), (u, v), (p, q) = self.random, self.vectors, self.zeros
        terms: tuple[Term, ...] = ((a, b), (p, v), (u, q))
        if len(self.shape) == 2:
            terms = ((torch.cat([a, p, u], -1), torch.cat([b, v, q], -1)),)
        of_stack = LEFT if a.shape[0] == self.shape[0] else RIGHT
        kinds = of_stack * (len(self.shape) - 2) + LEFT + RIGHT
        return Factors(terms, kinds, torch.empty(self.shape, device="meta"))

    def fresh(self) -> "Parts":
        """Returns the same parameter A B' + P v' + u Q' with new autograd leaves P and Q, filled with zeros."""
        return Parts(self.random, self.vectors, _leaves(self.random), self.shape)

    def shard(self, dim: int, rows: Sequence[int]) -> "Parts":
        """Returns the slice of the parameter A B' + P v' + u Q' at indices ``rows`` of ``dim``, with new zero factors P
        and Q.
        """
        where, shape = torch.tensor(rows), list(self.shape)
        shape[dim] = len(rows)

        def taken(tensor: Tensor) -> Tensor:
            return tensor if tensor.shape[dim] == 1 != self.shape[dim] else tensor.index_select(dim, where)

        random, vectors = (tuple(map(taken, pair)) for pair in (self.random, self.vectors))
        return Parts(random, vectors, _leaves(random), tuple(shape))  # type: ignore[arg-type]


def _leaves(random: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    left, right = (torch.zeros(*tensor.shape[:-1], 1, dtype=tensor.dtype).requires_grad_() for tensor in random)
    return left, right


class LowRankWeight(Tensor):
    """Float64 tensor subclass that shows the full shape of a weight and stores only its low-rank factors."""

    factors: Factors
    weight: str
    """Name of the parameter."""
    refused: set[str]
    """Names of the parameters that code has read in full, shared by all weights of a block."""
    parts: Parts | None
    """Factor tensors of a parameter; None for a view."""

    @staticmethod
    def __new__(cls, factors: Factors, weight: str, refused: set[str], parts: Parts | None = None) -> "LowRankWeight":
        twin = factors.twin
        made: LowRankWeight = Tensor._make_wrapper_subclass(
            cls, twin.shape, twin.stride(), dtype=torch.float64, device=torch.device("cpu"), requires_grad=True
        )
        made.factors, made.weight, made.refused, made.parts = factors, weight, refused, parts
        if parts is not None:
            made._is_param = True  # for isinstance(made, nn.Parameter)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_THE_OBJECT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = next(found for found in (*args, *kwargs.values()) if _has_weight(found))
        if any(issubclass(other, GlobalTensor) for other in types):
            return NotImplemented
        name = function_name(func)
        written = args and first is args[0] and writes_in_place(name)
        if not torch.is_grad_enabled() or name.startswith("set ") or written:
            raise _refuse(first)
        rule = _RULES.get(func)
        if rule is not None:
            try:
                return rule(*args, **kwargs)
            except NoRuleError:
                pass
        args, kwargs = tree_map(lambda leaf: leaf.factors.full() if type(leaf) is cls else leaf, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.set_.source_Tensor and args[0] is args[1]:  # as torch.nn.utils.parametrize does
            return args[0]
        raise _refuse(next(found for found in (*args, *(kwargs or {}).values()) if _has_weight(found)))

    def __deepcopy__(self, memo: dict[int, Any]) -> "LowRankWeight":
        if id(self) not in memo:
            assert self.parts is not None
            memo[id(self)] = _parameter(self.parts.fresh(), self.weight, self.refused)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LowRankWeight({self.weight}, shape={tuple(self.factors.twin.shape)})"

    def view_of(self, factors: Factors) -> "LowRankWeight":
        """Wraps ``factors``, computed from the factors of this parameter, as a weight with the parameter's name."""
        return LowRankWeight(factors, self.weight, self.refused)

    def shard(self, dim: int, rows: Sequence[int]) -> "LowRankWeight":
        """Returns a new parameter: the slice of this parameter at indices ``rows`` of ``dim``."""
        assert self.parts is not None
        return _parameter(self.parts.shard(dim, rows), self.weight, self.refused)


def low_rank_parameter(
    shape: Sequence[int], weight: str, generator: torch.Generator, refused: set[str]
) -> LowRankWeight:
    """Returns a random low-rank parameter of ``shape`` [.., O, I], with entries of about 1 / sqrt(I).

    ``weight``: the parameter's name. It is added to the set ``refused`` if the parameter is used under
    ``torch.no_grad``, in place, or by code that bypasses ``__torch_function__``, such as a kernel.
    """
    *experts, outputs, inputs = shape
    ones = (1,) * len(experts)
    # a stack is one matrix; all experts are on its longer edge
    left = (*(experts if inputs > outputs else ones), outputs, 1)
    right = (*(ones if inputs > outputs else experts), 1, inputs)

    def random(sizes: tuple[int, ...], columns: int, scale: float) -> Tensor:
        return torch.randn(*sizes, columns, generator=generator, dtype=torch.float64) * scale

    entries = random(left, RANK, RANK**-0.5), random(right, RANK, inputs**-0.5)
    vectors = random(left, 1, outputs**-0.5), random(right, 1, inputs**-0.5)
    return _parameter(Parts(entries, vectors, _leaves(entries), tuple(shape)), weight, refused)


def gradient_leaves(parameter: Tensor) -> tuple[Tensor, ...]:
    """Returns the autograd leaves that get the gradient of ``parameter``: the parameter, or two factors of a low-rank
    weight.
    """
    if isinstance(parameter, LowRankWeight) and parameter.parts is not None:
        return parameter.parts.zeros
    return (parameter,)


def memory_of(tensor: Tensor) -> int:
    """Returns an integer that identifies the storage of ``tensor``; live views of one tensor share it."""
    whole = tensor.factors.twin if isinstance(tensor, LowRankWeight) else tensor
    return int(whole.untyped_storage()._cdata)


def _parameter(parts: Parts, weight: str, refused: set[str]) -> LowRankWeight:
    with torch.enable_grad():
        return LowRankWeight(parts.factors(), weight, refused, parts)


def _has_weight(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_weight, value))
    return isinstance(value, LowRankWeight)


def _refuse(found: Any) -> WholeWeightError:
    while isinstance(found, list | tuple):
        found = next(inner for inner in found if _has_weight(inner))
    found.refused.add(found.weight)
    return WholeWeightError(found.weight)


# ------------------------------------------------------------------------------------------------ rules


def _viewed(change: Callable[..., Factors]) -> Callable[..., LowRankWeight]:
    def rule(weight: LowRankWeight, *args: Any, **kwargs: Any) -> LowRankWeight:
        return weight.view_of(change(weight.factors, *args, **kwargs))

    return rule


def _sizes(given: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], tuple | list) else given


def _through_twin(name: str) -> Callable[..., LowRankWeight]:
    """Returns the rule of a function that changes the shape alone: torch's function on the twin gives the new shape."""

    def change(factors: Factors, *args: Any, **kwargs: Any) -> Factors:
        if any(isinstance(arg, torch.dtype) for arg in args):
            raise NoRuleError("only float32 and float64 have a rule; the full weight is used.")
        return factors.reshaped(getattr(factors.twin, name)(*args, **kwargs))

    return _viewed(change)


def _same(weight: LowRankWeight, *args: Any, **kwargs: Any) -> LowRankWeight:
    """Ignores a conversion: all weights are float64 on the CPU."""
    wanted = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
    if any(dtype not in (torch.float64, torch.float32) for dtype in wanted):
        raise NoRuleError("only float32 and float64 have a rule; the full weight is used.")
    return weight.view_of(weight.factors)


def _last_two(factors: Factors) -> Factors:
    if len(factors.kinds) != 2:  # T reverses more dims
        raise NoRuleError("T and t have a rule for matrices only; the full weight is used.")
    return factors.transposed(0, 1)


def _narrow(factors: Factors, dim: int, start: int, length: int) -> Factors:
    return factors.indexed((*(slice(None),) * (dim % len(factors.kinds)), slice(start, start + length)))


def _select(factors: Factors, dim: int, index: int) -> Factors:
    return factors.indexed((*(slice(None),) * (dim % len(factors.kinds)), index))


def _index_select(factors: Factors, dim: int, index: Tensor) -> Factors:
    return factors.indexed((*(slice(None),) * (dim % len(factors.kinds)), index))


def _several(name: str) -> Callable[..., tuple[LowRankWeight, ...]]:
    """Returns the rule of ``split``, ``chunk`` or ``unbind``: torch's function on the row numbers gives the pieces."""

    def rule(weight: LowRankWeight, *args: Any, **kwargs: Any) -> tuple[LowRankWeight, ...]:
        dim = kwargs.pop("dim", None)
        args, dim = (args[:-1], args[-1]) if dim is None and len(args) == _WITH_DIM[name] else (args, dim or 0)
        dim %= weight.ndim
        rows = getattr(torch.arange(weight.shape[dim]), name)(*args, **kwargs)
        one = name == "unbind"
        entries = [int(own) if one else slice(int(own[0]), int(own[-1]) + 1) for own in rows]
        return tuple(weight.view_of(weight.factors.indexed((*(slice(None),) * dim, entry))) for entry in entries)

    return rule


_WITH_DIM: Mapping[str, int] = MappingProxyType({"split": 2, "chunk": 2, "unbind": 1})


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    if type(weight) is not LowRankWeight or _has_weight((x, bias)) or weight.ndim != 2:
        raise NoRuleError("linear has a rule for a matrix as its weight only; the full weight is used.")
    return weight.factors.linear(x, bias)


def _matmul(a: Any, b: Any) -> Any:
    if _has_weight(a) and _has_weight(b):
        raise NoRuleError("a product of two weights has no rule; the full weights are used.")
    of_weight = b if _has_weight(b) else a
    if of_weight.ndim < 2:
        raise NoRuleError("a product with a vector of a weight has no rule; the full weight is used.")
    return b.factors.after(a) if of_weight is b else a.factors.before(b)


def _rmatmul(b: Any, a: Any) -> Any:
    return _matmul(a, b)


def _addmm(bias: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    if beta != 1 or (alpha != 1 and not _has_weight(bias)):
        raise NoRuleError("these options have no rule; the full weight is used.")
    if _has_weight(bias):
        left, right = (leaf.factors.full() if _has_weight(leaf) else leaf for leaf in (a, b))
        return bias.view_of(bias.factors.plus(alpha * left, right))
    return bias + _matmul(a, b)


def _embedding(ids: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, **options: Any) -> Any:
    if padding_idx is not None or max_norm is not None or weight.ndim != 2 or options.get("scale_grad_by_freq"):
        raise NoRuleError("these options have no rule; the full weight is used.")
    return weight.factors.embedding(ids)


def _einsum(equation: Any, *operands: Any) -> Any:
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    plain = isinstance(equation, str) and "->" in equation and "." not in equation and len(tensors) == 2
    if not plain or sum(map(_has_weight, tensors)) != 1:
        raise NoRuleError("these options have no rule; the full weight is used.")
    terms, out = equation.replace(" ", "").split("->")
    pairs = sorted(zip(tensors, terms.split(","), strict=True), key=lambda pair: _has_weight(pair[0]))
    (x, of_x), (weight, of_weight) = pairs
    return weight.factors.einsum(x, (of_x, of_weight), out)


_OF_THE_OBJECT = METADATA | {
    Tensor.requires_grad_, Tensor.__repr__, Tensor._is_view, getter("_backward_hooks"),
    *(getattr(Tensor, name).__set__ for name in ("requires_grad", "grad")),
}  # fmt: skip
_RULES: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    dict.fromkeys((functional.linear,), _linear)
    | dict.fromkeys((torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm), _matmul)
    | {Tensor.__matmul__: _matmul, Tensor.__rmatmul__: _rmatmul, torch.einsum: _einsum}
    | dict.fromkeys((torch.addmm, torch.baddbmm, Tensor.addmm, Tensor.baddbmm), _addmm)
    | {functional.embedding: _embedding, Tensor.__getitem__: _viewed(Factors.indexed)}
    | dict.fromkeys((torch.transpose, Tensor.transpose, Tensor.swapaxes), _viewed(Factors.transposed))
    | dict.fromkeys((torch.t, Tensor.t, getter("mT"), getter("T")), _viewed(_last_two))
    | {Tensor.permute: _viewed(lambda w, *dims: w.permuted(_sizes(dims))), torch.permute: _viewed(Factors.permuted)}
    | dict.fromkeys((torch.unsqueeze, Tensor.unsqueeze), _viewed(Factors.unsqueezed))
    | {Tensor.expand: _viewed(lambda w, *sizes: w.expanded(_sizes(sizes)))}
    | dict.fromkeys((torch.narrow, Tensor.narrow), _viewed(_narrow))
    | dict.fromkeys((torch.select, Tensor.select), _viewed(_select))
    | dict.fromkeys((torch.index_select, Tensor.index_select), _viewed(_index_select))
    | {Tensor.view: _through_twin("view"), Tensor.reshape: _through_twin("reshape")}
    | {torch.reshape: _through_twin("reshape"), Tensor.view_as: _viewed(lambda w, x: w.reshaped(w.twin.view(x.shape)))}
    | {Tensor.flatten: _through_twin("flatten"), torch.flatten: _through_twin("flatten")}
    | {Tensor.unflatten: _through_twin("unflatten")}
    | {torch.split: _several("split"), Tensor.split: _several("split"), Tensor.unbind: _several("unbind")}
    | {torch.chunk: _several("chunk"), Tensor.chunk: _several("chunk"), torch.unbind: _several("unbind")}
    | dict.fromkeys((Tensor.to, Tensor.float, Tensor.double, Tensor.contiguous, Tensor.cpu), _same)
)
