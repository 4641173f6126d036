"""Owner of all patches that an engine installs on the modules of a user's model.

A call of a module passes its patches from outside to inside; :class:`PatchLayer` declares the order:

    STAGE            a pipeline stage without the module returns received values instead of the call
     GATHER          sharded parameters are gathered before the call and freed after it (ZeRO 3)
      RANDOM         hooks reseed the random generators after the call
       RECOMPUTE     the call saves only its inputs and runs again in backward
       ROWS         a module runs on the positions of this rank, or in tiles of positions
        COUNT        the rows of each expert are counted
         EXPERTS     rows are sent to the ranks of their experts, and their results back
         FP32        inputs are cast to fp32, outputs back
          COMPILE    torch.compile, or its exclusion of a module that communicates
           DEFERRED  the weight gradient may be computed later than the input gradient
            LAZY     logits stay uncomputed until the loss reads them
             FUSED   the activation after a linear layer is computed in its kernel
              TENSOR the class of a sharded layer, and the attributes it reads
               KERNEL a fused operator in place of the module's own forward
                the module's own forward

A patch changes only instance attributes or the class of a module; hooks, ``isinstance`` and the module's position in
lists stay unchanged. Patches are applied from inside to outside, so that each calls the previous content of its slot,
and are removed in the opposite order.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from enum import IntEnum
from functools import partial
from types import CellType, FunctionType, MappingProxyType, MethodType
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from engine.errors import EngineError

_FORWARD, _COMPILED = "forward", "_compiled_call_impl"
_THROUGH_CLASS = "_through_class"
_COPIED = "__deepcopy__"
_OWN = (_FORWARD, _COPIED, "__reduce_ex__")
"""Attributes that a deep copy of a module gets anew, or not at all."""
_NOTHING = object()


class PatchLayer(IntEnum):
    """Position of a patch among the patches of one module; smaller is closer to the module's original forward."""

    PARAMETERS = 0
    """Patches outside forward: parameters are in flat buckets, and hooks collect their gradients."""
    KERNEL = 1
    TENSOR = 2
    FUSED = 3
    LAZY = 4
    DEFERRED = 5
    COMPILE = 6
    FP32 = 7
    EXPERTS = 8
    COUNT = 9
    ROWS = 10
    RECOMPUTE = 11
    RANDOM = 12
    GATHER = 13
    STAGE = 14


@dataclass(frozen=True, slots=True)
class Patch:
    """Reversible change to one module, with its position among the module's patches and an undo function."""

    module: nn.Module
    layer: PatchLayer
    note: str
    """Effect of the patch on a module, for reports: a predicate such as "runs in fp32"."""
    undo: Callable[[], None]


class ForwardPatches:
    """List of the reversible changes (patches) that one engine makes to modules."""

    def __init__(self) -> None:
        self._patches: list[Patch] = []
        self._outermost: dict[int, PatchLayer] = {}
        """Outermost layer of each patched module, by module id."""

    @contextmanager
    def changing(self, module: nn.Module, layer: PatchLayer, note: str) -> Iterator[None]:
        """Records all changes to attributes and class of ``module`` inside the context as one patch.

        ``layer``: position of the patch; ``note``: its effect, for reports. Removal restores each attribute, unless
        other code has assigned it again.
        """
        outer = self._outermost.get(id(module), layer)
        # COMPILE is exempt: blocks are compiled before they are planned, and call the forward of the time of the call
        if layer is not PatchLayer.COMPILE:
            assert outer <= layer, f"{layer.name} is put on a {type(module).__name__} after {outer.name}, outside it"
            self._outermost[id(module)] = layer
        before, own = dict(vars(module)), type(module)
        try:
            yield
        finally:  # a change that fails halfway comes off too
            self._patches.append(Patch(module, layer, note, _undo(module, before, own)))

    def replace_forward(self, module: nn.Module, layer: PatchLayer, forward: Callable[..., Any], note: str) -> None:
        """Makes ``module(*args)`` call ``forward(module, *args)`` in place of the module's forward.

        ``layer``: position of the patch; ``note``: its effect, for reports.
        """
        with self.changing(module, layer, note):
            object.__setattr__(module, _FORWARD, MethodType(forward, module))
            _own_copies(module)

    def wrap_forward(self, module: nn.Module, layer: PatchLayer, forward: Callable[..., Any], note: str) -> None:
        """Makes ``module(*args)`` call ``forward(*args)`` in place of the module's forward.

        ``forward`` gets no module, so a wrapper must store the original forward. ``layer``: position of the patch;
        ``note``: its effect, for reports.
        """
        with self.changing(module, layer, note):
            object.__setattr__(module, _FORWARD, forward)
            _own_copies(module)

    def hook(self, module: nn.Module, layer: PatchLayer, handle: RemovableHandle, note: str) -> None:
        """Records a hook on ``module`` as a patch; removal calls ``handle.remove``.

        ``layer``: position among the patches of ``module``; ``note``: effect, for reports.
        """
        self._patches.append(Patch(module, layer, note, handle.remove))

    def own(self, module: nn.Module, layer: PatchLayer, undo: Callable[[], None], note: str) -> None:
        """Records, as a patch, a change that the caller makes to ``module``; removal of the patch calls ``undo``.

        ``layer``: position of the patch; ``note``: effect, for reports.
        """
        self._patches.append(Patch(module, layer, note, undo))

    def around(self, module: nn.Module) -> list[Patch]:
        """Returns the patches on ``module`` itself, from the innermost to the outermost."""
        return sorted((patch for patch in self._patches if patch.module is module), key=lambda patch: patch.layer)

    def remove(self) -> None:
        """Removes all patches, the last one first. If the removal of some fails, removes the others and raises the last
        error.
        """
        with ExitStack() as undone:
            for patch in self._patches:
                undone.callback(patch.undo)
            self._patches = []
            self._outermost.clear()

    def explain(self, model: nn.Module, name: str) -> list[str]:
        """Returns one line ``path: note`` for each patch on the module ``name``, its parents and its descendants.

        Lines are sorted from the outermost module to the innermost.

        Raises:
            EngineError: the model has no module of this name; the text proposes a name.
        """
        names = dict(model.named_modules(remove_duplicate=False))
        if name not in names:
            near = get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else "pass a name of model.named_modules()."
            raise EngineError(f"explain({name!r}): the model has no module of that name; {hint}")
        parts = name.split(".") if name else []
        outside = [".".join(parts[:count]) for count in range(len(parts))]
        inside = [f"{name}.{path}" if name else path for path, _ in model.get_submodule(name).named_modules() if path]
        lines = (
            f"{path or 'the model'}: {patch.note}"
            for path in (*outside, name, *inside)
            for patch in reversed(self.around(model.get_submodule(path)))
        )
        return list(dict.fromkeys(lines))


def through_class(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Marks ``forward``, assigned to a module, as one that calls the forward of the module's class; returns it."""
    vars(forward)[_THROUGH_CLASS] = True
    return forward


def goes_through_class(module: nn.Module) -> bool:
    """Returns True if a call of ``module`` runs the forward of its class."""
    own = vars(module).get(_FORWARD)
    return own is None or getattr(own, _THROUGH_CLASS, False)


def _undo(module: nn.Module, before: Mapping[str, Any], own: type) -> Callable[[], None]:
    """Returns a function that takes the attributes of ``module`` back to ``before``, and its class to ``own``, unless
    other code has assigned them again.
    """
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

    return undo


def _assign(module: nn.Module, name: str, value: Any) -> None:
    if value is _NOTHING:
        object.__delattr__(module, name)
    else:
        object.__setattr__(module, name, value)


def with_global(function: FunctionType, name: str, value: Any) -> FunctionType:
    """Returns a copy of ``function`` that reads ``value`` as its global ``name``."""
    return with_globals(function, {name: value})


def with_globals(
    function: FunctionType, values: Mapping[str, Any], cells: Mapping[int, Any] = MappingProxyType({})
) -> FunctionType:
    """Returns a copy of ``function`` with other contents of some globals and closure cells.

    ``values``: new contents of globals, by name. ``cells``: new contents of closure cells, by index of the cell.
    """
    scope = {**function.__globals__, **values}
    scope.pop("__name__", None)  # torch.compile would look globals up in the original module by this name
    code = function.__code__.replace()  # a copy, because torch.compile caches results with the code object
    closure = function.__closure__
    if closure is not None and cells:
        closure = tuple(CellType(cells[place]) if place in cells else cell for place, cell in enumerate(closure))
    made = FunctionType(code, scope, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__module__ = function.__module__
    made.__dict__.update(function.__dict__)
    return made


def _own_copies(module: nn.Module) -> None:
    """Makes deep copies of ``module`` compute with their own parameters, although wrappers close over the module."""
    kind: Any = type(module)
    standard = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    if standard and kind.__getstate__ is nn.Module.__getstate__ and not hasattr(module, _COPIED):
        object.__setattr__(module, _COPIED, MethodType(copy_deeply, module))


def copy_deeply(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Returns a deep copy of ``module`` in which patched forwards call the modules of the copy, not of the original.

    ``memo``: copies made so far, by id of the original, as ``copy.deepcopy`` passes it.
    """
    copied = type(module).__new__(type(module))
    memo[id(module)] = copied
    state = nn.Module.__getstate__(module)  # type: ignore[no-untyped-call]
    own = deepcopy({name: value for name, value in state.items() if name not in _OWN}, memo)
    copied.__setstate__(own)  # type: ignore[no-untyped-call]
    bound: dict[int, Any] = {}
    for inner in module.modules():
        if (forward := vars(inner).get(_FORWARD)) is not None and (other := memo.get(id(inner))) is not None:
            object.__setattr__(other, _FORWARD, _bound_to_copies(forward, memo, bound))
            _own_copies(other)
    return copied


def _bound_to_copies(value: Any, memo: Mapping[int, Any], bound: dict[int, Any]) -> Any:
    """Returns ``value``, or a shallow copy of it in which copied modules and tensors replace the originals.

    Follows functions, their closures, plain containers and objects of the engine. ``bound``: results so far, by id.
    """
    if isinstance(value, nn.Module | Tensor):
        return memo.get(id(value), value)
    if id(value) in bound:
        return bound[id(value)]
    bound[id(value)] = value  # a cycle ends here
    own, kind = type(value).__module__.startswith("engine.") and not hasattr(value, _COPIED), type(value)
    parts: dict[Any, Any] = {}
    if kind is FunctionType:
        parts = {place: cell.cell_contents for place, cell in enumerate(value.__closure__ or ()) if _is_full(cell)}
    elif kind is MethodType:
        parts = {"func": value.__func__, "self": value.__self__}
    elif kind is partial:
        parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
    elif kind is dict:
        parts = value
    elif kind in (tuple, list):
        parts = dict(enumerate(value))
    elif own and not isinstance(value, type):
        names = [*getattr(value, "__dict__", ()), *(name for base in kind.__mro__ for name in _slots(base))]
        parts = {name: getattr(value, name) for name in names if hasattr(value, name)}
    new = {name: _bound_to_copies(part, memo, bound) for name, part in parts.items()}
    changed = {name: part for name, part in new.items() if part is not parts[name]}
    if changed:
        bound[id(value)] = _with_parts(value, new, changed)
    return bound[id(value)]


def _with_parts(value: Any, new: Mapping[Any, Any], changed: Mapping[Any, Any]) -> Any:
    """Returns a copy of ``value`` with the parts ``new``, of which ``changed`` are other than the original's."""
    kind = type(value)
    if kind is FunctionType:
        return with_globals(value, {}, changed)
    if kind is MethodType:
        return MethodType(new["func"], new["self"])
    if kind is partial:
        return partial(new["func"], *new["args"], **new["keywords"])
    if kind in (tuple, list, dict):
        return dict(new) if kind is dict else kind(new.values())
    made = copy(value)
    for name, part in changed.items():
        object.__setattr__(made, name, part)
    return made


def _is_full(cell: CellType) -> bool:
    """Returns True if the variable of a closure cell has a value."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _slots(base: type) -> tuple[str, ...]:
    slots = vars(base).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


class Handler(Protocol):
    """Interface of a callback that is called in place of a module's forward.

    It receives the module's name, original forward and arguments, and returns the result.
    """

    def __call__(
        self, unit: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Interception:
    """Installer of patches that make calls of modules run the callback ``handler`` in place of the forward."""

    handler: Handler
    layer: PatchLayer
    patches: ForwardPatches
    skips: Callable[[str], bool] = lambda unit: False
    """Returns True if the handler will not run the unit in the next call.

    A compiled unit contains its hooks, so a skipped call of it runs the hooks eagerly around the handler's result.
    """

    def install(self, unit: str, module: nn.Module, note: str) -> None:
        """Makes calls of ``module``, named ``unit``, run ``self.handler`` in place of its forward.

        ``note``: effect of the patch, for reports.
        """
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
