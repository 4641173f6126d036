"""Contents of a config: one frozen dataclass for each JSON object, one line of documentation for each key.

Names are DeepSpeed's wherever DeepSpeed has the same setting. The text under a field is its description in the JSON
Schema.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from engine.config.reader import Section, Sections, setting, stored
from engine.config.rules import AnyOf, Choice, Flag, Int, ListOf, OperatorName, Real, Rule, Text, TextMap, Unbuilt

SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-v", "dualpipe-v", "auto")
SIZE = Int(low=1)
COUNT = Int(low=0)
NOT_NEGATIVE = Real(low=0)
FACTOR = Real(low=0, below=1)
AUTO = Choice(options=("auto",), noun="auto")
AXIS = AnyOf(rules=(AUTO, SIZE), remedy='give a whole number of at least 1, or "auto" for one axis')
GLOBS = ListOf(each=Text(), noun='a list of name patterns such as ["*.bias"]')
FOLDER = Text(noun="a path", null=True, remedy="give a path in quotes, or null for none")


def _words(*options: str, noun: str) -> Rule:
    return Choice(options=options, noun=noun)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleCosts:
    """Times of a pipeline rank's whole slice of the model, in any one unit; each stage takes its share of them."""

    forward: float = setting(1.0, Real(above=0))
    """Forward of one microbatch."""
    input: float = setting(1.0, NOT_NEGATIVE)
    """Gradient of the inputs, the part of a backward that other stages wait for."""
    weight: float = setting(1.0, NOT_NEGATIVE)
    """Gradient of the weights, the part of a backward that can wait."""
    transfer: float = setting(0.0, NOT_NEGATIVE)
    """One message to another rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Layout of the processes as data x tensor x pipeline, and how the model is cut over them."""

    data: int | Literal["auto"] = setting("auto", AXIS)
    """Size of the data axis; "auto" takes what tensor and pipeline leave of the world."""
    tensor: int | Literal["auto"] = setting(1, AXIS)
    """Size of the tensor axis: ranks that share every layer."""
    pipeline: int | Literal["auto"] = setting(1, AXIS)
    """Size of the pipeline axis: ranks that each hold a run of layers."""
    sequence_parallel: bool = setting(False, Flag())
    """Shard the activations between tensor-parallel layers along the sequence."""
    sequence_parallel_regather: bool = setting(False, Flag())
    """Gather sequence-sharded inputs again in the backward instead of keeping them: less memory, more traffic."""
    schedule: str = setting("1f1b", AnyOf(
        rules=(Choice(options=SCHEDULES, noun="a schedule"), Text(noun="a schedule", ends=(".csv", ".txt"))),
        remedy=f"give {', '.join(SCHEDULES)}, or the path of a .csv or .txt file of actions"))  # fmt: skip
    """Pipeline schedule: a name, or the path of a .csv or .txt file of action tokens."""
    schedule_costs: ScheduleCosts | None = setting(None, Section(cls=ScheduleCosts, null=True))
    """Times for which zb-h1 and zb-v choose their order; null: measured ones with balance "time", else equal ones."""
    virtual_stages: int = setting(1, SIZE)
    """Model stages on each pipeline rank, for schedules with virtual stages."""
    split: Literal["auto"] | tuple[str, ...] = setting("auto", AnyOf(
        rules=(AUTO, ListOf(each=Text(), noun="a list of module names")),
        remedy='give "auto" or a list of the module names that begin a stage'))  # fmt: skip
    """First modules of the pipeline stages: "auto", or a list of module names."""
    balance: Literal["flops", "time"] = setting("flops", _words("flops", "time", noun="a measure of work"))
    """Measure of work that stages share equally: counted FLOPs, or seconds measured before the run."""
    activation_limit_bytes: int | None = setting(None, Int(low=1, null=True))
    """Limit of activation bytes on a rank for schedule "auto"; null allows about what 1f1b needs."""
    tensor_plan: str | Mapping[str, str] = setting("auto", AnyOf(
        rules=(AUTO, TextMap(), Text()),
        remedy='give "auto", an object {"name pattern": "style"}, or the path of a JSON file'))  # fmt: skip
    """Sharding styles of the tensor ranks: "auto", an object from name patterns to styles, or a file of one."""
    verify_plan: bool = setting(True, Flag())
    """Compare the gradients that all tensor ranks should compute alike, in the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Placement of the optimizer state."""

    device: Literal["none", "cpu", "nvme"] = setting("none", _words("none", "cpu", "nvme", noun="a place for state"))
    """none: on the GPU; cpu: in host memory; nvme: on disk."""
    nvme_path: str | None = setting(None, FOLDER)
    """Folder on the disk, for device nvme."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroConfig:
    """Optimizer state, gradients and parameters that the data ranks shard instead of holding full copies."""

    stage: Literal[0, 1, 2, 3] = setting(0, Choice(options=(0, 1, 2, 3), noun="a ZeRO stage"))
    """0: nothing; 1: optimizer state; 2: gradients too; 3: parameters too."""
    reduce: Literal["step", "microbatch"] = setting("step", _words("step", "microbatch", noun="a reduce mode"))
    """Reduce gradients once per step, or after every microbatch (less memory, more traffic)."""
    gather: Literal["microbatch", "step"] = setting("microbatch", _words("microbatch", "step", noun="a gather mode"))
    """At stage 3, gather parameters for every microbatch, or once per step and keep them (more memory)."""
    keep_gathered_bytes: int = setting(0, COUNT)
    """At stage 3, bytes of gathered parameters that may be kept over the microbatches of a step."""
    reduce_bucket_size: int = setting(4_000_000, SIZE)
    """Elements reduced in one collective."""
    offload_optimizer: OffloadConfig = setting(OffloadConfig(), Section(cls=OffloadConfig))
    """Placement of the optimizer state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bf16Config:
    """Training in bfloat16."""

    enabled: bool = setting(False, Flag())
    """Hold the model in bfloat16."""
    bf16_master_weights_and_grads: bool = setting(False, Flag())
    """Keep no fp32 copies of weights and gradients: updates are computed in fp32 and rounded stochastically."""
    bf16_optimizer_states: bool = setting(False, Flag())
    """Keep optimizer state in bfloat16 too, rounded in the same way."""
    check_grad_overflow: bool = setting(True, Flag())
    """Skip a step whose gradients are not finite; false makes such a step anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp16Config:
    """Training in float16 with a loss scale."""

    enabled: bool = setting(False, Flag())
    """Hold the model in float16."""
    loss_scale: float = setting(0.0, Real(low=0, remedy="give a number, 0 means a dynamic scale"))
    """Fixed loss scale; 0 makes it dynamic."""
    initial_scale_power: int = setting(16, Int(low=0, high=127))
    """Power of 2 at which the dynamic scale starts."""
    loss_scale_window: int = setting(1000, SIZE)
    """Steps without overflow before the dynamic scale doubles."""
    hysteresis: int = setting(2, SIZE)
    """Number of the overflow at which the dynamic scale halves, as at every later one; earlier ones are tolerated."""
    consecutive_hysteresis: bool = setting(False, Flag())
    """Restore the tolerance after every good step; false restores it after every doubling."""
    min_loss_scale: float = setting(1.0, Real(above=0))
    """Lower bound of the dynamic scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWParams:
    """Parameters of AdamW, with torch's defaults."""

    lr: float = setting(1e-3, NOT_NEGATIVE)
    """Learning rate."""
    betas: tuple[float, float] = setting((0.9, 0.999), ListOf(
        each=FACTOR, length=2, noun="a list of two numbers from 0 to below 1"))  # fmt: skip
    """Decay rates of the running averages of the gradient and of its square."""
    eps: float = setting(1e-8, NOT_NEGATIVE)
    """Term added to the denominator."""
    weight_decay: float = setting(0.01, NOT_NEGATIVE)
    """Decoupled weight decay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams(AdamWParams):
    """Parameters of Adam with weight decay in the gradient; "Adam" is AdamW unless adam_w_mode is false."""

    weight_decay: float = setting(0.0, NOT_NEGATIVE)
    """Weight decay, added to the gradient."""
    adam_w_mode: bool = setting(False, Flag(), kept=False)
    """false selects Adam as published; true, DeepSpeed's default, makes it AdamW."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SgdParams:
    """Parameters of stochastic gradient descent, with torch's defaults."""

    lr: float = setting(1e-3, NOT_NEGATIVE)
    """Learning rate."""
    momentum: float = setting(0.0, NOT_NEGATIVE)
    """Momentum factor."""
    dampening: float = setting(0.0, Real())
    """Dampening of the momentum."""
    weight_decay: float = setting(0.0, NOT_NEGATIVE)
    """Weight decay, added to the gradient."""
    nesterov: bool = setting(False, Flag())
    """Nesterov momentum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LionParams:
    """Parameters of Lion, which steps by the sign of an interpolated momentum."""

    lr: float = setting(1e-4, NOT_NEGATIVE)
    """Learning rate."""
    betas: tuple[float, float] = setting((0.9, 0.99), ListOf(
        each=FACTOR, length=2, noun="a list of two numbers from 0 to below 1"))  # fmt: skip
    """Interpolation weight of the update, and decay rate of the momentum."""
    weight_decay: float = setting(0.0, NOT_NEGATIVE)
    """Decoupled weight decay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LRRangeTestParams:
    """Learning rate that grows step by step, to find the range that trains."""

    lr_range_test_min_lr: float = setting(1e-3, NOT_NEGATIVE)
    """Rate at the start."""
    lr_range_test_step_size: int = setting(2000, SIZE)
    """Steps between two increases."""
    lr_range_test_step_rate: float = setting(1.0, NOT_NEGATIVE)
    """Increase per step_size, as a fraction of the rate at the start."""
    lr_range_test_staircase: bool = setting(False, Flag())
    """Increase in stairs instead of continuously."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneCycleParams:
    """One cycle of the learning rate up and down, with the momentum moving opposite, then decay."""

    cycle_min_lr: float = setting(0.0, NOT_NEGATIVE, required=True)
    """Rate at the start and the end of the cycle."""
    cycle_max_lr: float = setting(0.0, NOT_NEGATIVE, required=True)
    """Rate at the peak of the cycle."""
    decay_lr_rate: float = setting(0.0, NOT_NEGATIVE)
    """Decay of the rate after the cycle."""
    cycle_first_step_size: int = setting(2000, SIZE)
    """Steps of the rise."""
    cycle_second_step_size: int | None = setting(None, Int(low=1, null=True))
    """Steps of the fall; null takes as many as the rise."""
    cycle_first_stair_count: int = setting(0, COUNT)
    """Stairs of the rise; 0 rises continuously."""
    cycle_second_stair_count: int | None = setting(None, Int(low=0, null=True))
    """Stairs of the fall; null takes as many as the rise."""
    decay_step_size: int = setting(0, COUNT)
    """Steps per decay after the cycle; 0 means no decay."""
    cycle_momentum: bool = setting(True, Flag())
    """Cycle the momentum as well."""
    cycle_min_mom: float = setting(0.8, FACTOR)
    """Momentum at the peak of the rate."""
    cycle_max_mom: float = setting(0.9, FACTOR)
    """Momentum at the start and the end of the cycle."""
    decay_mom_rate: float = setting(0.0, NOT_NEGATIVE)
    """Decay of the momentum after the cycle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupLRParams:
    """Learning rate that rises and then stays."""

    warmup_min_lr: float = setting(0.0, NOT_NEGATIVE)
    """Rate at the start."""
    warmup_max_lr: float | None = setting(None, Real(low=0, null=True))
    """Rate after the warmup; null uses the optimizer's."""
    warmup_num_steps: int = setting(1000, COUNT)
    """Steps of the warmup."""
    warmup_type: Literal["log", "linear"] = setting("log", _words("log", "linear", noun="a warmup type"))
    """Shape of the warmup."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupDecayLRParams(WarmupLRParams):
    """Learning rate that rises and then falls linearly to its minimum."""

    total_num_steps: int = setting(1, SIZE, required=True)
    """Steps of the whole training."""
    warmup_max_lr: float | None = setting(0.001, Real(low=0, null=True))
    """Rate after the warmup; null uses the optimizer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupCosineLRParams:
    """Learning rate that rises and then falls along a cosine; all values are fractions of the optimizer's rate."""

    total_num_steps: int = setting(1, SIZE, required=True)
    """Steps of the whole training."""
    warmup_min_ratio: float = setting(0.0, NOT_NEGATIVE)
    """Fraction at the start."""
    warmup_num_steps: int = setting(1000, COUNT)
    """Steps of the warmup."""
    cos_min_ratio: float = setting(1e-4, NOT_NEGATIVE)
    """Fraction at the end."""
    warmup_type: Literal["log", "linear"] = setting("log", _words("log", "linear", noun="a warmup type"))
    """Shape of the warmup."""


OPTIMIZERS: Mapping[str, type[Any]] = MappingProxyType(
    {"AdamW": AdamWParams, "Adam": AdamParams, "SGD": SgdParams, "Lion": LionParams}
)
SCHEDULERS: Mapping[str, type[Any]] = MappingProxyType({
    "LRRangeTest": LRRangeTestParams, "OneCycle": OneCycleParams, "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams, "WarmupCosineLR": WarmupCosineLRParams,
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """Parameters with a learning rate or weight decay of their own."""

    params: tuple[str, ...] = setting((), GLOBS, required=True)
    """Patterns of the original parameter names."""
    lr: float | None = setting(None, Real(low=0, null=True))
    """Learning rate of the group; null uses the optimizer's."""
    weight_decay: float | None = setting(None, Real(low=0, null=True))
    """Weight decay of the group; null uses the optimizer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its parameter groups."""

    type: Literal["AdamW", "Adam", "SGD", "Lion"] = setting("AdamW", Choice(
        options=tuple(OPTIMIZERS), noun="built in", fold=True,
        remedy="give AdamW, Adam, SGD or Lion, or pass optimizer=... to engine.initialize"))  # fmt: skip
    """AdamW, Adam, SGD or Lion, in any letter case."""
    params: Mapping[str, Any] = stored(AdamWParams())
    """Settings of the chosen optimizer, with all defaults filled in."""
    no_weight_decay: tuple[str, ...] = setting((), GLOBS)
    """Name patterns of parameters without weight decay."""
    groups: tuple[GroupConfig, ...] = setting((), Sections(cls=GroupConfig))
    """Parameters with a learning rate or weight decay of their own."""
    update_unused: bool = setting(False, Flag())
    """Update parameters without a gradient in a step by decay and momentum, as DeepSpeed does; false: as torch, no."""
    include_frozen: tuple[str, ...] = setting((), GLOBS)
    """Name patterns of frozen parameters that may be thawed later, with memory for gradient and optimizer state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Learning rate schedule."""

    type: str = setting("WarmupLR", Choice(options=tuple(SCHEDULERS), noun="a scheduler", fold=True), required=True)
    """LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR or WarmupCosineLR."""
    params: Mapping[str, Any] = stored(WarmupLRParams())
    """Settings of the chosen scheduler, with all defaults filled in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCheckpointingConfig:
    """Activation checkpointing: activations of the forward that the backward recomputes instead of keeping them."""

    mode: Literal["none", "full", "selective"] = setting(
        "none", _words("none", "full", "selective", noun="a checkpointing mode")
    )
    """none: keep all; full: recompute every block; selective: recompute what ``save`` or ``every`` leaves out."""
    save: tuple[str, ...] | None = setting(None, ListOf(
        each=OperatorName(noun="an operator"), noun='a list of operators such as ["matmul", "attention", "aten.bmm"]',
        null=True))  # fmt: skip
    """With mode selective, operators whose outputs are kept, as are sums over tensor ranks; null: matmul, attention."""
    every: int | None = setting(None, Int(low=1, null=True))
    """With mode selective, recompute every n-th block in full and keep the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When and where checkpoints are written."""

    folder: str | None = setting(None, FOLDER)
    """Folder of the run's checkpoints; null writes them only on request."""
    every: int = setting(0, COUNT)
    """Steps between checkpoints; 0 writes them only on request."""
    keep: int = setting(2, SIZE)
    """Number of the newest checkpoints to keep."""
    asynchronous: bool = setting(True, Flag(), key="async")
    """Write checkpoints in the background."""
    on_failure: Literal["continue", "stop"] = setting("continue", _words("continue", "stop", noun="a reaction"))
    """Reaction to a checkpoint that cannot be written: continue or stop the run. It is logged either way."""
    init_from: str | None = setting(None, FOLDER)
    """Hugging Face folder or checkpoint from which the model takes its initial weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig:
    """Destinations of the figures of each step."""

    jsonl: str | None = setting(None, FOLDER)
    """File that receives a JSON object every ``every`` steps."""
    tensorboard: str | None = setting(None, FOLDER)
    """Folder of the TensorBoard log."""
    every: int = setting(10, SIZE)
    """Steps between two logged lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogConfig:
    """Reactions to a run that has stopped learning."""

    timeout_seconds: None = setting(None, Unbuilt(
        why="would have no effect, since this version has no watchdog that looks at time",
        remedy="leave it out, max_skipped_steps works without it"))  # fmt: skip
    """Not built yet, only null is accepted: seconds without progress after which every rank reports where it is."""
    max_skipped_steps: int = setting(100, Int(low=0, remedy="give a whole number, 0 never stops the run"))
    """Skipped steps in a row, because of non-finite gradients, that stop the run; 0 never stops it."""
