"""Block of a model in isolation: a copy with random weights, in the dtypes of the run, for timing.

A call that reads anything except its unit's parameters, buffers and arguments cannot run on a copy; ``reads_elsewhere``
finds such calls.
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from engine.errors import PlanError
from engine.kernels.device import finish
from engine.parallel.activation_checkpointing.blocks import recomputed_in_part
from engine.parallel.activation_checkpointing.selective import SavedActivations, Selective
from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer
from engine.parallel.model.torch_checkpoint import open_checkpoints
from engine.parallel.model.user_code import call_user_code
from engine.parallel.pipeline.runtime.split_backward import DeferredWeightGrads, SplitBackward
from engine.parallel.trace.model_trace import Arguments, Call, Sample
from engine.precision.dtypes import Precision
from engine.precision.fp32_modules import put_casts

_STD = 0.02
_PLAIN = bool | int | float | str | None


class Seconds(NamedTuple):
    """Measured seconds of one forward and backward of a block."""

    forward: float
    inputs: float
    """Seconds of the backward without deferrable weight gradients."""
    weights: float
    """Seconds of the deferred weight gradients."""


class BlockBytes(NamedTuple):
    """Activation bytes that a block stores for one microbatch."""

    kept: int
    """Bytes stored from forward to backward."""
    left: int
    """Bytes stored from backward until the deferred weight gradients are computed."""


class IsolatedBlock:
    """Copy of the module ``name`` of a model, for measurements of its time and memory.

    ``selective``: rule that names the operators with outputs that are stored instead of recomputed; None: no selective
    recomputation.

    Raises:
        PlanError: the ``forward`` of the module or of a submodule is a closure, which would run the original model.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str,
        precision: Precision,
        device: torch.device,
        selective: Selective | None = None,
    ) -> None:
        self._device, self._precision = device, precision
        self._module = copy_block(model, name, precision, device)
        patches = self._patches = ForwardPatches()
        self._waiting = SplitBackward(self._module, patches)
        put_casts(self._module, precision.kept.within(name), precision.compute, patches)
        self._weights = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        self._started: list[SavedActivations] = []
        if selective is not None:
            forward = recomputed_in_part(self._module, selective, self._started)
            patches.wrap_forward(self._module, PatchLayer.RECOMPUTE, forward, "is recomputed in backward")

    def time(self, arguments: Arguments) -> Seconds:
        """Runs the copy's forward and backward once with random tensors in the shapes of ``arguments``; returns the
        seconds of each.
        """
        return self._run(_Given(arguments, self._device), nullcontext())[0]

    def weigh(self, arguments: Arguments) -> tuple[Seconds, BlockBytes]:
        """Runs the copy's forward and backward once; returns (their seconds, bytes of activations stored for backward).

        The bytes leave out parameters, buffers, and tensors that depend only on the batch.
        """
        given = _Given(arguments, self._device)
        shared = (*self._module.parameters(), *self._module.buffers(), *given.free)
        not_counted = {tensor.untyped_storage().data_ptr() for tensor in shared}
        sizes: dict[int, int] = {}

        def pack(saved: Tensor) -> Tensor:
            storage = saved.untyped_storage()
            if storage.data_ptr() not in not_counted:
                sizes[storage.data_ptr()] = storage.nbytes()
            return saved

        seconds, kept, left = self._run(given, saved_tensors_hooks(pack, lambda saved: saved))
        return seconds, BlockBytes(sum(sizes.values()) + kept, left)

    def _run(self, given: "_Given", around_forward: AbstractContextManager[Any]) -> tuple[Seconds, int, int]:
        """Runs once; returns (seconds, bytes that selective recomputation keeps, bytes of the deferred weight
        gradients)."""
        waits = DeferredWeightGrads()
        with torch.enable_grad(), open_checkpoints(recompute=True):
            # The same split as in a schedule with split backwards: inputs first, deferred weight gradients after.
            # A schedule without the split pays the sum of both.
            begun = self._now()
            with around_forward, self._precision.forward(self._device, whole=False):
                output = call_user_code(self._module.forward, given.args, given.kwargs)
            forward = self._now() - begun
            kept = sum(outputs.bytes for outputs in self._started)
            self._started.clear()
            inputs = self._backward(output, given, waits)
            left, begun = waits.bytes, self._now()
            waits.compute(lambda name, gradient: None)
        return Seconds(forward, inputs, self._now() - begun), kept, left

    def close(self) -> None:
        """Frees the copied module now, instead of at the next garbage collection."""
        self._patches.remove()
        vars(self._module).pop("forward", None)

    def _backward(self, output: Any, given: "_Given", waits: DeferredWeightGrads) -> float:
        roots = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        leaves = [*given.inputs, *self._weights]
        if not roots or not leaves:
            return 0.0
        ones = [torch.ones_like(root) for root in roots]
        begun = self._now()
        with self._waiting.leaving(waits):
            torch.autograd.backward(roots, ones)  # as in a run; autograd.grad would defer no weight gradient
        seconds = self._now() - begun
        for leaf in leaves:
            leaf.grad = None
        return seconds

    def _now(self) -> float:
        finish(self._device)
        return perf_counter()


@dataclass
class _Given:
    """Arguments of a call with content: random for traced values, copied for other tensors, unchanged for the rest."""

    arguments: Arguments
    device: torch.device
    inputs: list[Tensor] = field(default_factory=list)
    """Leaves that need a gradient."""
    free: list[Tensor] = field(default_factory=list)
    """Tensors that depend on the batch alone."""

    def __post_init__(self) -> None:
        self.args, self.kwargs = pytree.tree_map(self._fill, self.arguments, is_leaf=is_sample)

    def _fill(self, leaf: Any) -> Any:
        if isinstance(leaf, Sample):
            tensor = _random(torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=self.device))
            if not leaf.grad:
                return tensor
            self.inputs.append(tensor.requires_grad_())
            return tensor.clone()  # a unit may write into its arguments; autograd forbids writing into a leaf
        if isinstance(leaf, Tensor):
            self.free.append(_elsewhere(leaf, leaf.dtype, self.device))
            return self.free[-1]
        return self.device if isinstance(leaf, torch.device) else leaf


def reads_elsewhere(model: nn.Module, call: Call, arguments: Arguments) -> bool:
    """Returns True if the call ``call`` uses other modules' parameters, or traced tensors outside of ``arguments``."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    known = {names[id(parameter)] for parameter in model.get_submodule(call.unit).parameters()}
    return not known.issuperset(call.parameters) or reads_other_values(call, arguments)


def reads_other_values(call: Call, arguments: Arguments) -> bool:
    """Returns True if the call ``call`` uses traced tensors outside of its recorded ``arguments``."""
    leaves = pytree.tree_leaves(arguments, is_leaf=is_sample)
    return not {leaf.source for leaf in leaves if isinstance(leaf, Sample)}.issuperset(call.inputs)


def holds_objects(arguments: Arguments) -> bool:
    """Returns True if a recorded argument is an object, such as a key-value cache, and neither a tensor nor a plain
    value.
    """
    plain = (Sample, Tensor, bool, int, float, str, type(None), torch.dtype, torch.device)
    return not all(isinstance(leaf, plain) for leaf in pytree.tree_leaves(arguments, is_leaf=is_sample))


def signatures(model: nn.Module, units: Sequence[str], arguments: Sequence[Arguments]) -> list[object]:
    """Returns one signature per module call, in order; calls with equal signatures take equal time.

    ``units``: module name of each call. ``arguments``: recorded arguments of each call. A signature has the module's
    classes, tensor shapes and plain attributes, and the shapes of the arguments. Attributes that contain the layer's
    number are left out.
    """
    settings = {name: _settings(model.get_submodule(name)) for name in units}
    numbering = _numbering(model, settings)
    found: dict[str, object] = {}
    for name, values in settings.items():
        unit = model.get_submodule(name)
        own = tuple(entry for entry in values.items() if (type(unit), entry[0]) not in numbering)
        tensors = (*unit.named_parameters(), *unit.named_buffers())
        found[name] = own, tuple((path, tuple(t.shape), t.dtype, t.requires_grad) for path, t in tensors)
    return [(found[name], _shapes(given)) for name, given in zip(units, arguments, strict=True)]


_Setting = tuple[str, str]
"""Path of a module in its unit, and name of an attribute; an empty name stands for the class of the module."""


def _settings(unit: nn.Module) -> dict[_Setting, object]:
    found: dict[_Setting, object] = {}
    for path, module in unit.named_modules():
        found[path, ""] = type(module)
        found |= {(path, key): value for key, value in vars(module).items() if isinstance(value, _PLAIN)}
    return found


def _numbering(model: nn.Module, settings: Mapping[str, Mapping[_Setting, object]]) -> set[tuple[type, _Setting]]:
    """Returns (class of unit, attribute) pairs with an equal distance to the number in the unit's name in all units."""
    distances: dict[tuple[type, _Setting], set[object]] = {}
    for name, values in settings.items():
        number = next((int(part) for part in reversed(name.split(".")) if part.isdecimal()), None)
        for key, value in values.items():
            whole = isinstance(value, int) and not isinstance(value, bool) and number is not None
            distance = value - number if whole else None  # type: ignore[operator]
            distances.setdefault((type(model.get_submodule(name)), key), set()).add(distance)
    return {key for key, found in distances.items() if len(found) == 1 and found != {None}}


def _shapes(arguments: Arguments) -> object:
    def describe(leaf: Any) -> object:
        if isinstance(leaf, Sample):
            return leaf[1:]
        if isinstance(leaf, Tensor):
            return tuple(leaf.shape), leaf.dtype
        return leaf if isinstance(leaf, _PLAIN) else type(leaf)

    leaves, spec = pytree.tree_flatten(arguments, is_leaf=is_sample)
    return str(spec), tuple(map(describe, leaves))


def is_sample(node: object) -> bool:
    """Returns True if ``node``, an entry of a call's recorded arguments, is the description of a traced tensor."""
    return isinstance(node, Sample)


def copy_block(
    model: nn.Module, name: str, precision: Precision, device: torch.device, left_out: Collection[str] = ()
) -> nn.Module:
    """Returns a copy of the module ``name`` of ``model`` on ``device``, with random parameters and the same buffer
    values.

    ``left_out``: names, within the module, of parameters that become meta tensors.

    Raises:
        PlanError: the ``forward`` of the module or of a submodule is a closure, which would run the original model.
    """
    unit = model.get_submodule(name)
    for path, module in unit.named_modules():
        if isinstance(vars(module).get("forward"), FunctionType):
            raise PlanError(
                f"the forward of {path or name!r} is a function assigned to the module, which may use the original "
                "model when a copy of the block calls it; define it as a method in the module's class, or assign "
                "types.MethodType(function, module)."
            )
    # deepcopy would follow references out of the unit, to its parent or to shared tensors, and copy those too. With
    # all parameters of the model in the memo it copies none of them; parameters outside of the unit become meta.
    parameters = (parameter for local, parameter in unit.named_parameters() if local not in left_out)
    own = {id(tensor) for tensor in (*parameters, *unit.buffers())}
    # deepcopy takes these in place of the originals; a tensor under several names stays one tensor
    memo: dict[int, Any] = {}
    for path, parameter in model.named_parameters():
        dtype = precision.frozen(path, parameter.dtype)
        there = device if id(parameter) in own else torch.device("meta")
        content = _random(torch.empty(parameter.shape, dtype=dtype, device=there))
        memo[id(parameter)] = nn.Parameter(content, parameter.requires_grad)
    for path, buffer in model.named_buffers():
        if id(buffer) in own:
            memo[id(buffer)] = _elsewhere(buffer, precision.buffer(path, buffer.dtype), device)
    return copy.deepcopy(unit, memo)


def _elsewhere(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a copy on ``device``; a meta tensor gets random content."""
    if tensor.is_meta:
        return _random(torch.empty(tensor.shape, dtype=dtype, device=device))
    return tensor.detach().to(device, dtype, copy=True)


@torch.no_grad()
def _random(tensor: Tensor) -> Tensor:
    """Fills in place: True for booleans (no mask hides a token), 0 for integers and 8-bit floats, else small
    normals."""
    if tensor.is_meta:
        return tensor
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    narrow = tensor.is_floating_point() and tensor.element_size() == 1
    normal = (tensor.is_floating_point() or tensor.is_complex()) and not narrow
    return tensor.normal_(std=_STD) if normal else tensor.zero_()
