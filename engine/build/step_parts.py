"""Table of features that act during steps: a function for each, which returns its step part or None if it is off."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from engine.integrity.copies import AtRest, DataCopies, ReplicaCopies
from engine.integrity.guard import ComputedGradients, Integrity
from engine.optim.lr_schedules import LearningRate
from engine.outer.http.open_link import open_link
from engine.outer.local_pieces import UntrainedState, find_pieces
from engine.outer.site import OpenLink, OuterLoop
from engine.outer.site_weights import SiteWeights
from engine.parallel.comm.comm import Comm
from engine.parallel.pipeline.runtime.encoded_messages import MessageEncoder
from engine.planning.plan import Plan
from engine.program.expert_load import ExpertCounter
from engine.program.router_replay import RouterReplay
from engine.step.parts import StepPart, StepParts
from engine.step.rank_parts import (
    AverageOfWeights,
    BackgroundReads,
    BalancedRouters,
    CountedExperts,
    DelayedUpdates,
    EncodingResiduals,
    EqualGradients,
    EqualWeights,
    MomentsOnDisk,
    ReplayedRouters,
    StatesOnHost,
    WrittenBuffers,
)
from engine.zero.flat_buckets import FlatBucket
from engine.zero.gather.gatherer import ParameterGatherer
from engine.zero.optim.averaged_weights import AveragedWeights, WeightAverage
from engine.zero.optim.rules.schedule_free import ScheduleFreeAverage
from engine.zero.optim.sharded_optimizer import ShardedOptimizer
from engine.zero.reduce.reducer import Reducer
from engine.zero.reduce.replica_check import ReplicaCheck
from engine.zero.reduce.weight_copies import WeightCopies
from engine.zero.state.offloaded_states import OffloadedStates
from engine.zero.state.state_inventory import StateInventory


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRequest:
    """Objects of one rank that optional features of a training step need, such as integrity checks."""

    model: nn.Module
    plan: Plan
    comm: Comm
    device: torch.device
    inventory: StateInventory
    optimizer: ShardedOptimizer
    rates: LearningRate
    reducer: Reducer
    encoder: MessageEncoder | None
    gatherer: ParameterGatherer | None
    experts: ExpertCounter | None
    """Counter of tokens per expert; None: not counted."""
    replay: RouterReplay | None
    """Replay of recorded routing; None: routers choose."""

    @property
    def buckets(self) -> Sequence[FlatBucket]:
        """Flat buckets (1-D tensors of many parameters) of this rank's trainable parameters."""
        return self.inventory.trained


def make_parts(request: PartRequest) -> StepParts:
    """Returns the enabled optional features of a training step, in the same order on all ranks."""
    return StepParts(part for make in MAKERS if (part := make(request)) is not None)


def _delayed(request: PartRequest) -> StepPart | None:
    delayed = request.optimizer.delayed
    return DelayedUpdates(delayed, request.optimizer, request.gatherer) if delayed is not None else None


def _reads(request: PartRequest) -> StepPart | None:
    return BackgroundReads() if request.plan.config.weights_out is not None else None


def _disk(request: PartRequest) -> StepPart | None:
    return MomentsOnDisk(request.optimizer.disk) if request.optimizer.disk is not None else None


def _states(request: PartRequest) -> StepPart:
    return StatesOnHost(OffloadedStates(request.inventory, request.device))


def _outer(request: PartRequest) -> StepPart | None:
    plan, optimizer = request.plan, request.optimizer
    if plan.config.outer is None:
        return None
    outer, stores = plan.config.outer, max(1, len(plan.config.outer.urls))
    local = find_pieces(plan, request.comm.grid.coord(), request.buckets, outer.fragments, stores)
    untrained = UntrainedState(plan, request.inventory)
    weights = SiteWeights(local, outer, optimizer, request.gatherer, untrained)
    request.inventory.companions.append(weights.anchors)
    connect: OpenLink = open_link
    if outer.serve and outer.site == 0 and request.comm.grid.rank == 0:
        from engine.outer.http.service import HostedLink  # needs the packages of a server

        connect = partial(HostedLink, plan.config)
    return OuterLoop(plan, request.comm, request.device, weights, request.rates, connect)


def _integrity(request: PartRequest) -> StepPart | None:
    plan, comm, device, optimizer = request.plan, request.comm, request.device, request.optimizer
    settings = plan.config.integrity
    if not settings.every:
        return None
    copies = DataCopies(comm, device), ReplicaCopies(plan.table, request.buckets, comm)
    names = sorted(slot.name for flat in request.buckets for slot in flat.bucket.slots)
    computed = ComputedGradients(names, device) if settings.rerun else None
    return Integrity(settings, AtRest(request.inventory, device), copies, computed, optimizer.join_delayed)


def _equal_gradients(request: PartRequest) -> StepPart | None:
    if request.comm.grid.tp == 1 or not request.plan.config.parallel.check_replicas:
        return None
    return EqualGradients(ReplicaCheck(request.plan.table, request.buckets, request.comm))


def _equal_weights(request: PartRequest) -> StepPart | None:
    if request.comm.grid.world_size == 1:
        return None
    return EqualWeights(WeightCopies(request.plan.table, request.buckets, request.comm), request.optimizer)


def _buffers(request: PartRequest) -> StepPart:
    return WrittenBuffers(request.model)


def _residuals(request: PartRequest) -> StepPart | None:
    sends = request.encoder is not None and request.plan.config.wire.error_feedback
    return EncodingResiduals(request.reducer, request.encoder) if sends or request.reducer.residuals else None


def _average(request: PartRequest) -> StepPart | None:
    """Returns the moving average, or that of schedule-free optimizers; the same on all ranks."""
    plan, optimizer = request.plan, request.optimizer
    given = plan.config.optimizer
    entries = given.entries if given is not None and plan.moments is not None else ()
    if any(entry.type == "ScheduleFreeAdamW" for entry in entries):
        free = ScheduleFreeAverage(optimizer.places, optimizer.inner)
        return AverageOfWeights(AveragedWeights(request.buckets, optimizer, free))
    if plan.config.ema is None:
        return None
    average = WeightAverage(optimizer.places, plan.config.ema.decay)
    request.inventory.companions.append(average)
    return AverageOfWeights(AveragedWeights(request.buckets, optimizer, average))


def _experts(request: PartRequest) -> StepPart | None:
    return CountedExperts(request.experts) if request.experts is not None else None


def _replay(request: PartRequest) -> StepPart | None:
    return ReplayedRouters(request.replay) if request.replay is not None else None


def _routers(request: PartRequest) -> StepPart | None:
    plan, starts = request.plan, dict[str, int]()
    if not plan.router_biases:
        return None
    for stack in plan.experts:
        starts[stack.name] = sum(other.experts for other in plan.experts[: len(starts)])
    biases = [(request.model.get_buffer(each.buffer), starts[each.experts]) for each in plan.router_biases]
    return BalancedRouters(biases, plan.config.router_bias_update_rate)


MAKERS: tuple[Callable[[PartRequest], StepPart | None], ...] = (
    _delayed, _reads, _disk, _states, _outer, _integrity, _equal_gradients, _equal_weights, _buffers, _residuals,
    _average, _experts, _routers, _replay,
)  # fmt: skip
"""Function of each feature that returns its step part; ``PartOrder`` defines the order of calls."""
