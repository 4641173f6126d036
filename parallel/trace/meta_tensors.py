"""Meta tensors that represent the tensors of a traced model.

stand-in     the tensor that user code holds for a value: expanded, on the run device, without memory
twin         its meta tensor, on which operations really run, so that shapes, strides, ``requires_grad`` and
             shared memory are torch's own; free tensors and parameters get one when an operation mixes them with a
             value. Meta tensors rather than FakeTensors, since user code must not notice that it is traced.
autocast     decides by the device of its arguments and ignores meta tensors; so an operation runs once more on
             FakeTensors that claim the run device, and their result tells the dtypes
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from engine.errors import first_line
from engine.kernels.device import ACCELERATORS
from engine.parallel.model.placeholders import PlaceholderPool, trainable
from engine.parallel.model.user_code import is_own_mistake
from engine.parallel.trace.operation_meter import META
from engine.parallel.trace.torch_function import Operation, map_leaves, plain_leaves


class NeedsContentError(Exception):
    """Error of an operation that cannot run on meta tensors, for example because its result's shape depends on data."""


class MetaTwins:
    """Map from each tensor of a trace to its twin: a meta tensor of the same shape, dtype and gradient flag, without
    data. It also records which tensors share memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._placeholders = PlaceholderPool(device)
        self._twin: dict[int, Tensor] = {}
        self._stand_ins: set[int] = set()
        self._sharing: dict[int, dict[int, Tensor]] = {}
        self._memory: dict[int, int] = {}
        self._kept: dict[int, Any] = {}

    def stand_in(self, twin: Tensor) -> Tensor:
        """Returns a placeholder that user code gets for the meta tensor ``twin``: same shape, on this object's
        ``device``, with memory for at most one element.
        """
        sparse = twin.layout != torch.strided
        tensor = without_elements(twin, self.device) if sparse else self._placeholders.give(twin.shape, twin.dtype)
        self._stand_ins.add(id(tensor))
        self._bind(tensor, twin)
        return tensor

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the meta twin of ``tensor``. The first call makes it."""
        if id(tensor) not in self._twin:
            twin = tensor.detach().to(META)
            grad = trainable(tensor)
            if isinstance(tensor, nn.Parameter):  # a memory of its own, although a flat bucket holds many parameters
                twin = nn.Parameter(twin, requires_grad=grad)
            else:
                self.notice(tensor)
                twin.requires_grad_(grad)
                # tensors over one memory get separate twins, so sharing is looked up by the original memory
                self._memory[_memory(twin)] = _memory(tensor)
            self._bind(tensor, twin)
        return self._twin[id(tensor)]

    def notice(self, tensor: Tensor) -> None:
        """Registers ``tensor``, which does not depend on parameters, so that :meth:`sharing` finds it by its memory."""
        if id(tensor) not in self._kept and tensor.layout == torch.strided:
            self._keep(tensor, tensor.untyped_storage()._cdata)

    def sharing(self, tensor: Tensor) -> list[Tensor]:
        """Returns all registered tensors that share memory with ``tensor``, including ``tensor`` itself."""
        storage = _memory(self.of(tensor))
        return list(self._sharing[self._memory.get(storage, storage)].values())

    def swap(self, tree: Any) -> Any:
        """Returns ``tree`` with each tensor replaced by its meta twin, and each ``torch.device`` by the meta device."""
        return map_leaves(self._swap_leaf, tree)

    def on_meta(self, operation: Operation) -> Any:
        """Runs ``operation`` on the meta twins of its tensors and returns the result.

        Raises:
            NeedsContentError: the operation does not run on meta tensors; the message contains the original error.
        """
        name = operation.name
        if name == "cpu" or name in ACCELERATORS:
            return self.of(operation.args[0])
        args, kwargs = self.swap((operation.args, dict(operation.kwargs)))
        if kwargs.get("device") is not None:
            kwargs["device"] = META
        if name == "to":
            args = tuple(META if isinstance(arg, str) else arg for arg in args)

        def run(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
            return operation.run_with(*arguments)

        shape_rule = _SHAPE_RULES.get(name)
        if shape_rule is not None and (out := shape_rule(*args, **kwargs)) is not None:
            return out
        cast = torch.is_autocast_enabled(self.device.type)
        try:
            out = cast_like_autocast(self.device, run, (args, kwargs)) if cast else run((args, kwargs))
        except Exception as error:  # torch, or a Function of the user, may raise anything on meta tensors
            if is_own_mistake(error):
                raise
            raise NeedsContentError(first_line(error)) from error
        if any(isinstance(leaf, Tensor) and not leaf.is_meta for leaf in plain_leaves(out)):
            raise NeedsContentError(f"{name} leaves the meta device")
        return out

    def on_zeros(self, operation: Operation) -> Any:
        """Runs ``operation`` with zeros on the device in place of parameters and of tensors without data, such as meta
        tensors. Returns the result, which is not on meta.
        """
        if operation.is_of_torch and not operation.written:
            try:
                return self._filled(operation, expanded=True)
            except RuntimeError:  # a kernel that needs dense tensors; a genuine error is raised again below
                pass
        return self._filled(operation, expanded=False)

    def on_ones(self, operation: Operation, zeros: Any) -> Any | None:
        """Runs ``operation`` with ones in place of zeros. Returns the result if it has tensors of other shapes than
        ``zeros``, the result of :meth:`on_zeros`, so that their shapes depend on content; else None.
        """
        if not operation.is_of_torch or operation.written or operation.is_random:
            return None
        try:
            ones = self._filled(operation, expanded=False, value=1)
        except (IndexError, RuntimeError, ValueError):  # ones may be no legal content, such as an index beyond the end
            return None
        return ones if _shapes(ones) != _shapes(zeros) else None

    def _filled(self, operation: Operation, expanded: bool, value: int = 0) -> Any:
        def filled(leaf: Any) -> Any:
            # parameters too: the result must be the same on ranks that hold them and on ranks that do not
            if not (isinstance(leaf, nn.Parameter) or (isinstance(leaf, Tensor) and self._is_empty(leaf))):
                return leaf
            if leaf.layout != torch.strided:
                return without_elements(leaf, self.device)
            shape = () if expanded else leaf.shape
            return torch.full(shape, value, dtype=leaf.dtype, device=self.device).expand(leaf.shape)

        with torch.no_grad():
            return operation.run_with(tree_map(filled, operation.args), tree_map(filled, dict(operation.kwargs)))

    def lift(self, out: Any, operation: Operation) -> Any:
        """Converts ``out``, the result of running ``operation`` on zeros, to meta twins with autograd edges to the
        operation's inputs.
        """
        inputs = [self.of(tensor) for tensor in operation.tensors]

        def twin(leaf: Any) -> Any:
            return depending(leaf.detach().to(META), inputs) if isinstance(leaf, Tensor) else leaf

        return map_leaves(twin, out)

    def write(self, operation: Operation) -> Tensor:
        """Returns the meta twin of the tensor that ``operation`` writes in place. Adds autograd edges, so that the twin
        depends on all inputs of the operation. Does not run the operation, which meta tensors do not support.
        """
        twin = self.of(operation.written[0])
        inputs = [self.of(tensor) for tensor in operation.tensors]
        if any(each.requires_grad for each in inputs) and twin.is_floating_point() and not is_trained_leaf(twin):
            twin.copy_(depending(torch.empty_like(twin), inputs))
        return twin

    def _is_empty(self, tensor: Tensor) -> bool:
        return tensor.is_meta or id(tensor) in self._stand_ins

    def _swap_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self.of(leaf)
        return META if isinstance(leaf, torch.device) else leaf

    def _bind(self, tensor: Tensor, twin: Tensor) -> None:
        self._twin[id(tensor)] = twin
        storage = _memory(twin)
        self._keep(tensor, self._memory.get(storage, storage))

    def _keep(self, tensor: Tensor, memory: int) -> None:
        self._kept[id(tensor)] = tensor
        self._sharing.setdefault(memory, {})[id(tensor)] = tensor


def _memory(tensor: Tensor) -> int:
    """Returns the number of the tensor's memory; a sparse tensor's number belongs to it alone."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else -id(tensor)


def _grouped_mm(rows: Tensor, weights: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor | None:
    """Each row meets one weight of [groups, in, out]; torch's own meta kernel requires bf16 and aligned strides."""
    return rows @ weights[0] if rows.ndim == 2 and weights.ndim == 3 and offs is not None else None


_SHAPE_RULES: Mapping[str, Callable[..., Tensor | None]] = MappingProxyType(
    {"_grouped_mm": _grouped_mm, "grouped_mm": _grouped_mm}
)
"""Operations that meta tensors refuse, and a replacement of equal shape, gradient and FLOPs; None: case not covered."""


def cast_like_autocast(device: torch.device, run: Callable[[Any], Any], arguments: Any) -> Any:
    """Returns ``run(arguments)`` for meta tensors, with the results cast to the dtypes that the active autocast gives
    on ``device``.
    """
    mode = FakeTensorMode()

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shown: Tensor = FakeTensor(mode, leaf.detach(), device)
        return shown.requires_grad_(leaf.requires_grad)

    fakes = tree_map(fake, arguments)  # outside the mode, which accepts only FakeTensors of its own
    with mode:
        shown, spec = tree_flatten(run(tree_map(_inner, fakes)))
    try:
        plain = tree_leaves(run(arguments))
    except RuntimeError:  # mixed dtypes that only autocast makes compatible
        plain = shown
    inputs = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
    return tree_unflatten([_cast(leaf, like, inputs) for leaf, like in zip(plain, shown, strict=True)], spec)


def _inner(fake: Any) -> Any:
    """Returns a clone, because a leaf of the graph cannot be written in place."""
    return fake.clone() if isinstance(fake, FakeTensor) and fake.requires_grad else fake


def _cast(leaf: Any, like: Any, inputs: Sequence[Tensor]) -> Any:
    if not isinstance(like, Tensor):
        return like
    if leaf is not like:
        return leaf if leaf.dtype == like.dtype else leaf.to(like.dtype)
    size, stride = tuple(like.shape), like.stride()
    made = torch.empty_strided(size, stride, dtype=like.dtype, device="meta")
    return depending(made, inputs) if like.requires_grad else made


def without_elements(like: Tensor, device: torch.device | str) -> Tensor:
    """Returns a sparse tensor on ``device`` with the shape and dtype of ``like``, in which every element is zero."""
    indices = torch.empty(like.ndim, 0, dtype=torch.int64, device=device)
    values = torch.empty(0, dtype=like.dtype, device=device)
    return torch.sparse_coo_tensor(indices, values, like.shape)


def is_trained_leaf(tensor: Tensor) -> bool:
    """Returns True if ``tensor`` is an autograd leaf that requires a gradient, so that autograd forbids in-place writes
    to it.
    """
    return tensor.is_leaf and tensor.requires_grad and torch.is_grad_enabled()


def depending(made: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """Returns a new meta tensor like ``made``, with autograd edges to the ``inputs`` that require a gradient; ``made``
    itself if no edge is needed. A backward through the edges raises ``NotImplementedError``.
    """
    graded = [tensor for tensor in inputs if tensor.requires_grad]
    if not (graded and torch.is_grad_enabled() and (made.is_floating_point() or made.is_complex())):
        return made
    linked: Tensor = _Depending.apply(made, *graded)  # type: ignore[no-untyped-call]
    return linked


class _Depending(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: Tensor, *inputs: Tensor) -> Tensor:
        # a tensor of its own: a view that a Function returns could not be written in place
        if made.layout != torch.strided:
            return without_elements(made, META)
        return torch.empty_strided(made.size(), made.stride(), dtype=made.dtype, device=META)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise NotImplementedError("a trace has no gradients")


def _shapes(out: Any) -> list[torch.Size]:
    return [leaf.shape for leaf in plain_leaves(out) if isinstance(leaf, Tensor)]
