"""The training runs that ``tests.recorded`` records: models, configurations, and how they are fed.

Together they take every axis and their products, every schedule, ZeRO stage, precision, way of recomputing, kernel and
optimizer, each with the others in another combination.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from engine.models.decoder import loss_sum
from tests import models

ROWS, STEPS = 16, 3
"""Of a global batch; trained."""
OTHER_GRID, STARTED, WEIGHTS = "on another grid", "as a start", "weights alone"
LOADS = ("on its own grid", OTHER_GRID, STARTED, WEIGHTS)
"""What is done with a checkpoint, each followed by a step."""
Config = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A model and how it is trained."""

    build: Callable[[], nn.Module]
    config: Config
    other: Config | None = None
    """The configuration under which its checkpoint is loaded once more; None: no checkpoint is saved."""
    feed: Literal["whole", "iterator", "loop"] = "whole"
    """To ``train_batch`` whole or by microbatches, or trained by ``eng(batch)``, ``backward`` and ``step``."""
    edited: bool = False
    """Weights are written by hand after the first step."""
    example: bool = True
    """Whether the engine is given an example, or has to wait for the first batch."""
    uneven: bool = False
    """Rows have very different numbers of labels."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of ``engine.initialize``."""
    unsteady: tuple[str, ...] = ()
    """Patterns of fields that two runs of the same code have different, and why; they are not compared."""

    @property
    def kind(self) -> str:
        """The name of the builder."""
        return str(getattr(self.build, "func", self.build).__name__)

    @property
    def loss_fn(self) -> Callable[..., Any] | None:
        """The model's own loss, unless it gives logits."""
        if self.kind == "normed":
            return distance
        return loss_sum if "decoder" in self.kind or self.kind == "repeated" else None

    def settings(self, load: str | None = None, folder: str | None = None) -> Config:
        """The configuration, of the run or of what is done with its checkpoint in ``folder``."""
        if load == STARTED:
            return self.config | {"checkpoint": {"init_from": folder}}
        return self.other if load == OTHER_GRID and self.other is not None else self.config

    def batches(self) -> list[Any]:
        """A global batch for each step, and one to evaluate."""
        generator = torch.Generator().manual_seed(11)
        if self.kind == "normed":
            return [(torch.randn(ROWS, 12, generator=generator),) for _ in range(STEPS + 1)]
        batches = models.batches_for({"moe": "qwen3"}.get(self.kind, self.kind), ROWS, STEPS + 1)
        for batch in batches if self.uneven else ():
            lengths = torch.randint(1, models.LENGTH + 1, (ROWS, 1), generator=generator)
            lengths[:4] = 1  # the first data rank has hardly anything to learn from
            batch["labels"] = batch["labels"].masked_fill(torch.arange(models.LENGTH) >= lengths, -100)
        return batches


def ranks_of(config: Config) -> int:
    """The processes that a configuration needs."""
    return prod(config["parallel"].get(axis, 1) for axis in ("data", "tensor", "pipeline"))


# ------------------------------------------------------------------------------------------------ models


def meta_decoder() -> nn.Module:
    """The decoder without memory; each rank makes what it keeps."""
    with torch.device("meta"):
        return models.decoder(layers=4)


def moe() -> nn.Module:
    """Hugging Face Qwen3-MoE: experts, and router logits of every block that go to the loss."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(7)
    sizes: dict[str, Any] = dict(
        vocab_size=models.VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=models.LENGTH, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, output_router_logits=True,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))


def normed() -> nn.Module:
    """Batch normalisation: buffers that forwards write."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


def distance(output: Tensor, batch: tuple[Tensor]) -> Tensor:
    """Loss of that."""
    return (output - 3 * batch[0].mean(dim=1, keepdim=True)).square().mean()


def rmsprop(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer of code."""
    return torch.optim.RMSprop(parameters, lr=1e-3, alpha=0.9, momentum=0.5, foreach=False)


def falling(update: int) -> float:
    """A learning rate of code, as a factor."""
    return float((1 + update) ** -0.5)


decoder, llama, gpt2, nano, t5 = models.decoder, models.llama, models.gpt2, models.nano, models.t5
decoder4, llama4, nano4 = partial(decoder, layers=4), partial(llama, layers=4), partial(nano, layers=4)
tied4, gpt2_dry = partial(decoder, tied=True, layers=4), partial(gpt2, layers=4, dropout=0.0)
dropout = partial(decoder, dropout=0.2, layers=4)

# ------------------------------------------------------------------------------------------------ configurations

PARALLEL = (
    "data", "tensor", "pipeline", "schedule", "virtual_stages", "split", "sequence_parallel",
    "sequence_parallel_regather", "tensor_plan", "prove_plan", "check_replicas",
)  # fmt: skip


def settings(zero: int | Config = 0, full: bool = False, **changes: Any) -> Config:
    """Eight microbatches of two rows in all (sixteen of one row on four data ranks), clipping active, a moving rate.

    ``changes`` that ``parallel`` has go there; ``full``: blocks are computed again in backward.
    """
    parallel = {"data": 1} | {name: changes.pop(name) for name in PARALLEL if name in changes}
    stage = zero if isinstance(zero, dict) else {"stage": zero}
    return {
        "train_batch_size": ROWS,
        "train_micro_batch_size_per_gpu": 2 if parallel["data"] < 4 else 1,
        "parallel": parallel,
        "zero_optimization": {"reduce_bucket_size": 6000} | stage,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_min_lr": 1e-3}},
        "gradient_clipping": 0.5,
        "activation_checkpointing": {"mode": "full" if full else "none"},
    } | changes


BF16: Config = {"bf16": {"enabled": True}}
NO_MASTER: Config = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
FP16: Config = {"fp16": {"enabled": True, "initial_scale_power": 13, "hysteresis": 1}}  # skips the first step
SGD: Config = {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}}
LION: Config = {"type": "Lion", "params": {"lr": 1e-3, "weight_decay": 0.1}}
ADAM: Config = {"type": "Adam", "params": {"lr": 3e-3, "weight_decay": 0.1, "adam_w_mode": False}}
GROUPS: Config = {
    "type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1},
    "no_weight_decay": ["*norm*", "*.bias"], "groups": [{"params": ["tokens.*", "head.*"], "lr": 1e-3}],
}  # fmt: skip
CODE: Config = {"optimizer": None, "scheduler": None}
IN_CODE: Config = {"optimizer": rmsprop, "lr_scheduler": falling}
COSINE: Config = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 1, "total_num_steps": 6}}
CYCLE: Config = {
    "type": "OneCycle", "params": {"cycle_min_lr": 1e-3, "cycle_max_lr": 3e-3, "cycle_first_step_size": 2},
}  # fmt: skip
EACH: Config = {"reduce": "microbatch"}
SELECTIVE: Config = {"activation_checkpointing": {"mode": "selective"}}
SAVE: Config = {"activation_checkpointing": {"mode": "selective", "save": ["attention"]}}
SECOND: Config = {"activation_checkpointing": {"mode": "selective", "every": 2}}
PLAN: Config = {
    "*.query": "column", "*.key": "column", "*.value": "column", "*.attention.output": "row", "*.up": "column",
    "*.down": "row", "tokens": "vocabulary", "head": "vocabulary",
}  # fmt: skip
SEQUENCE: Config = {"tensor": 2, "sequence_parallel": True}
CUBE: Config = {"data": 2, "tensor": 2, "pipeline": 2}
PROVEN_BY_THREADS = ("* / generator",)  # the proof of a written plan draws from torch's generator in any order
MEASURED_SECONDS = ("* / banner*", "* / sent / world start")  # they are shown, and travel as text of any length


def pipe(schedule: str, stages: int = 1, **changes: Any) -> Config:
    """Sizes and schedule of a pipeline of two ranks, if ``changes`` have no other number."""
    return {"pipeline": 2, "schedule": schedule, "virtual_stages": stages} | changes


RUNS: dict[str, Run] = {
    # one process
    "one-decoder-groups": Run(decoder, settings(optimizer=GROUPS), settings(1, data=2, optimizer=GROUPS)),
    "one-llama-full-loop": Run(llama, settings(1, full=True), feed="loop"),
    "one-llama-adam-iterator": Run(llama, settings(optimizer=ADAM, scheduler=CYCLE), feed="iterator"),
    "one-llama-reference": Run(llama, settings(kernels="reference", scheduler=COSINE)),
    "one-nano-sgd-unclipped": Run(nano, settings(optimizer=SGD, gradient_clipping=0.0), example=False),
    "one-gpt2-bf16-keep": Run(gpt2, settings(**BF16, **SELECTIVE, keep_fp32=["*ln*"]), settings(1, data=2, **BF16)),
    "one-decoder-fp16-skips": Run(decoder, settings(**FP16), settings(2, data=2, **FP16)),
    "one-decoder-save-edited": Run(decoder, settings(**SAVE), edited=True),
    "one-decoder-no-master": Run(decoder, settings(**NO_MASTER), settings(1, data=2, **NO_MASTER), feed="loop"),
    "one-decoder-triton": Run(partial(decoder, layers=1), settings(kernels="triton")),
    "one-decoder-compiled": Run(decoder, settings(compile=True)),
    "one-meta-in-code": Run(meta_decoder, settings(**CODE), settings(2, data=2, **CODE), given=IN_CODE),
    "one-normed": Run(normed, settings(gradient_clipping=0.1), settings(data=2)),
    # data ranks
    "dp2-zero0-dropout-loop": Run(dropout, settings(data=2, **SELECTIVE), feed="loop"),
    "dp2-zero0-normed-sgd": Run(normed, settings(data=2, optimizer=SGD)),
    "dp2-zero1-nano-lion": Run(nano, settings(1, data=2, optimizer=LION), settings(optimizer=LION)),
    "dp2-zero1-llama-wire": Run(llama, settings(1, data=2, communication_data_type="bf16", **BF16)),
    "dp2-zero2-gpt2-bf16-each": Run(gpt2, settings({"stage": 2} | EACH, data=2, **BF16), settings(**BF16)),
    "dp2-zero2-tied-fp16-skips": Run(tied4, settings(2, data=2, **FP16), feed="iterator"),
    "dp2-zero3-tied-full": Run(tied4, settings(3, full=True, data=2), settings()),
    "dp2-zero3-llama-step-each": Run(llama, settings({"stage": 3, "gather": "step"} | EACH, data=2), feed="loop"),
    "dp2-zero3-nano-keep-edited": Run(nano, settings({"stage": 3, "keep_gathered_bytes": 30000}, data=2), edited=True),
    "dp2-zero3-meta-no-master": Run(meta_decoder, settings(3, data=2, **NO_MASTER), example=False),
    "dp4-zero1-uneven-in-code": Run(decoder, settings(1, data=4, **CODE), given=IN_CODE, uneven=True),
    "dp4-zero2-nano-sgd": Run(nano, settings(2, data=4, optimizer=SGD), settings(data=2, optimizer=SGD)),
    # tensor ranks
    "tp2-nano-views": Run(nano, settings(tensor=2), settings()),
    "tp2-moe": Run(moe, settings(tensor=2)),
    "tp2-t5": Run(t5, settings(tensor=2, prove_plan=False, check_replicas=False, **BF16), example=False),
    "tp2-decoder-written-edited": Run(
        decoder, settings(tensor=2, tensor_plan=PLAN), edited=True, unsteady=PROVEN_BY_THREADS
    ),
    "tp2-sequence-dropout-bf16": Run(dropout, settings(**SEQUENCE, **BF16), feed="loop"),
    "tp2-regather-llama-reference": Run(
        llama, settings(**SEQUENCE, sequence_parallel_regather=True, kernels="reference"), settings()
    ),
    "tp4-gpt2-full": Run(gpt2_dry, settings(full=True, tensor=4)),
    "dp2-tp2-zero3-qwen3-sequence": Run(models.qwen3, settings(3, data=2, **SEQUENCE), settings(tensor=2)),
    # pipelines
    "pp2-gpipe-t5": Run(t5, settings(**pipe("gpipe"))),
    "pp2-1f1b-tied-uneven": Run(tied4, settings(pipeline=2), settings(), uneven=True),
    "pp2-split-decoder-second": Run(decoder4, settings(**pipe("1f1b"), split=["blocks.1"], **SECOND), feed="iterator"),
    "pp2-interleaved-llama-bf16": Run(
        llama4, settings(1, **pipe("interleaved", 2), **BF16), settings(data=2, **BF16)
    ),
    "pp2-looped-bfs-gpt2": Run(partial(gpt2, layers=4), settings(**pipe("looped-bfs", 2), **SELECTIVE)),
    "pp2-zb-h1-fp16-keep": Run(decoder4, settings(**pipe("zb-h1"), keep_fp32=["*norm*"], **FP16)),
    "pp2-zb-v-crossing": Run(models.crossing, settings(**pipe("zb-v", 2)), example=False),
    "pp2-dualpipe-v-tied": Run(tied4, settings(**pipe("dualpipe-v", 2)), settings(), edited=True),
    "pp2-auto-dropout-full": Run(dropout, settings(full=True, **pipe("auto")), unsteady=MEASURED_SECONDS),
    "pp4-zb-h1-nano": Run(nano4, settings(**pipe("zb-h1", pipeline=4))),
    "dp2-pp2-zero1-t5": Run(t5, settings(1, data=2, pipeline=2)),
    "dp2-pp2-zero2-each-zb-v-nano": Run(nano4, settings({"stage": 2} | EACH, data=2, **pipe("zb-v", 2))),
    "dp2-pp2-zero3-bfs-tied-bf16": Run(tied4, settings(3, data=2, **pipe("looped-bfs", 2), **BF16), settings(**BF16)),
    "tp2-pp2-repeated-selective": Run(models.repeated, settings(pipeline=2, **SEQUENCE, **SELECTIVE)),
    # all axes
    "dp2-tp2-pp2-zero1-gpt2": Run(gpt2_dry, settings(1, **CUBE), settings(data=2, pipeline=2)),
    "dp2-tp2-pp2-zero2-each-dualpipe-v": Run(
        llama4, settings({"stage": 2} | EACH, **CUBE, schedule="dualpipe-v", virtual_stages=2)
    ),
    "dp2-tp2-pp2-zero3-sequence-bf16": Run(
        decoder4, settings(3, full=True, **CUBE, sequence_parallel=True, **BF16)
    ),
    "dp2-pp4-zero3-interleaved": Run(
        partial(decoder, layers=8), settings(3, data=2, **pipe("interleaved", 2, pipeline=4)), feed="iterator"
    ),
}  # fmt: skip
