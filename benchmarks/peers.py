"""The same decoder trained in several ways, one rank's side of each: plain torch, torch DDP, Trine.

All modes start from the same weights, see the same sequences and take the same step: mean cross-entropy,
clipping, AdamW. The peers get torch's fused AdamW, which Trine runs inside too, so that a difference
between modes is a difference in distribution and not in the optimizer's kernel.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from engine.decoder import Decoder, DecoderConfig

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1


@dataclass(frozen=True, slots=True)
class Workload:
    """What every mode trains; the defaults are the benchmark, smaller sizes make a smoke test."""

    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    sequences: int = 16
    """Global batch, in sequences of ``decoder.context`` tokens."""
    learning_rate: float = 3e-4
    clip: float = 1.0
    """Largest L2 norm of the gradient."""
    bucket_elements: int | None = None
    """Trine's ``zero_optimization.reduce_bucket_size``; None is the engine's default."""
    optimizer_kernel: Literal["fused", "default"] = "fused"
    """Which AdamW of torch the peers run."""
    seed: int = 1234


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to train, and one row of the table."""

    name: str
    kind: Literal["plain", "ddp", "trine"]
    ranks: int
    accumulation: int = 1
    """Microbatches of one step on one rank."""
    stage: int = 0
    """ZeRO stage, Trine only."""


class Trainer(Protocol):
    """One rank of a mode, ready for its first step."""

    def step(self, rows: Tensor) -> float:
        """One optimizer step on this rank's sequences [rows, context + 1]; the rank's or the global loss."""

    def sent_bytes(self) -> int:
        """Bytes this rank has sent so far, by ring convention."""


def make_trainer(mode: Mode, workload: Workload) -> Trainer:
    """Build one rank of ``mode`` inside a running process group."""
    if mode.kind == "trine":
        return _Trine(mode, workload)
    return _Plain(mode, workload) if mode.kind == "plain" else _Ddp(mode, workload)


def make_rows(workload: Workload, step: int, rank: int, ranks: int) -> Tensor:
    """This rank's sequences of one step, int64 [sequences / ranks, context + 1].

    The bytes are skewed towards 0, so that there is something to learn and losses fall.
    """
    generator = torch.Generator().manual_seed(workload.seed + step)
    draws = torch.rand(workload.sequences, workload.decoder.context + 1, generator=generator)
    rows = (draws.square() * workload.decoder.vocabulary).long()
    return rows.chunk(ranks)[rank]


def _make_model(workload: Workload) -> Decoder:
    torch.manual_seed(workload.seed)
    return Decoder(workload.decoder)


def _mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class _Plain:
    """A loop as in a tutorial: backward, one flat all-reduce, clip, step."""

    def __init__(self, mode: Mode, workload: Workload) -> None:
        self._mode = mode
        self._clip = workload.clip
        self._model = self._wrap(_make_model(workload))
        self._parameters = list(self._model.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=workload.learning_rate,
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
            fused=workload.optimizer_kernel == "fused" or None,
        )
        self._sent = 0

    def step(self, rows: Tensor) -> float:
        count, loss = self._mode.accumulation, 0.0
        for index, part in enumerate(rows.chunk(count)):
            with self._quiet() if index < count - 1 else nullcontext():
                mean = _mean_loss(self._model(part[:, :-1]), part[:, 1:])
                (mean / count if count > 1 else mean).backward()  # type: ignore[no-untyped-call]
            loss += mean.item() / count
        self._reduce()
        nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._count()
        return loss

    def sent_bytes(self) -> int:
        return self._sent

    def _wrap(self, model: nn.Module) -> nn.Module:
        return model

    def _quiet(self) -> AbstractContextManager[None]:
        """Around every microbatch but the last."""
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

    def _count(self) -> None:
        payload = sum(parameter.numel() * parameter.element_size() for parameter in self._parameters)
        self._sent += 2 * payload * (self._mode.ranks - 1) // self._mode.ranks


class _Ddp(_Plain):
    """torch's DistributedDataParallel with its default buckets."""

    def _wrap(self, model: nn.Module) -> nn.Module:
        self._ddp = DistributedDataParallel(model)
        return self._ddp

    def _quiet(self) -> AbstractContextManager[None]:
        return self._ddp.no_sync()

    def _reduce(self) -> None:
        """DDP has reduced during backward."""


class _Trine:
    """``engine.initialize`` and ``train_batch``."""

    def __init__(self, mode: Mode, workload: Workload) -> None:
        import engine  # here, so that its import counts as its start-up

        zero = {"stage": mode.stage}
        if workload.bucket_elements is not None:
            zero["reduce_bucket_size"] = workload.bucket_elements
        config = {
            "train_batch_size": workload.sequences,
            "gradient_accumulation_steps": mode.accumulation,
            "zero_optimization": zero,
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": workload.learning_rate, "betas": list(BETAS), "weight_decay": WEIGHT_DECAY},
            },
            "gradient_clipping": workload.clip,
        }
        self._engine = engine.initialize(_make_model(workload), config, _loss_of_batch)

    def step(self, rows: Tensor) -> float:
        return self._engine.train_batch({"input_ids": rows[:, :-1], "labels": rows[:, 1:]}).loss

    def sent_bytes(self) -> int:
        return self._engine.sent.bytes()


def _loss_of_batch(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return _mean_loss(logits, batch["labels"])
