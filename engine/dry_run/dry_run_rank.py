"""Dry run of one rank of a plan: a rank of shapes plays a short step, and the memory of each action is recorded.

The runtime is that of training (sharded layers, operators, recomputation, gathers, reducers), so the bytes counted are
the bytes that the run allocates. Per stage, the first, a middle and the last microbatch are played, in the order F .. F
B .. B of one microbatch after another; :mod:`engine.planning.activation_memory.schedule_walk` reorders them by the
schedule. If every microbatch reduces its gradients, the second one is played too: a buffer is returned when another
bucket needs it, so each microbatch returns as much as it takes only from the third on.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.build.assemble import assemble_rank
from engine.build.forward_changes import change_forwards
from engine.build.request import Request
from engine.build.validate import prepare
from engine.dry_run.dry_run_transport import DryRunTransport
from engine.dry_run.gpu_attention import attention_of_gpu
from engine.dry_run.shape_only_model import CPU, EqualRanksBackend, MissingShapes, shape_mode, take_content
from engine.kernels.dispatch import Kernels
from engine.kernels.ops.adamw import DeviceDecision
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.traffic import Tally
from engine.parallel.model.forward_patch import ForwardPatches
from engine.parallel.pipeline.runtime.executor import Executor, RankSchedule
from engine.parallel.pipeline.schedule.actions import Action, Op
from engine.planning.activation_memory.live_storages import LiveStorages
from engine.planning.activation_memory.schedule_walk import ActionMemory
from engine.planning.budgets import reduces_each_microbatch
from engine.planning.plan import Plan
from engine.program.batch import Batch, map_tensors
from engine.step.microbatches import MicrobatchRunner
from engine.step.runtime import RankRuntime
from engine.step.state import StepState

FIRST, SECOND, MIDDLE, LAST = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunStep:
    """Memory of the actions of a rank in a steady step."""

    actions: dict[tuple[Op, int, int], ActionMemory]
    """Memory by operation, stage and place of the microbatch: FIRST, SECOND, MIDDLE or LAST."""
    base: int
    """Live bytes between steps."""
    end_rise: int
    """Peak of live bytes while the last gradients are reduced, minus the live bytes between steps."""

    def memory_of(self, action: Action, number: int, total: int) -> ActionMemory:
        """Returns the memory of the action that is the n-th of ``total`` of its stage and operation."""
        place = LAST if number == total - 1 else min(number, MIDDLE)
        return self.actions[action.op, action.stage, place]

    def on_stages(self, stages: Mapping[int, int]) -> "DryRunStep":
        """Returns the same for a rank with other stages; ``stages`` maps this rank's stages to that rank's."""
        actions = {(op, stages[stage], place): memory for (op, stage, place), memory in self.actions.items()}
        return replace(self, actions=actions)


class DryRunRank:
    """Runtime of one rank over shapes.

    Args:
        model: as it was passed to the plan; a copy is used.
        example: one microbatch; on the meta device it stands for zeros.
        kernels: choices for an absent device; None: those of the CPU.
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
        self.plan, self._mode = plan, shape_mode()
        self._model = copied = deepcopy(model)
        example = map_tensors(example, _real)
        most = 4 if reduces_each_microbatch(plan.config) else 3
        played = min(most, plan.schedule.microbatches)
        self._batches = [map_tensors(example, Tensor.clone) for _ in range(played)]
        given = replace(request, patches=ForwardPatches(), placing=lambda: self._mode, example_batch=example)
        prepare(copied, plan.config, given)
        given = replace(given, changes=change_forwards(copied, plan.config, CPU, given.patches, kernels))
        take_content(copied, self._mode)
        grid = plan.grid(rank)
        self._comm = Comm(grid, EqualRanksBackend(grid, exchanges=kernels is None))
        self._runtime = assemble_rank(copied, plan, self._comm, CPU, given, example)
        self._pp, self._on_gpu = grid.coord().pp, kernels is not None
        self.live = LiveStorages(_gathered_bytes(self._runtime))
        self._runtime.on_host.observer = self.live.leave_out

    def trace_like(self, other: "DryRunRank") -> None:
        """Takes over the traces of another pipeline rank of the same plan, which has stepped."""
        own, others = self._runtime.pipeline, other._runtime.pipeline
        if own is not None and others is not None:
            own.traces.take(others.traces)

    def step(self) -> DryRunStep:
        """Plays a step to warm up, then a measured step for each kind of backward in the schedule."""
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
        """Returns a list that receives the live bytes as each of ``modules`` returns in a forward."""
        levels = list[int]()

        def note(*_: Any) -> None:
            if torch._C._current_graph_task_id() == -1:  # recomputation in the backward calls the hook again
                gc.collect()
                levels.append(self.live.bytes)

        for name in modules:
            self._model.get_submodule(name).register_forward_hook(note)
        return levels

    def play(self) -> None:
        """Plays a step with its update, for a caller that records launches instead of memory."""
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
    """Returns a row of the same stages for a few microbatches in sequence; ``splits``: split backwards as ``row`` does.

    Forwards are in the order of stages, backwards in the opposite order.
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
