"""One torch function as a ``TorchFunctionMode`` shows it, and the rules that follow from its name.

metadata     asks for shape, type or device; costs nothing and is answered, never recorded
blank        uses a tensor's shape only (``zeros_like``); what it makes is free
in place     writes the memory of its first argument, or of ``out=``
random       draws from a generator: stages that skip it must draw as much, or their streams part
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import BuiltinFunctionType, FrameType, MappingProxyType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves

_METADATA = frozenset((
    "size", "dim", "ndimension", "stride", "numel", "nelement", "is_contiguous", "is_floating_point", "is_complex",
    "is_signed", "is_inference", "is_same_size", "is_tensor", "element_size", "storage_offset", "get_device",
    "data_ptr", "untyped_storage", "is_pinned", "is_shared", "is_conj", "is_neg", "is_coalesced", "dense_dim",
    "sparse_dim", "__len__", "__hash__",
    # ask for something later on, and make nothing now; ZeRO-3 does it around the modules of opened units
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
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__", "__iand__",
    "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__setitem__",
))  # fmt: skip
_NOT_IN_PLACE = frozenset(("requires_grad_", "share_memory_"))
_RANDOM = frozenset((
    "bernoulli", "bernoulli_", "multinomial", "normal", "normal_", "uniform_", "random_", "exponential_",
    "geometric_", "cauchy_", "log_normal_", "poisson", "binomial", "rrelu", "rrelu_", "gumbel_softmax",
))  # fmt: skip
_DRAWS = frozenset(("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm"))
_KEEPS_STATISTICS: Mapping[Any, str] = MappingProxyType(
    {functional.batch_norm: "training", functional.instance_norm: "use_input_stats"}
)
"""Functions that write what they are given for later, and the argument that says so."""
_BUILT_IN = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
_DIFFERENTIATES = frozenset(("backward", "grad"))

Function = Callable[..., Any]


def name_of(function: Function) -> str:
    """What an operation is called; ``get x`` and ``set x`` for attributes of tensors."""
    name: str = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__"):
        return f"{name.strip('_')} {function.__self__.__name__}"  # type: ignore[attr-defined]
    return name


@dataclass(frozen=True)
class Operation:
    """A torch function and its arguments."""

    function: Function
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @cached_property
    def name(self) -> str:
        """What it is called."""
        return name_of(self.function)

    @cached_property
    def leaves(self) -> list[Any]:
        """The leaves of the arguments, in a fixed order."""
        return tree_leaves((self.args, dict(self.kwargs)))

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors among the leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def is_metadata(self) -> bool:
        """Whether it only asks for shape, type or device."""
        return self.name in _METADATA or (self.name.startswith("get ") and self.name not in _TENSOR_GETTERS)

    @property
    def asks_for_the_object(self) -> bool:
        """Whether the answer is a property of the Python object and not of the value it stands for."""
        return self.name in _OF_THE_OBJECT

    @property
    def is_blank(self) -> bool:
        """Whether it uses the shapes of its arguments alone."""
        return self.name in _BLANK

    @property
    def is_random(self) -> bool:
        """Whether it may draw random numbers."""
        dropout_p = self.args[4:5] if self.name == "scaled_dot_product_attention" else ()
        share = max(self.kwargs.get("dropout_p", 0.0), *dropout_p, 0.0)
        return self.name in _RANDOM or "dropout" in self.name or share > 0.0

    @property
    def draws(self) -> bool:
        """Whether it makes random numbers out of nothing but a shape."""
        return self.name in _DRAWS or self.name in _RANDOM

    @property
    def is_of_torch(self) -> bool:
        """Whether it is torch's own, which respects strides; another's kernel may take every tensor for dense."""
        if isinstance(self.function, _BUILT_IN):
            return True
        return getattr(self.function, "__module__", None) in ("torch.functional", "torch.nn.functional")

    @property
    def differentiates(self) -> bool:
        """Whether it runs a backward, which one stage cannot do for the graph of all."""
        return self.name in _DIFFERENTIATES

    @cached_property
    def written(self) -> list[Tensor]:
        """The tensors whose memory it writes."""
        out = self.kwargs.get("out")
        if out is not None:
            return [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        in_place = self.name in _IN_PLACE_SIGNS or (
            self.name.endswith("_") and not self.name.endswith("__") and self.name not in _NOT_IN_PLACE
        )
        flagged = self.kwargs.get("inplace") is True
        if (in_place or flagged) and self.args and isinstance(self.args[0], Tensor):
            return [self.args[0]]
        return []

    @cached_property
    def statistics(self) -> list[Tensor]:
        """The running mean and variance that a normalisation in training mode writes, beside what it returns."""
        flag = _KEEPS_STATISTICS.get(self.function)
        if flag is None:
            return []
        names = ("input", "running_mean", "running_var", "weight", "bias", flag)
        given = dict(zip(names, self.args, strict=False)) | dict(self.kwargs)
        if not given.get(flag, self.function is functional.instance_norm):
            return []
        return [given[name] for name in ("running_mean", "running_var") if isinstance(given.get(name), Tensor)]

    def run(self) -> Any:
        """Do it."""
        return self.function(*self.args, **self.kwargs)


def user_place() -> str:
    """File and line of the nearest frame that is neither torch's nor ours."""
    inside = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), "<")
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(inside):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown place"


@contextmanager
def functions_shown_to(show: Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Within, ``show(function, args, kwargs)`` takes the place of every ``autograd.Function.apply``.

    A function mode does not see ``apply``; a cut inside would lose its backward.
    """
    original = torch.autograd.Function.__dict__["apply"]
    watcher = [show]  # modules that torch imports meanwhile keep this ``apply``: afterwards it must show, and keep, nothing

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            return original.__get__(None, cls)(*args, **kwargs)

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
    """Whether an operation may refuse NaN, so that it cannot run on what is absent."""
    return name in _RANDOM or name.startswith(("linalg_", "cholesky", "logdet", "slogdet"))
