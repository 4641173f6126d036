"""Configuration: reads a file into typed frozen dataclasses and reports all mistakes at once. Imports no torch.

``load_config`` reads the file, converts DeepSpeed's keys (``deepspeed``), reads typed sections (``sections``, by
``reader`` with the ``rules`` of their fields), and checks rules between keys (``between``) and sizes.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, cast

from engine.config.between import (
    check_average,
    check_copies,
    check_integrity,
    check_managed,
    check_optimizer,
    check_precision,
    check_profile,
    check_rates,
    check_recomputation,
    check_reruns,
    check_tiles,
    check_uneven,
    check_zero,
)
from engine.config.config_file import overridden, read_config_file, remarks
from engine.config.deepspeed.keys import KEYS
from engine.config.deepspeed.translate import translate
from engine.config.grid_rules import check_nodes, check_parallel, check_wire
from engine.config.optim_sections import (
    COUNT,
    GLOBS,
    OPTIMIZERS,
    SCHEDULERS,
    GroupConfig,
    MatchedOptimizerConfig,
    OptimizerConfig,
    SchedulerConfig,
)
from engine.config.outer_section import OuterConfig, WeightsOutConfig, check_outer, check_weights_out
from engine.config.reader import Section, Typed, dump_section, paths, read_section, renamed, setting
from engine.config.rules import Choice, Flag, FrozenMap, Int, Problems, Real
from engine.config.sections import (
    GPU_BUCKET,
    ActivationCheckpointingConfig,
    Bf16Config,
    CheckpointConfig,
    CommunicationConfig,
    EmaConfig,
    Fp16Config,
    IntegrityConfig,
    MonitorConfig,
    OffloadConfig,
    OffloadParamConfig,
    ParallelConfig,
    QuantizeFrozenConfig,
    ScheduleCosts,
    TorchAutocastConfig,
    WatchdogConfig,
    WireConfig,
    ZeroConfig,
)
from engine.config.serve_section import ServeConfig, check_serve
from engine.config.wording import divisors, either, kind, show_path, shown_value
from engine.errors import ConfigError
from engine.parallel import grid
from engine.parallel.grid import Grid

__all__ = [
    "ActivationCheckpointingConfig",
    "Bf16Config",
    "CheckpointConfig",
    "CommunicationConfig",
    "Config",
    "EmaConfig",
    "Fp16Config",
    "GroupConfig",
    "IntegrityConfig",
    "MatchedOptimizerConfig",
    "MonitorConfig",
    "OffloadConfig",
    "OffloadParamConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "QuantizeFrozenConfig",
    "ScheduleCosts",
    "SchedulerConfig",
    "TorchAutocastConfig",
    "WatchdogConfig",
    "WireConfig",
    "ZeroConfig",
    "load_config",
]

ConfigSource = Mapping[str, Any] | str | os.PathLike[str]


AXES = ("data", "tensor", "pipeline")
"""Axes of the grid in the order of messages; further axes of ``grid.AXES`` follow."""
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_BATCH_PART = Int(low=1, null=True, remedy="give a whole number of at least 1, or leave it out to have it derived")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Full configuration of a run. ``resolve`` fills in sizes that depend on the number of processes."""

    train_batch_size: int | None = setting(None, _BATCH_PART)
    """Rows per optimizer step over all data ranks: micro x accumulation x data."""
    train_micro_batch_size_per_gpu: int | None = setting(None, _BATCH_PART)
    """Rows per data rank in one forward pass."""
    gradient_accumulation_steps: int | None = setting(None, _BATCH_PART)
    """Microbatches per data rank and step."""
    parallel: ParallelConfig = setting(ParallelConfig(), Section(cls=ParallelConfig))
    """Grid of ranks: sizes of the data, tensor and pipeline axes."""
    zero_optimization: ZeroConfig = setting(ZeroConfig(), Section(cls=ZeroConfig))
    """ZeRO: optimizer state, gradients and parameters sharded over data ranks."""
    wire: WireConfig = setting(WireConfig(), Section(cls=WireConfig))
    """Activations and their gradients sent in fewer bits between pipeline and tensor ranks."""
    bf16: Bf16Config = setting(Bf16Config(), Section(cls=Bf16Config))
    """Training with bfloat16 parameters."""
    fp16: Fp16Config = setting(Fp16Config(), Section(cls=Fp16Config))
    """Training with float16 parameters and a loss scale."""
    torch_autocast: TorchAutocastConfig = setting(TorchAutocastConfig(), Section(cls=TorchAutocastConfig))
    """Forwards inside torch.autocast."""
    communication: CommunicationConfig = setting(CommunicationConfig(), Section(cls=CommunicationConfig))
    """Timeout of communication between ranks."""
    communication_data_type: Literal["fp32", "bf16", "fp16"] | None = setting(None, Choice(
        options=("fp32", "bf16", "fp16"), noun="a communication type", null=True,
        also=FrozenMap({"bfp16": "bf16", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}),
    ))  # fmt: skip
    """Dtype of gradients on the wire; null uses the gradients' own dtype."""
    keep_fp32: tuple[str, ...] = setting((), GLOBS)
    """Name patterns of modules that stay in fp32 under bf16 or fp16."""
    cast_forward_inputs: bool = setting(False, Flag())
    """Under bf16 or fp16, cast the floating inputs of forward to that type; false passes them unchanged."""
    buffer_dtype: Literal["fp32", "bf16", "fp16"] | None = setting(None, Choice(
        options=("fp32", "bf16", "fp16"), noun="a dtype", null=True,
        also=FrozenMap({"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}),
    ))  # fmt: skip
    """Dtype of floating buffers under bf16 or fp16; null keeps the dtype of each buffer."""
    quantize_frozen: QuantizeFrozenConfig | None = setting(None, Section(cls=QuantizeFrozenConfig, null=True))
    """Frozen weights in 8 or 4 bits, under adapters that are trained (QLoRA); null stores them unchanged."""
    optimizer: OptimizerConfig | None = setting(
        OptimizerConfig(), Typed(cls=OptimizerConfig, kinds=OPTIMIZERS, several=MatchedOptimizerConfig, null=True)
    )
    """Optimizer; null: that of engine.initialize. In a list, each updates those of its ``match``, the last others."""
    scheduler: SchedulerConfig | None = setting(None, Typed(cls=SchedulerConfig, kinds=SCHEDULERS, null=True))
    """Learning rate schedule; null keeps the rate constant."""
    ema: EmaConfig | None = setting(None, Section(cls=EmaConfig, null=True))
    """Moving average of the weights; null computes none."""
    outer: OuterConfig | None = setting(None, Section(cls=OuterConfig, null=True))
    """Outer loop over sites that train apart and meet in a store; null: this engine trains alone."""
    weights_out: WeightsOutConfig | None = setting(None, Section(cls=WeightsOutConfig, null=True))
    """Versions of the weights for receivers, such as inference processes, that follow the training; null: none."""
    serve: ServeConfig | None = setting(None, Section(cls=ServeConfig, null=True))
    """Training service over HTTP; null: ``trine serve`` takes its defaults."""
    router_bias_update_rate: float = setting(0.0, Real(low=0, remedy="give a number, 0 leaves the biases as they are"))
    """Step of the router biases towards an even expert load after each update; 0: biases do not change."""
    router_replay: bool = setting(False, Flag())
    """Experts of each position are read from batch["routed_experts"] where it has them; elsewhere routers choose."""
    gradient_clipping: float = setting(1.0, Real(low=0, remedy="give a number, 0 switches clipping off"))
    """Maximum global gradient norm; 0 switches clipping off."""
    max_skipped_steps: int = setting(100, Int(low=0, remedy="give a whole number, 0 never stops the run"))
    """Number of consecutive steps skipped for non-finite gradients that stops the run; 0 never stops it."""
    gradient_allreduce_op: Literal["mean", "sum"] = setting(
        "mean", Choice(options=("mean", "sum"), noun="a way to reduce gradients", fold=True)
    )
    """mean: gradients are averaged over data ranks; sum: they are added. The loss is a mean in both."""
    managed_gradient_accumulation: bool = setting(True, Flag())
    """true: step updates after gradient_accumulation_steps microbatches; false: each step updates, with the sum of its
    gradients divided by gradient_accumulation_steps."""
    uneven_microbatches: bool = setting(False, Flag())
    """true: each data rank passes a list of any number of microbatches to train_batch and eval_batch."""
    activation_checkpointing: ActivationCheckpointingConfig = setting(
        ActivationCheckpointingConfig(), Section(cls=ActivationCheckpointingConfig)
    )
    """Activation checkpointing: recomputation of activations in the backward."""
    kernels: Literal["auto", "reference", "triton"] = setting(
        "auto", Choice(options=("auto", "reference", "triton"), noun="a kernel set")
    )
    """auto: Triton where it is the faster choice; triton: Triton wherever it runs; reference: plain torch."""
    compile: bool = setting(False, Flag())
    """Compile the model's blocks with torch.compile."""
    seed: int = setting(1234, COUNT)
    """Seed of all random numbers."""
    initial_weights: Literal["equal", "rank0"] = setting(
        "equal", Choice(options=("equal", "rank0"), noun="a source of the initial weights")
    )
    """equal: every rank passes the same weights, which is checked; rank0: all ranks take the weights of rank 0."""
    checkpoint: CheckpointConfig = setting(CheckpointConfig(), Section(cls=CheckpointConfig))
    """Checkpoints: folder, interval and number retained."""
    monitor: MonitorConfig = setting(MonitorConfig(), Section(cls=MonitorConfig))
    """Logs that receive the results of each step."""
    watchdog: WatchdogConfig = setting(WatchdogConfig(), Section(cls=WatchdogConfig))
    """Detection of hung and slow ranks."""
    integrity: IntegrityConfig = setting(IntegrityConfig(), Section(cls=IntegrityConfig))
    """Detection of silent corruption of weights and optimizer state."""
    notes: tuple[str, ...] = ()
    """One line for each DeepSpeed key that is accepted without effect."""
    written: frozenset[str] = field(default=frozenset(), compare=False)
    """Keys that the file or dict contains, such as "optimizer.type", without defaults."""

    @cached_property
    def micro(self) -> int:
        """Number of batch rows that one data rank computes in one forward."""
        return self._settled("train_micro_batch_size_per_gpu")

    @cached_property
    def accumulation(self) -> int:
        """Number of microbatches that one data rank computes in a step."""
        return self._settled("gradient_accumulation_steps")

    @property
    def given_microbatches(self) -> int | None:
        """Number of microbatches in each data rank's batch of a step; None (``uneven_microbatches``): any number."""
        return None if self.uneven_microbatches else self.accumulation

    @cached_property
    def dp(self) -> int:
        """Number of ranks on the data axis."""
        return self._settled("data")

    @cached_property
    def row_ranks(self) -> int:
        """Number of data ranks, which each have their own rows of the batch."""
        return self.dp

    @cached_property
    def shards(self) -> int:
        """Number of ranks over which ZeRO shards: ``shard_size`` (default: all data ranks) times context ranks."""
        return (self.zero_optimization.shard_size or self.dp) * self.cp

    @cached_property
    def cp(self) -> int:
        """Number of ranks on the context axis."""
        return self._settled("context")

    @cached_property
    def tp(self) -> int:
        """Number of ranks on the tensor axis."""
        return self._settled("tensor")

    @cached_property
    def pp(self) -> int:
        """Number of ranks on the pipeline axis."""
        return self._settled("pipeline")

    @property
    def divides_parameters(self) -> bool:
        """True if ranks compute with different parameters (tensor, pipeline or expert parallelism)."""
        return self.tp > 1 or self.pp > 1 or self.parallel.expert > 1

    def _settled(self, name: str) -> int:
        sizes = {key: getattr(self, key) for key in BATCH} | axis_sizes(self.parallel)
        if not all(isinstance(size, int) for size in sizes.values()):
            full = name if name in BATCH else f"parallel.{name}"
            raise ConfigError(
                f"{full}: unknown until the number of processes is known; "
                "pass world_size to load_config, or call config.resolve(world_size)."
            )
        return int(sizes[name])

    def grid(self, rank: int) -> Grid:
        """Returns the grid of ranks over the parallel axes, with the coordinates of rank ``rank``."""
        asked = self.zero_optimization.shard_size
        shards = asked if asked is not None and asked < self.dp else None
        sizes = {axis.name: self._settled(axis.noun) for axis in grid.AXES}
        return Grid(rank=rank, order=self.parallel.order, shard_size=shards, experts=self.parallel.expert, **sizes)

    def resolve(self, world_size: int) -> "Config":
        """Returns a copy with all "auto" and missing batch and axis sizes computed for ``world_size`` processes.

        Raises:
            ConfigError: the sizes do not fit the number of processes.
        """
        return load_config(self, world_size)

    def for_accelerators(self) -> "Config":
        """Returns the config with the default ``reduce_bucket_size`` of GPUs, unless that key is set."""
        zero = self.zero_optimization
        if zero.reduce_bucket_size is not None:
            return self
        return replace(self, zero_optimization=replace(zero, reduce_bucket_size=GPU_BUCKET))

    def to_json(self) -> dict[str, Any]:
        """Returns a dict of JSON values, from which ``load_config`` makes one that is equal except in ``notes``."""
        return dump_section(self)


_PATHS = tuple(paths(Config))


def load_config(
    source: "ConfigSource | Config",
    world_size: int | None = None,
    overrides: Sequence[str] = (),
    pass_strangers: bool = False,
) -> Config:
    """Loads a config from a dict, a JSON, TOML or YAML file, or another Config, and checks it.

    ``world_size``, the number of processes, determines all "auto" and missing sizes; None leaves them open.
    ``overrides`` are words such as ``optimizer.params.lr=3e-4``, which replace single keys. With ``pass_strangers``,
    unknown top-level keys are only noted in ``Config.notes``, unless they resemble a key of this or another engine.

    Raises:
        ConfigError: the config has mistakes; the message lists all of them by their JSON paths.
    """
    problems = _problems_of(source)
    problems.passed = [] if pass_strangers else None
    config = _read(source, problems, overrides)
    _check_between(config, problems)
    if not problems.touch("", "parallel", *BATCH):
        config = _resolve(config, world_size, problems)
        check_nodes(config.parallel, config.zero_optimization, problems)
    problems.raise_if_any()
    return config


def load_raw(source: "ConfigSource", overrides: Sequence[str] = ()) -> Mapping[str, Any]:
    """Returns the unchecked JSON object in a file or dict, changed by ``overrides`` such as "optimizer.params.lr=3e-4".

    Raises:
        ConfigError: the file cannot be read, or it contains no JSON object.
    """
    problems = _problems_of(source)
    raw = overridden(_object(source, problems) or {}, overrides, problems)
    problems.raise_if_any()
    return raw


def _problems_of(source: "ConfigSource | Config") -> Problems:
    name = show_path(os.fsdecode(source)) if isinstance(source, (str, os.PathLike)) else "the config"
    return Problems(name, _PATHS, KEYS)


def _object(source: "ConfigSource", problems: Problems) -> Mapping[str, Any] | None:
    raw: object = read_config_file(source, problems) if isinstance(source, (str, os.PathLike)) else source
    if isinstance(raw, Mapping):
        return raw
    problems.add("", f"{shown_value(raw)} is {kind(raw)}; give one JSON object, the path of one, or a dict.")
    return None


def _read(source: "ConfigSource | Config", problems: Problems, overrides: Sequence[str]) -> Config:
    if isinstance(source, Config):
        # read again, so that a hand-built config meets the same rules
        return replace(_read(source.to_json(), problems, overrides), notes=source.notes, written=source.written)
    raw = _object(source, problems)
    if raw is None:
        return Config()
    given, old = renamed(overridden(raw, overrides, problems), problems)
    own, notes = translate(given, frozenset(_PATHS), problems)
    read = read_section(Config, own, "", problems)
    passed = [f"{key}: accepted, changes nothing here; no key of this name is known." for key in problems.passed or ()]
    return replace(read, notes=(*remarks(raw), *old, *notes, *passed), written=_written(given))


def _written(given: Mapping[str, Any]) -> frozenset[str]:
    sections = {key: value for key, value in given.items() if isinstance(value, Mapping)}
    return frozenset(map(str, (*given, *(f"{key}.{inner}" for key, value in sections.items() for inner in value))))


def _check_between(config: Config, problems: Problems) -> None:
    """Checks the rules between keys."""
    check_precision(config.bf16, config.fp16, config.torch_autocast, problems)
    check_optimizer(config.optimizer, config.zero_optimization, config.bf16, config.ema, problems)
    if not problems.touch("scheduler", "optimizer"):
        # without a section the optimizer may be one from code
        check_rates(config.scheduler, config.optimizer if "optimizer" in config.written else None, problems)
    check_recomputation(config.activation_checkpointing, problems)
    check_tiles(config.activation_checkpointing, config.parallel, config.compile, problems)
    check_copies(config.checkpoint, problems)
    check_zero(config.zero_optimization, problems)
    check_parallel(config.parallel, problems)
    check_integrity(config.integrity, problems)
    check_reruns(config.integrity, config.zero_optimization, problems)
    check_average(config.ema, config.zero_optimization, problems)
    check_outer(config.outer, config.optimizer, config.gradient_clipping, config.zero_optimization, problems)
    check_weights_out(config.weights_out, problems)
    check_serve(config.serve, problems)
    check_wire(config.wire, config.parallel, config.integrity, problems)
    check_profile(config.monitor, config.watchdog, problems)
    check_uneven(config.uneven_microbatches, config.parallel, problems)
    check_managed(config.managed_gradient_accumulation, config.parallel, problems)


def _resolve(config: Config, world_size: int | None, problems: Problems) -> Config:
    """Fills in axes and batch; without a world size, notes only contradictions that hold in any world."""
    if world_size is not None and not _is_world(world_size):
        problems.add(
            "world_size", f"{shown_value(world_size)} is not a number of processes; give an int of at least 1."
        )
        return config
    axes = axis_sizes(config.parallel)
    sizes = _fit_grid(axes, world_size, problems) if world_size else None
    if world_size and not sizes:
        return config
    data = sizes["data"] if sizes else axes["data"]
    ranks = data if isinstance(data, int) else None
    origin = "parallel.data"
    if axes["data"] == "auto":
        others = " / ".join(
            f"{axis} {axes[axis]}" for axis in axes if axis in AXES[1:] or axes[axis] not in (1, axes["data"])
        )
        origin = f"data ranks: world size {world_size} / {others}"
    if not world_size and not any(getattr(config, key) for key in BATCH):
        return config  # without sizes, an absent batch is not a contradiction yet
    batch = _fit_batch({key: getattr(config, key) for key in BATCH}, ranks, origin, problems)
    if not sizes or not batch:
        return config
    given = {axis: size for axis, size in sizes.items() if hasattr(config.parallel, axis)}
    settled: dict[str, Any] = {"parallel": replace(config.parallel, **cast(Any, given)), **batch}
    return replace(config, **settled)


def axis_sizes(parallel: ParallelConfig) -> dict[str, int | Literal["auto"]]:
    """Returns the size of each parallel axis, or "auto", by axis name.

    An axis for which ``parallel`` has no key has its default size.
    """
    others = {axis.noun: getattr(parallel, axis.noun, axis.size) for axis in grid.AXES if axis.noun not in AXES}
    return {axis: getattr(parallel, axis) for axis in AXES} | others


def _is_world(size: object) -> bool:
    """Returns True if ``size`` can be a number of processes: the libraries that join ranks store it in a C int."""
    return isinstance(size, int) and not isinstance(size, bool) and 1 <= size < 2**31


def _fit_grid(axes: Mapping[str, Any], world_size: int, problems: Problems) -> dict[str, int] | None:
    """Returns the axis sizes with "auto" filled in, or None after a problem."""
    fixed = {axis: int(size) for axis, size in axes.items() if size != "auto"}
    automatic = [axis for axis in axes if axis not in fixed]
    product = math.prod(fixed.values())
    if world_size % product == 0 if automatic else world_size == product:
        return {axis: fixed.get(axis, world_size // product) for axis in axes}
    fits: list[str] = []
    for axis, size in fixed.items():
        if axis not in AXES and size == 1:
            continue
        share, left = divmod(world_size, product // size)
        if not left:
            fits.append(f"parallel.{axis} {either(divisors(share)) if automatic else share}")
    given = " x ".join(f"{axis} {size}" for axis, size in fixed.items() if axis in AXES or size > 1)
    if world_size == 1:  # usually a script that was started without its launcher
        problems.add(
            "parallel",
            f"{given} needs {product} processes{' or a multiple' * bool(automatic)}, but only this one was started; "
            f"start with `torchrun --nproc_per_node {product} ...`, or leave parallel out.",
        )
        return None
    rule = "does not divide" if automatic else "is not"
    remedy = f"{', or '.join(fits)} would fit" if fits else f"give sizes from {either(divisors(world_size))}"
    problems.add("parallel", f"{given} = {product} {rule} the world size {world_size}; {remedy}.")
    return None


def _fit_batch(
    given: Mapping[str, int | None], ranks: int | None, origin: str, problems: Problems
) -> dict[str, int] | None:
    """Returns the three batch sizes, with train = micro x accumulation x data ranks; None if unknown or wrong.

    ``origin`` names the source of the number of data ranks.
    """
    train, micro, accumulation = (given[key] for key in BATCH)
    if train is None and micro is None:
        problems.add(BATCH[0], f"missing; give {BATCH[0]}, {BATCH[1]} or both.")
        return None
    parts = {BATCH[1]: micro, BATCH[2]: accumulation, origin: ranks}
    known = {name: size for name, size in parts.items() if size is not None}
    product = math.prod(known.values())
    if train is not None and (train % product or (len(known) == 3 and train != product)):
        problems.add(BATCH[0], _batch_sentence(train, known, product))
    if ranks is None or problems.touch(BATCH[0]):
        return None
    left = train // product if train is not None else 1
    micro = micro or left
    accumulation = accumulation or (left if parts[BATCH[1]] else 1)
    total = micro * accumulation * ranks
    if total >= 2**63:
        problems.add(
            BATCH[0],
            f"{micro} x {accumulation} x {ranks} = {total} rows in a batch do not fit in 64 bits; give smaller sizes.",
        )
        return None
    return {BATCH[0]: total, BATCH[1]: micro, BATCH[2]: accumulation}


def _batch_sentence(train: int, known: Mapping[str, int], product: int) -> str:
    factors = " x ".join(f"{size} ({name})" for name, size in known.items())
    total = f" = {product}" if len(known) > 1 else ""
    if len(known) == 3:
        return f"{train} is not {factors}{total}; change one of them, or leave one out, which derives it."
    below = train // product * product
    near = either([size for size in (below, below + product) if size])
    return f"{train} is not a multiple of {factors}{total}; give {near}, or change the other sizes."
