"""Tensors that one context rank has: positions of a sharded sequence, and the state that a loop carries over them.

    u[:, t]            on the rank of position t, without communication
    h = f(h, u[:, t])  on that rank; the state h moves to it where t enters another rank
    stack(outputs, 1)  sharded as the ranks of the outputs are; nothing is communicated
    y[:, t] = h        written on the rank of position t

Plain Python loops over positions so run unchanged: every rank runs the loop, and computes its positions only. A rank
without an operation's tensors learns the shapes from meta tensors. Other uses send the tensor to all ranks.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map

from engine.parallel.context.recurrence.relay import RECURRENT_STATE, Relay
from engine.parallel.context.rows.rowwise_proof import apart
from engine.parallel.tensor.collectives import ROW_OUTPUTS
from engine.parallel.tensor.global_tensor.global_tensor import Function, GlobalTensor, LocalOnlyError, follow_grad
from engine.parallel.tensor.global_tensor.index_sets import Index, NoRuleError
from engine.parallel.trace.torch_function import Operation, function_name

if TYPE_CHECKING:
    from engine.parallel.tensor.global_tensor.context import GlobalTensorContext

_VIEWS = frozenset((
    "view", "reshape", "select", "__getitem__", "narrow", "squeeze", "unsqueeze", "transpose", "permute", "expand",
    "view_as", "expand_as", "flatten", "unflatten", "chunk", "split", "unbind", "movedim", "swapaxes", "detach", "t",
    "get T", "get mT", "get data", "diagonal", "contiguous", "to", "float", "type_as",
))  # fmt: skip
_DETACHED = frozenset(("detach", "get data"))
_CONTENT = frozenset((
    "item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__complex__", "equal", "allclose",
    "is_nonzero", "__array__", "data_ptr", "untyped_storage", "storage", "register_hook", "retain_grad", "backward",
    "get grad", "__contains__", "__reduce_ex__", "is_contiguous", "stride", "storage_offset",
))  # fmt: skip


class SequenceState(Protocol):
    """Interface for code about tensors that a single rank stores: the sender of messages between ranks, the rules by
    function, the record of writes and the count of slices.

    The context of sharded sequences implements it.
    """

    relay: Relay
    placed: Mapping[Any, Any]
    """Rules of tensors on one rank, by function."""
    written: Any

    def next_age(self) -> int:
        """Counts one more slice, such as ``x[:, t]``, that a single rank stores; returns the count."""


class PlacedTensor(GlobalTensor):
    """Tensor that only rank ``rank`` of the axis stores; on other ranks ``local`` is a meta tensor of its shape."""

    rank: int
    age: int
    """Number of the slice that decided the rank."""
    carried: bool
    """True for a result of several slices, such as the state of a loop."""
    sliced: bool
    """True if the tensor shares the memory of a sharded one."""
    own_device: torch.device
    """Device of the tensor on its rank."""
    moved: "dict[int, tuple[int, PlacedTensor]]"
    """Copies on other ranks, each with the number of writes before it; none without a gradient that the tensor has."""

    @staticmethod
    def place(
        local: Tensor,
        context: "GlobalTensorContext",
        home: tuple[int, int],
        device: torch.device,
        carried: bool = False,
    ) -> "PlacedTensor":
        """Wraps ``local`` as a tensor that a single rank stores; on other ranks ``local`` is a meta tensor.

        ``home``: (rank that stores it, number of the slice, such as ``x[:, t]``, that decided the rank, from
        :meth:`SequenceState.next_age`). ``device``: device on that rank. ``carried``: True if it is computed from
        several such slices, as a recurrent state is.
        """
        x: PlacedTensor = Tensor._make_wrapper_subclass(
            PlacedTensor,
            local.shape,
            dtype=local.dtype,
            device=device,
            requires_grad=local.requires_grad,
            dispatch_sizes_strides_policy="sizes",
        )
        x.local, x.full, x.sets, x.views = local, torch.Size(local.shape), (None,) * local.ndim, context
        x.copied, x.folded, x.unrepeated = False, None, None
        (x.rank, x.age), x.carried, x.sliced, x.own_device = home, carried, False, device
        x.moved = {}
        return x

    @classmethod
    def __torch_function__(cls, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = next(one for one in tensor_leaves((args, kwargs)) if type(one) is PlacedTensor)
        context, rule = first.views, state_of(first).placed.get(func)
        if rule is not None:
            try:
                return rule(context, func, *args, **kwargs)
            except NoRuleError:
                pass
        return run_on_one_rank(context, func, args, kwargs)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Device of the tensor on the rank that stores it."""
        return self.own_device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """True if the tensor is on a CUDA device on the rank that stores it."""
        return torch.empty(0, device=self.own_device).is_cuda

    @property
    def here(self) -> bool:
        """True if this rank stores the tensor."""
        return self.views.axis.index == self.rank

    def on(self, rank: int) -> "PlacedTensor":
        """Returns this tensor if rank ``rank`` stores it, else a copy that ``rank`` stores; all ranks call it.

        An earlier copy is returned again, without sending, until a write in place to any :class:`PlacedTensor`.
        """
        if rank == self.rank:
            return self
        relay = state_of(self).relay
        writes, done = self.moved.get(rank, (-1, self))
        if writes == relay.writes:
            return done
        received = relay.send(self.local, self.rank, (rank,), RECURRENT_STATE, self.own_device)
        local = received if self.views.axis.index == rank else _shape_only(self)
        done = PlacedTensor.place(local, self.views, (rank, self.age), self.own_device, self.carried)
        if torch.is_grad_enabled() or not self.requires_grad:
            self.moved[rank] = relay.writes, done
        return done

    def everywhere(self, reason: str) -> Tensor:
        """Broadcasts the tensor and returns it as a plain tensor on every rank; all ranks call it.

        ``reason``: key under which ``gathers`` of the context counts this broadcast.
        """
        context = self.views
        context.note_gather(reason)
        ranks = tuple(range(context.axis.size))
        made = state_of(self).relay.send(self.local, self.rank, ranks, ROW_OUTPUTS, self.own_device)
        return made


def _flatten(x: PlacedTensor) -> tuple[list[Tensor], Any]:
    shape = None if x.here else x.local  # meta tensors are unknown to a trace
    return [x.local] if x.here else [], (shape, x.views, (x.rank, x.age), x.own_device, x.carried, x.sliced)


def _unflatten(leaves: Any, context: Any) -> Any:
    shape, views, *others, sliced = context
    local = next(iter(leaves), shape)
    if not isinstance(local, Tensor):
        return local
    made = PlacedTensor.place(local, views, *others)
    made.sliced = sliced
    return made


register_pytree_node(PlacedTensor, _flatten, _unflatten)


def state_of(x: GlobalTensor) -> SequenceState:
    """Returns the context of ``x``, a tensor sharded along positions, typed as :class:`SequenceState`."""
    return cast(SequenceState, x.views)


def slice_on_rank(x: GlobalTensor, dim: int, start: int, stop: int) -> PlacedTensor:
    """Returns the rows from ``start`` to before ``stop`` of the sharded ``dim`` of ``x``, without communication.

    The result is a tensor on the rank that stores these rows.

    Raises:
        NoRuleError: the rows are on several ranks, another dim is sharded too, or autocast is enabled.
    """
    context, index = x.views, x.sets[dim]
    nested = type(x.local) is GlobalTensor  # over tensor ranks
    if (
        index is None
        or nested
        or sum(one is not None for one in x.sets) > 1
        or torch.is_autocast_enabled(x.device.type)
    ):
        raise NoRuleError("a slice on one rank is along the only sharded dim.")
    rank, place = home_of(context, index, start, stop)
    shape = (*x.full[:dim], stop - start, *x.full[dim + 1 :])
    if context.axis.index == rank:
        local = x.local.narrow(dim, place, stop - start)
    else:
        local = _meta(shape, x.dtype, x.requires_grad)
    state_of(x).relay.join(x.local)
    made = PlacedTensor.place(local, context, (rank, state_of(x).next_age()), x.device)
    made.sliced = True
    return made


def home_of(context: "GlobalTensorContext", index: Index, start: int, stop: int) -> tuple[int, int]:
    """Returns the rank that stores the rows from ``start`` to before ``stop``, and their offset in that rank's shard.

    ``index``: sharding of the rows.

    Raises:
        NoRuleError: the rows are on several ranks, or several ranks store each of them.
    """
    owner, place = context.find(("homes", index), lambda: _homes(index))
    rank, first = int(owner[start]), int(place[start])
    if rank < 0 or int(owner[stop - 1]) != rank or int(place[stop - 1]) - first != stop - 1 - start:
        raise NoRuleError("the rows are on several ranks.")
    return rank, first


def _homes(index: Index) -> Any:
    owner, place = np.full(index.size, -1), np.zeros(index.size, dtype=np.int64)
    if index.once:
        for rank, held in enumerate(index.ranks):
            owner[held], place[held] = rank, np.arange(len(held))
    return owner, place


def _meta(shape: Any, dtype: torch.dtype, graded: bool) -> Tensor:
    with torch._C.DisableTorchFunction():
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=graded)


def _shape_only(x: Tensor) -> Tensor:
    return _meta(tuple(x.shape), x.dtype, x.requires_grad)


def tensor_leaves(values: Any) -> list[Any]:
    """Returns the leaves of ``values`` as a pytree; a tensor of any subclass is a leaf."""
    return tree_leaves(values, is_leaf=lambda one: isinstance(one, Tensor))


def run_on_one_rank(context: "GlobalTensorContext", func: Function, args: Any, kwargs: Any) -> Any:
    """Runs ``func`` on the rank that stores the argument to which ``func`` writes.

    If ``func`` writes to no argument, runs it on the rank of the most recently made slice among the arguments. Other
    arguments are sent there. A function that reads values on the host, writes into a plain tensor, or has a sharded
    argument runs on all ranks instead.
    """
    name = function_name(func)
    leaves = tensor_leaves((args, kwargs))
    placed = [one for one in leaves if type(one) is PlacedTensor]
    operation = Operation(func, args, kwargs)
    written = operation.written
    sharded = any(type(one) is GlobalTensor and any(one.sets) for one in leaves)
    if name in _CONTENT or sharded or any(type(one) is not PlacedTensor for one in written):
        return _on_all(func, args, kwargs, name)
    fresh = [one for one in placed if not one.carried] or placed
    target: PlacedTensor = written[0] if written else max(fresh, key=lambda one: one.age)  # type: ignore[assignment]
    try:
        context.find(("meta", func, *map(_kind, leaves)), lambda: _check_meta(func, args, kwargs))
    except NoRuleError:
        return _on_all(func, args, kwargs, name)
    if any(one.sliced for one in written):  # type: ignore[attr-defined]
        raise LocalOnlyError(
            f"{name} writes in place into a slice along a sequence that context ranks share, but the slice may be on "
            "another rank than the sequence; assign it: x[:, t] = value."
        )
    rank = target.rank
    args, kwargs = mapped(lambda one: one.on(rank) if type(one) is PlacedTensor else one, (args, kwargs))
    here = context.axis.index == rank
    graded = torch.is_grad_enabled() and name not in _DETACHED and any(map(requires_grad, leaves))
    with _drawing(context, operation, target):
        out = _local(func, args, kwargs) if here else _on_meta(func, args, kwargs)
    carried = len({one.age for one in placed}) > 1 or target.carried
    if written:
        state_of(target).relay.writes += 1
        target.local = with_gradient(target.local, graded)
        follow_grad(target)
        return target if isinstance(out, Tensor) or out is None else out
    sliced = name in _VIEWS and any(one.sliced for one in placed)

    def shown(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        local = with_gradient(value, graded)
        made = PlacedTensor.place(local, context, (rank, target.age), target.device, carried)
        made.sliced = sliced
        return made

    return mapped(shown, out)


def _kind(leaf: Any) -> Any:
    return (leaf.ndim, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf)


def _drawing(context: "GlobalTensorContext", operation: Operation, target: PlacedTensor) -> Any:
    return context.own_draws(target.device) if operation.is_random else nullcontext()


def _local(func: Function, args: Any, kwargs: Any) -> Any:
    args, kwargs = mapped(lambda one: one.local if isinstance(one, GlobalTensor) else one, (args, kwargs))
    return func(*args, **kwargs)


def _on_meta(func: Function, args: Any, kwargs: Any) -> Any:
    """Returns the results of ``func`` as meta tensors, without a graph."""
    args, kwargs = mapped(_twin, (args, kwargs))
    with torch._C.DisableTorchFunction(), torch.no_grad():
        return func(*args, **kwargs)


def with_gradient(local: Tensor, graded: bool) -> Tensor:
    """Returns ``local``, or a detached alias of it that requires a gradient.

    Returns the alias if ``graded`` is True, but a floating-point ``local`` requires no gradient. All ranks call it, so
    that ``requires_grad`` is equal on them.
    """
    if not graded or local.requires_grad or not (local.is_floating_point() or local.is_complex()):
        return local
    with torch._C.DisableTorchFunction():
        return local.detach().requires_grad_()


def requires_grad(leaf: Any) -> bool:
    """Returns True for a tensor that requires a gradient."""
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _twin(value: Any) -> Any:
    if type(value) is PlacedTensor and value.local.is_meta:
        return value.local
    if isinstance(value, torch.device):
        return torch.device("meta")
    return _shape_only(value) if isinstance(value, Tensor) else value


def _check_meta(func: Function, args: Any, kwargs: Any) -> bool:
    copies = mapped(lambda one: _twin(one).detach() if isinstance(one, Tensor) else _twin(one), (args, kwargs))
    try:
        with apart(), torch.no_grad():
            func(*copies[0], **copies[1])
    except Exception as error:
        raise NoRuleError(f"the shapes of the results are not known without content: {error}") from None
    return True


def _on_all(func: Function, args: Any, kwargs: Any, name: str) -> Any:
    args, kwargs = mapped(lambda one: one.everywhere(name) if type(one) is PlacedTensor else one, (args, kwargs))
    return func(*args, **kwargs)


def mapped(change: Callable[[Any], Any], values: Any) -> Any:
    """Returns ``values`` with each leaf replaced by ``change(leaf)``; a tensor of any subclass is a leaf."""
    return tree_map(change, values, is_leaf=lambda one: isinstance(one, Tensor))
