"""Peak of a rank's live bytes over a step, from the memory that each of its actions takes and frees. Pure arithmetic.

    level    |            .-- rise --.
             |            |          |  left
             |  --- post -'          '-------- sent ... released
             +--------------------------------------------------> actions of the row

A receive is offered one action ahead, into a buffer that is used again once it is given back; a sent tensor stays until
the schedule says that its send has completed. Buffers stay from step to step, so the second of two steps counts.

Bytes of the storages that operators make, each storage once, while they live.

    operator     its new storages are added; views share the storage of what they view
    last holder  a storage is taken off when the last tensor, graph or list that holds it lets it go

It counts real tensors and tensors without content (FakeTensors) alike. Storages that existed before are not counted,
so parameters, buffers of the model and optimizer state are left out by being made before. Memory that a kernel takes
and gives back inside one operator is not seen.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.parallel.pipeline.schedule.actions import Action, Op
from engine.parallel.pipeline.schedule.simulate import RECEIVES_AHEAD


class MessageBuffer(NamedTuple):
    """Memory of a received message; buffers of equal shape and dtype serve each other's messages."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionMemory:
    """Change that one action makes to the live bytes of its rank."""

    rise: int
    """Most bytes inside the action, above the bytes before it. Gathered parameters count as they stand."""
    left: int
    """Bytes after the action, less the bytes before it, once its sends have completed; negative for most backwards."""
    sent: int = 0
    """Bytes that only its sends to other ranks hold."""
    taken: tuple[MessageBuffer, ...] = ()
    """Bytes that it receives from other ranks."""
    given_back: tuple[MessageBuffer, ...] = ()
    """Buffers that later messages may use."""
    kept: tuple[MessageBuffer, ...] = ()
    """Buffers that something holds on to; ``left`` counts them from here on."""


class LivePeak(NamedTuple):
    """Most live bytes, and where."""

    bytes: int
    action: str
    """Token of the action; "end" after the last one."""


MemoryOf = Callable[[Action, int, int], ActionMemory]
"""Memory of an action that is the n-th (from 0) of so many of its stage in the row; B and I count together, B and W."""


class _Level:
    """Live bytes of a rank between two operators."""

    def __init__(self, base: int) -> None:
        self.bytes = base
        self.free = Counter[MessageBuffer]()
        self.sent: dict[int, int] = {}

    def take(self, buffers: Sequence[MessageBuffer]) -> None:
        for buffer in buffers:
            if self.free[buffer]:
                self.free[buffer] -= 1
            else:
                self.bytes += buffer.bytes

    def end(self, position: int, memory: ActionMemory) -> None:
        self.bytes += memory.left + memory.sent - sum(buffer.bytes for buffer in memory.kept)
        self.free.update(memory.given_back)
        self.sent[position] = memory.sent

    def rest(self, base: int) -> None:
        """Sets the live bytes between steps: the base and the buffers."""
        self.bytes = base + sum(buffer.bytes * count for buffer, count in self.free.items())

    def release(self, positions: Sequence[int]) -> None:
        for position in positions:
            self.bytes -= self.sent.pop(position, 0)


def peak_of_row(
    actions: Sequence[Action],
    releases: Sequence[Sequence[int]],
    memory_of: MemoryOf,
    base: int = 0,
    end_rise: int = 0,
) -> LivePeak:
    """Returns the peak of a step that plays ``actions``.

    Args:
        releases: for each action, positions of earlier ones with sent tensors that are released just before it.
        base: bytes that live between steps, without buffers of messages.
        end_rise: most bytes after the last action, during the reduction of gradients, above the bytes after it.
    """
    memories = _memories(actions, memory_of)
    level = _Level(base)
    peaks: list[LivePeak] = []
    for _ in range(2):
        peaks, posted = [], 0
        for position, (action, memory) in enumerate(zip(actions, memories, strict=True)):
            for soon in memories[posted : position + 1 + RECEIVES_AHEAD]:
                level.take(soon.taken)
            posted = max(posted, min(len(memories), position + 1 + RECEIVES_AHEAD))
            level.release(releases[position])
            peaks.append(LivePeak(level.bytes + memory.rise, str(action)))
            level.end(position, memory)
            peaks.append(LivePeak(level.bytes, str(action)))
        level.release(tuple(level.sent))
        peaks.append(LivePeak(level.bytes + end_rise, "end"))
        level.rest(base)
    return max(peaks, key=lambda peak: peak.bytes)


def _memories(actions: Sequence[Action], memory_of: MemoryOf) -> list[ActionMemory]:
    totals = Counter(kind for action in actions for kind in _kinds(action))
    seen = Counter[tuple[int, str]]()
    found = []
    for action in actions:
        kinds = _kinds(action)
        found.append(memory_of(action, seen[kinds[0]], totals[kinds[0]]))
        seen.update(kinds)
    return found


def _kinds(action: Action) -> tuple[tuple[int, str], ...]:
    """Returns (name, unit) of the counters of a stage: forwards, begun backwards, and finished weight gradients."""
    words = {Op.FORWARD: ("F",), Op.BACKWARD: ("begun", "done"), Op.BACKWARD_INPUT: ("begun",)}
    return tuple((action.stage, word) for word in words.get(action.op, ("done",)))


class LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts live bytes inside a with statement, which may be entered again.

    Args:
        resized: bytes of older storages that change their size, such as parameters that are gathered (ZeRO 3); they
            count for ``peak`` and not for ``bytes``.
    """

    def __init__(self, resized: Callable[[], int] = int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.peak = 0
        """Most bytes after any operator since :meth:`mark`, with the bytes of ``resized``."""
        self._resized = resized
        self._sizes: dict[int, int] = {}
        """By the number of the storage, which is its own while it lives."""

    def mark(self) -> int:
        """Begins a new peak; returns the bytes that live now."""
        self.peak = self.bytes + self._resized()
        return self.bytes

    def leave_out(self, tensor: Tensor) -> None:
        """Excludes the storage of ``tensor`` from the count."""
        self.bytes -= self._sizes.pop(_number(tensor), 0)

    def take_in(self, tensor: Tensor) -> None:
        """Counts the storage of ``tensor``, which was left out, or allocated before."""
        number, storage = _number(tensor), tensor.untyped_storage()
        if number not in self._sizes:
            self._sizes[number] = storage.nbytes()
            self.bytes += storage.nbytes()
            weakref.finalize(storage, self._forget, number).atexit = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and what would hide the mode from Dynamo runs at each operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # asked of a tensor without content for every look at its device
            return func(*args, **(kwargs or {}))
        older = {_number(leaf) for leaf in tree_leaves((args, kwargs)) if _has_storage(leaf)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if _has_storage(leaf) and _number(leaf) not in older:
                self.take_in(leaf)
        self.peak = max(self.peak, self.bytes + self._resized())
        return out

    def _forget(self, number: int) -> None:
        self.bytes -= self._sizes.pop(number, 0)


def _number(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _has_storage(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided
