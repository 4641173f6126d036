"""Schedules played on real models: all stages in one process, each with an executor and a model of its own."""

import copy
import gc
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.parallel.comm.backend import RecordingBackend, Wait
from engine.parallel.comm.comm import Comm
from engine.parallel.grid import Grid
from engine.parallel.model.forward_patch import ForwardPatches
from engine.parallel.pipeline.partition.partition import Partition, make_cut
from engine.parallel.pipeline.runtime.executor import Executor, RankSchedule, StageMicrobatch, StageOutput
from engine.parallel.pipeline.runtime.split_backward import DeferredWeightGrads, SplitBackward
from engine.parallel.pipeline.runtime.transport import CommTransport, MemoryTransport, Message
from engine.parallel.pipeline.schedule.actions import Action, Op, Schedule
from engine.parallel.pipeline.schedule.dependencies import DependencyGraph
from engine.parallel.pipeline.schedule.kinds import make_schedule
from engine.parallel.pipeline.schedule.one_f_one_b import forward_only, gpipe, one_f_one_b
from engine.parallel.pipeline.schedule.simulate import peak_live
from engine.parallel.trace.model_trace import ModelTrace
from engine.parallel.trace.tracer import trace_model
from tests.parallel.pipeline.play import Play, batches_of, whole
from tests.parallel.pipeline.runtime.test_stage import assert_same
from tests.parallel.pipeline.zoo import CASES, WIDTH, Case, Own, run_own, tokens
from tests.selection import wide

MICROBATCHES = 5


def _split(model: nn.Module) -> SplitBackward:
    return SplitBackward(model, ForwardPatches())


class RankJob:
    """The stages of one rank of a play as the executor sees them."""

    def __init__(self, play: Play, rank: int, timeline: ModelTrace, batches: list[Any]) -> None:
        self.play, self.timeline, self.batches = play, timeline, batches
        self.model = play.models[play.ranks.index(rank)]
        self.results: list[Any] = []
        self.sent: list[weakref.ref[Tensor]] = []
        self.left: dict[tuple[int, int], DeferredWeightGrads] = {}
        self.waited = 0

    def part(self, stage: int, microbatch: int) -> StageMicrobatch:
        return StageMicrobatch(self.play.cut.stages[stage], self.timeline.values)

    def forward(self, stage: int, microbatch: int, received: Mapping[int, Tensor]) -> StageOutput:
        plan = self.play.cut.stages[stage]
        program = partial(self.play.case.run, self.play.models[stage], self.batches[microbatch])
        outcome = self.play.stages[stage].forward(self.timeline, plan, program, received)
        self.sent += [weakref.ref(tensor) for tensor in outcome.sent.values()]
        if not plan.last:
            return StageOutput(outcome.sent, None)
        self.results.append((outcome.result[0].detach(), outcome.result[1]))
        return StageOutput(outcome.sent, outcome.result[0] if outcome.result[0].requires_grad else None)

    def backward(self, action: Action) -> AbstractContextManager[None]:
        if action.op is not Op.BACKWARD_INPUT:
            return nullcontext()
        leftover = self.left[action.stage, action.microbatch] = DeferredWeightGrads()
        waiting: SplitBackward = self.play.prepared[self.model]
        return waiting.leaving(leftover)

    def weights(self, stage: int, microbatch: int) -> None:
        parameters = dict(self.model.named_parameters())

        def take(name: str, grad: Tensor) -> None:
            self.waited += 1
            parameter = parameters[name]
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad

        self.left.pop((stage, microbatch)).compute(take)

    def beside(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        return nullcontext()


def play_in_process(schedule: Schedule, jobs: list[RankJob]) -> list[int]:
    """Play all rows in an order that keeps every need; the most microbatches that each executor held."""
    transport = MemoryTransport()
    executors = [Executor(transport) for _ in jobs]
    rules, held = DependencyGraph(schedule), [0] * len(jobs)
    for number in rules.order(rules.needs):
        rank = rules.rank[number]
        executors[rank].do(rules.actions[number], jobs[rank])
        held[rank] = max(held[rank], executors[rank].live)
    transport.finish()
    assert all(executor.live == 0 for executor in executors)
    return held


def prepared(
    name: str | Case, stages: int, ranks: Sequence[int] = (), prepare: Any = None
) -> tuple[Play, ModelTrace, list[Any], Any]:
    case = CASES[name] if isinstance(name, str) else name
    model = case.build()
    batches = batches_of(case, MICROBATCHES)
    timeline = trace_model(model, lambda: case.run(model, batches[0]), stages=stages)
    play = Play(case, model, make_cut(timeline, stages), ranks, prepare or (lambda model: None))
    return play, timeline, batches, copy.deepcopy(model)


@pytest.mark.parametrize("kind", [gpipe, wide(one_f_one_b)])
@pytest.mark.parametrize("stages", [wide(2), 4])
@pytest.mark.parametrize("name", ["decoder", "nano", "x0", "skips", "in_place", "frozen_start", "llama", "t5", "unet"])
def test_any_schedule_gives_every_gradient_of_the_uncut_model(name: str, stages: int, kind: Any) -> None:
    play, timeline, batches, model = prepared(name, stages)
    jobs = [RankJob(play, stage, timeline, batches) for stage in range(stages)]
    held = play_in_process(kind(stages, MICROBATCHES), jobs)
    losses, expected = whole(play.case, model, batches)
    assert jobs[-1].results == losses
    assert_same(play.gradients(), expected, play.case.exact)
    assert tuple(held) == peak_live(kind(stages, MICROBATCHES))


@pytest.mark.parametrize("kind", [wide("interleaved"), wide("looped-bfs"), "zb-h1", wide("zb-v"), "dualpipe-v"])
@pytest.mark.parametrize(
    "name",
    ["decoder", "nano", wide("x0"), "skips", "in_place", wide("frozen_start"), wide("llama"), "t5", wide("unet")],
)
def test_ranks_of_several_stages_and_split_backwards_give_every_gradient(name: str, kind: str) -> None:
    schedule = make_schedule(kind, 2, MICROBATCHES, 1 if kind == "zb-h1" else 2)
    ranks = schedule.rank_of_stage
    play, timeline, batches, model = prepared(name, schedule.stages, ranks, _split)
    jobs = [RankJob(play, rank, timeline, batches) for rank in range(2)]
    held = play_in_process(schedule, jobs)
    losses, expected = whole(play.case, model, batches)
    assert jobs[ranks[-1]].results == losses
    assert_same(play.gradients(), expected, exact=False)
    assert tuple(held) == peak_live(schedule)
    splits = any(action.op is Op.BACKWARD_WEIGHT for row in schedule.per_rank for action in row)
    assert bool(sum(job.waited for job in jobs)) is (splits and name != "unet"), "a unet has no linear layers"


class LegBlock(nn.Module):
    """The gradient of ``a`` is a view of the gradient of the sum, which is what the layer's weight gradient needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, a: Tensor, b: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(a.view_as(a) + self.layer(b) + 0.3 * old), torch.tanh(self.other(b))


class Legs(Own):
    """Two values go from block to block, one of them to the block after the next too."""

    block = LegBlock

    def trunk(self, x: Tensor) -> Tensor:
        old, a, b = x, x, 0.5 * x
        for block in self.blocks:
            old, (a, b) = a, block(a, b, old)
        return a + b


@pytest.mark.parametrize("kind", ["zb-v", "dualpipe-v"])
def test_a_gradient_that_stages_of_one_rank_share_is_added_to_none(kind: str) -> None:
    schedule = make_schedule(kind, 2, MICROBATCHES, 2)
    case = Case(partial(Legs, layers=4), run_own, tokens)
    play, timeline, batches, model = prepared(case, schedule.stages, schedule.rank_of_stage, _split)
    play_in_process(schedule, [RankJob(play, rank, timeline, batches) for rank in range(2)])
    assert_same(play.gradients(), whole(case, model, batches)[1], exact=False)


def test_what_was_sent_is_let_go() -> None:
    play, timeline, batches, _ = prepared("decoder", 2)
    jobs = [RankJob(play, stage, timeline, batches) for stage in range(2)]
    play_in_process(gpipe(2, MICROBATCHES), jobs)
    gc.collect()
    assert len(jobs[0].sent) == MICROBATCHES and all(reference() is None for reference in jobs[0].sent)


def test_evaluation_keeps_nothing() -> None:
    play, timeline, batches, model = prepared("decoder", 3)
    jobs = [RankJob(play, stage, timeline, batches) for stage in range(3)]
    with torch.no_grad():
        assert play_in_process(forward_only(3, MICROBATCHES), jobs) == [0, 0, 0]
    assert jobs[-1].results == whole(play.case, model, batches)[0]
    assert all(gradient is None for gradient in play.gradients().values())


class Log(RecordingBackend):
    """Notes what is issued and what is waited for."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self.events: list[str] = []

    def send(self, tensor: Tensor, to: int, flow: Any) -> Wait:
        number = sum(event.startswith("send") for event in self.events)
        self.events.append(f"send {number} to {to}")
        return lambda: self.events.append(f"sent {number}")

    def receive(self, tensor: Tensor, source: int, flow: Any) -> Wait:
        number = sum(event.startswith("offer") for event in self.events)
        self.events.append(f"offer {number} from {source}")
        return lambda: self.events.append(f"arrived {number}")


def logged(rank: int, stages: int) -> tuple[CommTransport, Log]:
    grid = Grid(pp=stages, rank=rank)
    log = Log(grid)
    return CommTransport(Comm(grid, log), range(stages), torch.device("cpu")), log


def test_receives_are_offered_early_and_sends_waited_for_when_they_are_released() -> None:
    transport, log = logged(1, 3)

    class Job:
        def part(self, stage: int, microbatch: int) -> StageMicrobatch:
            cut: Partition = play.cut
            return StageMicrobatch(cut.stages[stage], timeline.values)

        def forward(self, stage: int, microbatch: int, received: Mapping[int, Tensor]) -> StageOutput:
            log.events.append(f"F{microbatch}")
            made = {number: received[next(iter(received))] * 2 for number in play.cut.stages[1].sends}
            return StageOutput(made, None)

        def backward(self, action: Action) -> AbstractContextManager[None]:
            log.events.append(f"B{action.microbatch}")
            return nullcontext()

        def weights(self, stage: int, microbatch: int) -> None:
            raise AssertionError("1F1B leaves nothing")

        def beside(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
            raise AssertionError("1F1B leaves nothing")

    play, timeline, _, _ = prepared("decoder", 3)
    actions = one_f_one_b(3, 3).per_rank[1]
    Executor(transport).run(RankSchedule(actions, actions, ((), (), (0,), (), (1,), (2,))), Job())
    assert log.events == [
        "offer 0 from 0", "offer 1 from 0", "arrived 0", "F0", "send 0 to 2",
        "offer 2 from 2", "arrived 1", "F1", "send 1 to 2",
        "offer 3 from 0", "sent 0", "arrived 2", "B0", "send 2 to 0",
        "offer 4 from 2", "arrived 3", "F2", "send 3 to 2",
        "offer 5 from 2", "sent 1", "arrived 4", "B1", "send 4 to 0",
        "sent 2", "arrived 5", "B2", "send 5 to 0", "sent 3", "sent 4", "sent 5",
    ]  # fmt: skip


def test_what_goes_past_a_neighbour_is_held_until_its_gradient_comes() -> None:
    transport, log = logged(0, 3)
    far = Message("forward", 7, 0, source=0, target=2)
    transport.send(far, torch.ones(2))
    transport.send(Message("forward", 7, 0, source=0, target=1), torch.ones(2))
    transport.release("backward", 0, 0)
    assert log.events == ["send 0 to 2", "send 1 to 1"]
    transport.release("forward", 0, 0)
    assert log.events[2:] == ["sent 1"]
    transport.delivered(far)
    assert log.events[-1] == "sent 0"
    transport.finish()
    assert len(log.events) == 4


def test_stages_of_one_rank_hand_over_without_a_message() -> None:
    grid = Grid(pp=1)
    transport = CommTransport(Comm(grid, Log(grid)), (0, 0), torch.device("cpu"))
    message = Message("forward", 3, 1, source=0, target=1)
    arrive = transport.receive(message, (2,), torch.float32)
    transport.send(message, torch.ones(2, requires_grad=True) * 3)
    assert torch.equal(arrive(), torch.full((2,), 3.0)) and not transport._comm.records
    transport.finish()
