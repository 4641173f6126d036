"""The same decoder trained in several ways, one rank's side of each: plain torch, torch DDP, Trine.

All modes start from the same weights, see the same sequences and take the same step: mean cross-entropy,
clipping, AdamW. The peers get torch's fused AdamW, which Trine runs inside too, so that a difference
between modes is a difference in distribution and not in the optimizer's kernel. What torch offers beyond
data parallelism is in ``parallel_peers``; what shares state among data ranks in ``fsdp_peer`` and ``deepspeed_peer``;
DeepSpeed's pipeline in ``deepspeed_pipeline``.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks import models
from benchmarks.models import Name
from engine.models.decoder import Decoder, DecoderConfig

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1


Kind = Literal["plain", "ddp", "dtensor", "pipelining", "fsdp", "deepspeed", "trine"]
"""Who trains."""
Schedule = Literal["1f1b", "interleaved", "zb-v"]
"""In which order a pipeline computes; the last two give every rank two stages."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What every mode trains; the defaults are the benchmark, smaller sizes make a smoke test."""

    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    sequences: int = 16
    """Global batch, in sequences of ``decoder.context`` tokens."""
    learning_rate: float = 3e-4
    clip: float = 1.0
    """Largest L2 norm of the gradient."""
    epsilon: float = 1e-8
    """Of AdamW. What is compared by weights takes a larger one: a gradient that is zero but for rounding, a key's
    bias, would otherwise move weights as far as any."""
    bucket_elements: int | None = None
    """Trine's ``zero_optimization.reduce_bucket_size``; None is the engine's default."""
    optimizer_kernel: Literal["fused", "default"] = "fused"
    """Which AdamW of torch the peers run."""
    seed: int = 1234
    model: Name | None = None
    """One of ``benchmarks.models`` of the decoder's sizes; None is the decoder."""


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to train, and one row of the table."""

    name: str
    kind: Kind
    ranks: int
    accumulation: int = 1
    """Microbatches of one step on one rank."""
    stage: int = 0
    """ZeRO stage, of those that have one."""
    reduce: Literal["step", "microbatch"] | None = None
    """How often Trine reduces gradients; None is the engine's default."""
    gather: Literal["step", "microbatch"] | None = None
    """How often Trine gathers parameters at stage 3; None is the engine's default."""
    axis: Literal["data", "tensor", "pipeline"] = "data"
    """What the ranks share among them: the batch, or the model across or along its layers."""
    schedule: Schedule = "1f1b"
    """Of a pipeline."""
    own_clipping: bool = False
    """Clip as the peer's users would, and not by the norm of the whole model where that is another thing."""

    @property
    def virtual_stages(self) -> int:
        """Stages of one rank of a pipeline."""
        return 1 if self.schedule == "1f1b" else 2

    @property
    def data_ranks(self) -> int:
        """Among how many ranks the batch is cut."""
        return self.ranks if self.axis == "data" else 1


class Trainer(Protocol):
    """One rank of a mode, ready for its first step."""

    def step(self, rows: Tensor) -> float | None:
        """One optimizer step on this rank's sequences [rows, context + 1].

        The rank's or the global loss; None where this rank does not see it.
        """


@runtime_checkable
class Legible(Trainer, Protocol):
    """A trainer whose weights can be held against those of another."""

    def weights(self) -> dict[str, Tensor]:
        """What this rank has, by the model's names; among all ranks every parameter at least once. Collective."""


def make_trainer(mode: Mode, workload: Workload) -> Trainer:
    """Build one rank of ``mode`` inside a running process group.

    What only one kind needs is imported here, so that other modes do not pay for it at their start.
    """
    if mode.kind == "dtensor" and workload.model is not None:
        from benchmarks import tensor_peers

        return (tensor_peers.LlamaPeer if workload.model == "llama" else tensor_peers.FusedPeer)(mode, workload)
    if mode.kind in ("dtensor", "pipelining"):
        from benchmarks import parallel_peers

        pipelined = mode.kind == "pipelining"
        return (parallel_peers.PipeliningPeer if pipelined else parallel_peers.DTensorPeer)(mode, workload)
    if mode.kind == "fsdp":
        from benchmarks.fsdp_peer import FsdpPeer

        return FsdpPeer(mode, workload)
    if mode.kind == "deepspeed" and mode.axis == "pipeline":
        from benchmarks.deepspeed_pipeline import DeepSpeedPipeline

        return DeepSpeedPipeline(mode, workload)
    if mode.kind == "deepspeed":
        from benchmarks.deepspeed_peer import DeepSpeedPeer

        return DeepSpeedPeer(mode, workload)
    if mode.kind == "trine":
        return _Trine(mode, workload)
    return Plain(mode, workload) if mode.kind == "plain" else _Ddp(mode, workload)


def make_rows(mode: Mode, workload: Workload, step: int, rank: int) -> Tensor:
    """The sequences of one step for one rank of ``mode``, int64 [sequences / data ranks, context + 1].

    The bytes are skewed towards 0, so that there is something to learn and losses fall.
    """
    generator = torch.Generator().manual_seed(workload.seed + step)
    draws = torch.rand(workload.sequences, workload.decoder.context + 1, generator=generator)
    rows = (draws.square() * workload.decoder.vocabulary).long()
    return rows.chunk(mode.data_ranks)[rank % mode.data_ranks]


def make_model(workload: Workload) -> Any:
    """The decoder, or what takes its place: from tokens [B, L] to logits [B, L, V]."""
    torch.manual_seed(workload.seed)
    return Decoder(workload.decoder) if workload.model is None else models.make(workload.model, workload.decoder)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats, 0-dim, of logits [B, L, V] and labels [B, L]."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make_adamw(parameters: list[nn.Parameter], workload: Workload) -> torch.optim.AdamW:
    """The optimizer of all peers."""
    return torch.optim.AdamW(
        parameters,
        lr=workload.learning_rate,
        betas=BETAS,
        eps=workload.epsilon,
        weight_decay=WEIGHT_DECAY,
        fused=workload.optimizer_kernel == "fused" or None,
    )


class Plain:
    """A loop as in a tutorial: backward, one flat all-reduce, clip, step. The other peers change parts of it."""

    def __init__(self, mode: Mode, workload: Workload) -> None:
        self._mode = mode
        self._largest_norm = workload.clip
        model = make_model(workload)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._model = self._wrap(model)
        self._parameters = list(self._model.parameters())
        self._optimizer = make_adamw(self._parameters, workload)

    def step(self, rows: Tensor) -> float | None:
        """Loss of this rank's sequences."""
        loss = self._backward(rows)
        self._reduce()
        self._clip()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def weights(self) -> dict[str, Tensor]:
        """Those of this rank. FSDP and DTensor, which put others in their place, are not asked."""
        return {self._names[id(parameter)]: parameter.detach() for parameter in self._parameters}

    def _backward(self, rows: Tensor) -> float | None:
        count, loss = self._mode.accumulation, 0.0
        for index, part in enumerate(rows.chunk(count)):
            with self._microbatch(last=index == count - 1):
                mean = mean_loss(self._model(part[:, :-1]), part[:, 1:])
                (mean / count if count > 1 else mean).backward()  # type: ignore[no-untyped-call]
            loss += mean.item() / count
        return loss

    def _clip(self) -> None:
        nn.utils.clip_grad_norm_(self._parameters, self._largest_norm)

    def _wrap(self, model: Decoder) -> nn.Module:
        return model

    def _microbatch(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of every microbatch: only the last one reduces."""
        return nullcontext()

    @torch.no_grad()
    def _reduce(self) -> None:
        if self._mode.ranks == 1:
            return
        grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        flat = torch.cat([grad.view(-1) for grad in grads])
        dist.all_reduce(flat)
        flat /= self._mode.ranks
        parts = torch.split(flat, [grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])


class _Ddp(Plain):
    """torch's DistributedDataParallel with its default buckets."""

    def _wrap(self, model: Decoder) -> nn.Module:
        self._ddp = DistributedDataParallel(model)
        return self._ddp

    def _microbatch(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self._ddp.no_sync()

    def _reduce(self) -> None:
        """DDP has reduced during backward."""


class _Trine:
    """``engine.initialize`` and ``train_batch``."""

    def __init__(self, mode: Mode, workload: Workload) -> None:
        import engine  # here, so that its import counts as its start-up

        config, example = make_config(mode, workload), _make_example(mode, workload)
        self._engine = engine.initialize(make_model(workload), config, _loss_of_batch, example)

    def step(self, rows: Tensor) -> float:
        return self._engine.train_batch({"input_ids": rows[:, :-1], "labels": rows[:, 1:]}).loss

    def weights(self) -> dict[str, Tensor]:
        """All of them on rank 0, none on the others."""
        return self._engine.full_state_dict()


def make_config(mode: Mode, workload: Workload) -> dict[str, Any]:
    """What a Trine mode gives to ``engine.initialize``."""
    zero: dict[str, int | str] = {"stage": mode.stage}
    zero |= {name: value for name, value in (("reduce", mode.reduce), ("gather", mode.gather)) if value}
    if workload.bucket_elements is not None:
        zero["reduce_bucket_size"] = workload.bucket_elements
    parallel: dict[str, int | str] = {"data": mode.data_ranks}
    parallel |= {mode.axis: mode.ranks}
    if mode.axis == "pipeline":
        parallel |= {"schedule": mode.schedule, "virtual_stages": mode.virtual_stages}
    return {
        "train_batch_size": workload.sequences,
        "gradient_accumulation_steps": mode.accumulation,
        "parallel": parallel,
        "zero_optimization": zero,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": workload.learning_rate,
                "betas": list(BETAS),
                "eps": workload.epsilon,
                "weight_decay": WEIGHT_DECAY,
            },
        },
        "gradient_clipping": workload.clip,
    }


def _make_example(mode: Mode, workload: Workload) -> dict[str, Tensor]:
    """Shapes of one microbatch: what cuts along and across the layers are planned with."""
    rows = workload.sequences // (mode.data_ranks * mode.accumulation)
    tokens = torch.empty(rows, workload.decoder.context, dtype=torch.int64, device="meta")
    return {"input_ids": tokens, "labels": tokens}


def _loss_of_batch(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return mean_loss(logits, batch["labels"])
