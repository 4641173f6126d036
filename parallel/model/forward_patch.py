"""One owner of everything that an engine puts on the modules of a user's model.

A call of a module passes what was put on it from outside to inside; :class:`PatchLayer` declares the order:

    STAGE            a pipeline stage that does not hold the module answers the call instead
     GATHER          sharded parameters are gathered before the call and freed after it (ZeRO 3)
      RANDOM         hooks reseed the random generators after the call
       RECOMPUTE     the call keeps its inputs only and runs again in backward
        FP32         inputs are cast to fp32, outputs back
         COMPILE     torch.compile, or the order to pass over a module that communicates
          DEFERRED   the weight gradient may be computed later than the input gradient
           LAZY      logits stay uncomputed until the loss reads them
            FUSED    the activation after a linear layer is computed in its kernel
             TENSOR  the class of a sharded layer, and the attributes that it reads
              KERNEL a fused operator in place of the module's own forward
               the module's own forward

Each patch changes instance attributes or the class of a module and nothing else; hooks, ``isinstance`` and the places
of the module in lists stay the user's. Patches are put on from inside to outside, so that a patch runs what it found
in its slot, and are taken off in the opposite order.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from types import FunctionType, MethodType
from typing import Any, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

_FORWARD, _COMPILED = "forward", "_compiled_call_impl"
_NOTHING = object()


class PatchLayer(IntEnum):
    """Where a patch stands: a smaller number is nearer to the module's own forward."""

    PARAMETERS = 0
    """Beside the forward: parameters lie in flat buckets, and hooks take their gradients."""
    KERNEL = 1
    TENSOR = 2
    FUSED = 3
    LAZY = 4
    DEFERRED = 5
    COMPILE = 6
    FP32 = 7
    RECOMPUTE = 8
    RANDOM = 9
    GATHER = 10
    STAGE = 11


@dataclass(frozen=True, slots=True)
class Patch:
    """One change of one module."""

    module: nn.Module
    layer: PatchLayer
    note: str
    """What it does, for people: a predicate whose subject is the module."""
    undo: Callable[[], None]


class ForwardPatches:
    """Owns the patches of one engine. ``remove`` makes every module what it was before the first one."""

    def __init__(self) -> None:
        self._patches: list[Patch] = []
        self._outermost: dict[int, PatchLayer] = {}
        """The outermost layer that each module has, by the module's id."""

    @contextmanager
    def changing(self, module: nn.Module, layer: PatchLayer, note: str) -> Iterator[None]:
        """Around code that assigns instance attributes or the class of ``module``: they are the patch.

        An attribute that somebody else has assigned since is left alone by the removal.
        """
        outer = self._outermost.get(id(module), layer)
        if layer is not PatchLayer.COMPILE:  # blocks are compiled before they are planned, and call what they have then
            assert outer <= layer, f"{layer.name} is put on a {type(module).__name__} after {outer.name}, outside it"
            self._outermost[id(module)] = layer
        before, own = dict(vars(module)), type(module)
        yield
        after, made = vars(module), type(module)
        changed = {
            name: (before.get(name, _NOTHING), after.get(name, _NOTHING))
            for name in before.keys() | after.keys()
            if before.get(name, _NOTHING) is not after.get(name, _NOTHING)
        }

        def undo() -> None:
            if type(module) is made:
                module.__class__ = own
            for name, (old, new) in changed.items():
                if vars(module).get(name, _NOTHING) is new:
                    _assign(module, name, old)

        self._patches.append(Patch(module, layer, note, undo))

    def replace_forward(self, module: nn.Module, layer: PatchLayer, forward: Callable[..., Any], note: str) -> None:
        """Let ``forward(module, *args)`` run in place of what the module runs now.

        It is a bound method, so that it belongs to the copy in a copied module.
        """
        with self.changing(module, layer, note):
            object.__setattr__(module, _FORWARD, MethodType(forward, module))

    def wrap_forward(self, module: nn.Module, layer: PatchLayer, forward: Callable[..., Any], note: str) -> None:
        """Let ``forward(*args)`` run in place of what the module runs now, which it may call."""
        with self.changing(module, layer, note):
            object.__setattr__(module, _FORWARD, forward)

    def hook(self, module: nn.Module, layer: PatchLayer, handle: RemovableHandle, note: str) -> None:
        """Own a hook that was registered on ``module`` or on one of its parameters."""
        self._patches.append(Patch(module, layer, note, handle.remove))

    def own(self, module: nn.Module, layer: PatchLayer, undo: Callable[[], None], note: str) -> None:
        """Own a change of something that ``module`` refers to, such as its ``config``."""
        self._patches.append(Patch(module, layer, note, undo))

    def around(self, module: nn.Module) -> list[Patch]:
        """The patches of one module, from inside to outside."""
        return sorted((patch for patch in self._patches if patch.module is module), key=lambda patch: patch.layer)

    def remove(self) -> None:
        """Take all patches off, the outermost first."""
        while self._patches:
            self._patches.pop().undo()
        self._outermost.clear()

    def explain(self, model: nn.Module, name: str) -> list[str]:
        """What runs around the module ``name`` of ``model``, from outside to inside, and on the modules in it.

        A line a patch, ``path: note``; modules outside come first, then the module itself, then those in it.
        """
        parts = name.split(".") if name else []
        outside = [".".join(parts[:count]) for count in range(len(parts))]
        inside = [f"{name}.{path}" if name else path for path, _ in model.get_submodule(name).named_modules() if path]
        lines = (
            f"{path or 'the model'}: {patch.note}"
            for path in (*outside, name, *inside)
            for patch in reversed(self.around(model.get_submodule(path)))
        )
        return list(dict.fromkeys(lines))


def _assign(module: nn.Module, name: str, value: Any) -> None:
    if value is _NOTHING:
        object.__delattr__(module, name)
    else:
        object.__setattr__(module, name, value)


def with_global(function: FunctionType, name: str, value: Any) -> FunctionType:
    """``function`` with another global of this name; its module keeps its own."""
    scope = {**function.__globals__, name: value}
    scope.pop("__name__", None)  # by which torch.compile would look globals up in the module
    code = function.__code__.replace()  # what torch.compile has made of the other is kept with its code
    made = FunctionType(code, scope, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__module__ = function.__module__
    made.__dict__.update(function.__dict__)
    return made


class Handler(Protocol):
    """Gets the name of the unit, what it would run, and the arguments; returns what the call returns."""

    def __call__(
        self, unit: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Interception:
    """Sends the calls of units to ``handler``."""

    handler: Handler
    layer: PatchLayer
    patches: ForwardPatches
    skips: Callable[[str], bool] = lambda unit: False
    """Whether the call to come is one that the handler answers without running the unit: a compiled unit then runs
    its hooks around the handler's answer uncompiled, since its hooks lie inside what was compiled."""

    def install(self, unit: str, module: nn.Module, note: str) -> None:
        """Send the calls of ``module``, whose name is ``unit``, to the handler."""
        compiled = getattr(module, _COMPILED, None)
        own: Callable[..., Any] = getattr(module, _FORWARD if compiled is None else _COMPILED)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self.handler(unit, own, args, kwargs)

        def call_compiled(*args: Any, **kwargs: Any) -> Any:
            if not self.skips(unit):
                return call(*args, **kwargs)
            before = vars(module).get(_FORWARD, _NOTHING)
            object.__setattr__(module, _FORWARD, call)
            try:
                return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
            finally:
                _assign(module, _FORWARD, before)

        with self.patches.changing(module, self.layer, note):
            if compiled is None:
                object.__setattr__(module, _FORWARD, call)
            else:
                object.__setattr__(module, _COMPILED, call_compiled)
