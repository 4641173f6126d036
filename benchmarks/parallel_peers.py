"""Tensor and pipeline parallelism as torch itself offers them: DTensor plans and torch.distributed.pipelining.

Imported by the ranks of these two modes only: like the engine's, its imports belong to its start-up.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.peers import Plain, mean_loss
from engine.decoder import Decoder


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
        "positions": _Replicated(),
        "norm": _Replicated(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }


def _block() -> dict[str, ParallelStyle]:
    return {
        "norm1": _Replicated(),
        "attention": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.output": RowwiseParallel(),
        "norm2": _Replicated(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }


class _Replicated(ParallelStyle):
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
    """``PipelineStage`` and ``Schedule1F1B``, one stage a rank, cut by hand.

    torch clips by stage; the norm over all stages is put together here, or the model would be another one.
    """

    def _wrap(self, model: Decoder) -> nn.Module:
        rank, ranks = dist.get_rank(), self._mode.ranks
        self._first, self._last = rank == 0, rank == ranks - 1
        part = make_stage(model, rank, ranks)
        stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
        self._schedule = Schedule1F1B(stage, self._mode.accumulation, loss_fn=mean_loss)
        return part

    def _backward(self, rows: Tensor) -> float | None:
        inputs = (rows[:, :-1],) if self._first else ()
        losses: list[Tensor] = []
        self._schedule.step(*inputs, target=rows[:, 1:] if self._last else None, losses=losses, return_outputs=False)
        return torch.stack(losses).mean().item() if self._last else None

    @torch.no_grad()
    def _clip(self) -> None:
        grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        squared = nn.utils.get_total_norm(grads).square()
        dist.all_reduce(squared)
        nn.utils.clip_grads_with_norm_(self._parameters, self._largest_norm, squared.sqrt())


def make_stage(model: Decoder, stage: int, stages: int) -> nn.Sequential:
    """One of ``stages`` parts of ``model``, which run one after another compute what the model does."""
    parts: list[nn.Module] = [model.blocks[index] for index in stage_blocks(len(model.blocks), stage, stages)]
    if stage == 0:
        parts.insert(0, _Entry(model))
    if stage == stages - 1:
        parts += [model.norm, model.head]
    return nn.Sequential(*parts)


def stage_blocks(blocks: int, stage: int, stages: int) -> range:
    """Even shares; where they cannot be, the first stages have one more, since the last one has the head."""
    share, more = divmod(blocks, stages)
    start = stage * share + min(stage, more)
    return range(start, start + share + (stage < more))


class _Entry(nn.Module):
    """What a decoder does before its first block."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.tokens, self.positions, self.dropout = model.tokens, model.positions, model.dropout

    def forward(self, input_ids: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x_BLD: Tensor = self.dropout(self.tokens(input_ids) + self.positions(places))
        return x_BLD
