"""Gathers (unshards) parameters just before they are used, and frees (reshards) them afterwards (ZeRO 3).

    forward    a module of group k is entered      -> free k - 1, start the gather of k + 1, wait for k
    backward   the gradient of its output arrives  -> free k + 1, start the gather of k - 1, wait for k

Autograd runs the newest operations first, so when the gradient of a call's output arrives, backward of all later calls
is done. Groups of forwards that backward recomputes are gathered too.

Every rank gathers the groups in the same order, even for modules that it skips, in separate process groups. In a
forward, a rank that needs parameters outside this order (a module that runs again or early, a weight that other code
reads) requests them from all data ranks (``call_agreement``). In a backward after equal calls all ranks make equal
requests, and compare them before such a gather; after unequal calls a rank keeps the buckets that it will reach again.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.parallel.comm.comm import Comm
from engine.parallel.pipeline.schedule.actions import Action, Op
from engine.parallel.tensor.logits.sharded_logits import ShardedLogits
from engine.zero.flat_buckets import FlatBucket
from engine.zero.gather.call_agreement import GatherRounds, PassCalls, Said
from engine.zero.gather.gather_schedule import GatherOrder
from engine.zero.gather.outside_calls import OutsideCalls
from engine.zero.gather.secondary_shards import NO_SHARDS, SecondaryLayout
from engine.zero.gather.unsharded_buckets import UnshardedBuckets

_FORWARD, _BACKWARD = Action(Op.FORWARD, 0, 0), Action(Op.BACKWARD, 0, 0)
"""Passes of the user's forward/backward/step loop, which has one stage and no schedule."""


class _Walk:
    """State of the running pass."""

    def __init__(
        self, walk: Action, order: GatherOrder, calls: PassCalls, kept: frozenset[int], pinned: frozenset[int]
    ) -> None:
        self.is_forward, self.stage, self.calls = walk.op is Op.FORWARD, walk.stage, calls
        self.positions = order.positions(walk)
        self.kept = kept
        """Buckets that are not freed when they are only passed over."""
        self.stays = kept & (order.members[self.positions[-1]] | pinned) if self.positions else kept
        """Buckets that remain gathered after the pass, equal on all ranks, independent of their calls."""
        self.held: frozenset[int] = frozenset()
        """In a backward after unequal calls: buckets that stay gathered to its end, because it reaches them again."""
        self.pinned = pinned
        """Buckets that are not freed before their turn in this pass has come."""
        self.asked = 0
        """Number of positions with started gathers."""
        self.oldest: int | None = None
        """Oldest call with a gradient that has arrived, in a backward."""
        self.again: set[int] = set()
        """In a backward: positions that the running recomputation has entered."""

    def index(self, position: int) -> int:
        """Returns the index of the position in this pass, or -1 if the pass does not contain it."""
        return self.positions.index(position) if position in self.positions else -1


class ParameterGatherer:
    """Gatherer of sharded parameters (ZeRO 3): gathers them before their modules run, and frees them afterwards.

    Args:
        buckets: trainable buckets, then frozen ones; ``order`` refers to their indices.
        order: order in which buckets are needed.
        pinned: buckets that stay gathered over all passes (forwards and backwards) of a step. None: all buckets,
            gathered before the first pass; data ranks may then run different numbers of passes.
        comm: sends all-gathers over dp, label "parameters", one batch for each group of modules in each pass.
        start: callback for a gradient outside a pass; it begins a backward of the engine.
        within: buckets with secondary shards (ZeRO++ hpZ), gathered once over dp, then within nodes.
    """

    def __init__(
        self, buckets: Sequence[FlatBucket], order: GatherOrder, pinned: Collection[int] | None, comm: Comm,
        start: Callable[[], None], within: SecondaryLayout = NO_SHARDS,
    ) -> None:  # fmt: skip
        self._start_backward = start
        self._once, pinned = pinned is None, range(len(buckets)) if pinned is None else pinned
        self._order, self._pinned, self._ranks = order, frozenset(pinned), comm.grid.size(comm.grid.sharding)
        self._rounds = GatherRounds(comm, len(buckets))
        self._calls_of: defaultdict[tuple[int, int], PassCalls] = defaultdict(PassCalls)
        """Stage and microbatch -> calls of its forward."""
        self._whole = UnshardedBuckets(buckets, comm, self._read, within)
        self._outside = OutsideCalls(self._whole, comm)
        self._pass: _Walk | None = None
        self._to_come: deque[Action] = deque()
        self._calls = 0
        self._at: dict[tuple[int, int], int] = {turn: position for position, turn in enumerate(order.turns)}
        self._anywhere = {turn.group: position for position, turn in reversed(list(enumerate(order.turns)))}
        self._opened: set[int] = set()
        self._closed = False
        self._reads_shapes = False
        self.holds = False
        """All buckets stay gathered (``held``)."""
        self._openings = 0
        """Number of open `with` blocks of full_parameters, also of blocks that open nothing on this rank."""
        self._differentiated = False
        """A backward of this step has recorded its own operations, which a later one goes through."""
        self._silent: set[int] = set()
        """Positions of which a call has returned no tensor that a gradient could reach."""

    # ------------------------------------------------------------------ the passes of a step

    def start(self, passes: Sequence[Action]) -> None:
        """Sets the forwards and backwards ``passes`` of a step. Buckets that a pass needs at its start stay gathered
        from the pass before. Starts gathers only if ``pinned`` was None.

        Drops secondary shards (ZeRO++ hpZ) from earlier forwards.
        """
        self.refuse_opened("a step")
        self._whole.drop_secondary()
        self._to_come = deque(passes)
        if not torch.is_grad_enabled() or len({one.op for one in passes}) != 1:  # a user's loop has backwards apart
            self._calls_of.clear()
        if self._once:  # also on a rank without passes, whose shards the others need
            self._ask_all()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Gathers parameters for one forward inside the context, with prefetches in gather order."""
        following = _BACKWARD if torch.is_grad_enabled() else None
        with nullcontext() if self.holds else self._passing(_FORWARD, following):
            yield

    @contextmanager
    def held(self) -> Iterator[None]:
        """Gathers all buckets once. Forwards inside the context communicate no parameters.

        No backward may run inside. Every data rank enters and leaves the context.
        """
        self.refuse_opened("a step")
        everything = frozenset(range(len(self._order.buckets)))
        try:
            with torch.no_grad():
                self._whole.ask_alike(everything)
                self._whole.show(everything)
            self.holds = True
            yield
        finally:
            self.holds = False
            self.end()

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Gathers parameters for one backward inside the context. ``last``: True for the last one of the step."""
        with self._passing(_BACKWARD, None if last else _FORWARD):
            yield

    def end(self) -> None:
        """Frees all gathered buckets after a step or its failure, including memory that autograd nodes refer to."""
        self._to_come.clear()
        self._pass, self._differentiated = None, False
        self._whole.free(self._whole.live - self._opened)
        self._whole.drop_secondary()
        self._whole.settle()

    @contextmanager
    def _passing(self, walk: Action, following: Action | None) -> Iterator[None]:
        self.refuse_opened("a step")
        if self._to_come:
            walk = self._to_come.popleft()
            following = self._to_come[0] if self._to_come else None
        kept = self._order.at_start(following) | self._pinned if following else frozenset()
        now = self._pass = self._begin(walk, kept)
        twice = self._differentiated and not now.is_forward
        try:
            with torch.no_grad():
                if self._once:
                    self._ask_all()
                self._ask_up_to(1)
                if now.positions:
                    first = self._order.everywhere if walk.op is Op.FORWARD else self._order.at_start(walk)
                    self._whole.show(first)
                if twice:
                    self._hold_all(now)
            yield
            with torch.no_grad():
                self._ask_up_to(len(now.positions))
                if now.is_forward and now.positions:
                    self._end_forward(now)
            self._whole.refuse_written(self._whole.live)
        except BaseException:
            self.end()
            raise
        self._pass = None
        self._whole.free(self._whole.live - now.stays)
        if not torch.is_grad_enabled():  # no step follows, before which the host waits for more
            self._whole.settle()

    def unequal(self, stage: int, microbatch: int) -> bool:
        """Returns True if data ranks made different module calls in this forward of the stage. Sends nothing."""
        calls = self._calls_of.get((stage, microbatch))
        return calls is not None and calls.unequal

    def _begin(self, walk: Action, kept: frozenset[int]) -> _Walk:
        calls = self._calls_of[walk.stage, walk.microbatch]
        now = _Walk(walk, self._order, calls, kept, self._pinned)
        if now.is_forward:
            calls.begin_forward()
        else:
            calls.begin_backward()
            if calls.unequal:
                now.held = frozenset().union(*(self._order.members[position] for position in calls.reached_again))
        if self._once:
            now.held = self._pinned
        return now

    def _end_forward(self, now: _Walk) -> None:
        """Takes part in the rounds of ranks that have not ended their forward, and compares the calls of all.

        Without rounds, calls that a backward reaches again count as unequal, because other ranks may lack them.
        """
        if self._once:
            now.calls.unequal = now.calls.unequal or bool(now.calls.reached_again)
            return
        own = Said(ended=True, calls=now.calls.digest)
        said = self._round(own)
        while not all(each.ended for each in said):
            said = self._round(own)
        now.calls.compare(said)

    def _round(self, own: Said) -> list[Said]:
        """Gathers on all ranks the buckets that any rank requests."""
        said = self._rounds.meet(own)
        everywhere = frozenset().union(*(each.wanted for each in said if each.everywhere))
        if everywhere:
            self._order = replace(self._order, members=tuple(group | everywhere for group in self._order.members))
        self._whole.ask_again(frozenset().union(*(each.wanted for each in said)), own.wanted)
        return said

    def refuse_opened(self, what: str) -> None:
        """Raises EngineError, which names the call ``what``, if a ``full_parameters`` block is open."""
        if self._openings:
            raise EngineError(
                f"{what} cannot run inside full_parameters, which keeps parameters gathered; leave its `with` block "
                "first."
            )

    # ------------------------------------------------------------------ what modules call

    def enter(self, group: int) -> None:
        """Gathers the buckets of group ``group`` before one of its modules runs, and prefetches the next group."""
        position = self._position(group)
        if self._pass is not None and position is not None:
            if self._pass.is_forward:
                self._pass.calls.note(position)
            with torch.no_grad():
                (self._reach if self._pass.is_forward else self._enter_again)(position, self._pass)

    def around(self, group: int | None) -> AbstractContextManager[bool]:
        """Returns the context of a call of a module in gather group ``group`` (None: a module that contains groups).

        It yields True only for an outermost call outside a pass (forward or backward of the engine).

        Outside a pass, the context gathers the module's buckets and frees them at its end; inside a pass, it does
        nothing. A call inside autograd's backward, such as recomputation, first starts a pass.
        """
        if self._pass is None and torch._C._current_graph_task_id() != -1:
            self._start_backward()
        if self._pass is not None or self._reads_shapes or self.holds:
            return nullcontext(False)
        used = self._order.everywhere
        if group is not None and (position := self._anywhere.get(group)) is not None:
            used |= self._order.members[position]
        return self._outside.call(used)

    def leave(self, group: int, outputs: Sequence[Tensor]) -> None:
        """Registers hooks: the first gradient of a module's ``outputs`` gathers the buckets of its ``group`` again."""
        position = self._position(group)
        if position is not None and (self._pass is None or self._pass.is_forward):
            self._calls += 1
            if not outputs:
                self._silent.add(position)
            arrive = partial(self._arrive, position, self._calls)
            with torch._C.DisableTorchFunctionSubclass():  # some subclasses refuse hooks; ours only observes
                for tensor in outputs:
                    hooked = tensor.when_differentiated if isinstance(tensor, ShardedLogits) else tensor.register_hook
                    hooked(arrive)

    def _position(self, group: int) -> int | None:
        """Returns the position of the group in this pass, or else its first position on this rank; None if it has
        none."""
        if self._pass is None:
            return self._anywhere.get(group)
        return self._at.get((self._pass.stage, group), self._anywhere.get(group))

    def _arrive(self, position: int, call: int, _: Tensor) -> None:
        if self._pass is None:
            self._start_backward()
        now = self._pass
        if now is None:
            return
        if now.is_forward:  # a backward of the user's own, through a graph that the step may use again
            if not self._order.members[position] <= self._order.everywhere:
                self._need_everywhere(self._order.members[position])
            return
        self._differentiated = self._differentiated or torch.is_grad_enabled()  # create_graph
        if now.oldest is None or call < now.oldest:  # a later call is a tensor that the module only passed on
            now.oldest = call
            with torch.no_grad():
                self._reach(position, now)

    def _reach(self, position: int, now: _Walk) -> None:
        """Gathers and shows the group at ``position``, starts the gather of the next one, and frees the ones before
        it."""
        wanted, index = self._order.members[position], now.index(position)
        # Kept besides ``wanted``: the group that is prefetched already, and pinned buckets that this pass or the next
        # one still needs.
        ahead = self._order.members[now.positions[now.asked - 1]] if now.asked - 1 > index else frozenset()
        waiting: frozenset[int] = frozenset()
        if now.pinned:
            to_come = [self._order.members[later] for later in now.positions[index + 1 :]]
            waiting = now.pinned & (now.kept | frozenset().union(*to_come))
        # What is passed over now is freed by `_ask_up_to`: gathered again here, it would be on this rank alone.
        passed = frozenset().union(*(self._order.members[later] for later in now.positions[now.asked : index + 1]))
        behind = self._whole.live - wanted - ahead - waiting - passed - now.held
        self._whole.refuse_written(behind)
        self._whole.free(behind)
        # Asking in order keeps collectives matched on all data ranks. What is still missing after that is wanted out of
        # order (a module that runs again, or early), and the ranks agree on it first.
        self._ask_up_to(index + 1)
        self._ask_missing(wanted, now)
        self._whole.show(wanted | self._ask_ahead(index + 1, now))

    def _ask_missing(self, wanted: frozenset[int], now: _Walk) -> None:
        """Requests missing buckets out of order."""
        if now.is_forward and not wanted <= self._whole.live:
            self._ask_up_to(len(now.positions))  # the other ranks wait for these before they come to a round
            self._round(Said(wanted - self._whole.live))
        else:
            self._whole.ask_alike(wanted)

    def _ask_ahead(self, index: int, now: _Walk) -> frozenset[int]:
        """Starts the gather of the next group and returns the buckets that must be shown at once.

        In a backward, modules that returned no differentiable tensor never announce their group, so it is shown
        together with the group before it.
        """
        at_once: frozenset[int] = frozenset()
        while index:
            self._ask_up_to(index + 1)
            silent = not now.is_forward and index < len(now.positions) and now.positions[index] in self._silent
            if not silent:
                break
            self._whole.ask_alike(self._order.members[now.positions[index]])
            at_once |= self._order.members[now.positions[index]]
            index += 1
        return at_once

    def _hold_all(self, now: _Walk) -> None:
        """Gathers everything until the end of a backward through operations of an earlier backward.

        These read the weights in the order of the forward and then in that of the backward, and no module's output
        tells when.
        """
        now.held = frozenset(range(len(self._order.buckets)))
        self._ask_up_to(len(now.positions))
        self._whole.ask_alike(now.held)
        self._whole.show(now.held)

    def _enter_again(self, position: int, now: _Walk) -> None:
        """Gathers for a recomputed module; buckets that the running backward may need are not freed."""
        wanted = self._order.members[position]
        if now.calls.unequal:  # which modules a recomputation enters after this one is unknown
            now.held = frozenset(range(len(self._order.buckets)))
        if now.again and position < min(now.again):  # another recomputation begins, so the previous one is done
            behind: frozenset[int] = frozenset().union(*(self._order.members[past] for past in now.again))
            self._whole.free(behind - wanted - now.pinned - now.held)
            now.again.clear()
        now.again.add(position)
        self._ask_up_to(now.index(position) + 1)
        self._whole.ask_alike(wanted)
        self._whole.show(wanted)

    def _read(self, index: int, name: str) -> None:
        """Handles a read of a parameter that is not gathered, by code outside its module or outside the engine."""
        if self._outside.running:
            return self._outside.read(index)
        if self._pass is None:
            sharded = f"parameter {name!r} is sharded over {self._ranks} data ranks (ZeRO 3) and"
            if self._closed:
                raise EngineError(f"{sharded} its engine is closed; call eng.full_state_dict() before closing it.")
            raise EngineError(
                f"{sharded} is gathered only while the model or a module of it runs; read or write it inside "
                f"`with eng.full_parameters({name!r}):`, on all ranks."
            )
        return self._need_everywhere(frozenset({index}))

    @torch.no_grad()
    def _need_everywhere(self, indices: frozenset[int]) -> None:
        """Keeps these buckets gathered through every pass from now on, because unknown code reads them."""
        now = self._pass
        if self._once:
            self._whole.show(indices)
            return
        if now is not None and now.is_forward:
            self._ask_up_to(len(now.positions))
            self._round(Said(indices, everywhere=True))
            return
        self._order = replace(self._order, members=tuple(group | indices for group in self._order.members))
        self._whole.ask_alike(indices)
        self._whole.show(indices)

    def keep_views(self, outputs: Iterable[Tensor]) -> None:
        """Keeps a bucket gathered from now on if ``outputs`` of a module are views of the bucket's parameters."""
        if self._pass is None:
            return
        found = frozenset(index for output in outputs if (index := self._whole.bucket_of(output)) is not None)
        if not found <= self._order.everywhere:
            self._need_everywhere(found)

    def own(self, output: Tensor) -> Tensor:
        """Returns ``output``, for use after the forward or backward: a clone if it shares memory with a bucket."""
        index = self._whole.bucket_of(output)
        if index is None:
            return output
        if index not in self._whole.live:
            self._need_everywhere(frozenset({index}))
        return output.clone()

    def retire(self) -> None:
        """Marks the engine as closed: errors about later reads of sharded parameters mention this."""
        self._closed = True

    # ------------------------------------------------------------------ full parameters between steps

    @property
    def running(self) -> bool:
        """True while a forward or backward of the engine runs."""
        return self._pass is not None

    def open(self, indices: Collection[int]) -> frozenset[int]:
        """Gathers the buckets ``indices`` between steps; returns the indices not open before. Collective over dp."""
        opened = frozenset(indices) - self._opened
        self._whole.free(opened & self._whole.encoded)  # what a pass has left is rounded, and this is written back
        self._whole.ask_alike(opened, exact=True)
        self._whole.show(opened)
        self._openings += 1
        self._opened |= opened
        return opened

    def close(self, indices: Collection[int]) -> None:
        """Frees the buckets ``indices``, which :meth:`open` has returned, except memory that user tensors share."""
        self._openings -= 1
        self._opened -= set(indices)
        self._whole.free(frozenset(indices), leave=True)
        self._whole.drop_secondary(indices)

    def forget(self) -> None:
        """Frees gathered buckets and drops secondary shards (ZeRO++ hpZ), after a parameter change on all ranks."""
        self._whole.free(self._whole.live - self._opened)
        self._whole.drop_secondary()

    def settle(self) -> None:
        """Waits until the device has read this rank's shards in host memory. The host may then overwrite them."""
        self._whole.settle()

    @property
    def secondary(self) -> tuple[Tensor, ...]:
        """Secondary shards of this rank (ZeRO++ hpZ), as tensors; empty if there are none."""
        return self._whole.secondary.memory

    @contextmanager
    def without_content(self) -> Iterator[None]:
        """Disables gathers inside the context, for code that reads only the shapes of parameters, such as a trace."""
        self._reads_shapes = True
        try:
            with self._whole.without_content():
                yield
        finally:
            self._reads_shapes = False

    # ------------------------------------------------------------------ the order

    def _ask_all(self) -> None:
        """Starts the gathers of all groups, one batch for each."""
        for members in self._order.members:
            self._whole.ask(members)

    def _ask_up_to(self, count: int) -> None:
        """Starts the gathers of the first ``count`` groups in order, and frees the groups that it passes over."""
        now = self._pass
        assert now is not None
        members, count = self._order.members, min(count, len(now.positions))
        for index in range(now.asked, count):
            position = now.positions[index]
            self._whole.ask(members[position])
            now.asked = index + 1
            if now.asked < count:
                self._whole.free(members[position] - members[now.positions[now.asked]] - now.kept - now.held)
