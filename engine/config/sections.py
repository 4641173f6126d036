"""Sections of a configuration: one frozen dataclass for each JSON object.

Names are DeepSpeed's wherever it has the same setting. The text under a field is its description in the JSON Schema.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Literal

from engine.config.optim_sections import COUNT, GLOBS, NOT_NEGATIVE, SIZE, one_of
from engine.config.reader import Section, setting
from engine.config.rules import AnyOf, Choice, Flag, FrozenMap, Int, ListOf, OperatorName, Real, Text, TextMap
from engine.config.wording import shown_value
from engine.errors import ConfigError
from engine.parallel.context.choose import Method
from engine.parallel.grid import Order

SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-v", "dualpipe-v", "auto")
AUTO = Choice(options=("auto",), noun="auto")
AXIS = AnyOf(rules=(AUTO, SIZE), remedy='give a whole number of at least 1, or "auto" for one axis')
METHOD = one_of("auto", "gather", "need", "heads", "ring", noun="a method of attention")
BLOCKS = Choice(options=(64, 128, 256, 512, 1024, 2048), noun="a block size")
NUMBERS = Choice(options=("exact", "bf16", "fp16", "int8", "int4"), noun="a format of numbers")
FOLDER = Text(noun="a path", null=True, remedy="give a path in quotes, or null for none")
METRICS = ListOf(each=Text(), noun='a list of names such as ["accuracy"]')


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleCosts:
    """Compute and message times of one pipeline rank, in any common unit. A schedule orders its actions by them."""

    forward: float = setting(1.0, Real(above=0))
    """Time of the forward of one microbatch."""
    input: float = setting(1.0, NOT_NEGATIVE)
    """Time of the input gradients of one microbatch, for which earlier stages wait."""
    weight: float = setting(1.0, NOT_NEGATIVE)
    """Time of the weight gradients of one microbatch, which can be deferred."""
    transfer: float = setting(0.0, NOT_NEGATIVE)
    """Time of one message to another pipeline rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextConfig:
    """Settings of context parallelism in the object form of ``parallel.context``, which may also be the size alone."""

    size: int | Literal["auto"] = setting(1, AXIS, required=True)
    """Size of the context axis."""
    method: Method | Literal["auto"] = setting("auto", METHOD)
    """Method of attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Grid of data x tensor x pipeline ranks, and the partition of the model over it."""

    data: int | Literal["auto"] = setting("auto", AXIS)
    """Size of the data axis; "auto": the world size divided by tensor x pipeline."""
    tensor: int | Literal["auto"] = setting(1, AXIS)
    """Size of the tensor axis: ranks that each have a shard of every layer."""
    pipeline: int | Literal["auto"] = setting(1, AXIS)
    """Size of the pipeline axis: ranks that each compute a stage of consecutive layers."""
    context: int | Literal["auto"] = setting(1, replace(AXIS, section=ContextConfig))
    """Size of the context axis: ranks that each compute a part of the positions of every sequence; or an object with
    ``size`` and ``method``.
    """
    context_method: Method | Literal["auto"] = setting("auto", METHOD)
    """Keys that travel in attention: all of them ("gather"), only needed ones ("need"), those of some heads ("heads"),
    or one rank's after another's ("ring"); "auto": least exposed time within memory.
    """
    expert: int = setting(1, SIZE)
    """Number of data ranks among which the experts of each MoE layer are divided; tokens are sent to the ranks of their
    experts.
    """
    expert_tensor: Literal["auto", "whole", "cut"] = setting(
        "auto", one_of("auto", "whole", "cut", noun="a form of experts on tensor ranks"))  # fmt: skip
    """Form of these experts on tensor ranks: whole, dividing the tokens, or cut along their width; "auto": by cost."""
    order: Order = setting("tp-dp-pp", one_of("tp-dp-pp", "tp-pp-dp", noun="an order of the axes"))
    """Axes from innermost to outermost: adjacent ranks are data ranks, or stages of one replica."""
    sequence_parallel: bool = setting(False, Flag())
    """Shard the activations between tensor-parallel layers along the sequence."""
    sequence_parallel_regather: bool = setting(False, Flag())
    """Gather sequence-sharded inputs again in the backward instead of storing them: less memory, more traffic."""
    overlap: Literal["auto", "off", "chunks", "fused"] = setting(
        "auto", one_of("auto", "off", "chunks", "fused", noun="a way to overlap"))  # fmt: skip
    """Overlap of matrix products with tensor communication; "auto": chunks on GPUs, fused where measured faster."""
    overlap_buffer_bytes: int = setting(1 << 24, SIZE)
    """For overlap "fused": bytes that a rank can send to another in one product; larger products use collectives."""
    schedule: str = setting("1f1b", AnyOf(
        rules=(Choice(options=SCHEDULES, noun="a schedule"), Text(noun="a schedule", ends=(".csv", ".txt"))),
        remedy=f"give {', '.join(SCHEDULES)}, or the path of a .csv or .txt file of actions"))  # fmt: skip
    """Pipeline schedule: a name, or the path of a .csv or .txt file of action tokens."""
    schedule_costs: ScheduleCosts | None = setting(None, Section(cls=ScheduleCosts, null=True))
    """Times by which zb-h1 and zb-v choose their order; null: measured times with balance "time", else equal times."""
    virtual_stages: int = setting(1, SIZE)
    """Number of stages on each pipeline rank, for interleaved schedules."""
    split: Literal["auto"] | tuple[str, ...] = setting("auto", AnyOf(
        rules=(AUTO, ListOf(each=Text(), noun="a list of module names")),
        remedy='give "auto" or a list of the module names that begin a stage'))  # fmt: skip
    """First module of each pipeline stage: "auto", or a list of module names."""
    balance: Literal["flops", "time"] = setting("flops", one_of("flops", "time", noun="a measure of work"))
    """Cost that is balanced over stages: counted FLOPs, or seconds measured before the run."""
    activation_limit_bytes: int | None = setting(None, Int(low=1, null=True))
    """Limit of activation bytes on a rank for schedule "auto"; null allows about as much as 1f1b."""
    tensor_plan: str | Mapping[str, str] = setting("auto", AnyOf(
        rules=(AUTO, TextMap(), Text()),
        remedy='give "auto", an object {"name pattern": "style"}, or the path of a JSON file'))  # fmt: skip
    """Tensor-parallel styles of layers: "auto", an object from name patterns to styles, or a file with one."""
    gpus_per_node: int | None = setting(None, Int(low=1, null=True))
    """Number of GPUs of a node; plans note tensor groups that cross nodes, and trine plan adds their cost; null:
    unknown.
    """
    tensor_proof: Literal["auto", "full"] = setting("auto", one_of("auto", "full", noun="a proof of the tensor plan"))
    """Random weights in the search and proof of a tensor plan. "auto": large matrices are low-rank products; "full":
    all elements are drawn.
    """
    prove_plan: bool = setting(True, Flag())
    """Prove a configured ``tensor_plan`` before training: outputs and gradients equal those of the unsharded model."""
    check_replicas: bool = setting(True, Flag())
    """Compare the gradients of tensor-replicated parameters over the tensor ranks, in the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Placement of optimizer state (masters and moments) in GPU memory, host memory or on disk."""

    device: Literal["none", "cpu", "nvme"] = setting("none", one_of("none", "cpu", "nvme", noun="a place for state"))
    """none: on the GPU; cpu: in host memory, updated by the host; nvme: moments on disk, the rest as with cpu."""
    ratio: float | Literal["auto"] = setting(1.0, AnyOf(
        rules=(AUTO, Real(low=0, high=1)), remedy='give a number from 0 to 1, or "auto"'))  # fmt: skip
    """Fraction of the elements with offloaded state, in whole buckets; "auto": the smallest within memory_limit."""
    memory_limit: float | None = setting(None, Real(above=0, null=True))
    """GiB of planned state that a GPU may store, for ratio "auto"; activations are not counted."""
    pin_memory: bool = setting(True, Flag())
    """Page-lock host memory, so that copies to the GPU overlap with computation."""
    nvme_path: str | None = setting(None, FOLDER)
    """Folder on the disk, for device nvme."""
    buffer_count: int = setting(4, Int(low=2))
    """Number of buckets with moments in host memory at a time, for device nvme."""
    map_memory: bool = setting(False, Flag())
    """For device nvme: map all other host state to files on that disk too, which are written if memory is short."""
    delayed_update: bool = setting(False, Flag())
    """Overlap the update with the next step, which then uses weights that are one update old; for device cpu."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadParamConfig:
    """Placement of parameter shards at ZeRO 3; gathered buckets are on the GPU."""

    device: Literal["none", "cpu", "nvme"] = setting("none", one_of("none", "cpu", "nvme", noun="a place for weights"))
    """none: on the GPU; cpu: in host memory; nvme: as cpu, with a note."""
    pin_memory: bool = setting(True, Flag())
    """Page-lock host memory, so that copies to the GPU overlap with computation."""


HOST_BUCKET, GPU_BUCKET = 4_000_000, 64_000_000
"""Default elements of a bucket on CPUs and GPUs (16 and 256 MB in fp32). Links of GPUs need large messages, and each
bucket costs a launch of every update kernel.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroConfig:
    """ZeRO: optimizer state, gradients and parameters sharded over data ranks instead of replicated."""

    stage: Literal[0, 1, 2, 3] = setting(0, Choice(options=(0, 1, 2, 3), noun="a ZeRO stage"))
    """0: shard nothing; 1: optimizer state; 2: gradients too; 3: parameters too."""
    reduce: Literal["step", "microbatch"] = setting("step", one_of("step", "microbatch", noun="a reduce mode"))
    """Reduce gradients once per step, or after every microbatch (less memory, more traffic)."""
    gather: Literal["microbatch", "step"] = setting("microbatch", one_of("microbatch", "step", noun="a gather mode"))
    """At stage 3, gather parameters for every microbatch, or once per step and retain them (more memory)."""
    keep_gathered_bytes: int = setting(0, COUNT)
    """At stage 3, bytes of gathered parameters that may be retained over the microbatches of a step."""
    reduce_bucket_size: int | None = setting(None, Int(low=1, null=True))
    """Elements of a bucket, which one collective reduces; null: 4000000 on CPUs, 64000000 on GPUs."""
    zero_quantized_weights: bool = setting(False, Flag())
    """Gather parameters in fewer bits: all at stage 3, parameters with a master (bf16, fp16) at stages 1 and 2."""
    zero_quantized_weights_bits: Literal[8, 4] = setting(8, Choice(options=(8, 4), noun="a number of bits"))
    """Bits of an element in quantized parameter gathers."""
    zero_quantized_gradients: bool = setting(False, Flag())
    """Reduce gradients in fewer bits, and sum them in fp32; within nodes first, if parallel.gpus_per_node is given."""
    zero_quantized_gradients_bits: Literal[8, 4, 1] = setting(8, Choice(options=(8, 4, 1), noun="a number of bits"))
    """Bits of an element in quantized gradient reductions; 1: signs, only with error feedback."""
    zero_gradient_error_feedback: bool = setting(False, Flag())
    """Add the rounding error of quantized gradients to the next step's gradients; takes 4 bytes per element."""
    zero_quantized_block_size: Literal[64, 128, 256, 512, 1024, 2048] = setting(256, BLOCKS)
    """Elements that share a scale (fp32) in quantized messages."""
    zero_hpz_partition_size: int | Literal["auto"] = setting(1, AnyOf(
        rules=(AUTO, COUNT), remedy='give a number of data ranks, or "auto"'))  # fmt: skip
    """At stage 3, number of data ranks of a node over which gathered parameters stay sharded (hpZ); 1 or 0: none."""
    shard_size: int | None = setting(None, Int(low=2, null=True))
    """Number of adjacent data ranks over which one copy of the state is sharded (MiCS, HSDP); null: all data ranks."""
    offload_optimizer: OffloadConfig = setting(OffloadConfig(), Section(cls=OffloadConfig))
    """Placement of optimizer state on GPU, host or disk."""
    offload_param: OffloadParamConfig = setting(OffloadParamConfig(), Section(cls=OffloadParamConfig))
    """Placement of parameter shards, at stage 3."""

    @property
    def bucket_elements(self) -> int:
        """Number of elements in a bucket: ``reduce_bucket_size``, or if it is not set, the default for CPUs
        (``Config.for_accelerators`` sets the one for GPUs).
        """
        return self.reduce_bucket_size or HOST_BUCKET


@dataclass(frozen=True, slots=True, kw_only=True)
class WireConfig:
    """Formats of activations and gradients that are sent in fewer bits between pipeline or tensor ranks."""

    pipeline: Literal["exact", "bf16", "fp16", "int8", "int4"] = setting("exact", NUMBERS)
    """Format of messages between stages; error of an element: half a scale, max |block| / 127 (int8) or / 7 (int4)."""
    tensor: Literal["exact", "bf16", "fp16", "int8", "int4"] = setting("exact", NUMBERS)
    """Format of tensor-parallel collectives: a sum errs by half a scale of each rank and of the sum; logits stay
    exact.
    """
    block_size: Literal[64, 128, 256, 512, 1024, 2048] = setting(256, BLOCKS)
    """Elements that share a scale (fp32), with int8 and int4."""
    error_feedback: bool = setting(False, Flag())
    """Add the rounding error of gradients between stages to the next message; takes 4 bytes per element of a
    message.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeFrozenConfig:
    """Frozen weights of linear layers in 8 or 4 bits, for the training of adapters (QLoRA)."""

    dtype: Literal["int8", "nf4"] = setting("nf4", Choice(
        options=("int8", "nf4"), noun="a format of frozen weights", also=FrozenMap({"4bit": "nf4", "8bit": "int8"}),
        remedy='give "int8", or "nf4" for 4 bits'))  # fmt: skip
    """int8: error of at most max |block| / 254; nf4: 4 bits, 16 quantiles of a normal distribution."""
    block_size: Literal[64, 128, 256, 512, 1024, 2048] = setting(64, BLOCKS)
    """Columns of a row that share a scale (fp32)."""
    skip: tuple[str, ...] = setting((), GLOBS)
    """Name patterns of further parameters that stay unquantized; heads, embeddings and adapters always stay so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchAutocastConfig:
    """Settings of torch.autocast around every forward; it cannot be combined with ``fp16``."""

    enabled: bool = setting(False, Flag())
    """Enter torch.autocast around every forward."""
    dtype: Literal["bfloat16"] = setting("bfloat16", Choice(
        options=("bfloat16",), noun="a dtype of autocast",
        also=FrozenMap({"bf16": "bfloat16", "torch.bfloat16": "bfloat16"}),
        remedy='give "bfloat16", or fp16.enabled instead, which scales the loss'))  # fmt: skip
    """Dtype of the operators that autocast casts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bf16Config:
    """Training with bfloat16 parameters."""

    enabled: bool = setting(False, Flag())
    """Store parameters in bfloat16."""
    bf16_master_weights_and_grads: bool = setting(False, Flag())
    """Store no fp32 copies of weights and gradients: updates are computed in fp32 and rounded stochastically to
    bf16.
    """
    bf16_optimizer_states: bool = setting(False, Flag())
    """Store optimizer state in bfloat16 too, rounded stochastically."""
    check_grad_overflow: bool = setting(True, Flag())
    """Skip a step with non-finite gradients; false updates the weights anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp16Config:
    """Training with float16 parameters and a loss scale."""

    enabled: bool = setting(False, Flag())
    """Store parameters in float16."""
    loss_scale: float = setting(0.0, Real(low=0, remedy="give a number, 0 means a dynamic scale"))
    """Fixed loss scale; 0 makes it dynamic."""
    initial_scale_power: int = setting(16, Int(low=0, high=127))
    """Power of 2 at which the dynamic scale starts."""
    loss_scale_window: int = setting(1000, SIZE)
    """Steps without overflow before the dynamic scale doubles."""
    hysteresis: int = setting(2, SIZE)
    """Number of overflows until the dynamic scale is halved; earlier ones leave it unchanged."""
    consecutive_hysteresis: bool = setting(False, Flag())
    """Restore the full number of tolerated overflows after every good step; false: only when the scale doubles."""
    min_loss_scale: float = setting(1.0, Real(above=0))
    """Lower bound of the dynamic scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCheckpointingConfig:
    """Activation checkpointing: activations are recomputed in the backward, or offloaded to host memory."""

    mode: Literal["none", "full", "selective", "offload"] = setting(
        "none", one_of("none", "full", "selective", "offload", noun="a checkpointing mode")
    )
    """none: store all; full: recompute every block; selective: recompute all but ``save``, or the blocks of ``every``;
    offload: store all on the host."""
    save: tuple[str, ...] | None = setting(None, ListOf(
        each=OperatorName(noun="an operator"), noun='a list of operators such as ["matmul", "attention", "aten.bmm"]',
        null=True))  # fmt: skip
    """With mode selective, operators with stored outputs; null: matmul, attention. Sums over tensor ranks are stored
    too.
    """
    every: int | None = setting(None, Int(low=1, null=True))
    """With mode selective, recompute every n-th block in full and store the others; with mode offload, offload the
    activations of every n-th block; null: of all.
    """
    others: Literal["none", "full", "selective"] = setting(
        "none", one_of("none", "full", "selective", noun="a checkpointing mode")
    )
    """Mode of the other blocks, with mode offload and ``every``."""
    inputs: Literal["device", "host"] = setting("device", one_of("device", "host", noun="a place"))
    """Memory in which recomputed blocks store their inputs: the device's or the host's."""
    tile_tokens: int | Literal["auto"] | None = setting(None, AnyOf(
        rules=(AUTO, Int(low=1)), null=True, remedy='give a whole number of at least 1, "auto" or null'))  # fmt: skip
    """Tokens that a module of positions, such as a feed-forward layer, computes at a time, and again in the backward;
    auto: chosen by bytes; null: all at once.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints: folder, interval and number retained."""

    folder: str | None = setting(None, FOLDER)
    """Folder of the run's checkpoints; null writes them only on request."""
    every: int = setting(0, COUNT)
    """Steps between checkpoints; 0 writes them only on request."""
    keep: int = setting(2, SIZE)
    """Number of checkpoints to retain; older ones are deleted."""
    frozen: bool = setting(True, Flag())
    """Store frozen parameters too; false leaves them out, and a load does not change the model's (the base of
    adapters).
    """
    memory_every: int = setting(0, COUNT)
    """Steps between copies of the state in the memory of two hosts, from which a job resumes after losing one host; 0:
    none.
    """
    asynchronous: bool = setting(True, Flag(), key="async")
    """Write checkpoints in the background."""
    on_failure: Literal["continue", "stop"] = setting("continue", one_of("continue", "stop", noun="a reaction"))
    """Continue or stop the run after a checkpoint that cannot be written, which is logged either way."""
    init_from: str | None = setting(None, FOLDER)
    """Hugging Face folder or checkpoint from which the model takes its initial weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmaConfig:
    """Exponential moving average of the weights, stored with the optimizer state."""

    decay: float = setting(0.999, Real(low=0, below=1))
    """Fraction of the average that remains after an update; the weights contribute the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig:
    """Logs that receive the results of each step: files, TensorBoard, Weights & Biases, MLflow."""

    jsonl: str | None = setting(None, FOLDER)
    """File that receives the step report as a JSON line every ``every`` steps."""
    tensorboard: str | None = setting(None, FOLDER)
    """Folder of the TensorBoard log of step reports."""
    csv: str | None = setting(None, FOLDER)
    """File that receives the step report as a CSV line every ``every`` steps."""
    wandb: str | None = setting(None, FOLDER)
    """Weights & Biases project that receives step reports."""
    mlflow: str | None = setting(None, FOLDER)
    """MLflow experiment that receives step reports."""
    every: int = setting(10, SIZE)
    """Steps between two logged reports."""
    progress: bool = setting(False, Flag())
    """Print a line every ``every`` steps on rank 0."""
    metrics: tuple[str, ...] = setting((), METRICS)
    """Names of the metrics that ``loss_fn`` returns, averaged over microbatches and data ranks."""
    expert_load: bool = setting(False, Flag())
    """Count the tokens routed to each expert of MoE layers, over all microbatches and data ranks."""
    report: str | None = setting(None, FOLDER)
    """Folder that ``trine report`` reads: logged steps, and a small file of each rank."""
    profile: str | None = setting(None, Text(noun="a range of steps", null=True, remedy='give "A:B", or null'))
    """Steps "A:B" in which all ranks write a trace of actions, collectives and messages into the folder of
    ``report``.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegrityConfig:
    """Detection of silent corruption: flipped bits, replicas that differ, GPUs that compute wrong results."""

    every: int = setting(0, Int(low=0, remedy="give a whole number, 0 checks nothing"))
    """Number of steps within which a changed bit of weights or optimizer state is detected; 0: no digest is
    computed.
    """
    rerun: bool = setting(False, Flag())
    """Run every ``every``-th ``train_batch`` twice before its update, and name ranks with differing results."""
    on_failure: Literal["raise", "warn"] = setting("raise", one_of("raise", "warn", noun="a reaction"))
    """Reaction to corruption: raise on all ranks without saving corrupt state, or log it and continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationConfig:
    """Timeout of communication between ranks."""

    timeout_seconds: int = setting(600, Int(low=1, high=10**6))
    """Seconds that a rank waits for another one in a rendezvous, a collective or a save, before it raises. The
    environment variable TRINE_TIMEOUT_SECONDS overrides it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogConfig:
    """Detection of hung and slow ranks."""

    enabled: bool = setting(True, Flag())
    """After half of communication.timeout_seconds without progress, name the hung rank and end the job.
    TRINE_WATCHDOG_SECONDS in the environment overrides the number of seconds.
    """
    folder: str | None = setting(None, FOLDER)
    """Folder of the report about a hung job; null: the checkpoint folder, if there is one."""
    straggler_factor: float | None = setting(2.0, Real(
        above=1, null=True, remedy="give a number above 1, or null to call nobody slow"))  # fmt: skip
    """Ratio of compute times above which a rank is reported as slow, relative to the other ranks of its pipeline
    stage.
    """
    straggler_steps: int = setting(100, SIZE)
    """Number of steps over which compute times are compared."""


def check_installed(monitor: MonitorConfig) -> None:
    """Raises a ConfigError if ``monitor`` enables TensorBoard, wandb or MLflow, and this rank lacks the package."""
    for key, install in (("tensorboard", "'trine[ui]'"), ("wandb", "wandb"), ("mlflow", "mlflow")):
        if (value := getattr(monitor, key)) and find_spec(key) is None:
            raise ConfigError(
                f"monitor.{key}: {shown_value(value)} needs the package {key}, which is not installed; pip install "
                f"{install}, or leave monitor.{key} out."
            )
