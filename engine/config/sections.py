"""What a config may contain: one frozen dataclass per JSON object, one line of doc per key.

Names are DeepSpeed's wherever DeepSpeed has the thing. The text under a field is its description in
the JSON Schema.
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
class ParallelConfig:
    """How the processes are laid out as data x tensor x pipeline, and how the model is cut."""

    data: int | Literal["auto"] = setting("auto", AXIS)
    """Data axis size; "auto" takes what tensor and pipeline leave of the world."""
    tensor: int | Literal["auto"] = setting(1, AXIS)
    """Tensor axis size: ranks that share every layer."""
    pipeline: int | Literal["auto"] = setting(1, AXIS)
    """Pipeline axis size: ranks that each hold a run of layers."""
    sequence_parallel: bool = setting(False, Flag())
    """Keep activations between tensor-parallel layers cut along the sequence."""
    sequence_parallel_regather: bool = setting(False, Flag())
    """Gather sequence-cut inputs again in backward instead of keeping them: less memory, more bytes."""
    schedule: str = setting("1f1b", AnyOf(
        rules=(Choice(options=SCHEDULES, noun="a schedule"), Text(noun="a schedule", ends=(".csv", ".txt"))),
        remedy=f"give {', '.join(SCHEDULES)}, or the path of a .csv or .txt file of actions"))  # fmt: skip
    """Pipeline schedule: a name, or a .csv or .txt file of action tokens."""
    virtual_stages: int = setting(1, SIZE)
    """Model stages per pipeline rank, for the schedules that have them."""
    split: Literal["auto"] | tuple[str, ...] = setting("auto", AnyOf(
        rules=(AUTO, ListOf(each=Text(), noun="a list of module names")),
        remedy='give "auto" or a list of the module names that begin a stage'))  # fmt: skip
    """Where pipeline stages begin: "auto", or module names."""
    balance: Literal["flops", "time"] = setting("flops", _words("flops", "time", noun="a measure of work"))
    """What stages have an equal share of: counted FLOPs, or seconds, measured before the run."""
    activation_limit_bytes: int | None = setting(None, Int(low=1, null=True))
    """Schedule "auto": most bytes of activations that a rank may hold; null: about what 1f1b would."""
    tensor_plan: str | Mapping[str, str] = setting("auto", AnyOf(
        rules=(AUTO, TextMap(), Text()),
        remedy='give "auto", an object {"name pattern": "style"}, or the path of a JSON file'))  # fmt: skip
    """How tensor ranks share layers: "auto", styles by name pattern, or a file of them."""
    verify_plan: bool = setting(True, Flag())
    """Compare, in the first step, the gradients that all tensor ranks should find alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Where optimizer state lives."""

    device: Literal["none", "cpu", "nvme"] = setting("none", _words("none", "cpu", "nvme", noun="a place for state"))
    """none: on the GPU; cpu: in host memory; nvme: on disk."""
    nvme_path: str | None = setting(None, FOLDER)
    """Folder on the disk for device nvme."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroConfig:
    """What the data ranks share among them instead of each holding all of it."""

    stage: Literal[0, 1, 2, 3] = setting(0, Choice(options=(0, 1, 2, 3), noun="a ZeRO stage"))
    """0: nothing; 1: optimizer state; 2: and gradients; 3: and parameters."""
    reduce: Literal["step", "microbatch"] = setting("step", _words("step", "microbatch", noun="a reduce mode"))
    """Reduce gradients once per step, or after every microbatch (less memory, more bytes)."""
    gather: Literal["microbatch", "step"] = setting("microbatch", _words("microbatch", "step", noun="a gather mode"))
    """Stage 3: gather parameters for every microbatch, or once per step and keep them (more memory)."""
    keep_gathered_bytes: int = setting(0, COUNT)
    """Stage 3: bytes of gathered parameters that may stay over the microbatches of a step."""
    reduce_bucket_size: int = setting(4_000_000, SIZE)
    """Elements reduced in one message."""
    offload_optimizer: OffloadConfig = setting(OffloadConfig(), Section(cls=OffloadConfig))
    """Where optimizer state lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bf16Config:
    """Training in bfloat16."""

    enabled: bool = setting(False, Flag())
    """Hold the model in bfloat16."""
    bf16_master_weights_and_grads: bool = setting(False, Flag())
    """Keep no fp32 copy of weights and gradients: updates are computed in fp32 and rounded stochastically."""
    bf16_optimizer_states: bool = setting(False, Flag())
    """Keep optimizer state in bfloat16 too, rounded in the same way."""
    check_grad_overflow: bool = setting(True, Flag())
    """Skip a step whose gradients are not finite; false makes it as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp16Config:
    """Training in float16 with a loss scale."""

    enabled: bool = setting(False, Flag())
    """Hold the model in float16."""
    loss_scale: float = setting(0.0, Real(low=0, remedy="give a number, 0 means a dynamic scale"))
    """Fixed loss scale; 0 means dynamic."""
    initial_scale_power: int = setting(16, Int(low=0, high=127))
    """The dynamic scale starts at 2 to this power."""
    loss_scale_window: int = setting(1000, SIZE)
    """Steps without overflow before the dynamic scale doubles."""
    hysteresis: int = setting(2, SIZE)
    """The dynamic scale halves at this overflow and at every later one; those before it are forgiven."""
    consecutive_hysteresis: bool = setting(False, Flag())
    """Forgive anew after every good step; false: after every doubling."""
    min_loss_scale: float = setting(1.0, Real(above=0))
    """The dynamic scale never falls below this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWParams:
    """AdamW, torch's defaults."""

    lr: float = setting(1e-3, NOT_NEGATIVE)
    """Learning rate."""
    betas: tuple[float, float] = setting((0.9, 0.999), ListOf(
        each=FACTOR, length=2, noun="a list of two numbers from 0 to below 1"))  # fmt: skip
    """Decay of the running mean and of the running square of the gradient."""
    eps: float = setting(1e-8, NOT_NEGATIVE)
    """Added to the denominator."""
    weight_decay: float = setting(0.01, NOT_NEGATIVE)
    """Decoupled weight decay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams(AdamWParams):
    """Adam with weight decay inside the gradient; with adam_w_mode left out or true, "Adam" is AdamW."""

    weight_decay: float = setting(0.0, NOT_NEGATIVE)
    """Weight decay, added to the gradient."""
    adam_w_mode: bool = setting(False, Flag(), kept=False)
    """false for Adam as published; DeepSpeed's default true makes it AdamW."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SgdParams:
    """Stochastic gradient descent, torch's defaults."""

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
    """Lion (sign of an interpolated momentum)."""

    lr: float = setting(1e-4, NOT_NEGATIVE)
    """Learning rate."""
    betas: tuple[float, float] = setting((0.9, 0.99), ListOf(
        each=FACTOR, length=2, noun="a list of two numbers from 0 to below 1"))  # fmt: skip
    """Interpolation for the update, and decay of the momentum."""
    weight_decay: float = setting(0.0, NOT_NEGATIVE)
    """Decoupled weight decay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LRRangeTestParams:
    """A rate that grows step by step, to find the range that trains."""

    lr_range_test_min_lr: float = setting(1e-3, NOT_NEGATIVE)
    """Rate at the start."""
    lr_range_test_step_size: int = setting(2000, SIZE)
    """Steps between two growths."""
    lr_range_test_step_rate: float = setting(1.0, NOT_NEGATIVE)
    """Growth per step_size, as a share of the start."""
    lr_range_test_staircase: bool = setting(False, Flag())
    """Grow in stairs instead of evenly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneCycleParams:
    """One cycle of the rate up and down, the momentum the other way, then decay."""

    cycle_min_lr: float = setting(0.0, NOT_NEGATIVE, required=True)
    """Rate at the start and the end of the cycle."""
    cycle_max_lr: float = setting(0.0, NOT_NEGATIVE, required=True)
    """Rate at the top of the cycle."""
    decay_lr_rate: float = setting(0.0, NOT_NEGATIVE)
    """Decay of the rate after the cycle."""
    cycle_first_step_size: int = setting(2000, SIZE)
    """Steps up."""
    cycle_second_step_size: int | None = setting(None, Int(low=1, null=True))
    """Steps down; null: as many as up."""
    cycle_first_stair_count: int = setting(0, COUNT)
    """Stairs on the way up; 0: even."""
    cycle_second_stair_count: int | None = setting(None, Int(low=0, null=True))
    """Stairs on the way down; null: as many as up."""
    decay_step_size: int = setting(0, COUNT)
    """Steps per decay after the cycle; 0: no decay."""
    cycle_momentum: bool = setting(True, Flag())
    """Cycle the momentum as well."""
    cycle_min_mom: float = setting(0.8, FACTOR)
    """Momentum at the top of the rate."""
    cycle_max_mom: float = setting(0.9, FACTOR)
    """Momentum at the start and the end of the cycle."""
    decay_mom_rate: float = setting(0.0, NOT_NEGATIVE)
    """Decay of the momentum after the cycle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupLRParams:
    """A rate that rises and then stays."""

    warmup_min_lr: float = setting(0.0, NOT_NEGATIVE)
    """Rate at the start."""
    warmup_max_lr: float | None = setting(None, Real(low=0, null=True))
    """Rate after the warmup; null: the optimizer's."""
    warmup_num_steps: int = setting(1000, COUNT)
    """Steps of the warmup."""
    warmup_type: Literal["log", "linear"] = setting("log", _words("log", "linear", noun="a warmup type"))
    """Shape of the warmup."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupDecayLRParams(WarmupLRParams):
    """A rate that rises and then falls evenly to zero."""

    total_num_steps: int = setting(1, SIZE, required=True)
    """Steps of the whole training."""
    warmup_max_lr: float | None = setting(0.001, Real(low=0, null=True))
    """Rate after the warmup; null: the optimizer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupCosineLRParams:
    """A rate that rises and then falls along a cosine; all as shares of the optimizer's rate."""

    total_num_steps: int = setting(1, SIZE, required=True)
    """Steps of the whole training."""
    warmup_min_ratio: float = setting(0.0, NOT_NEGATIVE)
    """Share at the start."""
    warmup_num_steps: int = setting(1000, COUNT)
    """Steps of the warmup."""
    cos_min_ratio: float = setting(1e-4, NOT_NEGATIVE)
    """Share at the end."""
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
    """Parameters with their own learning rate or weight decay."""

    params: tuple[str, ...] = setting((), GLOBS, required=True)
    """Patterns on the original parameter names."""
    lr: float | None = setting(None, Real(low=0, null=True))
    """Learning rate of the group; null: the optimizer's."""
    weight_decay: float | None = setting(None, Real(low=0, null=True))
    """Weight decay of the group; null: the optimizer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its parameter groups."""

    type: Literal["AdamW", "Adam", "SGD", "Lion"] = setting("AdamW", Choice(
        options=tuple(OPTIMIZERS), noun="built in", fold=True,
        remedy="give AdamW, Adam, SGD or Lion, or pass optimizer=... to engine.initialize"))  # fmt: skip
    """AdamW, Adam, SGD or Lion, in any letter case."""
    params: Mapping[str, Any] = stored(AdamWParams())
    """Settings of that optimizer; all of them, defaults filled in."""
    no_weight_decay: tuple[str, ...] = setting((), GLOBS)
    """Patterns of parameter names that are not decayed."""
    groups: tuple[GroupConfig, ...] = setting((), Sections(cls=GroupConfig))
    """Parameters with their own learning rate or weight decay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The learning rate over the steps."""

    type: str = setting("WarmupLR", Choice(options=tuple(SCHEDULERS), noun="a scheduler", fold=True), required=True)
    """LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR or WarmupCosineLR."""
    params: Mapping[str, Any] = stored(WarmupLRParams())
    """Settings of that scheduler; all of them, defaults filled in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCheckpointingConfig:
    """What of the forward pass is computed again in backward instead of kept."""

    mode: Literal["none", "full", "selective"] = setting(
        "none", _words("none", "full", "selective", noun="a checkpointing mode")
    )
    """none: keep all; full: recompute every block; selective: recompute what ``save`` or ``every`` leaves."""
    save: tuple[str, ...] | None = setting(None, ListOf(
        each=OperatorName(noun="an operator"), noun='a list of operators such as ["matmul", "attention", "aten.bmm"]',
        null=True))  # fmt: skip
    """Mode selective: operators whose outputs are kept, with sums over tensor ranks; null: matmul, attention."""
    every: int | None = setting(None, Int(low=1, null=True))
    """Mode selective: recompute every n-th block in full, and keep the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When and where checkpoints are written."""

    folder: str | None = setting(None, FOLDER)
    """Folder of the run's checkpoints; null: only when asked."""
    every: int = setting(0, COUNT)
    """Steps between checkpoints; 0: only when asked."""
    keep: int = setting(2, SIZE)
    """How many of the newest to keep."""
    asynchronous: bool = setting(True, Flag(), key="async")
    """Write in the background."""
    on_failure: Literal["continue", "stop"] = setting("continue", _words("continue", "stop", noun="a reaction"))
    """What a checkpoint that cannot be written does to the run; it is logged either way."""
    init_from: str | None = setting(None, FOLDER)
    """Hugging Face folder, or checkpoint, whose weights the model starts from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig:
    """Where step figures go."""

    jsonl: str | None = setting(None, FOLDER)
    """File that gets a JSON object every ``every`` steps."""
    tensorboard: str | None = setting(None, FOLDER)
    """Folder for TensorBoard."""
    every: int = setting(10, SIZE)
    """Steps between two printed lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogConfig:
    """What happens when a run has stopped learning."""

    timeout_seconds: None = setting(None, Unbuilt(
        why="would have no effect, since this version has no watchdog that looks at time",
        remedy="leave it out, max_skipped_steps works without it"))  # fmt: skip
    """Not built yet, every value but null is refused: seconds without progress until ranks say where they are."""
    max_skipped_steps: int = setting(100, Int(low=0, remedy="give a whole number, 0 never stops the run"))
    """Skipped steps in a row, their gradients not finite, that stop the run; 0: never."""
