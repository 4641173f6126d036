"""Logits of which every tensor rank holds a slice of the vocabulary, behind the face of an ordinary tensor.

Code that knows nothing of tensor parallelism gets them from the head. What it does with them is done on the
slice where that is right (``logit_rules``): elementwise operations, another order of dims, losses. Anything else
first gathers the vocabulary over "tp" (label "logits"), with gradients, and goes on with a plain tensor; the name
of the function is kept.

Functions that reach Python are answered by ``__torch_function__``. The few that do not (custom autograd
functions) see a tensor that is in the autograd graph, and gather under ``__torch_dispatch__``.

Shape suffixes: V the vocabulary, W this rank's part of it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from engine.errors import EngineError
from engine.parallel.tensor.collectives import gather_last
from engine.parallel.tensor.logit_rules import answer
from engine.parallel.tensor.logit_slice import Slice, Vocabulary
from engine.parallel.tensor.views.moves import full
from engine.parallel.tensor.views.view import View


class ShardedLogits(Tensor):
    """A tensor whose dim of the vocabulary is cut: this rank holds ``part``.

    Raises:
        EngineError: something writes into it in place, or hangs a hook on it.
    """

    part: Slice
    _full: Tensor | None

    @staticmethod
    def wrap(local_W: Tensor, vocabulary: Vocabulary) -> "ShardedLogits":
        """The logits [.., V] of which ``local_W`` is this rank's part."""
        return ShardedLogits.of(Slice(local_W, vocabulary, local_W.dim() - 1))

    @staticmethod
    def of(part: Slice) -> "ShardedLogits":
        """The tensor of which ``part`` is this rank's."""
        wrapped: ShardedLogits = _Wrap.apply(part.local, part)  # type: ignore[no-untyped-call]
        wrapped.part, wrapped._full = part, None
        return wrapped

    @property
    def vocabulary(self) -> Vocabulary:
        """How the vocabulary lies on the ranks."""
        return self.part.vocabulary

    @property
    def gathered(self) -> bool:
        """Whether this object has been gathered."""
        return self._full is not None

    def full(self, reason: str = "full") -> Tensor:
        """The whole tensor, plain, with gradients: one all-gather over "tp", label "logits"."""
        local, dim, vocabulary = self.part.local, self.part.dim, self.vocabulary
        wanted = torch.is_grad_enabled() and local.requires_grad
        if self._full is None or self._full.requires_grad != wanted:
            if reason not in vocabulary.gathers:
                vocabulary.gathers.append(reason)
            whole_V = gather_last(local.movedim(dim, -1), vocabulary.widths, vocabulary.axis)
            self._full = whole_V if self.part.is_last else whole_V.movedim(-1, dim)
        return self._full

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        begin = self.vocabulary.start
        place = f"columns {begin}:{begin + self.vocabulary.width}"
        place += "" if self.part.is_last else f" of dim {self.part.dim}"
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
        result = answer(func, *_to_slices((args, dict(kwargs))))
        if result is not NotImplemented:
            return _from_slices(result, args)
        name = name_of(func)
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
            return _empty(args[0].part.now(args[0].part.local.detach(), same=True))
        name = func.__name__.split(".")[0]
        _refuse_writes(name, args, kwargs or {})
        with torch.no_grad():  # this is below autograd, which has seen the wrapped tensor
            return func(*_gathered(args, name), **_gathered(dict(kwargs or {}), name))


def whole(tree: Any) -> Any:
    """``tree`` (lists, tuples, dicts, Hugging Face outputs) with every cut tensor in it gathered."""
    return _gathered(pytree.tree_map(_plain, tree, is_leaf=lambda node: type(node) is View), "whole")


def _plain(leaf: Any) -> Any:
    return full(leaf, "whole") if type(leaf) is View else leaf


def _gathered(tree: Any, reason: str) -> Any:
    return pytree.tree_map_only(ShardedLogits, lambda logits: logits.full(reason), tree)


def _to_slices(tree: Any) -> Any:
    return pytree.tree_map_only(ShardedLogits, lambda logits: logits.part, tree)


def _from_slices(result: Any, args: tuple[Any, ...]) -> Any:
    """Slices as tensors; one that was given is the object that was given."""
    given = {id(arg.part): arg for arg in args if isinstance(arg, ShardedLogits)}
    return pytree.tree_map_only(
        Slice, lambda part: given[id(part)] if id(part) in given else ShardedLogits.of(part), result
    )


class _Wrap(torch.autograd.Function):
    """Gives the object a place in the graph, so that functions which Python does not see find gradients there."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, part: Slice) -> ShardedLogits:
        ctx.part = part.dim, part.vocabulary
        return _empty(part.now(local.detach()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        dim, vocabulary = ctx.part
        return grad.narrow(dim, vocabulary.start, vocabulary.width), None


def _empty(part: Slice) -> ShardedLogits:
    made: ShardedLogits = Tensor._make_wrapper_subclass(
        ShardedLogits, part.shape, dtype=part.local.dtype, device=part.local.device
    )
    made.part, made._full = part, None
    return made


def name_of(func: Callable[..., Any]) -> str:
    """What a function is called; an attribute of tensors by its own name."""
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
