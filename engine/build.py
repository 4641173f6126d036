"""From a plan to live parts on this rank: the one place that knows all parts."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.config import Config, OptimizerConfig
from engine.errors import ConfigError, PlanError
from engine.loss import LossFunction
from engine.lr import LearningRate, SchedulerArgument, make_learning_rate
from engine.metrics import check_sinks
from engine.parallel.comm import Comm, TorchBackend, World
from engine.parallel.grid import Grid
from engine.plan import Plan, build_plan
from engine.precision import place_rest
from engine.randomness import keyed
from engine.zero.inner import FlatAdam, FlatLion, FlatSGD
from engine.zero.optimizer import OptimizerFactory, ShardedOptimizer
from engine.zero.reduce import GradientReducer
from engine.zero.storage import FlatBucket, Ownership, allocate

ModelSource = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for, beside the model and the configuration."""

    loss_fn: LossFunction | None = None
    optimizer: OptimizerFactory | None = None
    lr_scheduler: SchedulerArgument | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything an engine needs, built and placed."""

    plan: Plan
    grid: Grid
    world: World
    comm: Comm
    model: nn.Module
    buckets: Sequence[FlatBucket]
    reducer: GradientReducer
    optimizer: ShardedOptimizer
    learning_rate: LearningRate
    loss_fn: LossFunction | None
    given_dtypes: Mapping[str, torch.dtype]
    """Of ``model.state_dict()`` as the user gave it."""


def make_model(source: ModelSource, seed: int, device: torch.device) -> nn.Module:
    """The user's module, built under the configured seed when a callable is given.

    Raises:
        PlanError: neither a module nor a callable that returns one, or a model on the meta device.
    """
    model: object = source
    if not isinstance(source, nn.Module):
        if not callable(source):
            raise PlanError(f"model is a {type(source).__name__}; give an nn.Module or a callable that returns one.")
        with keyed(device, seed):
            model = source()
    if not isinstance(model, nn.Module):
        raise PlanError(f"the model callable returned a {type(model).__name__}; it must return an nn.Module.")
    empty = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if empty is not None:
        raise PlanError(
            f"parameter {empty!r} is on the meta device, from which this version only plans; build the model in "
            "memory to train it."
        )
    return model


def prepare(model: nn.Module, config: Config, request: Request) -> Plan:
    """Everything that can be refused without communication, and the plan."""
    _refuse_unbuilt(config)
    check_sinks(config.monitor)
    if config.optimizer is None and request.optimizer is None:
        raise ConfigError("optimizer: null, and none was given in code; name one, or pass optimizer=... in code.")
    _refuse_shared_memory(model)
    return build_plan(model, config, own_optimizer=request.optimizer is not None)


def build(model: nn.Module, plan: Plan, world: World, request: Request) -> Parts:
    """Check that all ranks were given the same, then place parameters, hooks and optimizer."""
    config, grid = plan.config, plan.grid(world.rank)
    comm = Comm(grid, TorchBackend(grid, world.device))
    _check_equal(model, config, comm, world.device)
    _switch_cache_off(model)
    given_dtypes = {key: value.dtype for key, value in model.state_dict().items() if isinstance(value, Tensor)}
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sharded = config.zero_optimization.stage > 0
    who = Ownership(grid.coord().dp, grid.dp, sharded)
    place_rest(model, plan.precision, world.device)
    buckets = allocate(plan.layout(grid.coord()), trainable, who, world.device)
    reducer = GradientReducer(buckets, trainable, comm, plan.precision.wire, scatter=sharded)
    factory = request.optimizer or _factory(config.optimizer or OptimizerConfig())
    optimizer = ShardedOptimizer(buckets, plan.groups, factory, comm, sharded, shaped=request.optimizer is not None)
    rate = make_learning_rate(optimizer.inner, config.scheduler, request.lr_scheduler)
    return Parts(plan, grid, world, comm, model, buckets, reducer, optimizer, rate, request.loss_fn, given_dtypes)


def _refuse_unbuilt(config: Config) -> None:
    """Refuse, all at once, what the configuration can say and this version cannot do."""
    zero, parallel = config.zero_optimization, config.parallel
    missing = {
        f"parallel.tensor {config.tp}": config.tp > 1,
        f"parallel.pipeline {config.pp}": config.pp > 1,
        "parallel.sequence_parallel true": parallel.sequence_parallel,
        f"zero_optimization.stage {zero.stage}": zero.stage > 1,
        "zero_optimization.reduce 'microbatch'": zero.reduce == "microbatch",
        f"zero_optimization.offload_optimizer.device {zero.offload_optimizer.device!r}": (
            zero.offload_optimizer.device != "none"
        ),
        "fp16.enabled true": config.fp16.enabled,
        "bf16.bf16_master_weights_and_grads true": config.bf16.bf16_master_weights_and_grads,
        "bf16.bf16_optimizer_states true": config.bf16.bf16_optimizer_states,
        "bf16.check_grad_overflow false": config.bf16.enabled and not config.bf16.check_grad_overflow,
        "communication_data_type 'fp16'": config.communication_data_type == "fp16",
        "keep_fp32": bool(config.keep_fp32),
        f"activation_checkpointing.mode {config.activation_checkpointing.mode!r}": (
            config.activation_checkpointing.mode != "none"
        ),
        "kernels 'triton'": config.kernels == "triton",
        "compile true": config.compile,
        "checkpoint.every": config.checkpoint.every > 0,
        "checkpoint.folder": config.checkpoint.folder is not None,
        "checkpoint.init_from": config.checkpoint.init_from is not None,
    }
    asked = [setting for setting, wanted in missing.items() if wanted]
    if asked:
        raise ConfigError(
            f"{', '.join(asked)}: not in this version, which has data parallelism with ZeRO 0 and 1 in fp32 and bf16; "
            "leave it out."
        )


def _refuse_shared_memory(model: nn.Module) -> None:
    """Two parameters over one memory would be taken apart by the flat buckets without a word."""
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_meta or not parameter.numel():
            continue
        other = owners.setdefault(parameter.data_ptr(), name)
        if other != name:
            raise PlanError(
                f"parameters {other!r} and {name!r} are two objects over the same memory; tie them by assigning one "
                "nn.Parameter to both modules."
            )


def _factory(config: OptimizerConfig) -> OptimizerFactory:
    kinds: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
        "AdamW": (FlatAdam, {"decoupled": True}),
        "Adam": (FlatAdam, {"decoupled": False}),
        "SGD": (FlatSGD, {}),
        "Lion": (FlatLion, {}),
    }
    kind, extra = kinds[config.type]
    options = dict(config.params) | extra
    return lambda groups: kind(groups, **options)


def _switch_cache_off(model: nn.Module) -> None:
    """Hugging Face models build a key-value cache in every forward unless each config says no."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False


@torch.no_grad()
def _check_equal(model: nn.Module, config: Config, comm: Comm, device: torch.device) -> None:
    """Refuse ranks that were given different configurations, models or weights.

    One all-gather of three hashes; only when the weights differ a second one finds the first parameter.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    sums = torch.tensor([_bit_sum(tensor) for _, tensor in named], dtype=torch.int64)
    settings = json.dumps(config.to_json(), sort_keys=True)
    aliased = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    structure = repr([(name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in aliased])
    hashes = [_hash(text) for text in (settings.encode(), structure.encode(), sums.numpy().tobytes())]
    gathered = _gather(torch.stack(hashes), comm, device)
    if others := _differing(gathered, 0):
        raise ConfigError(f"rank 0 and rank {others[0]} were given different configurations; pass the same to all.")
    if others := _differing(gathered, 1):
        raise PlanError(
            f"rank 0 and rank {others[0]} were given different models (names, shapes, dtypes or requires_grad); build "
            "the same model on every rank."
        )
    if _differing(gathered, 2):
        table = _gather(sums, comm, device)
        column = next(i for i in range(len(named)) if _differing(table, i))
        raise PlanError(
            f"rank 0 and rank {_differing(table, column)[0]} were given different weights, first in "
            f"{named[column][0]!r}; build the model with the same seed on every rank (torch.manual_seed), or pass "
            "a callable that builds it."
        )


def _gather(values: Tensor, comm: Comm, device: torch.device) -> Tensor:
    world = comm.grid.world_size
    table = torch.zeros(world, values.numel(), dtype=values.dtype, device=device)
    table[comm.grid.rank] = values.to(device)
    comm.all_gather(table.view(-1), table[comm.grid.rank], "world", "equal weights").wait()
    return table.cpu()


def _differing(table: Tensor, column: int) -> list[int]:
    return [int(rank) for rank in (table[:, column] != table[0, column]).nonzero().flatten()]


def _hash(data: bytes) -> Tensor:
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return torch.tensor(int.from_bytes(digest, "little", signed=True), dtype=torch.int64)


def _bit_sum(tensor: Tensor) -> int:
    """Sum of the bit patterns: exact, and independent of the device's order of addition."""
    flat = tensor.detach().contiguous().reshape(-1)
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    size = flat.element_size()
    return int(flat.view(words.get(size, torch.uint8)).sum(dtype=torch.int64)) if flat.numel() else 0
