"""The backend of ranks that are threads: a message stays in memory until its receiver takes it.

A send is complete when its receiver has offered to receive it, as NCCL has it, so a schedule that needs a buffer
deadlocks here too.
Contributions are copied when they are issued; results appear at the wait, and not before. Sums add in rank order.

Threads that take turns: one runs until it waits for another, and then hands over.

    rank 0   ███ waits ········ ██████ ends
    rank 1             ██ waits ······ ····· ███ ends
    rank 2                  ███████ waits ·······  ███ ends

So a run is the same every time, and a deadlock is found when it happens: everybody waits, and each says for what. What
a process has one of (random generators, the default dtype) is put away at each hand-over: every rank has its own. So is
the generator of a device that several ranks share.
"""

import copy
import math
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils import checkpoint

from engine.errors import EngineError
from engine.kernels.device import PostedCopy, device_generator, is_host, use_device
from engine.parallel.comm.backend import Backend, Channel, Reduction, Wait
from engine.parallel.comm.world import World
from engine.parallel.grid import Axis, Grid

_NUMPY: Any = np.random  # its stubs lack the exchange of generators


class DeadlockError(EngineError):
    """Error when all thread ranks wait for each other; the message names the call of each waiting rank."""


class _AbortedError(EngineError):
    """Another rank has raised."""


Result = TypeVar("Result")


@dataclass(slots=True)
class _Rank(Generic[Result]):
    """One thread; ``ready`` returns True once its wait can end."""

    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ready: Callable[[], bool] | None = None
    what: Callable[[], str] = str
    ended: bool = False
    results: list[Result] = field(default_factory=list)
    problem: BaseException | None = None


class Turns:
    """Scheduler that runs ``size`` ranks as threads of one process, one at a time, in the same order in every run.

    Each rank has its own random state. This includes the states of the device random generators ``generators``.
    """

    def __init__(self, size: int, generators: Sequence[torch.Generator] = ()) -> None:
        self._generators = generators
        self._ranks: list[_Rank[Any]] = [_Rank() for _ in range(size)]
        self._failed = False
        self._deadlock = ""

    def run(self, body: Callable[[int], Result]) -> list[Result]:
        """Runs ``body(rank)`` for every rank, each in its thread; returns the results in rank order.

        Raises:
            DeadlockError: all ranks that have not ended wait for each other.
            Exception: a rank's own error; if several ranks have one, the error of the lowest rank.
        """
        process = _ProcessState.take(self._generators)
        grad = torch.is_grad_enabled()

        def thread(index: int) -> None:
            rank = self._ranks[index]
            rank.turn.acquire()
            process.put(self._generators)
            _NUMPY.set_bit_generator(copy.deepcopy(process.numpy))
            torch.set_grad_enabled(grad)
            try:
                rank.results.append(body(index))
            except BaseException as problem:
                rank.problem = problem
                self._failed = True
            rank.ended = True
            self._hand_over(index)

        threads = [threading.Thread(target=thread, args=(index,), daemon=True) for index in range(len(self._ranks))]
        for one in threads:
            one.start()
        self._ranks[0].turn.release()
        try:
            for one in threads:
                one.join()
        finally:
            process.put(self._generators)
        problem = self._take_problem()
        try:
            if problem is not None:
                raise problem
        finally:
            del problem  # this frame is in its traceback: they would keep each other, and all tensors of the ranks
        return [rank.results[0] for rank in self._ranks]

    def _take_problem(self) -> BaseException | None:
        """The first error of a rank's own, which no rank keeps."""
        problems = [rank.problem for rank in self._ranks if rank.problem is not None]
        for rank in self._ranks:
            rank.problem = None
        own = (problem for problem in problems if not isinstance(problem, _AbortedError))
        return next(own, problems[0] if problems else None)

    def wait(self, index: int, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Blocks rank ``index`` and runs the threads of other ranks until ``ready()`` is True.

        ``what`` is a callback that describes the wait, for error messages.

        Raises:
            DeadlockError: no rank can continue.
        """
        rank = self._ranks[index]
        if ready():
            return
        rank.ready, rank.what = ready, what
        process = _ProcessState.take(self._generators)
        self._hand_over(index)
        rank.turn.acquire()
        process.put(self._generators)
        rank.ready = None
        if self._deadlock:
            raise DeadlockError(self._deadlock)
        if not ready():  # what has come is taken, as by processes: the cause may be an error that is told next
            raise _AbortedError("another rank has raised; read its error.")

    def _hand_over(self, index: int) -> None:
        """Wake the next rank that can go on; every rank, if none can: they end by an error."""
        size = len(self._ranks)
        order = [self._ranks[(index + step) % size] for step in range(1, size + 1)]
        left = [rank for rank in order if not rank.ended]
        chosen = next((rank for rank in left if self._failed or rank.ready is None or rank.ready()), None)
        if chosen is None and left:
            self._failed, self._deadlock = True, self._who_waits()
            chosen = left[0]
        if chosen is not None:
            chosen.turn.release()

    def _who_waits(self) -> str:
        told = (
            f"rank {index} {'has ended' if rank.ended else f'waits for {rank.what()}'}"
            for index, rank in enumerate(self._ranks)
        )
        return f"no rank can go on: {'; '.join(told)}."


@dataclass(frozen=True, slots=True)
class _ProcessState:
    """State that a process has once and each rank needs for itself."""

    generator: torch.Tensor
    random: Any
    numpy: Any
    dtype: torch.dtype
    functions: tuple[Any, ...]
    """Functions of :data:`_REPLACED`."""
    shared: tuple[torch.Tensor, ...]
    """The states of generators that ranks share on a device."""

    @staticmethod
    def take(generators: Sequence[torch.Generator]) -> "_ProcessState":
        functions = tuple(vars(owner).get(name, _INHERITED) for owner, name in _REPLACED)
        host = random.getstate(), _NUMPY.get_bit_generator()
        shared = tuple(generator.get_state() for generator in generators)
        return _ProcessState(torch.get_rng_state(), *host, torch.get_default_dtype(), functions, shared)

    def put(self, generators: Sequence[torch.Generator]) -> None:
        torch.set_rng_state(self.generator)
        for generator, state in zip(generators, self.shared, strict=True):
            generator.set_state(state)
        random.setstate(self.random)
        _NUMPY.set_bit_generator(self.numpy)
        torch.set_default_dtype(self.dtype)
        for (owner, name), function in zip(_REPLACED, self.functions, strict=True):
            if function is not _INHERITED:
                setattr(owner, name, function)
            elif name in vars(owner):
                delattr(owner, name)


_INHERITED = object()
_REPLACED: tuple[tuple[Any, str], ...] = (
    (torch.autograd.Function, "apply"),
    (checkpoint.CheckpointFunction, "apply"),
    (checkpoint, "_checkpoint_without_reentrant_generator"),
)
"""Functions of torch that the forward of a pipeline stage replaces while it runs."""


@dataclass(slots=True)
class _Round:
    """One collective: the inputs of its ranks so far."""

    calls: dict[int, Any] = field(default_factory=dict)
    parts: dict[int, PostedCopy] = field(default_factory=dict)


@dataclass(slots=True)
class Rounds:
    """Collectives among the thread ranks ``ranks``: the n-th calls of all ranks form one collective."""

    turns: Turns
    ranks: Sequence[int]
    _open: dict[int, _Round] = field(default_factory=dict)
    _brought: dict[int, int] = field(default_factory=dict)
    """How many collectives a rank has issued."""

    def bring(self, rank: int, call: Any, part: Tensor) -> Callable[[], list[Tensor]]:
        """Contributes a copy of ``part`` to the next collective of rank ``rank``.

        Returns a function that waits for all ranks and returns their parts in order of rank, on the device of ``part``.
        ``call`` describes the collective.

        Raises:
            EngineError: another rank contributed to a different ``call``; the message contains ``str(call)``.
        """
        number = self._brought[rank] = self._brought.get(rank, -1) + 1
        round_ = self._open.setdefault(number, _Round())
        for other, theirs in round_.calls.items():
            if theirs != call:
                raise EngineError(
                    f"rank {rank} calls {call} where rank {other} calls {theirs}; all ranks make the same calls in the "
                    "same order."
                )
        round_.calls[rank], round_.parts[rank] = call, PostedCopy(part)

        def absent() -> str:
            return f"{call}, to which ranks {[one for one in self.ranks if one not in round_.parts]} have not come"

        def collect() -> list[Tensor]:
            self.turns.wait(rank, lambda: len(round_.parts) == len(self.ranks), absent)
            self._open.pop(number, None)
            return [round_.parts[one].read_on(part.device) for one in self.ranks]

        return collect


def run_thread_ranks(
    size: int, body: Callable[[World], Result], devices: Sequence[torch.device] | None = None
) -> list[Result]:
    """Runs ``body(world)`` on ``size`` ranks, each a thread of this process; returns the results in rank order.

    ``engine.initialize(..., world=world)`` makes a rank's engine. Each rank needs a model of its own.

    Args:
        devices: device of each rank, by default the CPU.

    Raises:
        DeadlockError: all ranks wait for each other; the message names each rank's call.
        Exception: a rank's own error; if several ranks have one, the error of the lowest rank.
    """
    shared = [device for device, ranks in Counter(devices or ()).items() if ranks > 1 and not is_host(device)]
    generators = [generator for device in shared if (generator := device_generator(device)) is not None]
    turns, posts = Turns(size, generators), defaultdict[int, _Post](_Post)

    def rank(index: int) -> Result:
        opened = iter(range(2**30))  # an engine has a post of its own; ranks make engines in the same order

        def connect(grid: Grid) -> ThreadBackend:
            return ThreadBackend(grid, turns, posts[next(opened)])

        device = torch.device("cpu") if devices is None else devices[index]
        use_device(device)
        with torch.autograd.set_multithreading_enabled(False) if shared else nullcontext():
            return body(World(index, size, index, device, connect=connect))

    return turns.run(rank)


@dataclass(frozen=True, slots=True)
class _Call:
    """A collective as a rank calls it: all ranks of a group make the same calls in the same order."""

    op: str
    elements: int
    dtype: torch.dtype
    purpose: str

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.op} of {self.elements} {dtype} elements over {self.purpose}"


@dataclass(slots=True)
class _Box:
    """The messages of a channel between two ranks, by number, until they are received."""

    messages: dict[int, PostedCopy] = field(default_factory=dict)
    sent: int = 0
    asked: int = 0


Group = tuple[str, tuple[int, ...]]
"""Pair (purpose, global ranks) that identifies a group."""


@dataclass(slots=True)
class _Post:
    """Calls that the ranks of one engine have issued and not yet completed."""

    rounds: dict[Group, Rounds] = field(default_factory=dict)
    boxes: defaultdict[tuple[Channel, int, int], _Box] = field(default_factory=lambda: defaultdict(_Box))


class ThreadBackend(Backend):
    """Backend of one of several ranks that are threads of this process and run one at a time.

    ``share_bytes`` returns None: a kernel that waits for another rank's kernel would deadlock.
    """

    def __init__(self, grid: Grid, turns: Turns, post: _Post) -> None:
        self._grid, self._turns, self._post = grid, turns, post

    def all_reduce(self, tensor: Tensor, axis: Axis, op: Reduction = "sum") -> Wait:
        """Starts to sum ``tensor`` in place over ``axis``; returns a function that waits.

        ``op`` "max" takes the elementwise maximum instead of the sum.
        """
        return self._reduce(tensor, (axis, self._grid.peers(axis)), op)

    def sum_over_stages(self, tensor: Tensor, stages: tuple[int, ...]) -> Wait:
        """Starts to sum ``tensor`` in place over the indices ``stages`` of axis pp; returns a function that waits."""
        line = self._grid.peers("pp")
        return self._reduce(tensor, ("stages", tuple(line[stage] for stage in stages)), "sum")

    def _reduce(self, tensor: Tensor, group: Group, op: Reduction) -> Wait:
        def place(parts: list[Tensor]) -> None:
            stacked = torch.stack(parts)
            tensor.copy_(stacked.amax(0) if op == "max" else stacked.sum(0))

        return self._meet(f"all_reduce ({op})", group, tensor, place)

    def reduce_scatter(self, shard: Tensor, full: Tensor, axis: Axis) -> Wait:
        """Starts to sum ``full`` over ``axis`` into ``shard``, this rank's slice of the sum; returns a function that
        waits.
        """
        index, ranks = self._grid.index(axis), self._grid.size(axis)

        def place(parts: list[Tensor]) -> None:
            own = torch.stack([part.view(ranks, -1)[index] for part in parts])
            shard.copy_(own.sum(0).view_as(shard))

        return self._meet("reduce_scatter", (axis, self._grid.peers(axis)), full, place)

    def all_gather(self, full: Tensor, shard: Tensor, axis: Axis) -> Wait:
        """Starts to copy the ``shard`` of every rank of ``axis`` into ``full``, in order of index.

        Returns a function that waits.
        """
        return self._gather(full, shard, (axis, self._grid.peers(axis)))

    def all_to_all(self, received: Tensor, given: Tensor, members: tuple[int, ...], axis: Axis) -> Wait:
        """Starts to send slice i of ``given`` to index ``members[i]`` of ``axis``; returns a function that waits.

        Slice i of ``received`` comes from index ``members[i]``. Slices have equal size.
        """
        line, own = self._grid.peers(axis), members.index(self._grid.index(axis))

        def place(parts: list[Tensor]) -> None:
            slices = [part.view(len(members), -1)[own] for part in parts]
            received.copy_(torch.cat(slices).view_as(received))

        return self._meet("all_to_all", (f"{axis} slices", tuple(line[index] for index in members)), given, place)

    def exchange(self, received: Tensor, given: Tensor, gets: Sequence[int], gives: Sequence[int], axis: Axis) -> Wait:
        """Starts to send ``gives[i]`` rows of ``given`` to each index i of ``axis``; returns a function that waits.

        ``received`` takes ``gets[i]`` rows from each index i, in order of index.
        """
        own, group = self._grid.index(axis), (f"{axis} rows", self._grid.peers(axis))
        counts: list[Tensor] = []
        count = self._meet("exchange of counts", group, torch.tensor(gives, dtype=torch.int64), counts.extend)

        def place(parts: list[Tensor]) -> None:
            found = [torch.split(part, row.tolist())[own] for part, row in zip(parts, counts, strict=True)]
            assert [len(rows) for rows in found] == list(gets), f"rank {self._grid.rank} expects {gets} rows"
            received.copy_(torch.cat(found))

        rows = self._meet("exchange", group, given, place, of_rows=True)

        def finish() -> None:
            count()
            rows()

        return finish

    def gather_parameters(
        self, pairs: Sequence[tuple[Tensor, Tensor]], within: int | None = None, axis: Axis | None = None
    ) -> Wait:
        """Starts to all-gather ``shard`` into ``full`` for each pair (``full``, ``shard``).

        The group has ``within`` neighbouring ranks (default: all) along ``axis`` (default: the data axis). Returns a
        function that waits.
        """
        line = axis or self._grid.shard_line
        size = within or self._grid.size(line)
        first = self._grid.index(line) // size * size
        group = (f"{axis or ''} gathers".strip(), tuple(self._grid.peers(line)[first : first + size]))
        waits = [self._gather(full, shard, group) for full, shard in pairs]

        def finish() -> None:
            for wait in waits:
                wait()

        return finish

    def exchange_gathers(self, data: bytes, within: int) -> Sequence[bytes]:
        """All-gathers ``data`` over ``within`` neighbouring data ranks; returns the bytes of each rank, by index."""
        line = self._grid.shard_line
        first = self._grid.index(line) // within * within
        group = ("agreement", tuple(self._grid.peers(line)[first : first + within]))
        with torch._C.DisableTorchFunction():
            own = torch.tensor(list(data), dtype=torch.uint8)
            full = own.new_empty(within, len(data))
            self._gather(full, own, group)()
            return [bytes(row) for row in full.tolist()]

    def _gather(self, full: Tensor, shard: Tensor, group: Group) -> Wait:
        def place(parts: list[Tensor]) -> None:
            full.copy_(torch.cat([part.reshape(-1) for part in parts]).view_as(full))

        return self._meet("all_gather", group, shard, place)

    @torch.no_grad()
    def _meet(
        self, op: str, group: Group, part: Tensor, place: Callable[[list[Tensor]], None], of_rows: bool = False
    ) -> Wait:
        """Bring this rank's part to the next collective of ``group``; the wait gives all parts to ``place``.

        ``of_rows``: ranks have different numbers of rows.
        """
        purpose, peers = group
        elements = math.prod(part.shape[1:]) if of_rows else part.numel()
        rounds = self._post.rounds.setdefault(group, Rounds(self._turns, peers))
        with torch._C.DisableTorchFunction():  # hidden from what watches a forward, as a process group's work is
            collect = rounds.bring(self._grid.rank, _Call(op, elements, part.dtype, purpose), part)

        def finish() -> None:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                place(collect())

        return finish

    def send(self, tensor: Tensor, to: int, channel: Channel) -> Wait:
        """Starts to send ``tensor`` to index ``to`` of axis pp over ``channel``; returns a function that waits.

        The wait ends when the receiver has called ``receive`` for this message.
        """
        target = self._grid.peers("pp")[to]
        box = self._post.boxes[channel, self._grid.rank, target]
        number, box.sent = box.sent, box.sent + 1
        box.messages[number] = PostedCopy(tensor)
        what = f"rank {target} to receive message {number} of {channel.flow} {channel.source} -> {channel.target}"
        return lambda: self._turns.wait(self._grid.rank, lambda: number < box.asked, lambda: what)

    def receive(self, tensor: Tensor, source: int, channel: Channel) -> Wait:
        """Starts to receive the next message of ``channel`` from index ``source`` of axis pp into ``tensor``.

        Returns a function that waits.
        """
        sender = self._grid.peers("pp")[source]
        box = self._post.boxes[channel, sender, self._grid.rank]
        number, box.asked = box.asked, box.asked + 1
        what = f"message {number} of {channel.flow} {channel.source} -> {channel.target} from rank {sender}"

        def finish() -> None:
            self._turns.wait(self._grid.rank, lambda: number in box.messages, lambda: what)
            with torch.no_grad():
                tensor.copy_(box.messages.pop(number).read_on(tensor.device).view_as(tensor))

        return finish
