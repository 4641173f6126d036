"""Types of a training workload: model and batch sizes, the mode, and the trainer of one rank.

All modes train the same weights on the same sequences: mean cross-entropy, clipping, AdamW. All use torch's fused AdamW
kernel, so that modes differ in distribution alone.
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
    "plain", "ddp", "dtensor", "pipelining", "fsdp2", "context_parallel", "deepspeed", "trine", "trine, empty launches",
    "trine, collectives alone", "trine, dispatch", "rows",
]  # fmt: skip
"""Kind of trainer: plain torch, a peer, or Trine."""
PEERS: tuple[Kind, ...] = ("ddp", "dtensor", "pipelining", "fsdp2", "deepspeed")
"""Peers that a table may omit."""
Axis = Literal["data", "tensor", "pipeline", "expert", "context"]
"""Axis that the ranks of a mode share."""
Schedule = Literal["1f1b", "interleaved", "zb-v"]
"""Pipeline schedule; the last two place two stages on each rank."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Model, data and optimizer of all modes; defaults are the benchmark's sizes."""

    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    sequences: int = 16
    """Global batch in sequences of ``decoder.context`` tokens."""
    learning_rate: float = 3e-4
    clip: float = 1.0
    """Maximum L2 norm of the gradient."""
    epsilon: float = 1e-8
    """Eps of AdamW. Comparisons of weights need a larger one, since gradients that are zero except for rounding would
    otherwise make full steps.
    """
    bucket_elements: int | None = None
    """Trine's ``zero_optimization.reduce_bucket_size``; None: the default."""
    optimizer_kernel: Literal["fused", "default"] = "fused"
    """AdamW implementation of torch that the peers use."""
    seed: int = 1234
    model: Name | None = None
    """Model of ``benchmarks.peers.models``; None: the decoder."""
    uneven: int = 1
    """For rows only: factor by which experts of the first rank are chosen more often than others."""


@dataclass(frozen=True, slots=True)
class Mode:
    """Way of training, a row of the table."""

    name: str
    kind: Kind
    ranks: int
    accumulation: int = 1
    """Number of microbatches per step and rank."""
    stage: int = 0
    """ZeRO stage, 0 to 3."""
    reduce: Literal["step", "microbatch"] | None = None
    """Trine's interval of gradient reduction; None: the default."""
    gather: Literal["step", "microbatch"] | None = None
    """Trine's interval of parameter gathers at ZeRO 3; None: the default."""
    axis: Axis = "data"
    """Axis along which the ranks divide the batch or the model."""
    schedule: Schedule = "1f1b"
    """Kind of pipeline schedule."""
    own_clipping: bool = False
    """True: clip by a rank's own norm as the peer's users would; False: by the whole model's."""
    watched: bool = True
    """True if Trine's watchdog runs."""
    model: Name | None = None
    """Model of the mode, if not the workload's."""
    method: str | None = None
    """Trine's method of attention over context ranks; None: the default."""
    note: str = ""
    """Difference of the way that the peer is called, for readers of the table."""

    @property
    def virtual_stages(self) -> int:
        """Number of pipeline stages on each rank."""
        return 1 if self.schedule == "1f1b" else 2

    @property
    def data_ranks(self) -> int:
        """Number of ranks that divide the batch."""
        return self.ranks if self.axis in ("data", "expert") else 1


class Trainer(Protocol):
    """Interface of one rank's trainer of a mode, ready for its first step."""

    def step(self, rows: Tensor) -> float | None:
        """Trains one optimizer step on this rank's sequences [rows, context + 1].

        Returns this rank's or the global loss; None if unknown on this rank.
        """


@runtime_checkable
class Legible(Trainer, Protocol):
    """Interface of a trainer with comparable weights."""

    def weights(self) -> dict[str, Tensor]:
        """Returns weights by the model's names; all ranks together return every parameter. Collective."""


def make_rows(mode: Mode, workload: Workload, step: int, rank: int) -> Tensor:
    """Returns the sequences of a step for one rank of ``mode``, int64 [sequences / data ranks, context + 1].

    Their distribution is skewed towards 0, so that the loss falls.
    """
    generator = torch.Generator().manual_seed(workload.seed + step)
    draws = torch.rand(workload.sequences, workload.decoder.context + 1, generator=generator)
    rows = (draws.square() * workload.decoder.vocabulary).long()
    return rows.chunk(mode.data_ranks)[rank % mode.data_ranks]


def make_model(workload: Workload) -> Any:
    """Builds the workload's model: tokens [B, L] -> logits [B, L, V]."""
    torch.manual_seed(workload.seed)
    return Decoder(workload.decoder) if workload.model is None else make(workload.model, workload.decoder)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean cross-entropy in nats, 0-dim, of logits [B, L, V] and labels [B, L]."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make_adamw(parameters: list[nn.Parameter] | list[dict[str, Any]], workload: Workload) -> torch.optim.AdamW:
    """Makes the AdamW optimizer of all peers."""
    return torch.optim.AdamW(
        parameters,
        lr=workload.learning_rate,
        betas=BETAS,
        eps=workload.epsilon,
        weight_decay=WEIGHT_DECAY,
        fused=workload.optimizer_kernel == "fused" or None,
    )
