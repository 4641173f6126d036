"""Peak of a rank's live bytes over a step, from the bytes that each pipeline action allocates and frees.

    level    |            .-- rise --.
             |            |          |  left
             |  --- post -'          '-------- sent ... released
             +--------------------------------------------------> actions of the row

A receive is posted one action ahead, into a reusable buffer; a sent tensor stays until its send has completed. Buffers
stay allocated between steps, so the second of two steps counts.

``LiveStorages`` counts the bytes of storages that operators allocate, real or FakeTensors, until their last reference
ends. Storages that existed before, and workspaces inside an operator, do not count.
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
    """Size of a buffer that receives a pipeline message; later messages with equal shape and dtype reuse the buffer."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionMemory:
    """Change of a rank's live bytes by one pipeline action (forward or backward of a stage for one microbatch)."""

    rise: int
    """Peak bytes during the action minus live bytes before it; gathered parameters are included."""
    left: int
    """Live bytes after the action and its sends minus bytes before it; negative for most backwards."""
    sent: int = 0
    """Bytes of tensors that only wait to be sent to other ranks."""
    taken: tuple[MessageBuffer, ...] = ()
    """Buffers of messages that the action receives."""
    given_back: tuple[MessageBuffer, ...] = ()
    """Buffers that the action frees for later messages."""
    kept: tuple[MessageBuffer, ...] = ()
    """Buffers that are still referenced after the action; ``left`` includes them."""


class LivePeak(NamedTuple):
    """Largest number of live bytes of a rank in a step, and the pipeline action at which it occurs."""

    bytes: int
    action: str
    """Action such as "2F5"; "end" after the last one."""


MemoryOf = Callable[[Action, int, int], ActionMemory]
"""Function (action, n, total) that returns the memory of the n-th (from 0) of ``total`` actions of its stage and kind;
I counts as B.
"""


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
    """Returns the peak of live bytes on a rank that runs ``actions`` in order, and the action at the peak.

    Args:
        releases: for each action, the indices of earlier actions with sent tensors that are freed just before it.
        memory_of: function that returns the memory change of an action.
        base: live bytes between steps, without message buffers.
        end_rise: bytes by which the peak of the final gradient reduction exceeds the live bytes after the last action.
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
    """Torch dispatch mode that counts the bytes of live tensors that were allocated inside it.

    Args:
        resized: function that returns the bytes of resizable storages allocated outside the mode, such as gathered
            parameters (ZeRO 3). Only ``peak`` includes these bytes.
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
        """Resets ``peak`` to the present number of live bytes, and returns that number without ``resized`` bytes."""
        self.peak = self.bytes + self._resized()
        return self.bytes

    def leave_out(self, tensor: Tensor) -> None:
        """Stops counting the storage of ``tensor`` as live bytes."""
        self.bytes -= self._sizes.pop(_number(tensor), 0)

    def take_in(self, tensor: Tensor) -> None:
        """Counts the storage of ``tensor`` as live bytes until it is freed, wherever it was allocated."""
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
