"""Tensor and pipeline parallelism as torch itself offers them: DTensor plans and torch.distributed.pipelining.

Imported by the ranks of these two modes only: like the engine's, its imports belong to its start-up.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.peers import Plain, Schedule, mean_loss
from engine.models.decoder import Decoder


class _OneDataRank(Plain):
    """The ranks share the model, not the batch."""

    def _reduce(self) -> None:
        """Nothing to reduce over."""


class DTensorPeer(_OneDataRank):
    """``parallelize_module`` with a vocabulary-parallel embedding, head and loss, as torch's tutorial has them.

    The attention's input becomes a DTensor once, so that the gradients of query, key and value with respect
    to it are added before they are reduced: 4 all-reduces a block, where three plain column layers make 6.
    """

    def step(self, rows: Tensor) -> float | None:
        with loss_parallel():
            return super().step(rows)

    def _wrap(self, model: Decoder) -> nn.Module:
        mesh = init_device_mesh("cpu", (self._mode.ranks,))
        parallelize_module(model, mesh, _edges())
        for block in model.blocks:
            parallelize_module(block, mesh, _block())
        return model


def _edges() -> dict[str, ParallelStyle]:
    return {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "positions": Replicated(),
        "norm": Replicated(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }


def _block() -> dict[str, ParallelStyle]:
    return {
        "norm1": Replicated(),
        "attention": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.output": RowwiseParallel(),
        "norm2": Replicated(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }


class Replicated(ParallelStyle):
    """Whole on every rank, yet a DTensor: clipping cannot mix plain and distributed gradients."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # torch types both as returning None, yet takes what they return
        return distribute_module(module, device_mesh, None, self._enter, self._leave)  # type: ignore[arg-type]

    @staticmethod
    def _enter(_: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
        return tuple(DTensor.from_local(given, mesh, (Replicate(),), run_check=False) for given in inputs)

    @staticmethod
    def _leave(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        return output.to_local()


class PipeliningPeer(_OneDataRank):
    """``PipelineStage`` and a schedule of torch's, cut by hand.

    A user of torch clips what a rank has, by its own norm; unless ``own_clipping`` asks for that, the norm over all
    ranks is put together here, or the model would be another one.
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
        inputs = (rows[:, :-1],) if self._first else ()
        losses: list[Tensor] = []
        self._schedule.step(*inputs, target=rows[:, 1:] if self._last else None, losses=losses, return_outputs=False)
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
    """The stages of ``rank``: one, every ``ranks``-th one, or those of a V, which comes back to where it began."""
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
    """One of ``stages`` parts of ``model``, which run one after another compute what the model does."""
    parts: list[nn.Module] = [model.blocks[index] for index in stage_blocks(len(model.blocks), stage, stages)]
    if stage == 0:
        parts.insert(0, Entry(model))
    if stage == stages - 1:
        parts += [model.norm, model.head]
    return nn.Sequential(*parts)


def stage_blocks(blocks: int, stage: int, stages: int) -> range:
    """Even shares; where they cannot be, the first stages have one more, since the last one has the head."""
    share, more = divmod(blocks, stages)
    start = stage * share + min(stage, more)
    return range(start, start + share + (stage < more))


class Entry(nn.Module):
    """What a decoder does before its first block."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.tokens, self.positions, self.dropout = model.tokens, model.positions, model.dropout

    def forward(self, input_ids: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x_BLD: Tensor = self.dropout(self.tokens(input_ids) + self.positions(places))
        return x_BLD
