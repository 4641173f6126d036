"""What every mode trains, what a mode is, and what one rank of it can do.

All modes start from the same weights, see the same sequences and take the same step: mean cross-entropy,
clipping, AdamW. The peers get torch's fused AdamW, which Trine runs inside too, so that a difference
between modes is a difference in distribution and not in the optimizer's kernel.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.peers.models import Name, make
from engine.models.decoder import Decoder, DecoderConfig

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1


Kind = Literal[
    "plain", "ddp", "dtensor", "pipelining", "fsdp2", "deepspeed", "trine", "trine, empty launches",
    "trine, collectives alone", "trine, dispatch", "rows",
]  # fmt: skip
"""Who trains."""
PEERS: tuple[Kind, ...] = ("ddp", "dtensor", "pipelining", "fsdp2", "deepspeed")
"""Those that a table may leave out."""
Axis = Literal["data", "tensor", "pipeline", "expert"]
"""What ranks share among them."""
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
    """One of ``benchmarks.peers.models`` of the decoder's sizes; None is the decoder."""
    uneven: int = 1
    """Rows alone: times that an expert of the first rank is chosen more often than another."""


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
    axis: Axis = "data"
    """What the ranks share among them: the batch, or the model across or along its layers."""
    schedule: Schedule = "1f1b"
    """Of a pipeline."""
    own_clipping: bool = False
    """Clip as the peer's users would, and not by the norm of the whole model where that is another thing."""
    watched: bool = True
    """Under Trine's watchdog."""
    model: Name | None = None
    """Model in the place of the workload's."""

    @property
    def virtual_stages(self) -> int:
        """Stages of one rank of a pipeline."""
        return 1 if self.schedule == "1f1b" else 2

    @property
    def data_ranks(self) -> int:
        """Among how many ranks the batch is cut."""
        return self.ranks if self.axis in ("data", "expert") else 1


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
    return Decoder(workload.decoder) if workload.model is None else make(workload.model, workload.decoder)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats, 0-dim, of logits [B, L, V] and labels [B, L]."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make_adamw(parameters: list[nn.Parameter] | list[dict[str, Any]], workload: Workload) -> torch.optim.AdamW:
    """The optimizer of all peers."""
    return torch.optim.AdamW(
        parameters,
        lr=workload.learning_rate,
        betas=BETAS,
        eps=workload.epsilon,
        weight_decay=WEIGHT_DECAY,
        fused=workload.optimizer_kernel == "fused" or None,
    )
