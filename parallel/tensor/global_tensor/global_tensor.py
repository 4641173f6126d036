"""Class :class:`GlobalTensor`: full shape outside, this rank's shard inside.

    x.shape, x.size(-1), len(x), x.device      computed here, without communication
    torch.softmax(x, -1), x @ w, x[:, 1:] ...  the function's rule (``rules.table``), else all arguments are gathered
    Function.apply(x), x.data_ptr(), a kernel  refused: it would read memory that does not exist

``torch.autograd.Function.apply`` does not call ``__torch_function__``. To build the graph, however, torch reads the
sizes of inputs that require a gradient, and this read reaches ``__torch_dispatch__``. There the caller is recorded, and
the Function's first operation on the global tensor raises.
"""

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

from engine.errors import EngineError
from engine.parallel.tensor.global_tensor.index_sets import NoRuleError, Sets
from engine.parallel.trace.torch_function import WrapperTensor, map_leaves

if TYPE_CHECKING:
    from engine.parallel.tensor.global_tensor.context import GlobalTensorContext


Function = Callable[..., Any]


class LocalOnlyError(EngineError):
    """Error of code that needs a plain tensor with all elements, or writes in place, and got a global tensor."""


class GlobalTensor(WrapperTensor):
    """Tensor subclass that shows the full shape of a tensor and stores only this rank's shard, comparable to DTensor.

    ``local``: this rank's shard; ``full``: full shape; ``sets``: sharding of each dim, None for an unsharded dim.
    """

    local: Tensor
    full: torch.Size
    sets: Sets
    views: "GlobalTensorContext"
    copied: bool
    """True if ``local`` is a copy where plain code would share memory with another tensor."""
    folded: tuple[int, ...] | None
    """Sizes of the dims that were flattened into the first of two dims; None: not flattened."""
    unrepeated: "Unrepeated | None"
    """The tensor of which a dim was repeated; None: unknown."""

    @staticmethod
    def __new__(
        cls, local: Tensor, full: tuple[int, ...], sets: Sets, context: "GlobalTensorContext"
    ) -> "GlobalTensor":
        x: GlobalTensor = Tensor._make_wrapper_subclass(
            cls,
            full,
            dtype=local.dtype,
            device=local.device,
            requires_grad=local.requires_grad,
            dispatch_sizes_strides_policy="sizes",
        )
        x.local, x.full, x.sets, x.views = local, torch.Size(full), sets, context
        x.copied, x.folded, x.unrepeated = False, None, None
        return x

    @classmethod
    def __torch_function__(cls, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = _torch_names(kwargs) if kwargs else {}
        first = args[0] if args else None
        context = (first if type(first) is GlobalTensor else next(global_tensors_in(args, kwargs))).views
        if context.axis.nested:
            context, args, kwargs = outermost(context, args, kwargs)
        if context.reached_below is not None:
            refuse_below(context)
        rule = context.rules.by_function.get(func)
        if rule is not None:
            try:
                return rule(context, func, *args, **kwargs)
            except NoRuleError:
                pass
        return context.rules.fallback(context, func, *args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        x = next(global_tensors_in(args, kwargs or {}))
        if func is torch.ops.aten.dim.default:  # torch.pow(x, 3.0) reads the dims of x to recognise a 0-dim tensor
            return x.ndim
        x.views.reached_below = x.views.reached_below or _caller(str(func))
        if func is torch.ops.aten.sym_size.default:  # torch reads sizes where no exception may be raised
            return x.full
        return refuse_below(x.views)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GlobalTensor(full={tuple(self.full)}, local={tuple(self.local.shape)}, dtype={self.local.dtype})"

    __str__ = __repr__

    def __format__(self, _: str) -> str:
        return repr(self)

    # ---- metadata, without communication

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Full (unsharded) shape."""
        return self.full

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """Number of dims."""
        return len(self.full)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Dtype of the shard."""
        return self.local.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Device of this rank's shard."""
        return self.local.device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """True if the shard is on a GPU."""
        return self.local.is_cuda

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """True if this rank's shard is a leaf of the autograd graph."""
        return self.local.is_leaf

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        """Autograd node of the shard."""
        return self.local.grad_fn

    @property
    def requires_grad(self) -> bool:
        """True if the shard requires a gradient."""
        return self.local.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.local.requires_grad_(value)
        follow_grad(self)

    def size(self, dim: int | None = None) -> Any:
        """Returns the full shape, or the full size of ``dim``."""
        return self.full if dim is None else self.full[dim]

    def dim(self) -> int:
        """Returns the number of dims."""
        return len(self.full)

    ndimension = dim

    def numel(self) -> int:
        """Returns the number of elements of the full tensor."""
        return self.full.numel()

    nelement = numel

    def __len__(self) -> int:
        return self.full[0]


class Unrepeated(NamedTuple):
    """Record that a global tensor repeats each element of ``source`` along ``dim``, as ``repeat_interleave`` does."""

    source: GlobalTensor
    dim: int
    local: Tensor
    version: int | None
    """Shard of the repeated tensor, and its version: a later write to it ends the equality."""

    @classmethod
    def note(cls, repeated: GlobalTensor, source: GlobalTensor, dim: int) -> None:
        """Records on ``repeated`` that it repeats each element of ``source`` along ``dim``."""
        repeated.unrepeated = cls(source, dim, repeated.local, version_of(repeated.local))

    def valid(self, repeated: GlobalTensor) -> bool:
        """Returns True if no code has written to ``repeated`` since the record was made."""
        return repeated.local is self.local and version_of(self.local) == self.version


def version_of(x: Tensor) -> int | None:
    """Returns the number of in-place writes to the memory of ``x``; None for an inference tensor, which has none."""
    return None if x.is_inference() else x._version


def global_tensors_in(args: Any, kwargs: Any) -> Iterator[GlobalTensor]:
    """Yields the global tensors in ``args`` and ``kwargs``, also from lists, tuples and dicts inside them."""
    for argument in args:
        if type(argument) is GlobalTensor:
            yield argument
        elif isinstance(argument, list | tuple):
            yield from global_tensors_in(argument, {})
        elif isinstance(argument, dict):
            yield from global_tensors_in((), argument)
    if kwargs:
        yield from global_tensors_in(kwargs.values(), {})


def has_views(args: Any, kwargs: Any) -> bool:
    """Returns True if ``args`` or ``kwargs`` contain a global tensor."""
    return next(global_tensors_in(args, kwargs), None) is not None


def outermost(context: "GlobalTensorContext", args: Any, kwargs: Any) -> tuple["GlobalTensorContext", Any, Any]:
    """Prepares a call that mixes global tensors over the axes "tp" and "cp": wraps each "tp" tensor in a "cp" tensor.

    The wrapper is unsharded over "cp". Returns (context of the "cp" tensors, arguments, keyword arguments). Without a
    "cp" tensor nothing changes.
    """
    outer = next((x.views for x in global_tensors_in(args, kwargs) if x.views.axis.name == "cp"), None)
    if outer is None:
        return context, args, kwargs

    def lift(x: Any) -> Any:
        inner = type(x) is GlobalTensor and x.views is not outer
        return GlobalTensor(x, tuple(x.full), (None,) * x.ndim, outer) if inner else x

    return (outer, *map_leaves(lift, (args, kwargs)))


def show_parameter(
    parameter: nn.Parameter, full: tuple[int, ...], sets: Sets, context: "GlobalTensorContext"
) -> GlobalTensor:
    """Wraps ``parameter``, this rank's shard, as a global tensor of the full shape ``full``, sharded as ``sets``."""
    return GlobalTensor(parameter, full, sets, context)


def like(x: GlobalTensor, local: Tensor) -> GlobalTensor:
    """Wraps ``local``, a shard of this rank, as a global tensor with the full shape and sharding of ``x``."""
    if local is x.local:
        return x
    made = GlobalTensor(local, x.full, x.sets, x.views)
    made.folded = x.folded
    return made


def follow_grad(x: GlobalTensor) -> None:
    """Copies ``requires_grad`` from this rank's shard to the global tensor ``x``."""
    wanted = x.local.requires_grad
    with torch._C.DisableTorchFunction():  # which also bypasses function modes
        torch._C.TensorBase.requires_grad.__set__(x, wanted)  # type: ignore[attr-defined]


def _caller(function: str) -> str:
    """Returns the name of the autograd.Function that is being applied, or else of the operation."""
    frame: FrameType | None = sys._getframe(2)
    if frame is not None and frame.f_code is torch.autograd.Function.apply.__func__.__code__:  # type: ignore[attr-defined]
        return f"autograd.Function {frame.f_locals['cls'].__name__}"
    return function


def _torch_names(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns keyword arguments under torch's names: torch also accepts numpy's names, rules do not."""
    if "axis" not in kwargs and "keepdims" not in kwargs:
        return kwargs
    return {{"axis": "dim", "keepdims": "keepdim"}.get(key, key): value for key, value in kwargs.items()}


def refuse_below(context: "GlobalTensorContext") -> None:
    """Raises an error: an autograd Function or kernel got a global tensor of ``context``.

    Raises:
        EngineError: always; the text names the function or kernel, ``context.reached_below``.
    """
    caller, context.reached_below = context.reached_below or "code below torch functions", None
    if "CheckpointFunction" in caller:
        raise EngineError(
            f"{caller} recomputes activations in a way that accepts plain tensors only; pass use_reentrant=False to "
            "torch.utils.checkpoint, or set activation_checkpointing.mode in its place."
        )
    if context.axis.name == "cp":
        raise LocalOnlyError(
            f"{caller} accepts plain tensors only, but with parallel.context = {context.axis.size} it got a tensor "
            f"with the positions of one rank; replace {caller} by functions of torch, or set parallel.context to 1."
        )
    raise LocalOnlyError(
        f"{caller} got a tensor that is sharded over tensor ranks, but accepts plain tensors only; give the "
        f'module that calls {caller} the style "replicate" in parallel.tensor_plan.'
    )


def _flatten(x: GlobalTensor) -> tuple[list[Tensor], Any]:
    return [x.local], (tuple(x.full), x.sets, x.views)


def _unflatten(leaves: Any, context: Any) -> Any:
    (local,), (shape, sets, views) = leaves, context
    return GlobalTensor(local, shape, views.current(sets), views) if isinstance(local, Tensor) else local


register_pytree_node(GlobalTensor, _flatten, _unflatten)
