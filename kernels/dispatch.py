"""Dispatch of kernels: the choice of an operator's implementation, PyTorch (the reference) or a Triton kernel.

    "reference"   PyTorch, on any device
    "triton"      Triton, if the kernel supports the tensor
    "auto"        on a GPU with Triton, the winner in ``tuned.json`` for the device, dtype and width; else PyTorch

A row of ``tuned.json`` applies from its width up to the next row of the same device. Rows that name the device precede
rows of "*", which are estimates.

Products may add weight gradients to main gradients (Megatron-LM: gradient accumulation fusion).

    apart    dW = dy' x    separate memory         main += dW    another pass over both
    added    main += dy' x                         in the product's epilogue

Higher layers own the sums and decide on their use; a product only gets the interface :class:`MainGradient`.
"""

import importlib.util
import inspect
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from engine.kernels.device import compiles_triton, device_name, is_host

logger = logging.getLogger("trine")


class OpenSum(NamedTuple):
    """Gradient sum of a parameter, to which a backward may now add in place."""

    into: Tensor
    """Gradient sum in the shape of the parameter; fp32, or the parameter's dtype."""
    holds: bool
    """True if ``into`` contains a sum; False: the first product overwrites it."""


class MainGradient(Protocol):
    """Interface to a parameter's main gradient, the tensor that sums its gradients over microbatches.

    Megatron-LM calls this tensor ``main_grad``.
    """

    def begin(self, node: Any | None) -> OpenSum | None:
        """Returns the gradient sum, to which the caller adds in place before it calls :meth:`end`.

        Returns None if the backward must return the gradient to autograd instead, for example because the parameter has
        a hook.

        ``node``: autograd node that accumulates the parameter's gradients; None: outside of autograd.
        """

    def end(self, node: Any | None) -> None:
        """Records that the caller has launched the kernel that adds to the sum from :meth:`begin`.

        ``node``: as for :meth:`begin`.
        """


class MainGradients:
    """Registry of an engine's main gradients: for each parameter, the tensor that sums its gradients.

    Gradients of parameters without an entry are returned to autograd.
    """

    def __init__(self) -> None:
        self._of: dict[int, tuple[Tensor, MainGradient]] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def register(self, parameter: Tensor, main: MainGradient) -> None:
        """Registers ``main`` as the sum of the gradients of ``parameter``."""
        self._of[id(parameter)] = parameter, main

    def clear(self) -> None:
        """Removes all entries; all gradients are then returned to autograd."""
        self._of.clear()

    def use(self, weight: Tensor) -> MainGradient | None:
        """Returns the main gradient of the parameter ``weight``; None if it has no entry.

        The result is also None for views, for weights that need no gradient, and inside torch.compile.
        """
        if torch.compiler.is_compiling() or not self._of or not weight.requires_grad:
            return None
        parameter, main = self._of.get(id(weight), (None, None))
        return main if parameter is weight else None


def is_executed(node: Any) -> bool:
    """Returns True if the running backward has executed or will execute the autograd node ``node``."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch raises this if backward returns the gradient of this node itself
        return False


def open_sum(main: MainGradient | None, node: Any | None) -> OpenSum | None:
    """Returns the gradient sum, to which the running backward adds in place before it calls ``main.end``.

    Returns None if no sum is available, as for a ``main`` of None; the backward must then return its gradient to
    autograd.

    ``node``: as for :meth:`MainGradient.begin`.
    """
    if main is None or torch.is_grad_enabled() or (node is not None and not is_executed(node)):
        return None
    return main.begin(node)


Mode = Literal["auto", "reference", "triton"]
NARROW = frozenset((torch.float32, torch.bfloat16, torch.float16))
"""Dtypes that the kernels support."""


@dataclass(frozen=True, slots=True)
class TunedChoice:
    """Entry of ``tuned.json``: the faster implementation, Triton or PyTorch, of an operator on rows of ``width``
    elements.

    It also applies to longer rows, up to the ``width`` of the next entry with the same operator, device and dtype.
    """

    operator: str
    device: str
    """Glob pattern for the GPU name, as ``device_name`` returns it; "*" is any GPU."""
    dtype: str
    """Glob pattern for the dtype name."""
    width: int
    """Smallest width of the entry's range: elements of a row, or inputs of a matrix product."""
    triton: bool
    speedup: float | None = None
    """Measured time of PyTorch over the time of Triton; None for an estimate from the moved bytes."""


def read_choices(text: str) -> tuple[TunedChoice, ...]:
    """Parses JSON text like ``tuned.json``; returns its choices between Triton and PyTorch."""
    return tuple(TunedChoice(**row) for row in json.loads(text)["winners"])


@cache
def shipped_choices() -> tuple[TunedChoice, ...]:
    """Returns the choices between Triton and PyTorch in the shipped ``tuned.json``."""
    return read_choices((Path(__file__).resolve().parent / "tuned.json").read_text(encoding="utf-8"))


def find_choice(rows: Iterable[TunedChoice], operator: str, device: str, dtype: str, width: int) -> TunedChoice | None:
    """Returns the entry in ``rows`` for ``operator`` on tensor rows of ``width`` elements; None if there is none.

    Entries with a larger width are skipped. Entries for ``device`` come before entries for "*", any GPU; then the
    largest width comes first.
    """
    held = [
        row
        for row in rows
        if row.operator == operator
        and (device != "cpu" if row.device == "*" else fnmatchcase(device, row.device))
        and fnmatchcase(dtype, row.dtype)
        and row.width <= width
    ]
    return max(held, key=lambda row: (row.device != "*", row.width), default=None)


@cache
def has_triton() -> bool:
    """Returns True if Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """Returns True if Triton runs in interpreter mode, which accepts CPU tensors too."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs_triton(device: torch.device) -> bool:
    """Returns True if Triton kernels can run on tensors of ``device``, compiled or interpreted."""
    return has_triton() and (compiles_triton(device) or (is_host(device) and is_interpreted()))


class Kernels:
    """Choice between Triton and PyTorch for each operator, cached by device, dtype and width."""

    def __init__(self, mode: Mode = "auto", winners: tuple[TunedChoice, ...] | None = None) -> None:
        self.mode = mode
        self._winners = shipped_choices() if winners is None else winners
        self._made: dict[tuple[Any, ...], bool] = {}
        self._chosen: dict[str, dict[str, dict[str, None]]] = {}
        """Names of operators in the order of their choices, by reason and implementation."""
        self._products: dict[tuple[torch.device, torch.dtype], Kernels] = {}
        self.card: str | None = None
        """Name of the GPU for the search of rows; "" turns all kernels off, None uses the tensor's GPU."""
        self.main = MainGradients()
        """Main gradients to which products add the gradients of weights."""

    def replaces(self, device: torch.device) -> bool:
        """Returns True if models on ``device`` use this package's operators in place of torch's.

        It is False only on the CPU with ``mode`` "auto".
        """
        return self.mode != "auto" or not is_host(device)

    def takes(self, operator: str, x: Tensor) -> bool:
        """Returns True if ``operator`` should run in Triton on ``x``.

        The choice depends on device, dtype and size of the last dim of ``x``.
        """
        return self.mode != "reference" and is_narrow(x) and self.triton(operator, x, x.shape[-1])

    def for_products(self, x: Tensor) -> "Kernels":
        """Returns the kernel selection for a linear layer's matrix products on the device and in the dtype of ``x``.

        It is ``self`` if ``mode`` is "reference", or if Triton is selected for some row length of these products; else
        ``REFERENCE``, which always uses PyTorch.
        """
        if self.mode == "reference":
            return self
        found = self._products.get((x.device, x.dtype))
        if found is None:
            widths = {1, *(row.width for row in self._winners if row.operator in _PRODUCTS)}
            kinds = ((operator, width) for operator in _PRODUCTS for width in sorted(widths))
            some = any(self._known(operator, x.device, x.dtype, width) for operator, width in kinds)
            found = self._products[x.device, x.dtype] = self if some else REFERENCE
        return found

    def summary(self) -> str:
        """Returns all choices between Triton and PyTorch so far, as text for one log line; "" if there are none."""
        return "; ".join(
            why.format("; ".join(f"{', '.join(operators)}: {name}" for name, operators in sorted(names.items())[::-1]))
            for why, names in sorted(self._chosen.items())
        )

    def triton(self, operator: str, x: Tensor, width: int) -> bool:
        """Returns True if ``operator`` should run in Triton on ``x``, with rows of ``width`` elements.

        Each new choice is logged once, at debug level.
        """
        if torch.compiler.is_compiling():
            # torch.compile may pass a symbolic width; the length of a range is a concrete int
            return self._known(operator, x.device, x.dtype, len(range(width)))
        made = self._made.get((operator, x.device, x.dtype, width))
        return self._known(operator, x.device, x.dtype, width) if made is None else made

    def _known(self, operator: str, device: torch.device, dtype: torch.dtype, width: int) -> bool:
        key = operator, device, dtype, width
        if key not in self._made:
            self._made[key] = self._decide(operator, device, dtype, width)
        return self._made[key]

    # torch.compile treats the result as a constant. torch.compiler.assume_constant_result would do the same, but it
    # imports the compiler, which takes as long as the import of torch.
    _known._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _decide(self, operator: str, device: torch.device, dtype: torch.dtype, width: int) -> bool:
        name = str(dtype).removeprefix("torch.")
        if self.mode == "reference" or self.card == "" or not runs_triton(device):
            return False
        row, times = None, ""
        if operator in _PRODUCTS and dtype == torch.float32 and _sums_in_full(device):
            chosen, why = False, _FULL
        elif self.mode == "auto":
            row = find_choice(self._winners, operator, self.card or device_name(device), name, width)
            chosen, why = (False, _UNKNOWN) if row is None else (row.triton, _MEASURED if row.speedup else _ESTIMATED)
            times = f", measured {row.speedup:.2f}x torch" if row is not None and row.speedup else ""
        else:
            chosen, why = True, _CONFIGURED
        logger.debug("kernels: %s, %s, width %d: %s%s", operator, name, width, _NAMES[chosen], times)
        self._chosen.setdefault(why, {}).setdefault(_NAMES[chosen], {})[operator] = None
        return chosen


def _sums_in_full(device: torch.device) -> bool:
    """Returns True if fp32 products on a GPU are computed in full fp32, which the library does.

    Without tensor cores a kernel gains nothing, and its one long sum over K errs up to 2.8 times as much as cuBLAS,
    which adds several partial sums. With partial sums the kernel spills registers.
    """
    return compiles_triton(device) and torch.get_float32_matmul_precision() == "highest"


REFERENCE = Kernels("reference")
"""Kernel selection that always uses PyTorch."""
_NAMES = ("torch", "triton")
_CONFIGURED, _MEASURED, _UNKNOWN = "as configured: {}", "measured on this GPU: {}", "not in the table: {}"
_ESTIMATED = "not measured on this GPU, so by the default table: {}; `python -m benchmarks kernels` measures"
_FULL = "in full fp32: {}"
_PRODUCTS = ("linear", "linear_backward")


def is_autocast(x: Tensor) -> bool:
    """Returns True if autocast is on for the device of ``x``."""
    return torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type)


def is_narrow(x: Tensor) -> bool:
    """Returns True if the Triton kernels support ``x``: fp32, fp16 or bf16, with a last dim that is not empty."""
    return x.dtype in NARROW and x.dim() > 0 and x.shape[-1] > 0


def rows_of(x: Tensor) -> Tensor:
    """Returns ``x`` [.., H] as a matrix [N, H] with contiguous rows: a view if possible, otherwise a copy."""
    x_NH = x.reshape(-1, x.shape[-1])
    return x_NH if x_NH.stride(1) == 1 or x_NH.shape[1] == 1 else x_NH.contiguous()


R = TypeVar("R")
_LAUNCHES: ContextVar[bool] = ContextVar("launches", default=False)
_PLAIN: Any = Tensor.__torch_dispatch__
"""Dispatch method of tensor classes without Python code below autograd."""
_has_wrapper: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def _plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Returns the ``apply`` of ``function`` for tensors without a wrapper of torch.func.

    ``Function.apply`` checks for transforms in Python before it calls this method; the check takes a fifth of the time.
    """
    return cast(Callable[..., Any], super(torch.autograd.Function, function).apply)  # type: ignore[misc]


_APPLY: Any = torch.autograd.Function.__dict__["apply"]


def _is_plain() -> bool:
    """Returns True if ``Function.apply`` is torch's own; a running trace replaces it."""
    return torch.autograd.Function.__dict__["apply"] is _APPLY


def _is_seen(tensor: Tensor) -> bool:
    """Returns True if ``Function.apply`` must handle the call.

    This is so in a trace, inside a transform of torch.func, and for a ``tensor`` with a transform's wrapper.
    """
    return not _is_plain() or torch._C._are_functorch_transforms_active() or _has_wrapper(tensor)


def eager_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Returns ``function.apply`` with less overhead in eager mode. The first argument of a call must be a tensor."""
    plain = _plain_apply(function)

    def apply(x: Tensor, *more: Any) -> Any:
        if torch.compiler.is_compiling() or _is_seen(x):
            return function.apply(x, *more)  # type: ignore[no-untyped-call]
        return plain(x, *more)

    return apply


class FusedOperator(Generic[R]):
    """Torch custom operator made from a Python function; eager mode calls the function directly.

    The function takes positional arguments, returns new tensors, and writes only to the arguments in ``mutates``.
    """

    def __init__(self, name: str, function: Callable[..., R], mutates: Sequence[str]) -> None:
        self.registered = torch.library.custom_op(name, function, mutates_args=mutates)
        self._function = function
        self._written = [index for index, one in enumerate(inspect.signature(function).parameters) if one in mutates]
        self._eager: type[torch.autograd.Function] | None = None
        self._plain_eager: Callable[..., Any]

    def register_fake(self, fake: Callable[..., R]) -> Callable[..., R]:
        """Registers the callback ``fake``, and returns it.

        ``fake`` gets meta or fake tensors, and returns outputs of the correct shape and dtype.
        """

        def on_shapes(*args: Any) -> R:
            if _LAUNCHES.get():
                with _disable_current_modes():
                    self._function(*map(_without_content, args))
            return fake(*args)

        self.registered.register_fake(on_shapes)
        return fake

    def register_autograd(self, gradients: Callable[..., Any], setup_context: Callable[..., Any]) -> None:
        """Registers the backward of the operator.

        The forward calls ``setup_context(ctx, inputs, output)``, and the backward ``gradients(ctx,
        *output_gradients)``.
        """
        self.registered.register_autograd(gradients, setup_context=setup_context)
        function: Callable[..., R] = self._function

        class Eager(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *args: Any) -> R:
                output = function(*args)
                setup_context(ctx, args, output)
                return output

            @staticmethod
            def backward(ctx: Any, *slopes: Any) -> Any:
                return gradients(ctx, *slopes)

        self._eager, self._plain_eager = Eager, _plain_apply(Eager)

    def __call__(self, *args: Any) -> R:
        """Runs the function on ``args``."""
        if torch.compiler.is_compiling() or _is_watched():
            return cast(R, self.registered(*args))
        differentiable = False
        for one in args:
            if isinstance(one, Tensor):
                if one.is_meta or type(one).__torch_dispatch__ is not _PLAIN or _has_wrapper(one):
                    return cast(R, self.registered(*args))
                differentiable = differentiable or one.requires_grad
        if differentiable and torch.is_grad_enabled():
            if self._eager is None:  # the registered operator raises torch's error, with the operator's name
                return cast(R, self.registered(*args))
            apply = self._plain_eager if _is_plain() else self._eager.apply
            return cast(R, apply(*args))
        output = self._function(*args)
        for index in self._written:  # autograd compares versions of saved tensors, and kernels do not increment them
            torch.autograd.graph.increment_version(cast(Tensor, args[index]))
        return output


@contextmanager
def launching_on_shapes() -> Iterator[None]:
    """Makes operators run their launch code inside the context even for meta or fake tensors.

    The caller must replace Triton's launch function by one that records launches and runs no kernel.
    """
    token = _LAUNCHES.set(True)
    try:
        yield
    finally:
        _LAUNCHES.reset(token)


def _without_content(given: Any) -> Any:
    """Returns a tensor on the meta device with the strides of ``given``; other objects unchanged."""
    if not isinstance(given, Tensor) or given.is_meta:
        return given
    storage = torch.empty(given.untyped_storage().nbytes() // given.element_size(), dtype=given.dtype, device="meta")
    return storage.as_strided(given.shape, given.stride(), given.storage_offset())


def fused_operator(name: str, mutates: Sequence[str] = ()) -> Callable[[Callable[..., R]], FusedOperator[R]]:
    """Returns a decorator that makes a function the torch operator ``name``, such as "trine::dequantize".

    ``mutates`` names the arguments that the function writes to.
    """
    return lambda function: FusedOperator(name, function, mutates)


def _is_watched() -> bool:
    """Returns True if a dispatch mode or a transform of torch.func must handle the call."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active())
