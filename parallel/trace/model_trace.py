"""One forward of a model as data: what is called in which order, and which values pass between.

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

Where two forwards of one model part: the first event that differs, by name.

A cut is planned for one timeline. A forward that takes another path later on reads what is not here, which is NaN, or
calls units in another order; which of its operations is to blame, two timelines tell.
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
    """A leaf that is a value."""

    value: int


class FromArgument(NamedTuple):
    """A leaf that is the k-th leaf of the arguments, passed through."""

    argument: int


class FromParameter(NamedTuple):
    """A leaf that is a parameter of the model."""

    parameter: str


class FreeTensor(NamedTuple):
    """A leaf that depends on the batch alone."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Constant(NamedTuple):
    """A leaf that is no tensor."""

    content: Any


Leaf = FromValue | FromArgument | FromParameter | FreeTensor | Constant


class Sample(NamedTuple):
    """What stands for a value or a parameter among the arguments of a call."""

    source: int | str
    """The number of the value, or the name of the parameter."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    grad: bool
    """Whether a gradient flows back through it."""


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""args and kwargs: a Sample for each value and parameter in them, all else as it was; of glue, whose arguments are kept
as long as the timeline, a FreeTensor for each other tensor."""


@dataclass
class Material:
    """What measuring needs of a probe beside its timeline. Filled while the probe runs."""

    arguments: list[Arguments] = field(default_factory=list)
    """What each call was given."""
    kept_by_glue: list[int] = field(default_factory=list)
    """Bytes that each glue operation saves for its backward, in tensors that no earlier one has saved."""

    def clear(self) -> None:
        """Forget an earlier forward."""
        self.arguments.clear()
        self.kept_by_glue.clear()


@dataclass(frozen=True, slots=True)
class Recipe:
    """The structure of what was returned and where each leaf comes from."""

    spec: TreeSpec
    leaves: tuple[Leaf, ...]

    def values(self) -> Iterator[int]:
        """The numbers of the values among the leaves."""
        return (leaf.value for leaf in self.leaves if isinstance(leaf, FromValue))


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that depends on a parameter."""

    number: int
    maker: Literal["call", "glue"]
    index: int
    """Which call or glue operation makes it."""
    inputs: tuple[int, ...]
    """The values it is computed from."""
    parameters: frozenset[str]
    """The parameters that the glue operation reads itself."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """As the whole model lays it out; contiguous where elements would share memory. A receiver that follows it keeps
    ``view`` of a permuted tensor possible, and the order in which kernels add."""
    dtype: torch.dtype
    grad: bool
    """Whether a gradient flows back through it."""
    movable: bool = True
    """False for memory with several names written in place: one name cannot travel alone."""
    rewritten: bool = False
    """Whether an operation writes this memory later on."""

    @property
    def bytes(self) -> int:
        """What one transfer takes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Call:
    """One invocation of a unit."""

    unit: str
    event: int
    inputs: tuple[int, ...]
    """Values it reads, by its arguments or by any side door."""
    parameters: frozenset[str]
    """Parameters of the unit, and others that it read."""
    flops: int
    output: Recipe
    writes: tuple[tuple[int, int], ...] = ()
    """(k, value) where the call leaves a value in the memory of the k-th leaf of its arguments."""
    starts_block: bool = False
    """Whether a stage may start here."""


@dataclass(frozen=True, slots=True)
class Glue:
    """One torch function outside units that touches a value or reads a parameter."""

    name: str
    event: int
    calls_before: int
    makes: tuple[int, ...]
    """All values it makes, those that other names of written memory get among them."""
    output: Recipe
    place: str
    """File and line of the code that runs it."""
    flops: int = 0
    writes: tuple[tuple[int, int], ...] = ()
    """(k, value) where it leaves a value in the memory of the k-th leaf of its arguments."""
    buffers: frozenset[str] = frozenset()
    """Buffers that it writes: that outlives the forward, so that one stage must run it even if none reads it."""
    updates: frozenset[str] = frozenset()
    """Parameters that it writes in place, from parameters alone: every stage that holds them must run it."""
    random: bool = False
    """May draw random numbers: a stage that skips it must draw as many."""
    function: Callable[..., Any] | None = field(default=None, compare=False, repr=False)
    """What ran; another process has an equal one."""
    arguments: Arguments = field(default=((), {}), compare=False, repr=False)
    """What it was given."""


class OnZeros(NamedTuple):
    """An operation that ran on zeros: its result may depend on content, which a trace does not have."""

    operation: str
    where: str
    """In which unit, or at which line."""
    why: str
    """What torch raised on meta tensors, in one line."""


@dataclass(frozen=True)
class ModelTrace:
    """One forward as data; equal on every rank that probes the same model with the same input signature."""

    values: tuple[Value, ...]
    calls: tuple[Call, ...]
    glue: tuple[Glue, ...]
    units: tuple[str, ...]
    """In the order of the model; units that this forward never calls are among them."""
    blocks: tuple[str, ...]
    parameter_bytes: Mapping[str, int]
    """Every parameter of the model under its first name, in the order of the model."""
    buffers: tuple[str, ...]
    """Every buffer of the model, in its order."""
    result: Recipe
    """What the program returned."""
    random: bool = True
    """Whether any of its operations draws random numbers."""
    on_zeros: tuple[OnZeros, ...] = field(default=(), compare=False)
    """Operations that ran on zeros."""

    @cached_property
    def unit_names(self) -> frozenset[str]:
        """The units, to look one up."""
        return frozenset(self.units)

    @cached_property
    def asks_arguments(self) -> tuple[bool, ...]:
        """Of each call: whether what it does to its arguments, or passes on of them, has to be told."""
        return tuple(
            bool(call.writes) or any(isinstance(leaf, FromArgument) for leaf in call.output.leaves)
            for call in self.calls
        )

    @cached_property
    def targets(self) -> tuple[int, ...]:
        """The values that the last stage must make, ascending."""
        return tuple(sorted(set(self.result.values())))

    @cached_property
    def read_by_glue(self) -> tuple[str, ...]:
        """Parameters read outside any unit: no module hook sees that."""
        read = {name for value in self.values if value.maker == "glue" for name in value.parameters}
        read |= {leaf.parameter for leaf in self.result.leaves if isinstance(leaf, FromParameter)}
        return tuple(name for name in self.parameter_bytes if name in read)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The calls at which a block starts."""
        return tuple(index for index, call in enumerate(self.calls) if call.starts_block)

    def describe(self, number: int) -> str:
        """Where a value comes from, for messages."""
        value = self.values[number]
        if value.maker == "call":
            return f"the output of unit {self.calls[value.index].unit!r}"
        glue = self.glue[value.index]
        return f"the result of {glue.name} at {glue.place}"

    def occurrence(self, index: int) -> tuple[str, int]:
        """The unit of a call, and how many calls of that unit come before it."""
        unit = self.calls[index].unit
        return unit, sum(call.unit == unit for call in self.calls[:index])


Event = Call | Glue


def trace_difference(before: ModelTrace, now: ModelTrace) -> str | None:
    """The first event that differs, as the end of a sentence that begins with "the forward"; None: they are alike.

    Events differ by what runs, by what they read, and by the shape, dtype and gradient of what they make. Where code
    stands in a file does not count.
    """
    for old, new in zip_longest(_events(before), _events(now)):
        if old is None:
            return f"goes on with {_name(new)} where it ended before"
        if new is None:
            return f"ends where it came to {_name(old)} before"
        if _kind(old) != _kind(new):
            return f"comes to {_name(new)} where it came to {_name(old)} before"
        if _reads(before, old) != _reads(now, new):
            return f"comes to {_name(new)}, which reads something else than before"
        if _makes(before, old) != _makes(now, new):
            return f"comes to {_name(new)}, which gives {_shown(now, new)} where it gave {_shown(before, old)} before"
    return None if before.result == now.result else "returns something else than before"


def _events(timeline: ModelTrace) -> list[Event]:
    return sorted((*timeline.calls, *timeline.glue), key=lambda event: event.event)


def _kind(event: Event) -> tuple[str, str]:
    return ("call", event.unit) if isinstance(event, Call) else ("glue", event.name)


def _name(event: Event | None) -> str:
    assert event is not None  # one of two that are not alike
    return f"a call of unit {event.unit!r}" if isinstance(event, Call) else f"{event.name} at {event.place}"


def _values(timeline: ModelTrace, event: Event) -> list[Value]:
    if isinstance(event, Glue):
        return [timeline.values[number] for number in event.makes]
    written = [number for _, number in event.writes]
    return [timeline.values[number] for number in (*written, *event.output.values())]


def _reads(timeline: ModelTrace, event: Event) -> object:
    if isinstance(event, Call):
        return event.inputs, event.parameters
    return [(value.inputs, value.parameters) for value in _values(timeline, event)]


def _makes(timeline: ModelTrace, event: Event) -> object:
    made = [(value.shape, value.dtype, value.grad) for value in _values(timeline, event)]
    return made, event.output, event.writes


def _shown(timeline: ModelTrace, event: Event) -> str:
    made = [f"{value.dtype} {value.shape}{'' if value.grad else ' without gradient'}"
            for value in _values(timeline, event)]  # fmt: skip
    return ", ".join(made) or "no value"
