"""One torch function as a ``TorchFunctionMode`` passes it, and the rules that follow from its name.

metadata     asks for shape, type or device; is cheap, and is answered without being recorded
blank        uses only a tensor's shape (``zeros_like``); its result is free
in place     writes the memory of its first argument, or of ``out=``
random       draws from a generator: a stage that skips it must draw as much, or the stages' streams diverge

torch's trees of arguments and results, with a short way for tuples, lists and dicts.

A trace takes the arguments and the result of every operation apart several times. torch's own ``tree_map`` looks each
leaf up in its registry of containers, and takes a third of the time of a trace with that.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import BuiltinFunctionType, FrameType, MappingProxyType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from engine.parallel.model.user_code import call_user_code, is_engine_hook

_LEAVES = frozenset((int, float, bool, str, type(None)))


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Returns ``tree`` with ``function`` applied to every leaf, like ``torch.utils._pytree.tree_map``. Every tensor is
    one leaf.
    """
    kind = type(tree)
    if kind in _LEAVES or isinstance(tree, Tensor):
        return function(tree)
    if kind is tuple:
        return tuple([map_leaves(function, item) for item in tree])
    if kind is list:
        return [map_leaves(function, item) for item in tree]
    if kind is dict:
        return {key: map_leaves(function, item) for key, item in tree.items()}
    if isinstance(tree, tuple) and hasattr(kind, "_fields"):  # its class may check its content (PackedSequence)
        return tuple.__new__(kind, [map_leaves(function, item) for item in tree])
    return tree_map(function, tree, is_leaf=_is_tensor)


def plain_leaves(tree: Any) -> list[Any]:
    """Returns the leaves of ``tree`` in the order of ``torch.utils._pytree.tree_leaves``. Every tensor is one leaf."""
    kind = type(tree)
    if kind in _LEAVES or isinstance(tree, Tensor):
        return [tree]
    if kind is tuple or kind is list:
        return [leaf for item in tree for leaf in plain_leaves(item)]
    if kind is dict:
        return [leaf for item in tree.values() for leaf in plain_leaves(item)]
    return tree_leaves(tree, is_leaf=_is_tensor)


def _is_tensor(node: Any) -> bool:
    return isinstance(node, Tensor)


Function = Callable[..., Any]


def getter(name: str) -> Function:
    """Returns the function that torch function modes get as ``func`` when code reads the tensor attribute ``name``."""
    return getattr(Tensor, name).__get__  # type: ignore[no-any-return]


_ASKING = (
    "size", "dim", "ndimension", "stride", "numel", "nelement", "is_contiguous", "is_floating_point", "is_complex",
    "is_signed", "is_inference", "element_size", "get_device", "__len__",
)  # fmt: skip
_ATTRIBUTES = (
    "shape", "dtype", "device", "ndim", "layout", "requires_grad", "grad_fn", "is_leaf", "grad", "is_cuda", "is_cpu",
    "is_meta", "is_sparse", "is_quantized", "itemsize", "nbytes", "is_mps", "is_xpu", "is_nested", "output_nr",
    "_version",
)  # fmt: skip
METADATA: frozenset[Function] = frozenset((
    *(getattr(Tensor, name) for name in _ASKING), *map(getter, _ATTRIBUTES),
    torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor,
))  # fmt: skip
"""Functions that return a tensor's shape, type, device or graph position and read no data."""
_METADATA = frozenset((
    *_ASKING, "is_same_size", "is_tensor", "storage_offset", "data_ptr", "untyped_storage", "is_pinned", "is_shared",
    "is_conj", "is_neg", "is_coalesced", "dense_dim", "sparse_dim", "__hash__",
    # register a call for later and compute nothing now; ZeRO-3 does so around the modules of opened units
    "register_hook", "register_post_accumulate_grad_hook", "retain_grad",
))  # fmt: skip
_OF_THE_OBJECT = frozenset((
    "__hash__", "data_ptr", "untyped_storage", "is_tensor", "is_pinned", "get is_nested", "get layout",
))  # fmt: skip
_TENSOR_GETTERS = frozenset(f"get {name}" for name in ("T", "mT", "H", "mH", "data", "real", "imag"))
_BLANK = frozenset((
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like",
    "new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided",
))  # fmt: skip
_IN_PLACE_SIGNS = frozenset((
    "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__",
    "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__setitem__",
))  # fmt: skip
_NOT_IN_PLACE = frozenset(("requires_grad_", "share_memory_"))
_SWITCHES = frozenset(("requires_grad_", "set requires_grad"))
_RANDOM = frozenset((
    "bernoulli", "bernoulli_", "multinomial", "normal", "normal_", "uniform_", "random_", "exponential_",
    "geometric_", "cauchy_", "log_normal_", "poisson", "binomial", "rrelu", "rrelu_", "gumbel_softmax",
))  # fmt: skip
_DRAWS = frozenset(("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm"))
_KEEPS_STATISTICS: Mapping[Any, str] = MappingProxyType(
    {functional.batch_norm: "training", functional.instance_norm: "use_input_stats"}
)
"""Functions that update buffers passed to them, and the argument that enables it."""
_BUILT_IN = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
_SHAPED_BY_CONTENT = ("nonzero", "argwhere", "masked_select", "bincount", "unique", "_unique")
_DIFFERENTIATES = frozenset(("backward", "grad"))


class WrapperTensor(torch.Tensor):
    """Base of tensor subclasses that store a local shard. Subclasses implement torch functions on wrappers in
    ``__torch_function__``.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Result of ``func`` on wrappers."""
        raise NotImplementedError


def wrapper_among(args: Any, kwargs: Any) -> type[WrapperTensor] | None:
    """Returns the class of a :class:`WrapperTensor` in ``args`` and ``kwargs``, also inside lists, tuples and dicts;
    None if there is none.
    """
    values = [*args, *(kwargs or {}).values()]
    while values:
        value = values.pop()
        if isinstance(value, WrapperTensor):
            return type(value)
        if isinstance(value, list | tuple):
            values.extend(value)
        elif isinstance(value, dict):
            values.extend(value.values())
    return None


def inside_transform() -> bool:
    """Returns True if this code runs inside a transform of torch.func, such as vmap, grad, vjp, jvp, jacrev or
    functionalize.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def function_name(function: Function) -> str:
    """Returns the name of a torch function. For reads and writes of a tensor attribute x it is "get x" and "set x"."""
    name: str = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__"):
        return f"{name.strip('_')} {getattr(getattr(function, '__self__', None), '__name__', name)}"
    return name


def writes_in_place(name: str) -> bool:
    """Returns True if a torch function with this name, such as ``add_``, ``+=`` or ``x[0] =``, writes to its first
    argument.
    """
    return name in _IN_PLACE_SIGNS or (name.endswith("_") and not name.endswith("__") and name not in _NOT_IN_PLACE)


@dataclass
class Operation:
    """Record of one call of a torch function, with its arguments."""

    function: Function
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    name: str = field(init=False)
    """Name of the operation, see :func:`function_name`."""

    def __post_init__(self) -> None:
        self.name = function_name(self.function)

    @cached_property
    def leaves(self) -> list[Any]:
        """Leaves of the positional and keyword arguments, in an order that is the same on all ranks."""
        return plain_leaves((self.args, dict(self.kwargs)))

    @cached_property
    def tensors(self) -> list[Tensor]:
        """Tensors among the leaves of the arguments."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def is_metadata(self) -> bool:
        """True if the operation reads only shape, dtype, device or a similar attribute, and no elements."""
        return self.name in _METADATA or (self.name.startswith("get ") and self.name not in _TENSOR_GETTERS)

    @property
    def reads_values(self) -> bool:
        """True if the operation reads elements of its tensors, and not only attributes such as the shape."""
        return not self.is_metadata and self.name not in _SWITCHES

    @property
    def asks_for_the_object(self) -> bool:
        """True if the operation, such as ``data_ptr``, asks for the tensor object or its memory, not for elements."""
        return self.name in _OF_THE_OBJECT

    @property
    def hooks(self) -> bool:
        """True if the operation registers a user's gradient hook on its first argument."""
        return self.name == "register_hook" and not is_engine_hook(plain_leaves((self.args[1:], self.kwargs))[0])

    @property
    def is_blank(self) -> bool:
        """True if the operation makes a new tensor and reads only the shape and dtype of its arguments, such as
        ``zeros_like``.
        """
        return self.name in _BLANK

    @property
    def is_random(self) -> bool:
        """True if the operation, such as dropout or ``normal_``, takes a tensor and can draw random numbers. Also True
        for dropout in evaluation.
        """
        dropout_p = self.args[4:5] if self.name == "scaled_dot_product_attention" else ()
        share = max(self.kwargs.get("dropout_p", 0.0), *dropout_p, 0.0)
        return self.name in _RANDOM or "dropout" in self.name or share > 0.0

    @property
    def draws(self) -> bool:
        """True if the operation is a random function such as ``rand`` or ``normal_``. Dropout does not count."""
        return self.name in _DRAWS or self.name in _RANDOM

    @property
    def is_of_torch(self) -> bool:
        """True for a function of torch itself, which respects strides. Kernels of other packages may assume contiguous
        memory.
        """
        if isinstance(self.function, _BUILT_IN):
            return True
        return getattr(self.function, "__module__", None) in ("torch.functional", "torch.nn.functional")

    def tells_content(self, out: Any) -> bool:
        """Returns True if ``out``, the operation's result, shows elements of its tensors to Python code, by a number or
        a shape.
        """
        if self.is_metadata or not self.tensors:
            return False
        masks = self.name == "__getitem__" and any(leaf.dtype == torch.bool for leaf in self.tensors[1:])
        tensors = any(isinstance(leaf, Tensor) for leaf in plain_leaves(out))
        return masks or self.name.startswith(_SHAPED_BY_CONTENT) or not (tensors or self.written)

    @property
    def differentiates(self) -> bool:
        """True if the operation runs a backward, such as ``Tensor.backward``."""
        return self.name in _DIFFERENTIATES

    @cached_property
    def written(self) -> list[Tensor]:
        """Tensors that the operation writes in place."""
        out = self.kwargs.get("out")
        if out is not None:
            return [leaf for leaf in plain_leaves(out) if isinstance(leaf, Tensor)]
        in_place = writes_in_place(self.name) or self.kwargs.get("inplace") is True
        if in_place and self.args and isinstance(self.args[0], Tensor):
            return [self.args[0]]
        return []

    @cached_property
    def statistics(self) -> list[Tensor]:
        """Running mean and variance that a normalization layer in training mode updates; an empty list for other
        operations.
        """
        flag = _KEEPS_STATISTICS.get(self.function)
        if flag is None:
            return []
        names = ("input", "running_mean", "running_var", "weight", "bias", flag)
        given = dict(zip(names, self.args, strict=False)) | dict(self.kwargs)
        if not given.get(flag, self.function is functional.instance_norm):
            return []
        return [given[name] for name in ("running_mean", "running_var") if isinstance(given.get(name), Tensor)]

    def run(self) -> Any:
        """Runs the function with its arguments."""
        return self.run_with(self.args, self.kwargs)

    def run_with(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the function with ``args`` and ``kwargs`` in place of its own arguments."""
        return call_user_code(self.function, args, kwargs)


def user_place() -> str:
    """Returns "file:line" of the innermost stack frame outside torch and this package."""
    inside = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), "<")
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(inside):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown place"


@contextmanager
def functions_shown_to(show: Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Replaces every ``autograd.Function.apply``, which torch function modes do not see, inside the context: a call of
    it calls ``show(function, args, kwargs)`` instead and returns the result.
    """
    original = torch.autograd.Function.__dict__["apply"]
    # modules that torch imports meanwhile keep this ``apply``, which afterwards must show nothing and keep nothing
    watcher = [show]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            return call_user_code(original.__get__(None, cls), args, kwargs)

        function.__name__ = f"apply:{cls.__name__}"
        return watcher[0](function, args, kwargs) if watcher else function(*args, **kwargs)

    del show
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]
        watcher.clear()


def checks_content(name: str) -> bool:
    """Returns True if an operation with this name may raise an error for NaN elements. It then cannot run on
    placeholders, which may contain NaN.
    """
    return name in _RANDOM or name.startswith(("linalg_", "cholesky", "logdet", "slogdet"))
