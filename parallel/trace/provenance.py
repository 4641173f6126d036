"""Origin of every tensor in a traced forward: a traced value, a tensor inside a call, a parameter, or free.

number      id of a tensor -> the value it currently is; a write in place gives every name of the memory a new one
inside      id of a tensor -> the call that made it and has not returned it (yet); reading it elsewhere is a leak
parameters  id of a parameter -> its first name
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from engine.errors import PlanError
from engine.parallel.trace.meta_tensors import MetaTwins
from engine.parallel.trace.model_trace import (
    Constant,
    FreeTensor,
    FromArgument,
    FromParameter,
    FromValue,
    Leaf,
    ModelTrace,
    Value,
)

_PLAIN = int | float | complex | bool | str | bytes | None | torch.dtype | torch.device | torch.Size


@dataclass
class OpenCall:
    """Module call in progress, with the traced tensors (serial numbers) and parameters (names) read so far."""

    index: int
    unit: str
    inputs: list[int]
    parameters: set[str]
    rewritten: set[int] = field(default_factory=set)
    """Ids of outer values with memory that the call has written."""


@dataclass(frozen=True)
class ValueSource:
    """Origin of a traced tensor: index of the module call or operation that made it, and serial numbers of the traced
    tensors that it read.
    """

    maker: Literal["call", "glue"]
    index: int
    inputs: tuple[int, ...]
    parameters: frozenset[str] = frozenset()


class UncutPath(NamedTuple):
    """Code between a model's blocks that works only without pipeline parallelism, because it cannot be divided over
    stages.
    """

    sentence: str
    """Reason and remedy, a whole sentence."""
    what: str
    """Effect on a trace, a phrase that completes a sentence."""


class UncutPathError(PlanError):
    """Error for a model that runs on one pipeline stage but cannot be divided into several.

    ``trace``: the trace of the model; None if the forward was not traced to its end.
    """

    def __init__(self, path: UncutPath, trace: ModelTrace | None = None) -> None:
        super().__init__(path.sentence)
        self.what, self.trace = path.what, trace


class TensorProvenance:
    """Record of the origin of every tensor in one traced forward, and of code that prevents a division into pipeline
    stages.
    """

    def __init__(self, model: nn.Module, twins: MetaTwins) -> None:
        self.values: list[Value] = []
        self.number: dict[int, int] = {}
        self.inside: dict[int, OpenCall] = {}
        self.parameters: dict[int, str] = {}
        self.problems: list[str | UncutPath] = []
        self.leaks: dict[str, str] = {}
        """For each unit that leaks: a sentence about who reads a tensor that it made and did not return."""
        self._twins = twins
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.parameters.setdefault(id(parameter), name)
        self._buffers = {id(buffer): name for name, buffer in model.named_buffers()}
        for buffer in model.buffers():
            twins.notice(buffer)

    def knows(self, tensor: Tensor) -> bool:
        """Returns True if ``tensor`` is a parameter or depends on parameters, False if it is computed from the batch
        alone.
        """
        return id(tensor) in self.number or id(tensor) in self.inside or id(tensor) in self.parameters

    def depends_on_calls(self, numbers: Iterable[int]) -> bool:
        """Returns True if any of the traced tensors with the serial numbers ``numbers`` depends on a module call."""
        values = [self.values[number] for number in numbers]
        return any(value.maker == "call" or self.depends_on_calls(value.inputs) for value in values)

    def names_among(self, tensors: Iterable[Tensor]) -> frozenset[str]:
        """Returns the names of the parameters among ``tensors``."""
        return frozenset(self.parameters[id(tensor)] for tensor in tensors if id(tensor) in self.parameters)

    def buffers_among(self, tensors: Iterable[Tensor]) -> frozenset[str]:
        """Returns the names of the buffers among ``tensors``."""
        return frozenset(self._buffers[id(tensor)] for tensor in tensors if id(tensor) in self._buffers)

    def read(self, tensors: Iterable[Tensor], reader: str, here: OpenCall | None) -> tuple[list[int], set[str]]:
        """Returns the serial numbers of the traced tensors, and the names of the parameters, in ``tensors``: the inputs
        of an operation or call. Records a problem for a tensor made inside another call and not returned by it.

        ``reader``: name of the operation or call, for error messages. ``here``: the module call in progress, or None.
        """
        inputs: dict[int, None] = {}
        parameters = set()
        for tensor in tensors:
            if id(tensor) in self.parameters:
                parameters.add(self.parameters[id(tensor)])
            if id(tensor) in self.number:
                inputs[self.number[id(tensor)]] = None
            elif self.inside.get(id(tensor), here) is not here:
                self._note_leak(tensor, reader)
        return list(inputs), parameters

    def new_value(self, tensor: Tensor, source: ValueSource, movable: bool = True) -> int:
        """Registers ``tensor`` as a new traced tensor and returns its new number.

        ``movable``: True if a pipeline stage can send the tensor to another stage.
        """
        twin, number = self._twins.of(tensor), len(self.values)
        value = Value(
            number=number,
            maker=source.maker,
            index=source.index,
            inputs=source.inputs,
            parameters=source.parameters,
            shape=tuple(twin.shape),
            stride=torch.empty_like(twin).stride(),  # dense, in the same order of dims
            dtype=twin.dtype,
            grad=twin.requires_grad,
            movable=movable,
        )
        self.values.append(value)
        self.inside.pop(id(tensor), None)
        self.number[id(tensor)] = number
        return number

    def rewrite(self, sharing: list[Tensor], source: ValueSource) -> None:
        """Registers the tensors ``sharing``, which share one memory, as new traced tensors after an in-place write to
        this memory. ``source``: the operation that wrote, with its inputs.
        """
        for tensor in sharing:
            inputs, before = source.inputs, self.forget(tensor)
            if before is not None:
                inputs = tuple(dict.fromkeys((*inputs, before)))
            self.new_value(tensor, replace(source, inputs=inputs), movable=len(sharing) == 1)

    def forget(self, tensor: Tensor) -> int | None:
        """Marks the traced tensor ``tensor`` as overwritten in place, and removes its number. Returns the number, or
        None if ``tensor`` had none.
        """
        number = self.number.pop(id(tensor), None)
        if number is not None:
            self.values[number] = replace(self.values[number], rewritten=True)
        return number

    def hook(self, tensor: Tensor) -> None:
        """Records that user code has registered a gradient hook on ``tensor``. Ignores tensors that are not traced."""
        number = self.number.get(id(tensor))
        if number is not None:
            self.values[number] = replace(self.values[number], hooked=True)

    def output_leaf(self, leaf: Any, arguments: list[Any]) -> Leaf:
        """Returns the source of ``leaf``, one output leaf of a call or operation.

        ``arguments``: the leaves of the call's arguments.
        """
        if isinstance(leaf, Tensor) and id(leaf) in self.parameters:
            return FromParameter(self.parameters[id(leaf)])
        position = position_of(leaf, arguments)
        if position is not None:
            return FromArgument(position)
        return FromValue(self.number[id(leaf)]) if isinstance(leaf, Tensor) else Constant(leaf)

    def result_leaf(self, leaf: Any) -> Leaf:
        """Returns the source of one leaf of the traced program's result, such as a traced tensor or a parameter."""
        if not isinstance(leaf, Tensor):
            self.refuse_hidden(leaf, [], "the program returns")
            return Constant(leaf)
        if id(leaf) in self.parameters:
            return FromParameter(self.parameters[id(leaf)])
        if id(leaf) in self.inside:
            self._note_leak(leaf, "the result of the program")
        if id(leaf) in self.number:
            return FromValue(self.number[id(leaf)])
        return FreeTensor(tuple(leaf.shape), leaf.dtype)

    def refuse_hidden(self, leaf: Any, arguments: list[Any], who: str) -> None:
        """Records a problem if ``leaf``, an output of a call, is an object of unknown class that contains tensors of
        the model.

        ``who``: beginning of the error sentence; ``arguments``: leaves of the call's arguments, always accepted as
        outputs.
        """
        if isinstance(leaf, Tensor | _PLAIN) or position_of(leaf, arguments) is not None:
            return
        if any(self.knows(tensor) for tensor in _hidden_tensors(leaf, depth=4)):
            self.problems.append(
                f"{who} a {type(leaf).__name__} that holds tensors of the model and is not a pytree, so that they "
                "cannot be sent; return tensors, tuples, lists or dicts, or register the class with "
                "torch.utils._pytree."
            )

    def _note_leak(self, tensor: Tensor, reader: str) -> None:
        unit = self.inside[id(tensor)].unit
        self.leaks.setdefault(
            unit,
            f"{reader} reads a tensor that unit {unit!r} made and did not return, so no stage can send it; "
            "return it from the unit's forward.",
        )


def position_of(leaf: Any, arguments: list[Any]) -> int | None:
    """Returns the index of ``leaf`` among ``arguments``, compared by identity. Returns None if it is absent, or a plain
    constant such as a number.
    """
    if isinstance(leaf, _PLAIN):
        return None
    return next((position for position, argument in enumerate(arguments) if argument is leaf), None)


def _hidden_tensors(thing: Any, depth: int) -> Iterable[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
    elif depth and not isinstance(thing, nn.Module | type):
        parts = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list | tuple) else ()
        for part in (*parts, *getattr(thing, "__dict__", {}).values()):
            yield from _hidden_tensors(part, depth - 1)
