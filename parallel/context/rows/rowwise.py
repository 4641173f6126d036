"""Modules that treat positions one by one: found by trial, and run on this rank's positions as plain tensors.

    x [B, S, H] sharded along S  ->  module(x.local)  ->  result, sharded along S

So code that global tensors cannot enter (autograd functions, kernels, compiled code, tokens sorted by expert) runs
unchanged, and without the overhead of global tensors. The outermost modules that are proven are taken.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from engine.parallel.context.rows.call_forms import SeenCall, SequenceSize, flatten_leaves, sequences_of
from engine.parallel.context.rows.rowwise_proof import ProvenForm, prove_rowwise
from engine.parallel.model.forward_patch import ForwardPatches, Interception, PatchLayer
from engine.parallel.model.side_effects import forward_settings
from engine.parallel.tensor.global_tensor.context import GlobalTensorContext
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor, global_tensors_in
from engine.parallel.tensor.global_tensor.index_sets import Index, NoRuleError, Sets
from engine.parallel.tensor.global_tensor.layout import Layout, reshaped
from engine.parallel.tensor.global_tensor.operands import fit

_NOTE = "treats positions one by one: runs on this rank's positions as plain tensors"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class RowwiseModule(NamedTuple):
    """Module that is proven to compute each position independently, for calls that satisfy one of ``forms``."""

    name: str
    forms: tuple[ProvenForm, ...]

    def contains(self, names: Iterable[str]) -> bool:
        """Returns True if one of the modules ``names`` is inside the module."""
        return any(_is_in(name, self.name) for name in names)


def find_rowwise(
    model: nn.Module, batch: Iterable[Tensor], calls: Mapping[str, Sequence[SeenCall]], units: Sequence[str] = ()
) -> tuple[RowwiseModule, ...]:
    """Finds by trial the outermost modules of ``model`` that compute each position independently.

    Args:
        batch: the batch tensors of the forward in which calls were recorded.
        calls: recorded calls by module name.
        units: names of modules around which no module is taken.
    """
    sizes = sequences_of(batch, calls.values())
    tried: dict[object, tuple[ProvenForm, ...]] = {}
    refused: set[object] = set()
    """Code, shapes and calls that a trial has refused, whatever their settings."""
    proven: dict[str, tuple[ProvenForm, ...]] = {}
    mixing: set[str] = set()
    names = [name for name, _ in model.named_modules() if name in calls]
    for name in sorted(names, key=lambda name: -name.count(".") if name else 1):
        module = model.get_submodule(name)
        seen = [call for call in calls[name] if any(size.form_of(call) is not None for size in sizes)]
        if not seen:
            continue
        inside = f"{name}." if name else ""
        if any(other.startswith(inside) for other in mixing) or is_heard(module):
            mixing.add(name)
            continue
        alike = (type(module), tuple(each.shape for each in module.parameters()), tuple(seen))
        key = (_kind(module), tuple(seen))
        if alike in refused:
            tried[key] = ()
        elif key not in tried:
            tried[key] = tuple(form for call in seen if (form := _prove(module, call, sizes)) is not None)
        if tried[key]:
            proven[name] = tried[key]
        else:
            refused.add(alike)
            mixing.add(name)
    free = [name for name in proven if not any(_is_in(unit, name) for unit in units)]
    outermost = [name for name in free if not any(_is_in(name, other) for other in free)]
    return tuple(RowwiseModule(name, proven[name]) for name in names if name in outermost)


def _prove(module: nn.Module, call: SeenCall, sizes: Iterable[SequenceSize]) -> ProvenForm | None:
    found = (prove_rowwise(module, call, size) for size in sizes if size.form_of(call) is not None)
    return next((form for form in found if form is not None), None)


def _is_in(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


def _kind(module: nn.Module) -> tuple[object, ...]:
    """Returns a key that is equal for modules of equal code, shapes and settings: a proof of one holds for all."""
    shapes = tuple((name, tuple(each.shape), each.dtype) for name, each in module.named_parameters())
    return shapes, forward_settings(module)


def is_heard(module: nn.Module) -> bool:
    """Returns True if submodules of ``module`` have hooks from user code."""
    return bool(module._modules) and any(
        not _is_own(hook)
        for each in module.modules()
        if each is not module
        for kind in _HOOKS
        for hook in vars(each).get(kind, {}).values()
    )


def _is_own(hook: Any) -> bool:
    function = getattr(hook, "func", hook)
    return str(getattr(function, "__module__", "")).partition(".")[0] == "engine"


def run_rowwise(model: nn.Module, found: Iterable[RowwiseModule], patches: ForwardPatches) -> None:
    """Patches the modules ``found`` to run on this rank's positions of arguments that are sharded along positions.

    They get plain tensors; their results are sharded along positions. ``patches``: list that records the changes.
    """
    known = {each.name: each.forms for each in found}
    modules = {name: model.get_submodule(name) for name in known}

    def handle(unit: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = next((one for one in global_tensors_in(args, kwargs) if one.views.axis.name == "cp"), None)
        if first is None or is_heard(modules[unit]):  # over tensor ranks, weights sum their gradients
            return forward(*args, **kwargs)
        for form in known[unit]:
            call = LocalCall.of(form, first.views, args, kwargs)
            if call is not None:
                return call.run(forward, modules[unit].training)
        return forward(*args, **kwargs)

    interception = Interception(handler=handle, layer=PatchLayer.ROWS, patches=patches)
    for name, module in modules.items():
        interception.install(name, module, _NOTE)


@contextmanager
def running_rowwise(model: nn.Module, found: Iterable[RowwiseModule]) -> Iterator[None]:
    """Patches the modules ``found`` as :func:`run_rowwise` does, during the block."""
    patches = ForwardPatches()
    run_rowwise(model, found, patches)
    try:
        yield
    finally:
        patches.remove()


class LocalCall(NamedTuple):
    """Call of a module, with only the sequence positions of its arguments that are on this rank."""

    form: ProvenForm
    context: GlobalTensorContext
    leaves: list[Any]
    sizes: tuple[int, int]
    """Size of dim 0 and of dim 1, where these have positions."""
    positions: tuple[Index | None, Index | None]
    """Positions along dim 0 and along dim 1."""

    @staticmethod
    def of(form: ProvenForm, context: GlobalTensorContext, args: Any, kwargs: Any) -> "LocalCall | None":
        """Returns the call of a module with this rank's positions of ``args`` and ``kwargs``.

        Returns None if they do not satisfy the conditions of ``form``, or are sharded along other dims.
        """
        leaves = form.call.match(args, kwargs)
        if leaves is None:
            return None
        dims = [each.dim for each in form.call.leaves]
        try:
            sizes, positions = _positions(context, leaves, dims)
            parts = [_part(context, leaf, dim, sizes, positions) for leaf, dim in zip(leaves, dims, strict=True)]
        except NoRuleError:
            return None
        return LocalCall(form, context, parts, sizes, positions)

    def run(self, forward: Callable[..., Any], training: bool) -> Any:
        """Runs ``forward`` on this rank's positions; returns global tensors sharded along positions.

        ``training``: True if the module is in training mode; random numbers then differ between ranks.
        """
        if not (self.form.draws and training):
            out = self.form.call.call(forward, self.leaves)
        else:
            device = next(leaf.device for leaf in self.leaves if isinstance(leaf, Tensor))
            with self.context.own_draws(device):
                out = self.form.call.call(forward, self.leaves)
        if isinstance(out, Tensor):
            return self._sharded(out, self.form.dims[0])
        leaves, spec = flatten_leaves(out)
        pairs = zip(leaves, self.form.dims, strict=True)
        return pytree.tree_unflatten([self._sharded(leaf, dim) for leaf, dim in pairs], spec)

    def _sharded(self, leaf: Any, dim: int | None) -> Any:
        if dim is None or not isinstance(leaf, Tensor):
            return leaf
        shape = tuple(leaf.shape)  # read once, because the mode of the forward sees each read
        shape = (*shape[:dim], self.sizes[dim], *shape[dim + 1 :])
        return GlobalTensor(leaf, shape, _sets(len(shape), dim, self.positions), self.context)


def _sets(dims: int, dim: int, positions: tuple[Index | None, Index | None]) -> Sets:
    return (*(None,) * dim, positions[dim], *(None,) * (dims - dim - 1))


def _positions(
    context: GlobalTensorContext, leaves: Sequence[Any], dims: Sequence[int | None]
) -> tuple[tuple[int, int], tuple[Index | None, Index | None]]:
    """Returns the sizes of dims 0 and 1 with positions, and the positions of each rank along them.

    Raises:
        NoRuleError: no argument is sharded along positions, or two are sharded differently.
    """
    found: list[Index | None] = [None, None]
    for leaf, dim in zip(leaves, dims, strict=True):
        if type(leaf) is GlobalTensor:
            if leaf.views is not context:
                raise NoRuleError("an argument is sharded over another axis.")
            if any(index is not None for place, index in enumerate(leaf.sets) if place != dim):
                raise NoRuleError("another dim than that of positions is sharded.")
            if dim is not None and leaf.sets[dim] is not None:
                if found[dim] not in (None, leaf.sets[dim]):
                    raise NoRuleError("the arguments are sharded differently.")
                found[dim] = leaf.sets[dim]
    shapes = [(dim, leaf.shape) for leaf, dim in zip(leaves, dims, strict=True) if dim is not None]
    lengths = {shape[1] for dim, shape in shapes if dim == 1}
    flat = {shape[0] for dim, shape in shapes if dim == 0}
    rows = max((shape[0] for dim, shape in shapes if dim == 1), default=0)
    if len(lengths) > 1 or len(flat) > 1 or (lengths and flat and flat != {rows * max(lengths)}):
        raise NoRuleError("the arguments have different lengths.")
    length, total = max(lengths, default=0), max(flat, default=0)
    if found[1] is not None and flat:
        own = found[1]
        sets = context.find(("rows", rows, own), lambda: reshaped(Layout((rows, length), (None, own)), (total,)).sets)
        if found[0] not in (None, sets[0]):
            raise NoRuleError("the arguments are sharded differently.")
        found[0] = sets[0]
    if (lengths and found[1] is None) or (flat and found[0] is None):
        raise NoRuleError("no argument is sharded along positions.")
    return (total, length), (found[0], found[1])


def _part(
    context: GlobalTensorContext, leaf: Any, dim: int | None, sizes: tuple[int, int],
    positions: tuple[Index | None, Index | None],
) -> Any:  # fmt: skip
    if not isinstance(leaf, Tensor):
        return leaf
    if dim is None:
        return leaf.local if type(leaf) is GlobalTensor else leaf
    return fit(context, leaf, _sets(leaf.ndim, dim, positions))
