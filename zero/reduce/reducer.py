"""Base class of gradient reducers, and the hooks that take each complete gradient from its parameter."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from engine.errors import EngineError
from engine.kernels.dispatch import MainGradients, OpenSum
from engine.parallel.comm.comm import Comm, Pending
from engine.parallel.model.placeholders import plan_as_trainable
from engine.parallel.trace.absent_parameter import AbsentParameter
from engine.zero.flat_buckets import FlatBucket
from engine.zero.offload.host_copies import HostCopies
from engine.zero.reduce.encoded_reduction import EncodedReduction
from engine.zero.reduce.gradient_guard import plain_grad, set_plain_grad

logger = logging.getLogger("trine")

Take = Callable[[str, Tensor], None]
"""Function (parameter name, gradient) called for each gradient of a backward; dense, in the parameter's shape."""


class EngineHook(partial[None]):
    """Callable that an engine registers as a post-accumulate-grad hook. Its class distinguishes it from hooks of the
    user.
    """


def check_own_hooks(name: str, parameter: Tensor, known: int) -> None:
    """Checks that a parameter has at most ``known`` post-accumulate-grad hooks, the number that this engine has
    registered.

    Raises:
        EngineError: another engine trains the parameter, or the user registered a hook, which would find no gradient.
    """
    hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)  # torch leaves it untyped
    if not hooks or len(hooks) <= known:
        return
    if sum(isinstance(hook, EngineHook) for hook in hooks.values()) > known:
        raise EngineError(
            f"another engine trains this model already (parameter {name!r}), and a model belongs to one engine; call "
            "close() of that one before, or build a new model (also in a notebook cell that runs twice)."
        )
    raise EngineError(
        f"parameter {name!r} has a hook for its accumulated gradient (register_post_accumulate_grad_hook), which the "
        "engine keeps in its own buckets; remove the hook, and use register_hook for the gradient of one backward, or "
        "eng.gradients() before step()."
    )


class BucketGradient:
    """Gradient of one parameter, summed in a slice of a flat bucket. The matrix products of a backward add to the slice
    in place.

        backward of a layer    dx | db | bucket += dy' x
        its weight's node      the bucket is complete: its reduction is launched directly behind that kernel
        autograd               the layer below

    The node of autograd that accumulates the weight marks a sum as complete: it waits for all uses, whether products
    have added them or a gradient arrives, and runs before the layer below. The hook of :class:`GradientHooks` hears of
    it, also where no gradient has come: a hook for each backward would take 3 us a weight.
    """

    def __init__(self, name: str, parameter: nn.Parameter, sums: "Reducer") -> None:
        self.name, self.parameter, self._sums = name, parameter, sums
        self._waits = False
        """True between the first product of a backward and the parameter's node."""

    def begin(self, node: Any | None) -> OpenSum | None:
        """Returns the parameter's slice of the bucket for in-place additions, with a flag: True if it contains a sum
        already. Returns None if the backward must return a separate gradient tensor.

        ``node``: the parameter's autograd node; None: the product runs outside autograd.
        """
        return self._sums.open_sum(self.name, node)

    def end(self, node: Any | None) -> None:
        """Records that one matrix product has added to the parameter's slice of its bucket. The sum is complete once
        the autograd node ``node`` has run; at once if None.
        """
        self._sums.added(self.name)
        if node is None:
            self._sums.complete(self.name)
        else:
            self._waits = True

    def forget(self) -> None:
        """Stops waiting for the parameter's autograd node, and does not mark the sum as complete."""
        self._waits = False

    def all_done(self) -> None:
        """Records that the parameter's autograd node has run in this backward. A sum in the parameter's slice of the
        bucket is then complete.
        """
        if self._waits:
            self._waits = False
            self._sums.complete(self.name)


class GradientHooks:
    """Post-accumulate-grad hooks that pass each gradient of an engine backward to the callback ``take`` (parameter
    name, gradient) and then clear ``param.grad``.

    ``products``: parameter name -> gradient to which matrix products add in place. ``start``: callback for a gradient
    outside of :meth:`backward`; it may enter :meth:`backward`. If it does not, the gradient stays in ``param.grad``.
    ``warns``: True to log the first gradient that stays.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], take: Take, start: Callable[[], None] | None,
        products: Mapping[str, BucketGradient], warns: bool = False,
    ) -> None:  # fmt: skip
        self._parameters, self._products = parameters, products
        self._take, self._start, self._warns = take, start, warns
        self.open = False
        """True during a backward with gradients for the engine."""
        self._told = not warns
        self._handles = []
        for name, parameter in parameters.items():
            untyped: Any = parameter  # torch leaves the method untyped
            self._handles.append(untyped.register_post_accumulate_grad_hook(EngineHook(self._arrive, name)))
            plan_as_trainable(parameter, True)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Returns a context for one backward, in which gradients go to ``take``. Values of ``param.grad`` from before
        the context are removed at its start, and restored at its end.
        """
        with torch._C.DisableTorchFunctionSubclass():  # freed parameters would run code of their class
            for name, parameter in self._parameters.items():
                check_own_hooks(name, parameter, 1)
            users = [(p, p.grad) for p in self._parameters.values() if p.grad is not None]
        for parameter, _ in users:
            self._warn(parameter)
            parameter.grad = None
        self.open = True
        try:
            yield
        finally:
            self.open = False
            for parameter, grad in users:
                parameter.grad = grad

    @property
    def frozen(self) -> frozenset[str]:
        """Names of parameters that were trainable when the engine was built, and are frozen (``requires_grad`` False)
        at present.
        """
        return frozenset(name for name, parameter in self._parameters.items() if not parameter.requires_grad)

    def remove(self) -> None:
        """Removes the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        for parameter in self._parameters.values():
            plan_as_trainable(parameter, False)

    def _warn(self, parameter: Tensor) -> None:
        if not self._warns or plain_grad(parameter) is None:
            return
        self._warns = False
        name = next(name for name, known in self._parameters.items() if known is parameter)
        logger.warning(
            "parameter %r has a gradient of its own (loss.backward(), or a grad that was set), which no step of the "
            "engine uses; call eng.backward(loss) and eng.step(), or eng.train_batch(batch).",
            name,
        )

    def _arrive(self, name: str, parameter: Tensor) -> None:
        if not self.open and self._start is not None:
            self._begin(parameter, self._start)
        if not self.open:
            self._warn(parameter)
            return  # a gradient of the user's own backward
        product, grad = self._products.get(name), parameter.grad
        if grad is None:
            if product is not None:
                product.all_done()
            return
        if product is not None:
            product.forget()
        _check_gathered(name, parameter)
        grad, parameter.grad = grad.detach(), None  # with create_graph, a gradient has a graph
        self._take(name, grad.to_dense() if grad.layout != torch.strided else grad)

    def admits(self, name: str, node: Any | None) -> bool:
        """Returns True if a matrix product may add directly to the gradient sum of parameter ``name``: an engine
        backward is open, and the parameter is neither frozen nor hooked by the user.

        ``node``: autograd node of the parameter, or None outside autograd.
        """
        parameter = self._parameters[name]
        if not self.open and self._start is not None:
            self._begin(parameter, self._start)
        if not self.open or not parameter.requires_grad:
            return False
        if parameter._backward_hooks:
            self._tell_hook(name)
            return False
        if node is not None:
            _check_gathered(name, parameter)
        return True

    def _tell_hook(self, name: str) -> None:
        if not self._told:
            logger.warning(
                "parameter %r has a hook (register_hook), so its gradient is made apart and then added to its bucket, "
                "which takes memory and time; all other weights are added to by their products.",
                name,
            )
        self._told = True

    @staticmethod
    def _begin(parameter: Tensor, start: Callable[[], None]) -> None:
        """Begins the backward of the gradient of ``parameter``, if none is open; it does not set ``grad`` aside."""
        grad = plain_grad(parameter)
        set_plain_grad(parameter, None)
        try:
            start()
        finally:
            set_plain_grad(parameter, grad)


def _check_gathered(name: str, parameter: Tensor) -> None:
    """Refuses a gradient that was computed from freed memory.

    Raises:
        EngineError: the parameter is sharded and not gathered.
    """
    if issubclass(type(parameter), AbsentParameter):  # isinstance would run code of torch's Parameter
        raise EngineError(
            f"parameter {name!r} got a gradient while it was not gathered (ZeRO 3), so the gradient is invalid: "
            "its module returns tensors that the engine cannot find; return "
            "tensors, or lists, tuples, dicts or objects of tensors."
        )


SumPartial = Callable[[Mapping[str, Tensor]], None]


BackwardPart = Literal["whole", "input", "weight"]


class Backward(NamedTuple):
    """Description of one backward, for one pipeline stage and one microbatch. A half of a split backward computes only
    input gradients or only weight gradients.
    """

    last: bool
    """True for the expected last backward of a stage in a step."""
    part: BackwardPart = "whole"
    stage: int = 0
    microbatch: int = 0
    further: bool = False
    """True for a backward after the expected last one: all buckets are reduced again."""
    unequal: bool = False
    """True if data ranks called different modules in the forward (ZeRO 3). Buckets are then reduced after the backward,
    since a reduction and a gather could wait for each other.
    """


@dataclass(frozen=True, slots=True)
class ReducerSetup:
    """Constructor arguments that all reducers share."""

    buckets: Sequence[FlatBucket]
    """This rank's flat buckets of trainable parameters."""
    parameters: Mapping[str, nn.Parameter]
    """Trainable parameters by name."""
    comm: Comm
    """Communication of gradients over axis dp, label "gradients"."""
    wire: torch.dtype | None = None
    """Dtype of sent gradients; None: the accumulation dtype."""
    sum_partial: SumPartial | None = None
    """Function that sums partial gradients by name, in place, over tensor ranks."""
    start: Callable[[], None] | None = None
    """Function that opens a backward context when a gradient arrives outside of one; None: not called."""
    main: MainGradients | None = None
    """Registry of main gradients for products of a backward; None: every gradient is computed separately."""
    encoded: Mapping[int, EncodedReduction] = field(default_factory=dict)
    """Encoded reductions by bucket index."""
    copies: HostCopies = field(default_factory=lambda: HostCopies(()))
    """Copies of reduced gradients to the host, for host-updated buckets."""


class Reducer(ABC):
    """Base class of gradient reducers, which sum a step's gradients over microbatches and data ranks into flat buckets.
    It owns the gradient hooks, casts gradients to the communication dtype, and sums gradients of tied parameters over
    stages.
    """

    def __init__(self, setup: ReducerSetup) -> None:
        self._comm, self._buckets = setup.comm, setup.buckets
        self._copies = setup.copies if setup.copies.any else None
        grid = setup.comm.grid
        self._dtype = setup.wire if grid.size(grid.sums) > 1 else None
        self._encoded = setup.encoded
        self._sum_partial = setup.sum_partial
        self._abandoned: list[Pending] = []
        names = [slot.name for flat in setup.buckets for slot in flat.bucket.slots]
        trained = {name: setup.parameters[name] for name in names}
        self.names = frozenset(names)
        """Names of this rank's parameters with gradients to reduce."""
        self.unused = frozenset[str]()
        """Names of the parameters in ``names`` that got no gradient in the finished step."""
        self._seen: set[str] = set()
        self._kept_sums: list[tuple[FlatBucket, slice, Tensor]] = []
        """Sums of this step that were completed before its end."""
        self._kept_names: frozenset[str] = frozenset()
        """Parameters with a gradient in them."""
        self._watched: list[Tensor] | None = None
        """While not None: for each gradient of a backward, whether it is finite, on the device."""
        self._observer: Take | None = None
        self._main = setup.main
        self._products: dict[str, BucketGradient] = {}
        if setup.main is not None:
            self._products = {name: BucketGradient(name, parameter, self) for name, parameter in trained.items()}
            for product in self._products.values():
                setup.main.register(product.parameter, product)
        told = setup.comm.grid.rank == 0
        self._hooks = GradientHooks(trained, self.take, setup.start, self._products, warns=told)

    @abstractmethod
    def backward(self, which: Backward) -> AbstractContextManager[None]:
        """Returns a context for the backward ``which``. Gradients computed inside are added to the buckets."""

    @abstractmethod
    def finish(self) -> None:
        """Completes the reduction of every bucket at the end of a step. All data ranks must call it."""

    @abstractmethod
    def land(self) -> None:
        """Waits for the reductions that have been started, without starting the remaining ones."""

    @abstractmethod
    def reset(self) -> None:
        """Discards the gradients of an unfinished step."""

    def take(self, name: str, grad: Tensor) -> None:
        """Adds a gradient of the running backward to the sum of parameter ``name``, for a later reduction."""
        self._seen.add(name)
        if self._watched is not None:
            self._watched.append(grad.isfinite().all())
        if self._observer is not None:
            self._observer(name, grad)
        self._add(name, grad)

    @abstractmethod
    def expect(self, backwards: int) -> None:
        """Sets the number of backwards of each stage in this step, if it differs from the usual number. All data ranks
        must set the same number.
        """

    @property
    def frozen(self) -> frozenset[str]:
        """Names of parameters that were trainable when the engine was built, and are frozen (``requires_grad`` False)
        at present.
        """
        return self._hooks.frozen

    def _add(self, name: str, grad: Tensor) -> None:
        """Adds a gradient to its bucket."""
        opened = self._sum(name)
        assert opened is not None
        if opened.holds:
            opened.into.add_(grad)
        else:
            opened.into.copy_(grad)
        self._note_sum(name)
        self.complete(name)

    def open_sum(self, name: str, node: Any | None) -> OpenSum | None:
        """Returns the memory for the gradient sum of parameter ``name``, for in-place additions, with a flag: False if
        the memory has no sum yet. Returns None if the backward must return a separate gradient tensor.

        ``node``: autograd node of the parameter, or None outside autograd.
        """
        if self._observer is not None or not self._hooks.admits(name, node):
            return None
        return self._sum(name)

    @abstractmethod
    def _sum(self, name: str) -> OpenSum | None:
        """Returns the memory for a gradient of the running backward; see :meth:`open_sum`."""

    def added(self, name: str) -> None:
        """Records that a matrix product has added to the gradient sum of parameter ``name``. With :meth:`watch` on,
        checks the sum for :meth:`found_nonfinite`.
        """
        self._seen.add(name)
        self._note_sum(name)
        if self._watched is not None and (opened := self._sum(name)) is not None:
            self._watched.append(opened.into.isfinite().all())

    @abstractmethod
    def _note_sum(self, name: str) -> None:
        """Notes that the sum of a parameter has content."""

    @abstractmethod
    def complete(self, name: str) -> None:
        """Records that the gradient sum of parameter ``name`` is complete for the running backward."""

    def keep(self) -> None:
        """Copies the reduced gradients after :meth:`finish`, so that the step can have more backwards. The next
        ``finish`` adds the copies to its result.
        """
        self._kept_sums = [(flat, self._part(flat), flat.gradient(self._part(flat)).clone()) for flat in self._buckets]
        self._kept_names = self.names - self.unused

    @abstractmethod
    def _part(self, flat: FlatBucket) -> slice:
        """Returns the elements with completed sums on this rank."""

    def _add_kept(self) -> None:
        """Adds the sums that were completed before the end of the step."""
        for flat, part, sums in self._kept_sums:
            flat.gradient(part).add_(sums)
            self._changed(flat)
        if self._copies is not None:
            self._copies.join()

    def _changed(self, flat: FlatBucket) -> None:
        """Notes that the sums of a bucket were written, so that a copy on the host is stale."""
        if self._copies is not None:
            self._copies.changed(flat)

    def _follow_copy(self, flat: FlatBucket, reduction: Pending) -> None:
        """Copies the sums to a host that updates them, once they are reduced."""
        if self._copies is not None:
            self._copies.follow(flat, reduction)

    def _forget(self) -> None:
        """Forgets kept gradients, and matrix products that wait for their nodes."""
        self._kept_sums, self._kept_names = [], frozenset()
        for product in self._products.values():
            product.forget()

    def remove(self) -> None:
        """Removes the gradient hooks from the parameters; matrix products then return gradient tensors to autograd,
        instead of adding to buckets.
        """
        self._hooks.remove()
        self._forget()
        if self._main is not None:
            self._main.clear()

    def watch(self, on: bool) -> None:
        """Enables or disables a check that every gradient of this rank is finite; :meth:`found_nonfinite` returns its
        result.
        """
        self._watched = [] if on else None

    def observe(self, observer: Take | None) -> None:
        """Sets a callback (parameter name, gradient) for each gradient before its reduction; None removes it. While it
        is set, matrix products return gradient tensors instead of adding to buckets.
        """
        self._observer = observer

    @property
    def residuals(self) -> Mapping[str, Tensor]:
        """Quantization errors of gradient reductions, fp32, with one row per shard that this rank encodes. Keys are
        "BUCKET.HOP": bucket index, and 0 or 1 for the first or second all-to-all.
        """
        return {
            f"{index}.{hop}": residual
            for index, reduction in self._encoded.items()
            for hop, residual in enumerate(reduction.residuals)
        }

    def found_nonfinite(self) -> bool:
        """Returns True if a gradient since the previous call was not finite; False while :meth:`watch` is off. The host
        waits for the device.
        """
        watched, self._watched = self._watched, self._watched and []
        return bool(watched) and not torch.stack(watched or []).all()

    def _on_wire(self, grads: Tensor) -> Tensor:
        """Returns ``grads`` as they are sent: themselves, or a copy in the dtype of the wire."""
        return grads if self._dtype is None else grads.to(self._dtype)

    def _settle(self) -> None:
        """Waits for the running collectives of an unfinished step."""
        while self._abandoned:
            self._abandoned.pop().wait()

    def _add_ties(self, flat: FlatBucket, kept: slice) -> None:
        """Sums the reduced gradients of tied parameters over the stages that own them; every owner makes the same
        update."""
        if flat.bucket.ties:
            self._comm.sum_over_stages(flat.gradient(kept), flat.bucket.ties, "ties").wait()
            self._changed(flat)
