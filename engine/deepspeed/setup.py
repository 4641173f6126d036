"""``deepspeed.initialize``: converts DeepSpeed's arguments to those of ``engine.initialize``."""

import argparse
import glob
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

import engine
from engine.build.untrained import freeze
from engine.config import Config, load_config, load_raw
from engine.config.config_file import remarks
from engine.deepspeed import comm
from engine.deepspeed.deepspeed_engine import DeepSpeedEngine
from engine.deepspeed.pipe import PipelineModule
from engine.deepspeed.returned import configured_schedule
from engine.deepspeed.runtime.dataloader import loader_of_a_rank
from engine.deepspeed.runtime.zero.partition_parameters import mark_sharded
from engine.deepspeed.scheduled import Scheduled
from engine.deepspeed.utils.tensor_fragment import tell_engine
from engine.errors import ConfigError
from engine.hosting.arguments import fill_auto
from engine.parallel.comm.world import read_world
from engine.zero.gather.left_shards import make_whole

_BY_GROUP = frozenset({"params", "lr", "weight_decay", "name"})


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the options ``--deepspeed`` and ``--deepspeed_config`` to ``parser``, and returns ``parser``."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="accepted; the script decides")
    group.add_argument("--deepspeed_config", default=None, type=str, help="path of the JSON configuration")
    return parser


def initialize(
    args: Any = None, model: nn.Module | None = None, optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None, training_data: Dataset[Any] | None = None, lr_scheduler: Any = None,
    distributed_port: int = 29500, mpu: Any = None, dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None, config: Any = None, mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, DataLoader[Any] | None, Any]:  # fmt: skip
    """Shards ``model`` over the ranks; returns (engine, optimizer, loader of ``training_data``, scheduler). Collective.

    Weights are broadcast from rank 0. Without an optimizer, the engine only evaluates. If ``optimizer`` or else
    ``model_parameters`` is passed, parameters outside it are not updated. ``args``: the script's parsed arguments. Its
    ``deepspeed_config`` may name the configuration; attributes such as ``learning_rate`` replace values "auto".

    Raises:
        ConfigError: the configuration is missing, wrong or passed twice; ``model`` is missing; ``model_parameters``
            sets more than lr and weight_decay; ``mpu`` or ``mesh_param`` contradicts the configured tensor ranks.
    """
    if model is None:
        raise ConfigError("deepspeed.initialize was given no model; pass model=....")
    given = _given(config if config is not None else config_params, args)
    raw, pipeline = _adapted(model, given, args), model if isinstance(model, PipelineModule) else None
    notes = [*remarks(given), *_unused_sections(raw, optimizer, lr_scheduler)]
    if optimizer is not None:
        raw.pop("optimizer", None)
    parts = _parts(model, list(model_parameters) if model_parameters is not None and optimizer is None else [])
    if optimizer is None and raw.setdefault("optimizer", None) is not None:
        _take_groups(parts, raw)
    world = read_world()
    resolved = load_config(raw, world.size, pass_strangers=True)
    resolved = replace(resolved, notes=(*notes, *parts.notes, *resolved.notes))
    _refuse_other_grid(resolved, mpu, mesh_param)
    assert resolved.micro is not None
    collate = collate_fn or default_collate
    example = None if pipeline is None else _example(training_data, resolved.micro, collate)
    lr_scheduler = configured_schedule(resolved, None if resolved.scheduler is not None else lr_scheduler)
    resolved = resolved if lr_scheduler is None else replace(resolved, scheduler=None)  # the one made from it is used
    scheduled, loss_fn = Scheduled(model, raw, pipeline is not None), _loss_of(pipeline)
    thaw = freeze(parts.left_out)
    try:
        make_whole(model, comm.from_every_rank)
        made = engine.initialize(model, resolved, loss_fn, example, optimizer, lr_scheduler, world=world)
    except BaseException:
        thaw()
        raise
    tell_engine(made)
    of_rank = (made.grid, resolved.micro, collate, pipeline is None)
    loader = loader_of_a_rank(training_data, *of_rank) if training_data is not None else None
    wrapped = DeepSpeedEngine(made, optimizer, lr_scheduler, loader, scheduled, collate_fn)
    wrapped.at_end += [thaw, *([mark_sharded(model)] if resolved.zero_optimization.stage == 3 else [])]
    return wrapped, wrapped.optimizer, loader, wrapped.lr_scheduler


def _adapted(model: nn.Module, given: Mapping[str, Any], args: Any) -> dict[str, Any]:
    """Returns the configuration, completed from the arguments and the model."""
    raw = {"initial_weights": "rank0"} | fill_auto(given, args)  # DeepSpeed broadcasts the weights of rank 0
    _take_decay(raw)
    _take_tensor_ranks(model, raw)
    if isinstance(model, PipelineModule):
        _take_pipeline(model, raw)
    return raw


def _take_decay(raw: dict[str, Any]) -> None:
    """Sets weight decay 0, DeepSpeed's default, for AdamW and Muon if the configuration has none."""
    section = raw.get("optimizer")
    if not isinstance(section, Mapping) or str(section.get("type", "")).lower() not in ("adamw", "muon"):
        return
    params = section.get("params") or {}
    if isinstance(params, Mapping) and not params.get("torch_adam"):
        raw["optimizer"] = {**section, "params": {"weight_decay": 0.0, **params}}


def _unused_sections(raw: Mapping[str, Any], optimizer: object, lr_scheduler: object) -> Iterator[str]:
    """Yields a note if code and configuration both have an optimizer or a schedule; DeepSpeed's precedence holds."""
    if optimizer is not None and raw.get("optimizer") is not None:
        yield "optimizer: the one passed in code is used, so the section has no effect; remove it"
    if lr_scheduler is not None and raw.get("scheduler") is not None:
        yield "scheduler: the section is used, so lr_scheduler=... has no effect; remove one of them"


def _refuse_other_grid(config: Config, mpu: Any, mesh_param: Any) -> None:
    """Raises if the script has tensor or sequence ranks that the configuration lacks."""
    asked = {"tensor ranks of mpu": 1, "sequence ranks of mesh_param": 1}
    for call in ("get_tensor_model_parallel_world_size", "get_model_parallel_world_size"):
        if hasattr(mpu, call):
            asked["tensor ranks of mpu"] = int(getattr(mpu, call)())
            break
    if mesh_param is not None:
        asked["sequence ranks of mesh_param"] = int(mesh_param[-1])
    for what, ranks in asked.items():
        if ranks not in (1, config.tp):
            raise ConfigError(
                f"deepspeed.initialize was given {ranks} {what}, and the configuration has {config.tp}; pass the full "
                f'model and set "parallel": {{"tensor": {ranks}}}, which shards its layers (add sequence_parallel to '
                "shard sequences)."
            )


def _given(source: Any, args: Any) -> Mapping[str, Any]:
    named = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)  # its older name
    if source is not None and named is not None:
        raise ConfigError(
            "deepspeed.initialize was given a configuration in code and another one by --deepspeed_config; keep one of "
            "them, as in DeepSpeed."
        )
    source = source if source is not None else named
    if source is None:
        raise ConfigError("deepspeed.initialize was given no configuration; pass config=... or --deepspeed_config.")
    return load_raw(source)


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype, config: Any = None, tp_group: Any = None
) -> nn.Module:
    """Casts ``model`` to ``dtype`` in place, and returns it; ``initialize`` later shards it over ``tp_size`` tensor
    ranks.

    ``config`` has no effect; pass it to ``initialize``.

    Raises:
        ConfigError: ``tp_group`` is passed.
    """
    if tp_group is not None:
        raise ConfigError(
            "tp_model_init was given tp_group, but tensor ranks are neighbours in the engine's own grid; leave "
            "tp_group out."
        )
    object.__setattr__(model, _TENSOR_RANKS, tp_size)
    return model.to(dtype)


_TENSOR_RANKS = "_deepspeed_tensor_ranks"


def _take_tensor_ranks(model: nn.Module, raw: dict[str, Any]) -> None:
    ranks, section = vars(model).get(_TENSOR_RANKS), raw.get("tensor_parallel") or {}
    if ranks is not None and not section.get("autotp_size") and "tensor" not in (raw.get("parallel") or {}):
        raw["parallel"] = {"tensor": ranks} | dict(raw.get("parallel") or {})


def _take_pipeline(model: PipelineModule, raw: dict[str, Any]) -> None:
    """Sets the grid from the module's own arguments, as DeepSpeed does."""
    grid = {"pipeline": model.num_stages, **({"tensor": model.tensor_ranks} if model.tensor_ranks > 1 else {})}
    raw["parallel"] = grid | dict(raw.get("parallel") or {})
    raw.pop("pipeline", None)
    if model.activation_checkpoint_interval:
        raw["activation_checkpointing"] = {"mode": "full"} | dict(raw.get("activation_checkpointing") or {})


@dataclass(frozen=True, slots=True)
class _Parts:
    """Groups in ``model_parameters``, over some of the model's trainable parameters."""

    groups: Sequence[Mapping[str, Any]]
    names: Mapping[int, str]
    """Name of each trainable parameter, by its id."""
    left_out: Sequence[nn.Parameter]
    notes: Sequence[str]


def _parts(model: nn.Module, given: Sequence[Any]) -> _Parts:
    groups = [each if isinstance(each, Mapping) else {"params": [each]} for each in given]
    groups = [dict(group) | {"params": list(group["params"])} for group in groups]
    known = {id(parameter) for group in groups for parameter in group["params"]}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    left = {name: parameter for name, parameter in trained.items() if given and id(parameter) not in known}
    notes = []
    if left:
        more = f" and {len(left) - 1} more of the trainable parameters" * (len(left) > 1)
        notes = [f"model_parameters leaves out {next(iter(left))!r}{more}, which are not updated until destroy()."]
    return _Parts(groups, {id(p): name for name, p in trained.items()}, tuple(left.values()), notes)


def _take_groups(parts: _Parts, raw: dict[str, Any]) -> None:
    """Converts ``model_parameters`` to ``optimizer.groups``."""
    options = []
    for group in parts.groups:
        if others := sorted(group.keys() - _BY_GROUP):
            raise ConfigError(
                f"model_parameters has a group with {others[0]!r}, but groups of a configured optimizer may differ "
                "only in lr and weight_decay; pass optimizer=... for other differences."
            )
        own = {name: group[name] for name in ("lr", "weight_decay") if name in group}
        patterns = [glob.escape(parts.names[id(p)]) for p in group["params"] if id(p) in parts.names]
        if own and patterns:
            options.append({"params": patterns, **own})
    if options and isinstance(raw["optimizer"], list):
        raise ConfigError(
            "model_parameters has groups, and the configuration has a list of optimizers; remove one of them, because "
            "the list assigns parameters by its patterns."
        )
    if options:
        raw["optimizer"] = dict(raw["optimizer"]) | {"groups": options}


def _loss_of(model: PipelineModule | None) -> Callable[[Any, Any], torch.Tensor] | None:
    loss_fn = None if model is None else model.loss_fn
    return None if loss_fn is None else lambda output, batch: loss_fn(output, batch[1])


def _example(data: Any, micro: int, collate: Callable[[list[Any]], Any]) -> Any:
    """Returns the first microbatch of the data, for the plan; None if the data have no length."""
    if data is None or not hasattr(data, "__len__") or len(data) < micro:
        return None
    return collate([data[index] for index in range(micro)])
