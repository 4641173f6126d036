"""One forward of a model as data: the calls in order, and the values that pass between them.

    unit      a module treated as a black box: a block of a chain, or another outermost module with parameters
    call      one invocation of a unit
    glue      a torch function that runs outside units and touches a value or a parameter
    value     a tensor that depends on a parameter; made by a call or by glue
    free      any other tensor (masks, positions, labels): every stage computes it from the batch
    target    a value that the program returns
    event     a call or a glue operation; events are numbered in the order in which they run

    event      0            1            2           3            4          5
              call embed   glue add     call h.0    call h.1     call head  glue cross_entropy
    value            0 ---------> 1 ---------> 2 ---------> 3 ---------> 4 ---------> 5 (target)

A stage is an interval of the calls. Values point forward only, so any interval can be a stage.

A partition is planned for one trace. A later forward that takes another path reads values that are absent here, which
are NaN, or calls units in another order. ``trace_difference`` then names the first event in which two traces differ.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch.utils._pytree import TreeSpec


class FromValue(NamedTuple):
    """Source of a leaf of a traced output: the traced tensor with the serial number ``value``."""

    value: int


class FromArgument(NamedTuple):
    """Source of a pytree leaf of a traced output: the pytree leaf number ``argument`` of the call's arguments."""

    argument: int


class FromParameter(NamedTuple):
    """Origin of one tensor in a traced output: the model's parameter called ``parameter``."""

    parameter: str


class FreeTensor(NamedTuple):
    """Origin of one tensor in a traced output: computed from the batch alone, without parameters."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Constant(NamedTuple):
    """Source of a non-tensor leaf of a traced output: the object ``content`` itself."""

    content: Any


Leaf = FromValue | FromArgument | FromParameter | FreeTensor | Constant


class Sample(NamedTuple):
    """Stand-in (source, shape, dtype) for a parameter, or for a tensor that depends on parameters, in the recorded
    arguments of a call.
    """

    source: int | str
    """Number of the traced value, or name of the parameter."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    grad: bool
    """True if a gradient flows through the argument."""


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""(args, kwargs) of a call, with a Sample in place of each traced value and parameter, and a FreeTensor in place of
other tensors.
"""


@dataclass
class Material:
    """Data of a trace from which time and memory are measured: arguments of the recorded module calls, and the bytes
    that each operation between two of these calls saves for backward.
    """

    arguments: list[Arguments] = field(default_factory=list)
    """Arguments of each call, by call index."""
    kept_by_glue: list[int] = field(default_factory=list)
    """Bytes that each operation between calls saves for backward, without tensors saved earlier."""

    def clear(self) -> None:
        """Discards the recorded data, before another forward is traced."""
        self.arguments.clear()
        self.kept_by_glue.clear()


@dataclass(frozen=True, slots=True)
class Recipe:
    """Output of a traced call: its pytree structure, and the source of each leaf. A rank that skips the call rebuilds
    the output from these sources.
    """

    spec: TreeSpec
    leaves: tuple[Leaf, ...]

    def values(self) -> Iterator[int]:
        """Yields the serial numbers of the traced tensors among the leaves, in leaf order."""
        return (leaf.value for leaf in self.leaves if isinstance(leaf, FromValue))


@dataclass(frozen=True, slots=True)
class Value:
    """Record of a traced tensor that depends on a parameter."""

    number: int
    maker: Literal["call", "glue"]
    index: int
    """Index of the module call or operation that returns this tensor."""
    inputs: tuple[int, ...]
    """Numbers of the traced values that this value is computed from."""
    parameters: frozenset[str]
    """Names of the parameters that the operation reads."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Strides in the unpartitioned model; contiguous if elements would share memory. A receiver with equal strides can
    ``view`` a permuted tensor, and adds in the same order.
    """
    dtype: torch.dtype
    grad: bool
    """True if a gradient flows through the value."""
    movable: bool = True
    """False for memory with several names that is written in place, since one name cannot be sent alone."""
    rewritten: bool = False
    """True if a later operation writes to its memory."""
    hooked: bool = field(default=False, compare=False)
    """True if code between units registers a gradient hook on it, which only one stage may call."""

    @property
    def bytes(self) -> int:
        """Size of the tensor in bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Call:
    """Record of one call of a unit: a block (repeated layer), or a module outside all blocks that has parameters, such
    as an embedding or a head.
    """

    unit: str
    event: int
    inputs: tuple[int, ...]
    """Numbers of the values that the call reads, as arguments or otherwise."""
    parameters: frozenset[str]
    """Names of the unit's parameters, and of others that the call read."""
    flops: int
    output: Recipe
    writes: tuple[tuple[int, int], ...] = ()
    """Pairs (k, value number): the call writes the value into argument leaf k in place."""
    starts_block: bool = False
    """True if a stage may start at this call."""


@dataclass(frozen=True, slots=True)
class Glue:
    """Record of one torch function call outside units (blocks and other outermost modules). It reads a parameter, or a
    tensor that depends on parameters.
    """

    name: str
    event: int
    calls_before: int
    makes: tuple[int, ...]
    """Numbers of the values that the operation returns or writes, including aliases of written memory."""
    output: Recipe
    place: str
    """File and line of the user's code that runs the operation."""
    flops: int = 0
    writes: tuple[tuple[int, int], ...] = ()
    """Pairs (k, value number): the operation writes the value into argument leaf k in place."""
    buffers: frozenset[str] = frozenset()
    """Names of the buffers that the operation writes: one stage must run it, even if its results are unused."""
    updates: frozenset[str] = frozenset()
    """Names of parameters written in place, from parameters alone: every stage with such a parameter must run the
    operation.
    """
    random: bool = False
    """True if the operation may draw random numbers; stages that skip it must advance their generators equally."""
    function: Callable[..., Any] | None = field(default=None, compare=False, repr=False)
    """Torch function; equal in every process that traces the same program."""
    arguments: Arguments = field(default=((), {}), compare=False, repr=False)
    """Arguments of the torch function."""


class OnZeros(NamedTuple):
    """Record of a traced operation that ran on zeros, because it does not run on meta tensors. Real data may lead to
    other shapes or branches.
    """

    operation: str
    where: str
    """Location: "in" and the unit, or "at" and the line of code between units."""
    why: str
    """First line of the error on meta tensors."""


@dataclass(frozen=True)
class ModelTrace:
    """Record of one forward. All ranks that trace one model with the same input signature get the same record."""

    values: tuple[Value, ...]
    calls: tuple[Call, ...]
    glue: tuple[Glue, ...]
    units: tuple[str, ...]
    """Names of all units in the order of the model, including units that this forward never calls."""
    blocks: tuple[str, ...]
    parameter_bytes: Mapping[str, int]
    """Bytes of each parameter by first name, in the order of the model."""
    buffers: tuple[str, ...]
    """Names of all buffers, in the order of the model."""
    result: Recipe
    """Structure and sources of the pytree that the program returned."""
    random: bool = True
    """True if any operation draws random numbers."""
    host_random: bool = False
    """True if the model draws from the generators of Python or NumPy."""
    reads_batch: bool = field(default=False, compare=False)
    """True if code between units reads content of the batch, as numbers or shapes, and may choose a path by it."""
    on_zeros: tuple[OnZeros, ...] = field(default=(), compare=False)
    """Operations that ran on zeros instead of data."""

    @cached_property
    def unit_names(self) -> frozenset[str]:
        """Names of all units (blocks and other outermost modules) as a set."""
        return frozenset(self.units)

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the startup banner: a warning if operations ran on zeros instead of data."""
        if not self.on_zeros:
            return ()
        first: dict[str, OnZeros] = {}
        for entry in self.on_zeros:
            first.setdefault(entry.operation, entry)
        shown = [f"{entry.operation} {entry.where} ({entry.why})" for entry in first.values()][:2]
        more = f" and {len(self.on_zeros) - len(shown)} more" if len(self.on_zeros) > len(shown) else ""
        return (
            "shapes and branches that depend on content are planned as they are for zeros, because the trace could not "
            f"run without content: {', '.join(shown)}{more}",
        )

    @cached_property
    def asks_arguments(self) -> tuple[bool, ...]:
        """One flag for each call: True if the call writes or returns one of its arguments. Stages that skip the call
        then need its arguments.
        """
        return tuple(
            bool(call.writes) or any(isinstance(leaf, FromArgument) for leaf in call.output.leaves)
            for call in self.calls
        )

    @cached_property
    def targets(self) -> tuple[int, ...]:
        """Serial numbers of the traced tensors that the traced program (forward and loss) returns, ascending. The last
        stage must have them.
        """
        return tuple(sorted(set(self.result.values())))

    @cached_property
    def graded(self) -> frozenset[int]:
        """Serial numbers of the traced tensors through which a gradient of the loss flows."""
        found, pending = set[int](), [number for number in self.targets if self.values[number].grad]
        while pending:
            number = pending.pop()
            if number not in found and self.values[number].grad:
                found.add(number)
                pending.extend(self.values[number].inputs)
        return frozenset(found)

    @cached_property
    def read_by_glue(self) -> tuple[str, ...]:
        """Names of parameters that are read by code outside units (blocks and other outermost modules)."""
        read = {name for value in self.values if value.maker == "glue" for name in value.parameters}
        read |= {leaf.parameter for leaf in self.result.leaves if isinstance(leaf, FromParameter)}
        return tuple(name for name in self.parameter_bytes if name in read)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Indices of the calls at which a block begins, ascending. A pipeline stage may begin at each of them."""
        return tuple(index for index, call in enumerate(self.calls) if call.starts_block)

    def describe(self, number: int) -> str:
        """Returns a phrase for error messages: the call or operation that made the traced tensor ``number``."""
        value = self.values[number]
        if value.maker == "call":
            return f"the output of unit {self.calls[value.index].unit!r}"
        glue = self.glue[value.index]
        return f"the result of {glue.name} at {glue.place}"

    def occurrence(self, index: int) -> tuple[str, int]:
        """Returns (unit name, n) for ``calls[index]``, which is call number n (from 0) of this unit."""
        unit = self.calls[index].unit
        return unit, sum(call.unit == unit for call in self.calls[:index])


Event = Call | Glue


def trace_difference(before: ModelTrace, now: ModelTrace, path_only: bool = False) -> str | None:
    """Returns a phrase about the first difference of the trace ``now`` from ``before``; None if they are equal. Line
    numbers are ignored. ``path_only``: compares the order of calls and operations, not their values.

    The phrase completes a sentence that begins with "the forward".
    """
    for old, new in zip_longest(_events(before), _events(now)):
        if old is None:
            return f"continues with {_name(new)} where it ended before"
        if new is None:
            return f"ends where it reached {_name(old)} before"
        if _kind(old) != _kind(new):
            return f"reaches {_name(new)} where it reached {_name(old)} before"
        if path_only:
            continue
        if _reads(before, old) != _reads(now, new):
            return f"reaches {_name(new)}, which reads other values than before"
        if _makes(before, old) != _makes(now, new):
            return f"reaches {_name(new)}, which gives {_shown(now, new)} where it gave {_shown(before, old)} before"
    return None if path_only or before.result == now.result else "returns other values than before"


def _events(trace: ModelTrace) -> list[Event]:
    return sorted((*trace.calls, *trace.glue), key=lambda event: event.event)


def _kind(event: Event) -> tuple[str, str]:
    return ("call", event.unit) if isinstance(event, Call) else ("glue", event.name)


def _name(event: Event | None) -> str:
    assert event is not None  # at most one of two events that differ is None, and callers pass the other
    return f"a call of unit {event.unit!r}" if isinstance(event, Call) else f"{event.name} at {event.place}"


def _values(trace: ModelTrace, event: Event) -> list[Value]:
    if isinstance(event, Glue):
        return [trace.values[number] for number in event.makes]
    written = [number for _, number in event.writes]
    return [trace.values[number] for number in (*written, *event.output.values())]


def _reads(trace: ModelTrace, event: Event) -> object:
    if isinstance(event, Call):
        return event.inputs, event.parameters
    return [(value.inputs, value.parameters) for value in _values(trace, event)]


def _makes(trace: ModelTrace, event: Event) -> object:
    made = [(value.shape, value.dtype, value.grad) for value in _values(trace, event)]
    return made, event.output, event.writes


def _shown(trace: ModelTrace, event: Event) -> str:
    made = [f"{value.dtype} {value.shape}{'' if value.grad else ' without gradient'}"
            for value in _values(trace, event)]  # fmt: skip
    return ", ".join(made) or "no value"
