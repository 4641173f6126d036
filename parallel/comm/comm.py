"""Communication of an engine: every collective and message is named, recorded and counted here.

The engine calls ``Comm``; a ``Backend`` carries out the call, ``TorchBackend`` between real processes. Collectives and
messages are issued at once and completed by ``Pending.wait``.
"""

import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import sleep
from typing import NamedTuple
from weakref import WeakSet

from torch import Tensor

from engine.errors import EngineError, first_line
from engine.parallel.comm.backend import Backend, Link, Reduction, Wait
from engine.parallel.comm.failed_calls import FailedCalls
from engine.parallel.comm.flight.layout import CALLS, EventKind
from engine.parallel.comm.flight.recorder import FlightRecorder, Stream, indices_text
from engine.parallel.comm.rendezvous import FailureReports, JointCalls
from engine.parallel.comm.symmetric_memory import PeerEndedError, SlotSizes, SymmetricBuffer
from engine.parallel.comm.traffic import Op, Record, Tally, sent_bytes
from engine.parallel.grid import Axis, Grid

logger = logging.getLogger("trine")

FLIGHT_RECORD_LENGTH = 256
"""Number of most recent collectives and messages that the flight record retains."""


class Pending:
    """Handle of a collective or message in progress; ``wait`` completes it."""

    def __init__(
        self,
        wait: Wait | None = None,
        describe: Callable[[], str] = str,
        broken: Callable[[], None] | None = None,
        absent: Callable[[RuntimeError], str] = lambda error: "",
        note: "_Note | None" = None,
    ) -> None:
        self._wait = wait
        self._note = note
        self._describe = describe
        self._broken = broken
        self._absent = absent
        self._beside: Callable[[], None] | None = None
        self._then: list[Callable[[], object]] = []

    @property
    def under_way(self) -> bool:
        """True until ``wait`` or ``drop`` is called; always False for a call that sends nothing."""
        return self._wait is not None

    def beside(self, work: Callable[[], None]) -> "Pending":
        """Registers ``work`` for the start of ``wait``, so that it runs during the communication. Returns self."""
        self._beside = work
        return self

    def then(self, work: Callable[[], object]) -> "Pending":
        """Registers ``work`` for the end of ``wait``, after earlier registered ``work``. Returns self."""
        self._then.append(work)
        return self

    def wait(self) -> None:
        """Blocks (on a GPU: the current stream) until the result can be read.

        Raises:
            EngineError: the collective failed or timed out; the message names the call and its ranks.
        """
        wait, self._wait = self._wait, None
        if wait is not None:
            self._complete(wait)
        then, self._then = self._then, []
        for work in then:
            work()

    def drop(self) -> None:
        """Abandons the communication and releases its tensors; a later ``wait`` does nothing."""
        self._wait = self._beside = None
        self._then = []

    def _complete(self, wait: Wait) -> None:
        if self._beside is not None:
            self._beside()
        try:
            if self._note is None:
                wait()
            else:
                self._note.complete(wait)
        except RuntimeError as error:
            raise _named_failure(self._describe(), error, self._broken, self._absent) from error


class _Note(NamedTuple):
    """An event of the flight recorder that a wait ends."""

    recorder: FlightRecorder
    sequence: int
    stream: Stream
    bytes: int

    def complete(self, wait: Wait) -> None:
        """Wait, and note since when."""
        began = self.recorder.wait(self.sequence)
        wait()
        self.recorder.waited(self.sequence, self.stream, began, self.bytes)


_HOLD_BACK_SECONDS = 10.0
"""Seconds: about a hundred times as long as the launcher takes to see an ended process and end the others."""


def _named_failure(
    what: str, error: RuntimeError, broken: Callable[[], None] | None, absent: Callable[[RuntimeError], str]
) -> EngineError:
    """Returns the error of a rank with failed communication, most often because another rank ended first.

    A launcher ends this process when it notices that end. Waiting leaves the first failure's traceback as the last one.
    """
    logger.debug("%s failed", what, exc_info=error)
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    if launched and broken is not None:
        broken()
    who = absent(error)
    if launched:
        sleep(_HOLD_BACK_SECONDS)
    peers = f": {who}" if who else ""
    return EngineError(
        f"{what} failed: {first_line(error)}. A peer has probably stopped{peers}; look for the first traceback of the "
        "job, which shows the cause."
    )


class Comm:
    """Collectives over the axes of a grid. Each call is counted and recorded under its ``label``.

    ``tally`` counts calls and sent bytes by axis and label; ``records`` has the most recent calls. An axis of one rank
    sends and counts nothing, and calls of :meth:`receive` are not counted.
    """

    def __init__(self, grid: Grid, backend: Backend) -> None:
        self.grid = grid
        self.broken: Callable[[], None] | None = None
        """Called before the wait for a launcher to end this process."""
        self.reports: FailureReports | None = None
        """Record of failed calls, by which ranks find the absent ones; None: there is no record."""
        self.joint: JointCalls | None = None
        """Knows who makes the calls that every rank has to make; None: they are not checked."""
        self.failures = FailedCalls(None, grid.rank, 1, self.close)
        """Knows whether the engine can go on after a call that has failed."""
        self.recorder: FlightRecorder | None = None
        """Recorder of this rank's calls for other processes; None: no process watches."""
        self.fill_wait: Callable[[], None] | None = None
        """Function that computes a piece of another microbatch in the waits of :meth:`filled`."""
        self.tally = Tally()
        self.records: deque[Record] = deque(maxlen=FLIGHT_RECORD_LENGTH)
        self._backend = backend
        self._symmetric: dict[tuple[Axis, SlotSizes], SymmetricBuffer] = {}
        self._in_flight: WeakSet[Pending] = WeakSet()
        self._sequence = 0
        self._routes: dict[Axis, _Route] = {}
        """Streams of collectives over whole axes."""
        self._gather_routes: dict[int | Axis | None, _Route] = {}
        self._closed = False
        self.borrows = False
        """True if groups, and frozen parameters of the model, belong to another engine."""

    def lend(self) -> "Comm":
        """Returns a Comm for another engine that uses the same process groups; its ``close`` leaves them open."""
        lent = Comm(self.grid, self._backend)
        lent.reports, lent.joint, lent.failures, lent.recorder = self.reports, self.joint, self.failures, self.recorder
        lent._symmetric, lent.borrows = self._symmetric, True
        return lent

    def all_reduce(self, tensor: Tensor, axis: Axis, label: str, op: Reduction = "sum") -> Pending:
        """Starts to sum ``tensor`` (any shape) in place over ``axis``; ``op`` "max" takes the elementwise maximum."""
        return self._issue("all_reduce", tensor, axis, label, lambda: self._backend.all_reduce(tensor, axis, op))

    def sum_over_stages(self, tensor: Tensor, stages: tuple[int, ...], label: str) -> Pending:
        """Starts to sum ``tensor`` in place over ``stages``, indices of axis pp; needs ``connect(stages)`` before."""
        call = partial(self._backend.sum_over_stages, tensor, stages)
        name = f"pp stages {indices_text(stages)}"
        route = _Route(len(stages), Stream(EventKind.COLLECTIVE, "pp", name))
        return self._issue("all_reduce", tensor, "pp", label, call, route)

    @contextmanager
    def within(self, made: Callable[[], int]) -> Iterator[None]:
        """Returns a context that marks an engine call in this rank's communication log; ``made`` counts made steps."""
        if self.recorder is None:
            yield
            return
        self.recorder.enter(made())
        try:
            yield
        finally:
            self.recorder.leave(made())

    @contextmanager
    def noted(self, call: str) -> Iterator[None]:
        """Returns a context that records ``call``, an engine call of every rank, in this rank's communication log."""
        if self.recorder is None:
            yield
            return
        stream = Stream(EventKind.COLLECTIVE, "world", CALLS)
        sequence = self.recorder.begin(stream, call)
        began = self.recorder.wait(sequence)
        try:
            yield
        finally:
            self.recorder.waited(sequence, stream, began)

    @property
    def issued(self) -> int:
        """Number of collectives and messages issued by this rank so far."""
        return self._sequence

    def failed(self, call: str, error: BaseException, alike: bool = True) -> None:
        """Records that ``call`` has failed on this rank with ``error``; a vote of all ranks then may end the engine.

        ``alike``: False ends the engine. True ends it unless all ranks fail in ``call`` after equally many collectives
        and no rank has lost another.
        """
        self.failures.note(call, error, f"{call} after {self._sequence} collectives" if alike else None)

    def join(self, call: str) -> None:
        """Waits until every rank of the world makes the engine call named ``call``. From the fourth time with the same
        name, returns at once.

        Raises:
            EngineError: a rank does not make the call in time, has closed its engine, or has ended.
        """
        with self.noted(call):
            if self.joint is not None:
                self.joint.join(call)

    def connect(self, stages: tuple[int, ...]) -> None:
        """Creates the group of ``sum_over_stages`` for indices ``stages`` of axis pp; all ranks pass the same ones."""
        self._backend.connect(stages)

    def link(self, links: Sequence[Link]) -> None:
        """Creates the process groups for messages over ``links``; every rank of the world passes the same ``links``."""
        self._backend.link(links)

    def send(self, tensor: Tensor, link: Link, label: str = "") -> Pending:
        """Starts to send ``tensor`` over ``link``; ``tensor`` must not change before the returned handle's wait ends.

        ``label``: name of the message in counts and errors, by default the link's flow, such as "forward".
        """
        call = partial(self._backend.send, tensor, link.target, link.channel)
        route = self._route(EventKind.SEND, link, link.target)
        return self._issue("send", tensor, "pp", label or link.channel.flow, call, route)

    def receive(self, tensor: Tensor, link: Link, label: str = "") -> Pending:
        """Starts to receive the next message of ``link`` into ``tensor``; messages arrive in the order of the sends."""
        call = partial(self._backend.receive, tensor, link.source, link.channel)
        route = self._route(EventKind.RECEIVE, link, link.source)
        return self._issue("receive", tensor, "pp", label or link.channel.flow, call, route)

    def reduce_scatter(self, shard: Tensor, full: Tensor, axis: Axis, label: str) -> Pending:
        """Starts to sum ``full`` [ranks * s] over ``axis`` into this rank's ``shard`` [s]; may overwrite ``full``."""
        return self._issue("reduce_scatter", full, axis, label, lambda: self._backend.reduce_scatter(shard, full, axis))

    def all_gather(self, full: Tensor, shard: Tensor, axis: Axis, label: str) -> Pending:
        """Starts to copy the ``shard`` [s] of every rank of ``axis`` into ``full`` [ranks * s], in order of index."""
        return self._issue("all_gather", full, axis, label, lambda: self._backend.all_gather(full, shard, axis))

    def open_symmetric(self, axis: Axis, sizes: SlotSizes, seconds: float) -> SymmetricBuffer | None:
        """Opens memory that kernels of all ranks of ``axis`` can write; returns None if unsupported.

        Every rank calls it. ``sizes``: bytes and tiles that one rank can send to another in one call. ``seconds``:
        timeout of a kernel's wait for data.
        """
        if (known := self._symmetric.get((axis, sizes))) is not None:  # of the engine that lends its groups
            return known
        memory = self._backend.share_bytes(axis, sizes.total) if sizes.ranks > 1 else None
        buffer = SymmetricBuffer(memory, sizes, seconds, self.grid.peers(axis)) if memory is not None else None
        if buffer is not None:
            self._symmetric[axis, sizes] = buffer
        return buffer

    def in_kernel(self, op: Op, full: Tensor, axis: Axis, label: str, call: Callable[[], Wait]) -> Pending:
        """Starts and counts a collective of type ``op`` that a kernel performs.

        ``call`` launches the kernel and returns a function that waits. Only the size and dtype of ``full`` are read.
        """
        return self._issue(op, full, axis, label, call)

    def bring_status(self) -> None:
        """Starts to copy the timeout reports of communicating kernels to the host.

        The next :meth:`check_kernels` reads these copies, and does not synchronize the device.
        """
        for buffer in self._symmetric.values():
            buffer.bring_status()

    def check_kernels(self) -> None:
        """Raises if a communicating kernel has timed out; on a GPU, call it after the end of the step.

        Raises:
            EngineError: a kernel timed out; the message names the call, the sending rank and the missing tile.
        """
        try:
            for buffer in self._symmetric.values():
                buffer.check()
        except PeerEndedError as error:
            raise EngineError(f"{error}; look for the first traceback of the job.") from error
        except RuntimeError as error:
            raise EngineError(
                f"{error}: that rank has ended, hangs, or makes other calls; look for the first traceback of the job."
            ) from error

    def connect_data(self, members: tuple[int, ...]) -> None:
        """Creates the group that :meth:`all_to_all` uses for the indices ``members`` of the data axis. All ranks
        make this call, with the same ``members``.
        """
        self._backend.connect_data(members)

    def all_to_all(self, received: Tensor, given: Tensor, members: tuple[int, ...], label: str, axis: Axis) -> Pending:
        """Starts to exchange slices of equal size: slice i of ``given`` goes to index ``members[i]`` of ``axis``.

        Slice i of ``received`` comes from that index. ``members`` has all indices of ``axis``; on the data axis, after
        :meth:`connect_data` with the same ``members``, it may have only some.
        """
        if len(members) == 1:
            received.copy_(given)
        name: str = axis if len(members) == self.grid.size(axis) else f"{axis} indices {indices_text(members)}"
        counted = self.grid.sharding if axis == self.grid.shard_line else axis
        route = _Route(len(members), Stream(EventKind.COLLECTIVE, counted, name))
        call = partial(self._backend.all_to_all, received, given, members, axis)
        return self._issue("all_to_all", given, counted, label, call, route)

    def exchange(
        self, received: Tensor, given: Tensor, gets: Sequence[int], gives: Sequence[int], axis: Axis, label: str
    ) -> Pending:
        """Starts to send ``gives[i]`` rows of ``given`` [sum of gives, ..] to each index i of ``axis``.

        ``received`` [sum of gets, ..] takes ``gets[i]`` rows from index i. Rows are in order of index.
        """
        size = given.element_size() * (math.prod(given.shape[1:]) if given.dim() > 1 else 1)
        if self.grid.size(axis) == 1:
            received.copy_(given)
        rows = sum(gives) - gives[self.grid.index(axis)]
        dtype = str(given.dtype).removeprefix("torch.")
        work = _Work("exchange", rows * size // given.element_size(), rows * size, dtype)
        call = partial(self._backend.exchange, received, given, gets, gives, axis)
        return self._launch(work, axis, label, call, self._axis_route(axis))

    def filled(self, pending: Pending) -> Pending:
        """Returns ``pending``; its wait first calls the callback ``self.fill_wait``, if set, for other computation."""
        return pending if self.fill_wait is None else pending.beside(self._use_wait)

    def _use_wait(self) -> None:
        if self.fill_wait is not None:
            self.fill_wait()

    def open_gathers(self, within: int | None = None, axis: Axis | None = None) -> None:
        """Creates the groups that :meth:`gather_parameters` uses with the same arguments; every rank calls it."""
        if axis is None:
            self._backend.open_gathers(within or self.grid.shard_group)
        elif self.grid.size(axis) > 1:
            self._backend.open_gathers(None, axis)

    def gather_parameters(
        self, pairs: Sequence[tuple[Tensor, Tensor]], label: str, within: int | None = None, axis: Axis | None = None
    ) -> Pending:
        """Starts to all-gather ``shard`` into ``full`` for each pair (``full``, ``shard``), as one call.

        ``within``: number of neighbouring data ranks in a group; None: the ZeRO shard group. ``axis``: axis of which
        all ranks are a group; ``within`` is then unused.
        """
        within = within or self.grid.shard_group if axis is None else None
        elements = sum(full.numel() for full, _ in pairs)
        size = sum(full.numel() * full.element_size() for full, _ in pairs)
        work = _Work("all_gather", elements, size, str(pairs[0][0].dtype).removeprefix("torch."))
        key, counted = axis or within, axis or self.grid.sharding
        route = self._gather_routes.get(key)
        if route is None:
            route = self._gather_routes[key] = self._gather_route(within, axis)
        call = partial(self._backend.gather_parameters, pairs, within, axis)
        return self._launch(work, counted, label, call, route)

    def _gather_route(self, within: int | None, axis: Axis | None) -> "_Route":
        if axis is not None:
            return _Route(self.grid.size(axis), Stream(EventKind.COLLECTIVE, axis, f"{axis} gathers"))
        line = self.grid.shard_line
        name, ranks = f"{line} gathers", within or self.grid.size(line)
        if within is not None:
            first = self.grid.index(line) // ranks * ranks
            name += f" indices {indices_text(range(first, first + ranks))}"
        return _Route(ranks, Stream(EventKind.COLLECTIVE, self.grid.sharding, name))

    def agree_on_gathers(self, said: bytes, label: str) -> Sequence[bytes]:
        """All-gathers the bytes ``said`` (equal length on all ranks) between the host memories of a ZeRO shard group.

        Returns the bytes of each rank, by index. No device synchronizes.
        """
        size = self.grid.size(self.grid.sharding)
        answers: list[bytes] = [said] if size == 1 else []

        def exchange() -> None:
            answers.extend(self._backend.exchange_gathers(said, size))

        axis = self.grid.sharding
        route = _Route(size, Stream(EventKind.COLLECTIVE, axis, f"{self.grid.shard_line} gathers agreement"))
        work = _Work("all_gather", len(said) * size, len(said) * size, "uint8")
        self._launch(work, axis, label, lambda: exchange, route).wait()
        return answers

    def close(self) -> None:
        """Ends this engine's communication; the default process group and groups borrowed from another engine remain.

        After a failed call it also drops this rank's unfinished calls; with gloo, other ranks' waits in them then fail.
        """
        self._closed = True
        if self.borrows:
            return
        self.failures.close()
        if self.joint is not None:
            self.joint.leave()
        for pending in list(self._in_flight) if self.failures.noted else ():
            pending.drop()
        for buffer in self._symmetric.values():
            buffer.close()
        self._backend.close()

    def _issue(
        self, op: Op, full: Tensor, axis: Axis, label: str, call: Callable[[], Wait], route: "_Route | None" = None
    ) -> Pending:
        work = _Work(op, full.numel(), full.numel() * full.element_size(), str(full.dtype).removeprefix("torch."))
        return self._launch(work, axis, label, call, route or self._axis_route(axis))

    def _axis_route(self, axis: Axis) -> "_Route":
        route = self._routes.get(axis)
        if route is None:
            route = self._routes[axis] = _Route(self.grid.size(axis), Stream(EventKind.COLLECTIVE, axis, axis))
        return route

    def _route(self, kind: EventKind, link: Link, other: int) -> "_Route":
        channel = link.channel
        name = f"{channel.flow} {channel.source}>{channel.target}"
        return _Route(self.grid.size("pp"), Stream(kind, "pp", name, self.grid.peers("pp")[other]))

    def _launch(self, work: "_Work", axis: Axis, label: str, call: Callable[[], Wait], route: "_Route") -> Pending:
        if route.ranks == 1:
            return Pending()
        if self._closed:
            raise EngineError(f"{label} was called after close(), which ends this engine; initialize a new one.")
        self._sequence += 1
        record = Record(self._sequence, work.op, axis, label, work.elements, work.dtype)
        self.records.append(record)
        if work.op != "receive":
            self.tally.count(axis, label, 1, sent_bytes(work.op, work.bytes, route.ranks))
        note = None
        if self.recorder is not None:
            seen = self.recorder.begin(route.stream, label, (work.bytes, work.dtype))
            note = _Note(self.recorder, seen, route.stream, work.bytes)
        describe, absent = partial(self._describe, record), partial(self._absent, record)
        try:
            pending = Pending(call(), describe, self.broken, absent, note)
        except RuntimeError as error:
            raise _named_failure(describe(), error, self.broken, absent) from error
        self._in_flight.add(pending)
        return pending

    def _describe(self, record: Record) -> str:
        kind = "message" if record.op in ("send", "receive") else "collective"
        return f"{kind} {record} between ranks {self.grid.peers(record.axis)} on rank {self.grid.rank}"

    def _absent(self, record: Record, error: RuntimeError) -> str:
        """Names the ranks that did not join the failed call; the two ends of a message are one call."""
        op = "message" if record.op in ("send", "receive") else record.op
        call = f"{op} {record.label!r} over {record.axis}"
        if self.reports is None:
            return ""
        if isinstance(error, PeerEndedError):  # it names the rank, and nobody has to wait for the words of others
            self.reports.tell(call)
            return ""
        return self.reports.absent(call, self.grid.peers(record.axis))


class _Route(NamedTuple):
    """Participants of a collective or message, and the stream that orders it."""

    ranks: int
    stream: Stream


class _Work(NamedTuple):
    """The data that a collective or message moves."""

    op: Op
    elements: int
    bytes: int
    dtype: str
