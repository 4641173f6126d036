"""Pipeline parallelism by torch.distributed.pipelining."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from benchmarks.peers.loop import OneDataRank
from benchmarks.peers.workload import Schedule, mean_loss
from engine.models.decoder import Decoder


class PipeliningPeer(OneDataRank):
    """torch's ``PipelineStage`` with one of its schedules, cut by hand.

    Clipping uses the norm over all ranks; with ``own_clipping`` each rank's own norm, as users of torch do.
    """

    def _wrap(self, model: Decoder) -> nn.Module:
        mode, count = self._mode, self._mode.ranks * self._mode.virtual_stages
        held = held_stages(dist.get_rank(), mode.ranks, mode.schedule)
        self._first, self._last = 0 in held, count - 1 in held
        parts = [make_stage(model, index, count) for index in held]
        stages = [
            PipelineStage(part, index, count, torch.device("cpu")) for part, index in zip(parts, held, strict=True)
        ]
        self._schedule = _make_schedule(mode.schedule, stages, mode.accumulation)
        return nn.ModuleList(parts)

    def _backward(self, rows: Tensor) -> float | None:
        # torch 2.11 takes only what lies as its shape says
        inputs = (rows[:, :-1].contiguous(),) if self._first else ()
        target = rows[:, 1:].contiguous() if self._last else None
        losses: list[Tensor] = []
        self._schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        return torch.stack(losses).mean().item() if self._last else None

    def _clip(self) -> None:
        if self._mode.own_clipping:
            super()._clip()
        else:
            self._clip_by_global_norm()

    @torch.no_grad()
    def _clip_by_global_norm(self) -> None:
        grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        squared = nn.utils.get_total_norm(grads).square()
        dist.all_reduce(squared)
        nn.utils.clip_grads_with_norm_(self._parameters, self._largest_norm, squared.sqrt())


def held_stages(rank: int, ranks: int, schedule: Schedule) -> tuple[int, ...]:
    """Returns the stages of ``rank``: one, every ``ranks``-th one, or two of a V."""
    return {
        "1f1b": (rank,),
        "interleaved": (rank, ranks + rank),
        "zb-v": (rank, 2 * ranks - 1 - rank),
    }[schedule]


def _make_schedule(
    name: Schedule, stages: list[PipelineStage], microbatches: int
) -> Schedule1F1B | ScheduleInterleaved1F1B | ScheduleZBVZeroBubble:
    if name == "1f1b":
        return Schedule1F1B(stages[0], microbatches, loss_fn=mean_loss)
    kind = ScheduleInterleaved1F1B if name == "interleaved" else ScheduleZBVZeroBubble
    return kind([*stages], microbatches, loss_fn=mean_loss)


def make_stage(model: Decoder, stage: int, stages: int) -> nn.Sequential:
    """Returns one of ``stages`` parts of ``model``, which together compute the model."""
    parts: list[nn.Module] = [model.blocks[index] for index in stage_blocks(len(model.blocks), stage, stages)]
    if stage == 0:
        parts.insert(0, Entry(model))
    if stage == stages - 1:
        parts += [model.norm, model.head]
    return nn.Sequential(*parts)


def stage_blocks(blocks: int, stage: int, stages: int) -> range:
    """Divides blocks evenly among stages; the first ones get the remainder, since the last one has the head."""
    share, more = divmod(blocks, stages)
    start = stage * share + min(stage, more)
    return range(start, start + share + (stage < more))


class Entry(nn.Module):
    """First part of a decoder: everything before its blocks."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.tokens, self.positions, self.dropout = model.tokens, model.positions, model.dropout

    def forward(self, input_ids: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x_BLD: Tensor = self.dropout(self.tokens(input_ids) + self.positions(places))
        return x_BLD
