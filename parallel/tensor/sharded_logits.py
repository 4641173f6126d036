"""Logits of which every tensor rank holds a slice of the vocabulary, behind the face of an ordinary tensor.

Code that knows nothing of tensor parallelism gets them from the head. What it does with them is done on the
slice where that is right: products with scalars, reshapes of the leading dims, ``functional.cross_entropy``.
Anything else first gathers the vocabulary over "tp" (label "logits"), with gradients, and goes on with a plain
tensor; the name of the function is kept, so that a plan can list who gathers.

Functions that reach Python are answered by ``__torch_function__``. The few that do not (custom autograd
functions) see a tensor that is in the autograd graph, and gather under ``__torch_dispatch__``.

Shape suffixes: V the vocabulary, W this rank's part of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

from engine.errors import EngineError
from engine.parallel.tensor.axis import TensorAxis
from engine.parallel.tensor.collectives import gather_last
from engine.parallel.tensor.loss import cross_entropy


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """How a vocabulary lies on the tensor ranks."""

    axis: TensorAxis
    widths: tuple[int, ...]
    """Rows by rank."""
    gathers: list[str] = field(default_factory=list)
    """Functions that have asked for all of it, once each."""

    @property
    def size(self) -> int:
        """All rows."""
        return sum(self.widths)

    @property
    def start(self) -> int:
        """This rank's first row."""
        return sum(self.widths[: self.axis.index])

    @property
    def width(self) -> int:
        """This rank's rows."""
        return self.widths[self.axis.index]


class ShardedLogits(Tensor):
    """A tensor [.., V] of which this rank holds ``local`` [.., W].

    Raises:
        EngineError: something writes into it in place, or hangs a hook on it.
    """

    local: Tensor
    vocabulary: Vocabulary
    _full: Tensor | None

    @staticmethod
    def wrap(local_W: Tensor, vocabulary: Vocabulary) -> "ShardedLogits":
        """The logits [.., V] of which ``local_W`` is this rank's part."""
        wrapped: ShardedLogits = _Wrap.apply(local_W, vocabulary)  # type: ignore[no-untyped-call]
        wrapped.local, wrapped.vocabulary, wrapped._full = local_W, vocabulary, None
        return wrapped

    @property
    def gathered(self) -> bool:
        """Whether this object has been gathered."""
        return self._full is not None

    def full(self, reason: str = "full") -> Tensor:
        """The whole tensor [.., V], plain, with gradients: one all-gather over "tp", label "logits"."""
        wanted = torch.is_grad_enabled() and self.local.requires_grad
        if self._full is None or self._full.requires_grad != wanted:
            if reason not in self.vocabulary.gathers:
                self.vocabulary.gathers.append(reason)
            self._full = gather_last(self.local, self.vocabulary.widths, self.vocabulary.axis)
        return self._full

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        begin = self.vocabulary.start
        place = f"columns {begin}:{begin + self.vocabulary.width}"
        return f"ShardedLogits(shape={tuple(self.shape)}, {place}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT_IT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        rule = _RULES.get(func)
        if rule is not None and args and isinstance(args[0], cls):
            result = rule(func, args[0], *args[1:], **kwargs)
            if result is not NotImplemented:
                return result
        name = _name_of(func)
        _refuse_writes(name, args, kwargs)
        return func(*_gathered(args, name), **_gathered(dict(kwargs), name))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # autograd passes the tensor on under a new name
            return _rewrap(args[0], args[0].local.detach())
        name = func.__name__.split(".")[0]
        _refuse_writes(name, args, kwargs or {})
        with torch.no_grad():  # this is below autograd, which has seen the wrapped tensor
            return func(*_gathered(args, name), **_gathered(dict(kwargs or {}), name))


def whole(tree: Any) -> Any:
    """``tree`` (lists, tuples, dicts, Hugging Face outputs) with every :class:`ShardedLogits` gathered."""
    return _gathered(tree, "whole")


def _gathered(tree: Any, reason: str) -> Any:
    return pytree.tree_map_only(ShardedLogits, lambda logits: logits.full(reason), tree)


class _Wrap(torch.autograd.Function):
    """Gives the object a place in the graph, so that functions which Python does not see find gradients there."""

    @staticmethod
    def forward(ctx: Any, local_W: Tensor, vocabulary: Vocabulary) -> ShardedLogits:
        ctx.vocabulary = vocabulary
        return _empty(local_W, vocabulary)

    @staticmethod
    def backward(ctx: Any, grad_V: Tensor) -> tuple[Tensor, None]:
        return grad_V.narrow(-1, ctx.vocabulary.start, ctx.vocabulary.width), None


def _empty(local_W: Tensor, vocabulary: Vocabulary) -> ShardedLogits:
    shape = (*local_W.shape[:-1], vocabulary.size)
    made: ShardedLogits = Tensor._make_wrapper_subclass(
        ShardedLogits, shape, dtype=local_W.dtype, device=local_W.device
    )
    made.local, made.vocabulary, made._full = local_W.detach(), vocabulary, None
    return made


def _rewrap(logits: ShardedLogits, local_W: Tensor) -> ShardedLogits:
    return _empty(local_W, logits.vocabulary)


def _name_of(func: Callable[..., Any]) -> str:
    name: str = getattr(func, "__name__", str(func))
    owner = getattr(func, "__self__", None)
    return getattr(owner, "__name__", name) if name == "__get__" else name


def _refuse_writes(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    target = args[0] if args else None
    writes = name == "__setitem__" or name == "__set__" or name in _HOOKS
    writes |= name.endswith("_") and not name.endswith("__")
    writes |= name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__int__", "__index__")
    if (writes and isinstance(target, ShardedLogits)) or isinstance(kwargs.get("out"), ShardedLogits):
        raise EngineError(
            f"{name} was called on logits whose vocabulary is cut over the tensor ranks; they cannot be changed in "
            "place or hooked: make a new tensor, or call engine.parallel.tensor.sharded_logits.whole on them first."
        )


# rules: what is right on the slice

Rule = Callable[..., Any]


def _elementwise(func: Callable[..., Any], logits: ShardedLogits, *args: Any, **kwargs: Any) -> Any:
    """With scalars only; ``to`` may also be given a tensor as a pattern."""
    operands = (*args, *kwargs.values())
    if func not in (Tensor.to, Tensor.type_as) and any(
        isinstance(value, Tensor) and value.dim() > 0 for value in operands
    ):
        return NotImplemented
    if any(isinstance(value, ShardedLogits) for value in operands) or kwargs.get("out") is not None:
        return NotImplemented
    return _again(logits, func(logits.local, *args, **kwargs))


def _again(logits: ShardedLogits, local_W: Any) -> Any:
    if not isinstance(local_W, Tensor):  # type() without arguments
        return local_W
    return logits if local_W is logits.local else ShardedLogits.wrap(local_W, logits.vocabulary)


def _view(func: Callable[..., Any], logits: ShardedLogits, *sizes: Any, **kwargs: Any) -> Any:
    if kwargs or (len(sizes) == 1 and isinstance(sizes[0], torch.dtype)):
        return NotImplemented
    shape = list(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
    if not shape or shape.count(-1) > 1:
        return NotImplemented
    vocabulary = logits.vocabulary
    if shape[-1] == -1:  # the vocabulary, if the others say so
        rest = 1
        for size in shape[:-1]:
            rest *= size
        shape[-1] = logits.numel() // rest if rest else -1
    if shape[-1] != vocabulary.size:
        return NotImplemented
    return _again(logits, func(logits.local, (*shape[:-1], vocabulary.width)))


def _flatten(func: Callable[..., Any], logits: ShardedLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    last = logits.dim() - 1
    start, end = start_dim % (last + 1), end_dim % (last + 1)
    if end == last and start != last:
        return NotImplemented
    return _again(logits, torch.flatten(logits.local, start, end))


def _index(func: Callable[..., Any], logits: ShardedLogits, index: Any) -> Any:
    entries = index if isinstance(index, tuple) else (index,)
    if not entries or not all(_is_simple(entry) for entry in entries):
        return NotImplemented
    addressed = sum(_dims_addressed(entry) for entry in entries)
    ellipsis, last = any(entry is Ellipsis for entry in entries), entries[-1]
    beyond_the_rest = last is Ellipsis if ellipsis else True
    if not (beyond_the_rest and addressed < logits.dim()) and not (isinstance(last, slice) and last == slice(None)):
        return NotImplemented
    return _again(logits, logits.local[index])


def _is_simple(entry: Any) -> bool:
    return entry is None or entry is Ellipsis or (isinstance(entry, int | slice | Tensor) and type(entry) is not bool)


def _dims_addressed(entry: Any) -> int:
    if entry is None or entry is Ellipsis:
        return 0
    return entry.dim() if isinstance(entry, Tensor) and entry.dtype == torch.bool else 1


_OPTIONS = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


def _cross_entropy(func: Callable[..., Any], logits: ShardedLogits, target: Tensor, *args: Any, **kwargs: Any) -> Any:
    given = dict(zip(_OPTIONS, args, strict=False)) | kwargs
    ignored, reduction = given.pop("ignore_index", -100), given.pop("reduction", "mean")
    classes = not target.is_floating_point() and logits.dim() == 2 and target.dim() == 1
    plain = given.pop("label_smoothing", 0.0) == 0.0 and all(value is None for value in given.values())
    if not (classes and plain and reduction in ("mean", "sum", "none")) or isinstance(target, ShardedLogits):
        return NotImplemented
    vocabulary = logits.vocabulary
    if target.device.type == "cpu":  # on a GPU looking would stop the stream
        _check_labels(target, ignored, vocabulary.size)
    return cross_entropy(logits.local, target, vocabulary.start, vocabulary.axis, ignored, reduction)


def _check_labels(target: Tensor, ignored: int, size: int) -> None:
    if bool((((target < 0) | (target >= size)) & (target != ignored)).any()):
        raise EngineError(
            f"a label is outside the vocabulary of {size} rows; labels count from 0, and those to leave out are "
            f"{ignored}."
        )


def _elementwise_functions() -> tuple[Callable[..., Any], ...]:
    both = ("mul", "div", "true_divide", "add", "sub", "neg", "tanh", "exp", "sigmoid", "clamp", "clone", "detach",
            "multiply", "divide", "negative", "abs", "pow")  # fmt: skip
    methods = ("__mul__", "__rmul__", "__truediv__", "__add__", "__radd__", "__sub__", "__rsub__", "__neg__",
               "__pow__", "float", "double", "half", "bfloat16", "to", "type", "type_as", "contiguous",
               "cpu", "cuda")  # fmt: skip
    return (*(getattr(torch, name) for name in both), *(getattr(Tensor, name) for name in (*both, *methods)))


def _functions_about_it() -> frozenset[Callable[..., Any]]:
    properties = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "grad_fn", "is_leaf", "grad",
                  "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "itemsize", "nbytes",
                  "is_mps", "is_xpu", "is_nested", "output_nr", "_version")  # fmt: skip
    methods = ("size", "dim", "numel", "nelement", "ndimension", "__len__", "is_floating_point", "is_complex",
               "element_size", "get_device", "is_contiguous", "stride", "__hash__", "is_inference",
               "is_signed")  # fmt: skip
    functions = (torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor)
    return frozenset(
        (*(getattr(Tensor, name).__get__ for name in properties), *(getattr(Tensor, n) for n in methods), *functions)
    )


_HOOKS = frozenset({"register_hook", "retain_grad", "register_post_accumulate_grad_hook"})
_ABOUT_IT = _functions_about_it()
_RULES: Mapping[Callable[..., Any], Rule] = MappingProxyType(
    {function: _elementwise for function in _elementwise_functions()}
    | {Tensor.view: _view, Tensor.reshape: _view, torch.reshape: _view}
    | {Tensor.flatten: _flatten, torch.flatten: _flatten}
    | {Tensor.__getitem__: _index, functional.cross_entropy: _cross_entropy}
)

KEEPS_THE_SLICE = frozenset(_name_of(function) for function in _RULES) - {"cross_entropy"}
"""Names of the functions that give sharded logits from sharded logits."""
