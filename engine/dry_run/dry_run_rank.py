"""Dry run of one rank of a plan: a short step runs on FakeTensors, and the bytes of each pipeline action are recorded.

The runtime is the one of training, on a copy of the model. Per stage, the first, a middle and the last microbatch run;
:mod:`engine.planning.activation_memory` puts their bytes in the order of the schedule. If every microbatch reduces its
gradients, the second one runs too, because buffers are reused only from then on.

Parameters and messages are FakeTensors that claim the CPU, so that torch and the model take the code paths of the run.
Other tensors, such as masks and positions, are real: their content may choose a path.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine.build.assemble import assemble_rank
from engine.build.forward_changes import change_forwards
from engine.build.request import Request
from engine.build.validate import prepare
from engine.dry_run.gpu_attention import attention_of_gpu
from engine.kernels.dispatch import Kernels
from engine.kernels.ops.adamw import DeviceDecision
from engine.optim.param_groups import as_trainable
from engine.parallel.comm.backend import Flow, RecordingBackend, Wait
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.traffic import Tally
from engine.parallel.grid import Axis, Grid
from engine.parallel.model.forward_patch import ForwardPatches
from engine.parallel.pipeline.runtime.executor import Executor, RankSchedule
from engine.parallel.pipeline.runtime.transport import Arrival, MemoryTransport, Message, ReceiveBuffers
from engine.parallel.pipeline.schedule.actions import Action, Op
from engine.planning.activation_memory import ActionMemory, LiveStorages, MessageBuffer
from engine.planning.budgets import reduces_each_microbatch
from engine.planning.flat_layouts import without_unread_heads
from engine.planning.plan import Plan
from engine.program.batch import Batch, map_tensors
from engine.step.microbatches import MicrobatchRunner
from engine.step.runtime import RankRuntime
from engine.step.state import StepState

CPU = torch.device("cpu")


def shape_mode() -> FakeTensorMode:
    """Returns a FakeTensorMode in which operators compute only shapes, and which accepts real input tensors."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def take_content(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replaces all parameters of ``model``, in place, by FakeTensors (shapes without data) of ``mode`` on the CPU.

    Buffers on the meta device are replaced too. Tied parameters stay tied.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = made.setdefault(id(parameter), _parameter(parameter, mode))
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = _shape_of(buffer, mode)


def _parameter(parameter: nn.Parameter, mode: FakeTensorMode) -> nn.Parameter:
    made: Any = nn.Parameter(_shape_of(parameter, mode), requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    return made  # type: ignore[no-any-return]


def _shape_of(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    return FakeTensor(mode, torch.empty_like(tensor.detach(), device="meta"), CPU)


class MissingShapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """torch dispatch mode that computes output shapes of grouped matrix products on FakeTensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and what would hide the mode from Dynamo runs at each operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default and any(isinstance(given, FakeTensor) for given in args[:2]):
            return _grouped(args[0], args[1], (kwargs or {}).get("offs", args[2] if len(args) > 2 else None))
        return func(*args, **(kwargs or {}))


def _grouped(left: Tensor, right: Tensor, ends: Tensor | None) -> Tensor:
    """Returns the result's shape: rows sorted by group times a matrix each, or a product per group of a sorted inner
    dim."""
    shape: tuple[int, ...] = (left.shape[-2], right.shape[-1])
    if left.ndim == right.ndim:
        groups = left.shape[0] if left.ndim == 3 or ends is None else len(ends)
        shape = (groups, *shape)
    return (left if isinstance(left, FakeTensor) else right).new_empty(shape)


class EqualRanksBackend(RecordingBackend):
    """Communication backend of a dry run in one process. It sends nothing; a gather acts as if all ranks had this
    rank's tensors.

    Args:
        exchanges: True: a reduce-scatter allocates a temporary tensor for the slices of all ranks, as on gloo.
    """

    def __init__(self, grid: Grid, exchanges: bool) -> None:
        super().__init__(grid)
        self._exchanges = exchanges

    def reduce_scatter(self, shard: Tensor, full: Tensor, axis: Axis) -> Wait:
        """Writes this rank's slice of ``full`` to ``shard``; returns a function without effect.

        If the backend was made with ``exchanges`` and ``axis`` is not "tp", the call only allocates a temporary tensor,
        and the returned function writes meaningless values to ``shard``.
        """
        if not self._exchanges or axis == "tp":  # the tensor axis shares memory
            return super().reduce_scatter(shard, full, axis)
        received, ranks = torch.empty_like(full), self._grid.size(axis)

        def finish() -> None:
            first, *others = received.view(ranks, -1)
            total = first.float() if first.element_size() < 4 else first
            for other in others:
                total += other
            shard.copy_(total)

        return finish

    def all_gather(self, full: Tensor, shard: Tensor, axis: Axis) -> Wait:
        """Copies ``shard`` to every slice of ``full``, one for each rank of ``axis``; returns a function without
        effect.
        """
        super().all_gather(full, shard, axis)
        if isinstance(full, FakeTensor):
            return lambda: None  # a FakeTensor has no content
        full.view(self._grid.size(axis), -1).copy_(shard.view(-1))
        return lambda: None

    def gather_parameters(
        self, pairs: Sequence[tuple[Tensor, Tensor]], within: int | None = None, axis: Axis | None = None
    ) -> Wait:
        """Copies each shard of ``pairs`` (full tensor, shard) to every slice of its full tensor; returns a function
        without effect.

        ``within`` and ``axis`` do not change the result.
        """
        super().gather_parameters(pairs, within, axis)
        for full, shard in pairs:
            if not isinstance(full, FakeTensor):
                full.view(-1, shard.numel()).copy_(shard.view(-1))
        return lambda: None


class DryRunTransport:
    """Transport of pipeline messages in a dry run of one rank. Messages between two stages of this rank are delivered;
    a message from another rank is received as a FakeTensor.

    A receive buffer counts as live bytes (bytes of existing tensors) only if a tensor still refers to it when
    ``recycle`` is called to free it.
    """

    def __init__(
        self, rank_of_stage: Sequence[int], live: LiveStorages, shapes: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._rank_of_stage, self._live, self._shapes = rank_of_stage, live, shapes
        self._own, self._buffers = MemoryTransport(), ReceiveBuffers(torch.device("cpu"))
        self._near: list[Tensor] = []
        self._far: dict[Message, Tensor] = {}
        self.taken: list[MessageBuffer] = []
        self.given_back: list[MessageBuffer] = []
        self.kept: list[MessageBuffer] = []

    def send(self, message: Message, tensor: Tensor, exact: bool = True) -> None:
        """Delivers ``tensor`` to a stage of this rank, or stores it if another rank is the target.

        A stored tensor counts as live bytes: for a neighboring stage until the pipeline action ends (``complete``),
        otherwise until ``delivered`` is called. ``exact`` has no effect.
        """
        if self._is_own(message):
            self._own.send(message, tensor)
        elif abs(message.target - message.source) == 1:
            self._near.append(tensor.detach().contiguous())
        else:
            self._far[message] = tensor.detach().contiguous()

    def receive(self, message: Message, shape: Sequence[int], dtype: torch.dtype, exact: bool = True) -> Arrival:
        """Returns a function that returns the received tensor.

        If ``message`` is from another rank, the tensor is a FakeTensor of ``shape`` and ``dtype``. ``exact`` has no
        effect.
        """
        if self._is_own(message):
            return self._own.receive(message, shape, dtype)
        with self._shapes():
            tensor = self._buffers.take(tuple(shape), dtype)
        self._live.leave_out(tensor)
        self.taken.append(_buffer(tensor))
        return tensor.detach

    def release(self, flow: Flow, stage: int, microbatch: int) -> None:
        """Does nothing, because ``complete`` and ``delivered`` release the sent tensors."""

    def delivered(self, message: Message) -> None:
        """Releases the stored tensor that was sent as ``message``."""
        self._far.pop(message, None)

    def recycle(self, tensor: Tensor) -> None:
        """Records the receive buffer of ``tensor`` as free, or as live if something still refers to the buffer."""
        if not self._buffers.lent(tensor):
            return
        buffer = _buffer(tensor)
        if self._buffers.give(tensor):
            self.given_back.append(buffer)
        else:
            self.kept.append(buffer)
            self._live.take_in(tensor)

    def complete(self) -> None:
        """Ends a pipeline action: releases the tensors sent to neighboring stages, and clears the records of receive
        buffers.
        """
        self._near.clear()
        self.taken, self.given_back, self.kept = [], [], []

    def finish(self) -> None:
        """Releases all tensors that were sent to other ranks, at the end of the step."""
        self.complete()
        self._far.clear()

    def _is_own(self, message: Message) -> bool:
        return self._rank_of_stage[message.source] == self._rank_of_stage[message.target]


def _buffer(tensor: Tensor) -> MessageBuffer:
    return MessageBuffer(tuple(tensor.shape), str(tensor.dtype), tensor.numel() * tensor.element_size())


FIRST, SECOND, MIDDLE, LAST = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunStep:
    """Live bytes (bytes of tensors that steps have allocated) during each pipeline action in a training step of one
    rank.

    The step follows a warm-up step.
    """

    actions: dict[tuple[Op, int, int], ActionMemory]
    """Bytes by operation, stage and microbatch: FIRST, SECOND, MIDDLE or LAST."""
    base: int
    """Live bytes of the rank between steps."""
    end_rise: int
    """Peak bytes of the final gradient reduction minus live bytes between steps."""

    def memory_of(self, action: Action, number: int, total: int) -> ActionMemory:
        """Returns the live bytes of ``action``.

        For each stage and operation, the first, second, last and one middle action were measured; all other actions get
        the result of the middle one.

        Args:
            number: index, from 0, of ``action`` among the actions with the same stage and operation.
            total: number of these actions.
        """
        place = LAST if number == total - 1 else min(number, MIDDLE)
        return self.actions[action.op, action.stage, place]

    def on_stages(self, stages: Mapping[int, int]) -> "DryRunStep":
        """Returns a copy with the stage numbers of another rank; the stages of both ranks must have the same shapes.

        Args:
            stages: mapping from each stage of this rank to a stage of the other rank.
        """
        actions = {(op, stages[stage], place): memory for (op, stage, place), memory in self.actions.items()}
        return replace(self, actions=actions)


class DryRunRank:
    """Dry run of one rank of a plan: runs short training steps on FakeTensors (shapes without data), and records live
    bytes.

    Args:
        model: model of the plan; a copy is used.
        rank: global rank to imitate.
        request: arguments of ``initialize``, such as the loss function.
        example: one microbatch; tensors on the meta device become zeros.
        kernels: choice of Triton or torch for each operator on the plan's GPU, which this machine may lack; None: the
            plan is for CPUs.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        rank: int,
        request: Request,
        example: Batch,
        kernels: Kernels | None = None,
    ) -> None:
        self._mode = shape_mode()
        self._model = copied = deepcopy(model)
        example = map_tensors(example, _real)
        most = 4 if reduces_each_microbatch(plan.config) else 3
        played = min(most, plan.schedule.microbatches)
        self._batches = [map_tensors(example, Tensor.clone) for _ in range(played)]
        given = replace(request, patches=ForwardPatches(), placing=lambda: self._mode, example_batch=example)
        prepare(copied, plan.config, given)
        given = replace(given, changes=change_forwards(copied, plan.config, CPU, given.patches, kernels))
        late, _ = without_unread_heads(copied, given.changes.replacements, plan.layouts)
        self.plan = plan = replace(plan, replacements=late)  # of the absent device
        take_content(copied, self._mode)
        grid = plan.grid(rank)
        self._comm = Comm(grid, EqualRanksBackend(grid, exchanges=kernels is None))
        with as_trainable(copied, request.included):
            self._runtime = assemble_rank(copied, plan, self._comm, CPU, given, example)
        self._pp, self._on_gpu = grid.coord().pp, kernels is not None
        self.live = LiveStorages(_gathered_bytes(self._runtime))
        self._runtime.on_host.observer = self.live.leave_out

    def trace_like(self, other: "DryRunRank") -> None:
        """Takes over recorded forwards (traces) of the model from ``other``, a finished dry run of another rank."""
        own, others = self._runtime.pipeline, other._runtime.pipeline
        if own is not None and others is not None:
            own.traces.take(others.traces)

    def step(self) -> DryRunStep:
        """Runs a warm-up step and a measured step, and returns the live bytes of each pipeline action.

        If the schedule has both full backwards and backwards split into input and weight gradients, two steps are
        measured, one with each kind, and the result has the actions of both.
        """
        found: dict[tuple[Op, int, int], ActionMemory] = {}
        end_rise, row = 0, self.plan.schedule.per_rank[self._pp]
        with self._dry_running():
            # buffers that are allocated once and reused must not count as memory of an action
            self._play(short_row(row, 1, splits=True))
            self._reduce()
            base = self.live.bytes
            begun = {action.op for action in row} & {Op.BACKWARD, Op.BACKWARD_INPUT}
            for splits in sorted(op is Op.BACKWARD_INPUT for op in begun):
                actions = short_row(row, len(self._batches), splits)
                found |= self._play(actions)
                end_rise = max(end_rise, self._reduce())
        return DryRunStep(actions=found, base=base, end_rise=end_rise)

    def watch(self, modules: Sequence[str]) -> list[int]:
        """Returns a list to which later steps append the live bytes after each forward of a module named in
        ``modules``.

        Forwards that a backward recomputes append nothing.
        """
        levels = list[int]()

        def note(*_: Any) -> None:
            if torch._C._current_graph_task_id() == -1:  # recomputation in the backward calls the hook again
                gc.collect()
                levels.append(self.live.bytes)

        for name in modules:
            self._model.get_submodule(name).register_forward_hook(note)
        return levels

    def play(self) -> None:
        """Runs one step with its optimizer update, without measuring bytes."""
        row = self.plan.schedule.per_rank[self._pp]
        splits = any(action.op is Op.BACKWARD_INPUT for action in row)
        with self._dry_running():
            self._play(short_row(row, len(self._batches), splits))
            self._reduce()
            self._update()

    def _update(self) -> None:
        runtime, one = self._runtime, torch.ones((), dtype=torch.float64)
        runtime.optimizer.gradient_squared_norm()
        if runtime.optimizer.copies.any:  # the host updates, by its own code
            return
        runtime.learning_rate.prepare(0)
        if runtime.optimizer.decides_on_device:
            runtime.optimizer.launch(DeviceDecision(one, one))
        else:
            runtime.optimizer.step(1.0)

    @contextmanager
    def _dry_running(self) -> Iterator[None]:
        if self._runtime.pipeline is not None:
            self._runtime.pipeline.traces.refresh()
        self._runner(1).trace_all()  # outside the counted region: all microbatches have the same trace
        with _cycles_end_with_actions(), self._attention(), self.live, MissingShapes(), torch.enable_grad():
            yield

    def _play(self, actions: Sequence[Action]) -> dict[tuple[Op, int, int], ActionMemory]:
        runtime = self._runtime
        microbatches = 1 + max(action.microbatch for action in actions)
        runner = self._runner(microbatches)
        runner.trace_all()
        transport = DryRunTransport(self.plan.schedule.rank_of_stage, self.live, lambda: self._mode)
        executor, found = Executor(transport), {}
        row = RankSchedule(tuple(actions), tuple(one for one in actions if one.op is not Op.BACKWARD_WEIGHT), ())
        with runtime.running(), runtime.passes(row):
            for action in actions:
                memory = self._act(executor, action, runner, transport)
                for place in _places(action.microbatch, microbatches):
                    found[action.op, action.stage, place] = memory
        transport.finish()
        return found

    def _runner(self, microbatches: int) -> MicrobatchRunner:
        zero = torch.zeros((), dtype=torch.float64)
        state = StepState(started=0.0, sent=Tally(), loss=zero, weight=zero.clone(), scale=1.0)
        batches = self._batches[:microbatches]
        return MicrobatchRunner(self._runtime, state, batches, lambda index: (0, 0, index), "train")

    def _attention(self) -> AbstractContextManager[None]:
        return attention_of_gpu() if self._on_gpu else nullcontext()

    def _reduce(self) -> int:
        """Reduces gradients after the last action; returns the peak of live bytes minus the live bytes afterwards."""
        self.live.mark()
        self._runtime.finish()
        return self.live.peak - self.live.bytes

    def _act(
        self, executor: Executor, action: Action, runner: MicrobatchRunner, transport: DryRunTransport
    ) -> ActionMemory:
        before = self.live.mark()
        executor.do(action, runner)
        gc.collect()
        live, peak = self.live.bytes, self.live.peak
        notes = {name: tuple(getattr(transport, name)) for name in ("taken", "given_back", "kept")}
        transport.complete()
        left = self.live.bytes - before
        return ActionMemory(rise=peak - before, left=left, sent=live - self.live.bytes, **notes)


@contextmanager
def _cycles_end_with_actions() -> Iterator[None]:
    """Frees reference cycles after each action instead of whenever Python's collector runs, inside this context.

    A dry run thus counts the same bytes each time. Older objects, including garbage, are frozen, so that a collection
    is cheap; objects that the caller's program has frozen stay frozen.
    """
    found, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        if found:
            gc.enable()


def short_row(row: Sequence[Action], microbatches: int, splits: bool) -> tuple[Action, ...]:
    """Returns the pipeline actions of a short step over the stages of ``row``, one microbatch after another.

    Args:
        row: actions of one rank in the full schedule.
        microbatches: number of microbatches of the short step.
        splits: True: all backwards of a stage are split into input and weight gradients if ``row`` splits any of them;
            False: none is split.
    """
    stages = sorted({action.stage for action in row})
    found: list[Action] = []
    for microbatch in range(microbatches):
        found += [Action(Op.FORWARD, stage, microbatch) for stage in stages]
        for stage in reversed(stages):
            parts = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
            split = splits and any(action.op in parts and action.stage == stage for action in row)
            found += [Action(op, stage, microbatch) for op in (parts if split else (Op.BACKWARD,))]
    return tuple(found)


def _places(microbatch: int, microbatches: int) -> Sequence[int]:
    """Returns the places that a microbatch of a short step represents, until a later one replaces it."""
    if microbatches == 1:
        return FIRST, SECOND, MIDDLE, LAST
    if microbatch == microbatches - 1:
        return (LAST,)
    return range(microbatch, LAST)


def _gathered_bytes(runtime: RankRuntime) -> Callable[[], int]:
    """Returns a function that counts the bytes of gathered parameters; it is called at every operator."""
    sharded = [flat.params for flat in (*runtime.buckets, *runtime.frozen) if flat.sharded]
    return lambda: sum(params.untyped_storage().nbytes() for params in sharded)


def _real(tensor: Tensor) -> Any:
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor.detach().cpu()
