"""Records one forward: a function mode that sees every torch function, and every call of a unit.

User code holds stand-ins for values, and operations on them run on meta twins (see ``meta_tensors``); ``provenance``
knows where every tensor comes from.

                        touches a value or parameter?
    operation  --- no ------------------------------->  runs for real: free
               --- yes, in a call ------------------->  runs on twins; the call depends on its reads
               --- yes, between calls --------------->  runs on twins; becomes Glue, its results become Values
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from engine.errors import PlanError
from engine.kernels.device import is_host
from engine.parallel.model.blocks import Units
from engine.parallel.model.user_code import call_user_code
from engine.parallel.trace.meta_tensors import MetaTwins, NeedsContentError
from engine.parallel.trace.model_trace import Call, FreeTensor, Glue, Material, OnZeros, Recipe, Sample
from engine.parallel.trace.operation_meter import META, OperationMeter
from engine.parallel.trace.provenance import OpenCall, TensorProvenance, UncutPath, ValueSource, position_of
from engine.parallel.trace.torch_function import (
    Function,
    Operation,
    inside_transform,
    map_leaves,
    plain_leaves,
    user_place,
    wrapper_among,
)

_DEVICE_TYPES = ("cpu", "cuda", "meta", "mps", "xpu", "xla", "hpu", "ipu", "mtia", "maia", "vulkan")


class Recorder(TorchFunctionMode):
    """Torch function mode that records one forward: calls of units (blocks and other outermost modules), and operations
    between units.

    ``calls`` and ``glue`` list these records. ``provenance`` has the origin of every tensor.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Units,
        device: torch.device,
        material: Material | None = None,
        drawn: float | None = None,
        ones: bool = False,
    ) -> None:
        super().__init__()
        self.random_read: str | None = None
        """First place where code between units reads a random number on the host, or None."""
        self.reads_batch = False
        """True after code between units has read content of the batch, as numbers or shapes."""
        self.shape_read: str | None = None
        """First place where code between units makes a tensor whose shape depends on content, or None."""
        self.calls: list[Call] = []
        self.glue: list[Glue] = []
        self.meter = OperationMeter()
        self._twins = MetaTwins(device)
        self.provenance = TensorProvenance(model, self._twins)
        self._units, self._device, self._material = units, device, material
        self._weighed: set[int] = set()
        self._call: OpenCall | None = None
        self._quiet = False
        self._read_by_glue: set[str] = set()
        self._drawn, self._random, self._ones = drawn, set[int](), ones
        self._on_zeros: dict[tuple[str, str], str] = {}

    @property
    def on_zeros(self) -> tuple[OnZeros, ...]:
        """Operations that ran on zeros because they do not run on meta tensors. Has one entry per operation and unit,
        or line of code between units.
        """
        return tuple(OnZeros(name, where, why) for (name, where), why in self._on_zeros.items())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wrapper = wrapper_among(args, kwargs)
        if wrapper is not None:
            with self:  # record the local operations into which a global tensor resolves this one
                return wrapper.__torch_function__(func, types, args, kwargs)
        return self.show(func, args, kwargs or {})

    def show(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one torch function and returns the result that user code gets. A function of tensors that depend on
        parameters runs without data, and is recorded if it runs outside units (blocks and other outermost modules).

        Inside another recorded function, it only runs the function.
        """
        if self._quiet:
            return call_user_code(function, args, kwargs)
        self._quiet = True
        try:
            return self._see(Operation(function, args, kwargs))
        except (NotImplementedError, RuntimeError) as error:
            _refuse_transform("an operation on activations", error)
            raise
        finally:
            self._quiet = False

    def call(self, unit: str, forward: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records one call of the unit (block or other outermost module) ``unit``, runs its ``forward`` and returns its
        output. Does not record units inside another unit.
        """
        if self._call is not None:  # a unit inside a unit
            return call_user_code(forward, args, kwargs)
        if self._quiet:
            self.provenance.problems.append(
                f"unit {unit!r} is called inside an autograd.Function, which hides what it reads and makes; call it "
                "outside, or checkpoint it with torch.utils.checkpoint."
            )
            return call_user_code(forward, args, kwargs)
        self._quiet = True
        try:
            _refuse_transform(f"unit {unit!r}")
            return self._record_call(unit, forward, args, kwargs)
        finally:
            self._quiet = False

    def finish(self, result: Any) -> Recipe:
        """Returns the structure of ``result``, the return value of the traced program, with the source of each leaf.
        Call it at the end of the recording.
        """
        leaves, spec = tree_flatten(result)
        recipe = Recipe(spec, tuple(self.provenance.result_leaf(leaf) for leaf in leaves))
        if next(recipe.values(), None) is None:
            self.provenance.problems.append(
                "nothing that the forward and the loss returned depends on a parameter; return a loss computed from "
                "the output of the model."
            )
        return recipe

    def used_by_glue(self, module: nn.Module) -> bool:
        """Returns True if code outside units (blocks and other outermost modules) reads a parameter of ``module``."""
        return any(self.provenance.parameters[id(parameter)] in self._read_by_glue for parameter in module.parameters())

    # ---- operations

    def _see(self, operation: Operation) -> Any:
        if operation.is_metadata:
            return self._answer(operation)
        if inside_transform() and any(self.provenance.knows(_unwrapped(tensor)) for tensor in operation.tensors):
            _refuse_transform("an operation on activations")
        if operation.is_blank or not any(map(self.provenance.knows, operation.tensors)):
            return self._run_free(operation)
        return self._record_glue(operation) if self._call is None else self._run_inside(operation, self._call)

    def _answer(self, operation: Operation) -> Any:
        """Metadata from the twin, except for the device, which is that of the run."""
        name = operation.name
        if not any(self.provenance.knows(tensor) or tensor.is_meta for tensor in operation.tensors):
            return operation.run()
        if name == "get device":
            return self._device
        if name == "get_device":
            return -1 if is_host(self._device) else self._device.index or 0
        if name.startswith("get is_") and name.removeprefix("get is_") in _DEVICE_TYPES:
            return name == f"get is_{self._device.type}"
        if operation.asks_for_the_object:
            return operation.run()
        if operation.hooks and self._call is None:
            self.provenance.hook(operation.tensors[0])
        return operation.run_with(self._twins.swap(operation.args), operation.kwargs)

    def _run_free(self, operation: Operation) -> Any:
        if operation.kwargs.get("device") == META:
            kwargs = {**operation.kwargs, "device": self._device}
            operation = Operation(operation.function, operation.args, kwargs)
        if any(tensor.is_meta for tensor in operation.tensors):  # the model or batch is on meta: only shapes are known
            out, _ = self._run_on_twins(operation)
            out = map_leaves(self._zeros, out)
        else:
            out = operation.run()
        for leaf in (*operation.tensors, *plain_leaves(out)):
            if isinstance(leaf, Tensor) and not _is_wrapped(leaf):
                self._twins.notice(leaf)
        if self._call is None:
            self.reads_batch |= operation.tells_content(out)
            self._follow_random(operation, out)
        return out

    def _follow_random(self, operation: Operation, out: Any) -> None:
        """Notes where a random number drawn without inputs becomes a Python number, which may choose the path."""
        tensors = [leaf for leaf in plain_leaves(out) if isinstance(leaf, Tensor)]
        if operation.draws and self._drawn is not None:
            for tensor in tensors:
                tensor.fill_(self._drawn)
        if not operation.draws and not any(id(tensor) in self._random for tensor in operation.tensors):
            return
        self._random.update(map(id, tensors))
        if not tensors and self.random_read is None:
            self.random_read = user_place()

    def _zeros(self, leaf: Any) -> Any:
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device=self._device) if isinstance(leaf, Tensor) else leaf

    def _run_inside(self, operation: Operation, call: OpenCall) -> Any:
        inputs, parameters = self.provenance.read(operation.tensors, f"{operation.name} in {call.unit}", call)
        call.inputs += inputs
        call.parameters |= parameters
        out, _ = self._run_on_twins(operation)
        for target in operation.written:
            for tensor in self._twins.sharing(target):
                if self.provenance.forget(tensor) is not None:
                    call.rewritten.add(id(tensor))
                self.provenance.inside[id(tensor)] = call
        return self._give(out, operation, lambda tensor: self.provenance.inside.setdefault(id(tensor), call))

    def _record_glue(self, operation: Operation) -> Any:
        place, event = user_place(), len(self.calls) + len(self.glue)
        inputs, parameters = self.provenance.read(operation.tensors, f"{operation.name} at {place}", None)
        self._read_by_glue |= parameters
        source = ValueSource("glue", len(self.glue), tuple(inputs), frozenset(parameters))
        arguments = map_leaves(self._described, (operation.args, dict(operation.kwargs)))
        first, flops = len(self.provenance.values), self.meter.flops
        with self._weighing(operation):
            out, on_host = self._run_on_twins(operation)
        self._note_problems(operation, place, on_host, source)
        writes, buffers = self._rewrite(operation, source)
        result = self._give(out, operation, lambda tensor: self.provenance.new_value(tensor, source))
        leaves, spec = tree_flatten(result)
        self.glue.append(
            Glue(
                name=operation.name,
                event=event,
                calls_before=len(self.calls),
                makes=tuple(range(first, len(self.provenance.values))),
                output=Recipe(spec, tuple(self.provenance.output_leaf(leaf, operation.leaves) for leaf in leaves)),
                place=place,
                flops=self.meter.flops - flops,
                writes=writes,
                buffers=buffers,
                updates=self._updated(operation),
                random=operation.is_random,
                function=operation.function,
                arguments=arguments,
            )
        )
        return result

    @contextmanager
    def _weighing(self, operation: Operation) -> Iterator[None]:
        """Measures the bytes that glue saves for backward, without memory of parameters and of free tensors."""
        if self._material is None:
            yield
            return
        others = [tensor for tensor in operation.tensors if id(tensor) not in self.provenance.number]
        twins = [twin for twin in map(self._twins.of, others) if twin.layout == torch.strided]
        self._weighed.update(twin.untyped_storage()._cdata for twin in twins)
        sizes: list[int] = []
        weighed = self._weighed  # autograd keeps the hook alive, which must not keep the recorder and its graph alive

        def pack(saved: Tensor) -> Tensor:
            if saved.layout == torch.strided and (storage := saved.untyped_storage())._cdata not in weighed:
                weighed.add(storage._cdata)
                sizes.append(storage.nbytes())
            return saved.detach()  # an output saved as it is would refer to its own node, and keep the graph

        with saved_tensors_hooks(pack, lambda saved: saved):
            yield
        self._material.kept_by_glue.append(sum(sizes))

    def _rewrite(self, operation: Operation, source: ValueSource) -> tuple[tuple[tuple[int, int], ...], frozenset[str]]:
        """New values for the memory that the operation writes, and the buffers among it."""
        writes, buffers = [], frozenset[str]()
        for target in (*operation.written, *operation.statistics):
            sharing = self._twins.sharing(target)
            buffers |= self.provenance.buffers_among(sharing)
            self.provenance.rewrite(sharing, source)
            position = position_of(target, operation.leaves)
            assert position is not None  # a written tensor is always an argument
            writes.append((position, self.provenance.number[id(target)]))
        return tuple(writes), buffers

    def _note_problems(self, operation: Operation, place: str, on_host: bool, source: ValueSource) -> None:
        name, problems = operation.name, self.provenance.problems
        if on_host:
            what = f"{place} reads the content of a tensor on the host ({name}) between units"
            stages = "where only one stage of a pipeline has it; keep it a tensor, or move it into a block."
            problems.append(UncutPath(f"{what}, {stages}", f"{what}, which a forward on shapes does not have"))
        if operation.differentiates:
            what = f"{place} differentiates ({name}) between units"
            stages = "where the graph spans several stages; leave the backward to the engine, or move it into a block."
            problems.append(UncutPath(f"{what}, {stages}", f"{what}, which a forward on shapes does not follow"))
        updated = self._updated(operation)
        if name == "set data" or (updated and self.provenance.depends_on_calls(source.inputs)):
            what = f"parameter {min(updated)!r}" if updated else "a tensor through .data"
            problems.append(
                f"{place} writes {what} in place ({name}) between units, where only one stage of a pipeline would see "
                "it; move it into a block."
            )

    def _updated(self, operation: Operation) -> frozenset[str]:
        """Returns the names of the parameters that share memory with a tensor the operation writes."""
        return self.provenance.names_among(t for target in operation.written for t in self._twins.sharing(target))

    def _run_on_twins(self, operation: Operation) -> tuple[Any, bool]:
        """Returns the result as twins, and True if it is Python content read on the host rather than tensors."""
        # Fall back to real zeros where meta tensors cannot answer: a shape that depends on content, a read on the host
        # (its result is Python content), a kernel without a meta version. A genuine error is raised again by on_zeros;
        # the trace lists all others, because a run with real content may differ.
        try:
            return self._twins.on_meta(operation), False
        except NeedsContentError as error:
            out = self._twins.on_zeros(operation)
            where = f"in {self._call.unit}" if self._call is not None else f"at {user_place()}"
            self._on_zeros.setdefault((operation.name, where), str(error))
            if self._call is None and any(map(self.provenance.knows, operation.tensors)):
                out = self._follow_shape(operation, out)
        tensors = [leaf for leaf in plain_leaves(out) if isinstance(leaf, Tensor)]
        if operation.written and not isinstance(out, tuple | list):
            return (self._twins.write(operation) if tensors else out), False
        return (self._twins.lift(out, operation), False) if tensors else (out, True)

    def _follow_shape(self, operation: Operation, zeros: Any) -> Any:
        """Notes where the shape of a tensor depends on content and may choose the path. Returns ``zeros``, the result
        of ``operation`` on zeros, or its result on ones in a trace that has ones.
        """
        ones = self._twins.on_ones(operation, zeros)
        if ones is None:
            return zeros
        if self.shape_read is None:
            self.shape_read = user_place()
        return ones if self._ones else zeros

    def _give(self, out: Any, operation: Operation, register: Callable[[Tensor], Any]) -> Any:
        """The result for user code: known tensors for known twins, new stand-ins for others, which are registered."""
        known = {id(self._twins.of(tensor)): tensor for tensor in operation.tensors}

        def give(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) in known:
                return known[id(leaf)]
            tensor = self._twins.stand_in(leaf)
            register(tensor)
            return tensor

        return map_leaves(give, out)

    # ---- calls

    def _record_call(self, unit: str, forward: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = plain_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        inputs, parameters = self.provenance.read(tensors, f"a call of {unit!r}", None)
        parameters |= {self.provenance.parameters[id(own)] for own in self._units.modules[unit].parameters()}
        call = OpenCall(len(self.calls), unit, inputs, parameters)
        if self._material is not None:
            self._material.arguments.append(map_leaves(self._sample, (args, kwargs)))
        event, flops = len(self.calls) + len(self.glue), self.meter.flops
        try:
            self._call, self._quiet = call, False
            out = call_user_code(forward, args, kwargs)
        finally:
            self._call, self._quiet = None, True
        source = ValueSource("call", call.index, tuple(dict.fromkeys(call.inputs)))
        writes = self._written_arguments(leaves, call, source)
        self.calls.append(
            Call(
                unit=unit,
                event=event,
                inputs=source.inputs,
                parameters=frozenset(call.parameters),
                flops=self.meter.flops - flops,
                output=self._output_of_call(out, leaves, unit, source),
                writes=writes,
            )
        )
        return out

    def _sample(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not self.provenance.knows(leaf):
            return leaf
        twin, provenance = self._twins.of(leaf), self.provenance
        stride = torch.empty_like(twin).stride()  # dense, in the same order of dims
        source = (
            provenance.parameters[id(leaf)]
            if id(leaf) in provenance.parameters
            else provenance.number.get(id(leaf), -1)
        )
        return Sample(source, tuple(twin.shape), stride, twin.dtype, twin.requires_grad)

    def _described(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and not self.provenance.knows(leaf):
            return FreeTensor(tuple(leaf.shape), leaf.dtype)
        return self._sample(leaf)

    def _written_arguments(self, leaves: list[Any], call: OpenCall, source: ValueSource) -> tuple[tuple[int, int], ...]:
        """Makes a new value for each argument if the call wrote its memory."""
        written = []
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and self.provenance.inside.get(id(leaf)) is call:
                others = [t for t in self._twins.sharing(leaf) if id(t) in call.rewritten and t is not leaf]
                written.append((position, self.provenance.new_value(leaf, source, movable=not others)))
        return tuple(written)

    def _output_of_call(self, out: Any, arguments: list[Any], unit: str, source: ValueSource) -> Recipe:
        provenance = self.provenance
        flat, spec = tree_flatten(out)
        for leaf in flat:
            provenance.refuse_hidden(leaf, arguments, f"unit {unit!r} returns")
            own = isinstance(leaf, Tensor) and position_of(leaf, arguments) is None
            if own and id(leaf) not in provenance.parameters:
                provenance.new_value(leaf, source)
        return Recipe(spec, tuple(provenance.output_leaf(leaf, arguments) for leaf in flat))


def _is_wrapped(tensor: Tensor) -> bool:
    """Returns True for a tensor of a transform, which has no memory of its own."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _unwrapped(tensor: Tensor) -> Tensor:
    """Returns the tensor that a transform was given."""
    while _is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _refuse_transform(what: str, error: Exception | None = None) -> None:
    """Refuses ``what`` inside a transform of torch.func; its tensors have no memory that a trace could follow.

    Raises:
        PlanError: a transform runs.
    """
    if inside_transform():
        raise PlanError(
            f"{user_place()} runs {what} inside a transform of torch.func (vmap, grad, vjp, jvp, jacrev), but "
            "parallel.tensor and parallel.pipeline trace the forward, and the trace cannot enter a transform; compute "
            "this with torch.autograd.grad inside the forward of one transformer block, or use data ranks alone, with "
            "any ZeRO stage."
        ) from error
