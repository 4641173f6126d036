"""The runs of ``trine verify``: the configuration as asked, and with one thing after another switched off.

as asked         dp2 x tp2 x pp2, ZeRO 2, full recomputation     off by 3e-2
tensor off       dp2 x  1  x pp2, ZeRO 2, full recomputation     equal          <- what brings it in
pipeline off     dp2 x tp2 x  1 , ZeRO 2, full recomputation     off by 3e-2
"""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import TypeVar

from engine.config import ActivationCheckpointingConfig as Recomputation
from engine.config import (
    Bf16Config,
    CheckpointConfig,
    Config,
    Fp16Config,
    IntegrityConfig,
    MonitorConfig,
    OptimizerConfig,
    ParallelConfig,
    TorchAutocastConfig,
    WatchdogConfig,
    ZeroConfig,
    load_config,
)
from engine.config.rules import FrozenMap
from engine.launch.verifier.subject import Subject
from engine.verify import Parity, verify

Chosen = TypeVar("Chosen", bound=OptimizerConfig)

MOST_DATA = 2
"""Data ranks of a trial; more of them repeat what two do."""
MICROBATCHES = 4
CLIP = 0.05
"""A norm that every gradient exceeds, for configurations that clip."""
EPS = 1e-5
"""Of Adam: with a smaller one, a gradient that is zero but for rounding makes full steps."""


def small_config(config: Config) -> Config:
    """The configuration of the first trial: its grid with at most two data ranks, few microbatches, in fp32.

    Shard groups are two of two data ranks each.
    What a run keeps, shows or watches is off, since nothing of it changes a number.
    """
    optimizer = config.optimizer
    if optimizer is not None:
        before = tuple(_steadied(entry) for entry in optimizer.before)
        optimizer = replace(_steadied(optimizer), before=before)
    plain = replace(
        config,
        bf16=Bf16Config(), fp16=Fp16Config(), torch_autocast=TorchAutocastConfig(), communication_data_type=None,
        optimizer=optimizer, checkpoint=CheckpointConfig(), monitor=MonitorConfig(), watchdog=WatchdogConfig(),
        integrity=IntegrityConfig(), gradient_clipping=min(config.gradient_clipping, CLIP), notes=(),
    )  # fmt: skip
    grouped = config.shards < config.dp
    plain = replace(
        plain, zero_optimization=replace(plain.zero_optimization, shard_size=MOST_DATA if grouped else None)
    )
    data = 2 * MOST_DATA if grouped else min(config.dp, MOST_DATA)
    return _resized(plain, plain.parallel, (data, config.tp, config.pp))


def _steadied(optimizer: Chosen) -> Chosen:
    """The optimizer with what keeps a rounding error as small as it is."""
    kept = {"eps": EPS} if {"betas", "eps"} <= optimizer.params.keys() else {}
    exact = {"ns_dtype": "fp32"} if "ns_dtype" in optimizer.params else {}
    return replace(optimizer, params=FrozenMap({**optimizer.params, **kept, **exact}))


def switched_off(config: Config) -> Iterator[tuple[str, Config]]:
    """Each thing that the configuration uses, and the configuration without it."""
    parallel, (dp, tp, pp) = config.parallel, (config.dp, config.tp, config.pp)
    parts = replace(parallel, sequence_parallel=False, sequence_parallel_regather=False)
    line = replace(parallel, schedule="1f1b", virtual_stages=1)
    if tp > 1:
        yield "parallel.tensor", _resized(config, replace(parts, tensor_plan="auto"), (dp, 1, pp))
    if tp > 1 and parallel.sequence_parallel:
        yield "parallel.sequence_parallel", replace(config, parallel=parts)
    if pp > 1:
        yield "parallel.pipeline", _resized(config, replace(line, split="auto"), (dp, tp, 1))
    if pp > 1 and parallel.schedule != "1f1b":
        yield "parallel.schedule", replace(config, parallel=line)
    if parallel.order != ParallelConfig().order:
        yield "parallel.order", replace(config, parallel=replace(parallel, order=ParallelConfig().order))
    if dp > 1:
        yield "parallel.data", _resized(config, parallel, (1, tp, pp))
    if config.zero_optimization.stage:
        yield "zero_optimization", replace(config, zero_optimization=ZeroConfig())
    if config.activation_checkpointing.mode != "none":
        yield "activation_checkpointing", replace(config, activation_checkpointing=Recomputation())
    if config.kernels != "reference":
        yield "kernels", replace(config, kernels="reference")
    if config.compile:
        yield "compile", replace(config, compile=False)


def train_both_ways(subject: Subject, config: Config, steps: int) -> Parity:
    """Train on the grid of ``config``, its ranks being threads of this process, and in one process of plain torch.

    Raises:
        EngineError: as :func:`engine.initialize` and a step raise it.
    """
    assert config.train_batch_size is not None
    batches = subject.batches(steps, config.train_batch_size)
    ranks = config.grid(0).world_size
    found = verify(subject.build, config, batches, subject.loss_fn, threads=ranks, **subject.more)
    assert found is not None  # ranks that are threads all answer
    return found


def _resized(config: Config, parallel: ParallelConfig, grid: tuple[int, int, int]) -> Config:
    """The configuration on a grid of data x tensor x pipeline ranks, with sizes of a batch that fit it."""
    zero = config.zero_optimization
    node, shards = zero.zero_hpz_partition_size, zero.shard_size
    near = node if isinstance(node, str) or not node or (shards or grid[0]) % node == 0 else 1
    fits = shards is not None and grid[0] % shards == 0
    sized = replace(
        config,
        zero_optimization=replace(zero, zero_hpz_partition_size=near, shard_size=shards if fits else None),
        parallel=replace(parallel, data=grid[0], tensor=grid[1], pipeline=grid[2]),
        gradient_accumulation_steps=max(MICROBATCHES, 2 * config.pp),
        train_batch_size=None,
        train_micro_batch_size_per_gpu=1,
    )
    return load_config(sized, prod(grid))
