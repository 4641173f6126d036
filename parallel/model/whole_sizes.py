"""Sharded parameters that return their full sizes to the model's code.

    code that reads a size                            gets the size of
    the engine, torch                                 the shard: they compute with it
    a module that computes with shards (a block)      the shard, while its forward runs
    other code: glue between modules, a loss, the     the full parameter
    user's own loop, libraries that count parameters

Only the results of Python's reads change (``shape``, ``size``, ``numel``, ``len``). The memory, every operator and
``parameter.data`` belong to the shard.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    _Before = nn.Parameter
else:
    _Before = object

_COMPUTES_WITH_PARTS = frozenset({"engine", "torch"})


class RunningModules:
    """Counter of the running modules that compute with shards of their parameters."""

    def __init__(self) -> None:
        self._running = 0

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Makes sharded parameters show the sizes of their shards to all code inside the context."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def call(self, unit: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls ``forward`` and returns its result. Meanwhile sharded parameters show the sizes of their shards.

        ``unit`` is not used.
        """
        self._running += 1
        try:
            return forward(*args, **kwargs)
        finally:
            self._running -= 1

    def asks_for_whole(self, callers: int = 1) -> bool:
        """Returns True if the code that reads a parameter's size belongs neither to torch nor to the engine, and no
        sharded module is running. Returns False in compiled code.

        ``callers``: number of stack frames from the caller of this method to the code that reads.
        """
        if torch.compiler.is_compiling() or self._running:
            return False
        asking = sys._getframe(callers + 1).f_globals.get("__name__", "")
        return asking.partition(".")[0] not in _COMPUTES_WITH_PARTS

    def __deepcopy__(self, memo: object) -> "RunningModules":
        """Returns ``self``: a copied model shares the patched forwards, and so this counter."""
        return self


class WholeSizes(_Before):
    """Mixin of sharded parameters that show full sizes to the user's code.

    The engine and torch see the sizes of the shard, and so does all code while a sharded module runs.
    """

    __slots__ = ()
    _whole_shape: torch.Size
    _running_modules: RunningModules

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Shape of the full parameter, or of the shard for code that computes with the shard."""
        return self._whole_shape if self._running_modules.asks_for_whole() else self._part()

    def size(self, dim: int | None = None) -> Any:
        """Returns the full shape or full size of ``dim``. Code that computes with the shard gets the shard's sizes."""
        shape = self._whole_shape if self._running_modules.asks_for_whole() else self._part()
        return shape if dim is None else shape[dim]

    def numel(self) -> int:
        """Returns the number of elements of the full parameter; for code that computes with the shard, of the shard."""
        return (self._whole_shape if self._running_modules.asks_for_whole() else self._part()).numel()

    def nelement(self) -> int:
        """Returns the number of elements, as :meth:`numel` does."""
        return (self._whole_shape if self._running_modules.asks_for_whole() else self._part()).numel()

    def __len__(self) -> int:
        return (self._whole_shape if self._running_modules.asks_for_whole() else self._part())[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        own: Any = self
        if id(self) not in memo:
            copied = nn.Parameter(own.detach().clone(memory_format=torch.preserve_format), own.requires_grad)
            answer_whole(copied, self._whole_shape, self._running_modules)
            memo[id(self)] = copied
        return memo[id(self)]  # type: ignore[no-any-return]

    def _part(self) -> torch.Size:
        return super().shape


class PartParameter(WholeSizes, nn.Parameter):
    """Sharded ``nn.Parameter`` that shows the full sizes to the user's code."""

    # operations run as on any tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def answer_whole(parameter: nn.Parameter, shape: tuple[int, ...], running: RunningModules) -> None:
    """Makes ``parameter``, a sharded ``nn.Parameter``, show the full sizes ``shape`` to the user's code.

    While ``running`` counts a running module, the parameter shows the sizes of the shard.
    """
    untyped: Any = parameter
    untyped._whole_shape, untyped._running_modules = torch.Size(shape), running
    untyped.__class__ = PartParameter


def answer_part(parameter: nn.Parameter) -> None:
    """Undoes :func:`answer_whole`, unless other code has changed the class of ``parameter`` since."""
    untyped: Any = parameter
    if type(parameter) is PartParameter:
        untyped.__class__ = nn.Parameter
        del untyped._whole_shape, untyped._running_modules


@contextmanager
def sizes_of_parts(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Makes ``shape``, ``numel()`` and other sizes of ``parameters`` the sizes of their shards for all code inside the
    context.
    """
    running = {id(p._running_modules): p._running_modules for p in parameters if isinstance(p, WholeSizes)}
    with ExitStack() as stack:
        for modules in running.values():
            stack.enter_context(modules.inside())
        yield
