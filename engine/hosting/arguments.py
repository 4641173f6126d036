"""Arguments of the Hugging Face Trainer and of TRL, merged with the engine's configuration.

Batch sizes, clipping, optimizer, schedule and precision come from the arguments. The configuration omits them, sets
"auto", or repeats them; another value raises before communication.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from functools import wraps
from numbers import Real
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.config import Config
from engine.errors import ConfigError, EngineError
from engine.hosting import check_versions
from engine.parallel.comm.agreement import differing
from engine.parallel.comm.comm import Comm


def _warmup(args: Any) -> int:
    """Returns the warmup steps; ``get_warmup_steps`` of TrainingArguments also resolves a ratio."""
    count = getattr(args, "get_warmup_steps", None)
    return int(count(args.max_steps) if count is not None else args.warmup_steps)


def _all_steps(args: Any) -> int:
    if args.max_steps <= 0:
        raise AttributeError("max_steps")  # epochs do not determine the number of steps
    return int(args.max_steps)


class _Owned(NamedTuple):
    """Value of the arguments."""

    name: str
    value: Callable[[Any], Any]


def _plain(name: str) -> _Owned:
    return _Owned(name, attrgetter(name))


_OWNED: Mapping[str, _Owned] = MappingProxyType({
    "train_micro_batch_size_per_gpu": _plain("per_device_train_batch_size"),
    "gradient_accumulation_steps": _plain("gradient_accumulation_steps"),
    "gradient_clipping": _plain("max_grad_norm"),
    "seed": _plain("seed"),
    "fp16.enabled": _Owned("fp16", lambda args: bool(args.fp16)),
    "bf16.enabled": _Owned("bf16", lambda args: bool(args.bf16)),
    "optimizer.params.lr": _plain("learning_rate"),
    "optimizer.params.betas": _Owned("adam_beta1, adam_beta2", lambda args: [args.adam_beta1, args.adam_beta2]),
    "optimizer.params.eps": _plain("adam_epsilon"),
    "optimizer.params.weight_decay": _plain("weight_decay"),
    "scheduler.params.warmup_min_lr": _Owned("warmup_steps", lambda args: 0.0),
    "scheduler.params.warmup_max_lr": _plain("learning_rate"),
    "scheduler.params.warmup_num_steps": _Owned("warmup_steps", _warmup),
    "scheduler.params.total_num_steps": _Owned("max_steps", _all_steps),
    "weights_out.to[].vllm": _plain("vllm_server_base_url"),
})  # fmt: skip
"""Key of the configuration -> the argument with its value."""
_OF_STEPS = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "seed")
"""Keys that always take the value of the arguments."""


def fill_auto(raw: Mapping[str, Any], args: Any, at: str = "") -> dict[str, Any]:
    """Returns a copy of the configuration ``raw`` in which values of ``args`` replace "auto".

    A value that ``args`` do not determine stays "auto".

    Args:
        args: ``TrainingArguments`` of the Hugging Face Trainer.
        at: dotted key of ``raw`` in the whole configuration; empty if ``raw`` is the whole configuration.
    """
    if not at and "distributed_type" in raw and "deepspeed_config" in raw:
        raw = {"train_micro_batch_size_per_gpu": "auto", **raw}  # as accelerate converts its own file
    filled: dict[str, Any] = {}
    for key, value in raw.items():
        path = f"{at}.{key}" if at else key
        filled[key] = value
        if isinstance(value, Mapping):
            filled[key] = fill_auto(value, args, path)
        elif isinstance(value, list):
            filled[key] = [fill_auto(each, args, f"{path}[]") if isinstance(each, Mapping) else each for each in value]
        elif value == "auto" and path in _OWNED:
            try:
                filled[key] = _OWNED[path].value(args)
            except AttributeError:
                continue
    return filled


_REFUSED: Mapping[str, str] = MappingProxyType({
        "deepspeed": "engine_config takes the place of DeepSpeed's file",
        "fsdp": "set zero_optimization in engine_config",
        "parallelism_config": "set parallel in engine_config",
        "torch_compile": 'set "compile": true in engine_config',
        "auto_find_batch_size": "a plan is made for one size; set per_device_train_batch_size",
        "activation_checkpointing": "set activation_checkpointing in engine_config",
        "gradient_checkpointing": "set activation_checkpointing in engine_config",
        "bf16_full_eval": "its weights keep the dtype of training; remove it",
        "eval_use_gather_object": "ranks gather tensors; remove it",
        "fp16_full_eval": "its weights keep the dtype of training; remove it",
})  # fmt: skip

_ALIKE = (
    "num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps",
    "optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "label_smoothing_factor",
    "per_device_eval_batch_size", "eval_strategy", "eval_steps", "save_strategy", "save_steps",
    "load_best_model_at_end", "dataloader_drop_last", "average_tokens_across_devices", "num_generations",
    "num_iterations", "steps_per_generation", "max_completion_length", "beta", "loss_type",
)  # fmt: skip
"""Arguments of the Trainer and of TRL that control steps, and must be equal on all ranks."""


def refuse_arguments(args: Any) -> None:
    """Refuses ``TrainingArguments`` that would shard or move the model outside the engine, such as FSDP or DeepSpeed.

    Raises:
        ConfigError: such an argument is set, a process sees several GPUs, or ``load_best_model_at_end`` is set with
            ``save_only_model``.
    """
    for name, remedy in _REFUSED.items():
        if getattr(args, name, None):
            raise ConfigError(f"TrainingArguments has {name}, but the engine places the model: {remedy}.")
    if args.n_gpu > 1:
        raise ConfigError(
            f"one process sees {args.n_gpu} GPUs, over which Trainer would replicate the model; start one process for "
            "each GPU with torchrun."
        )
    if args.save_only_model and args.load_best_model_at_end:
        raise ConfigError(
            "TrainingArguments has save_only_model and load_best_model_at_end, but the best weights are read from the "
            "engine's checkpoint; remove one of them."
        )


def settled(raw: Mapping[str, Any], args: Any) -> dict[str, Any]:
    """Returns the engine's configuration ``raw``, completed with the values of ``args``, a ``TrainingArguments``.

    In the result, the sections ``optimizer`` and ``scheduler`` are None.

    Raises:
        ConfigError: a value of ``raw`` contradicts the arguments.
    """
    config = fill_auto({"initial_weights": "rank0"} | dict(raw), args)
    for key in _OF_STEPS:
        owned = _OWNED[key]
        given, value = raw.get(key, "auto"), owned.value(args)
        if given not in ("auto", None) and given != value:
            raise conflict(key, given, owned.name, value)
        config[key] = value
    if config.get("train_batch_size") == "auto":
        del config["train_batch_size"]
    _take_precision(config, args)
    _check_optimizer(_section(config, "optimizer"), args)
    _check_schedule(_section(raw, "scheduler"), args)
    return config | {"optimizer": None, "scheduler": None}


def _take_precision(config: dict[str, Any], args: Any) -> None:
    """Maps bf16 of the arguments to autocast over fp32 weights, unless the configuration has a section for it."""
    for key in ("bf16", "fp16"):
        asked = bool(getattr(args, key))
        if key not in config:
            if asked:
                config["torch_autocast" if key == "bf16" else "fp16"] = {"enabled": True}
        elif (given := bool(_section(config, key).get("enabled"))) != asked:
            raise conflict(f"{key}.enabled", given, key, asked)


def _section(config: Mapping[str, Any], key: str, within: str = "") -> Mapping[str, Any]:
    """Returns the section ``key``; {} if it is missing or null. ``within``: dotted key of ``config``, with a dot."""
    section = config.get(key) or {}
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"{within}{key} is a {type(section).__name__} in engine_config, but TrainingArguments describe it, and "
            "engine_config only repeats their values in one object; remove it from engine_config."
        )
    return section


def _check_optimizer(section: Mapping[str, Any], args: Any) -> None:
    kind, optim = str(section.get("type", "AdamW")), str(getattr(args.optim, "value", args.optim))
    if section and kind.lower() not in optim:
        raise conflict("optimizer.type", kind, "optim", optim)
    for key in section:
        if key not in ("type", "params"):
            raise ConfigError(
                f"optimizer.{key} is set in engine_config, but TrainingArguments describe the optimizer; remove it, or "
                "pass an optimizer with its own groups to Trainer as optimizers=."
            )
    for key, given in _section(section, "params", "optimizer.").items():
        if (owned := _OWNED.get(f"optimizer.params.{key}")) is None:
            raise ConfigError(
                f"optimizer.params.{key} is set in engine_config; set it in TrainingArguments.optim_args."
            )
        value = owned.value(args)
        if given != "auto" and not _equal(given, value):
            raise conflict(f"optimizer.params.{key}", given, owned.name, value)


def _check_schedule(section: Mapping[str, Any], args: Any) -> None:
    for key, given in _section(section, "params", "scheduler.").items():
        if given != "auto":
            raise ConfigError(
                f"scheduler.params.{key} is {given} in engine_config, but TrainingArguments describe the schedule "
                f"(lr_scheduler_type, learning_rate, warmup_steps); remove scheduler from engine_config."
            )


def _equal(given: Any, value: Any) -> bool:
    if isinstance(value, list):
        return isinstance(given, list | tuple) and len(given) == len(value) and all(map(_equal, given, value))
    return isinstance(given, Real) and math.isclose(given, value)


def conflict(key: str, given: Any, name: str, value: Any, owner: str = "TrainingArguments") -> ConfigError:
    """Returns the error for two contradicting values: ``given`` for the configuration key ``key``, and ``value`` for
    ``name`` of ``owner``.
    """
    return ConfigError(
        f"{key} is {given} in engine_config and {name} is {value} in {owner}, but a run has one; set the same value, "
        f'or "auto" in engine_config.'
    )


def refuse_unlike(args: Any, rows: Mapping[str, int | None], comm: Comm, device: torch.device) -> None:
    """Refuses dataset lengths, and values of ``args`` that control training steps, if they differ between ranks.

    Collective over the world.

    Args:
        args: ``TrainingArguments`` of this rank.
        rows: number of rows of each dataset, by name; None: unknown.

    Raises:
        ConfigError: a value differs; all ranks raise.
    """
    given = {f"{name} of {type(args).__name__}": repr(getattr(args, name, None)) for name in _ALIKE}
    given |= {f"the number of rows of {name}": repr(count) for name, count in rows.items()}
    hashes = [hashlib.blake2b(text.encode(), digest_size=7).digest() for text in given.values()]
    numbers = torch.tensor([int.from_bytes(each, "little") for each in hashes])
    for name, unlike in zip(given, differing(numbers, comm, device, "start"), strict=True):
        if unlike:
            raise ConfigError(f"{name} differs between ranks, which make their steps together; pass equal values.")


def checked_metrics(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the user's function ``compute_metrics`` with a check that it returns a mapping or None.

    Raises:
        ConfigError: a call returns another type.
    """

    @wraps(compute)
    def checked(*args: Any, **kwargs: Any) -> Any:
        found = compute(*args, **kwargs)
        if found is not None and not isinstance(found, Mapping):
            raise ConfigError(
                f"compute_metrics returned a {type(found).__name__}, but metrics are logged by name; return a dict, "
                'such as {"accuracy": 0.5}.'
            )
        return found

    return checked


def refuse_best_metric(args: Any, metrics: Mapping[str, Any]) -> None:
    """Refuses evaluation results if ``float`` cannot convert the metric ``metric_for_best_model``.

    Raises:
        ConfigError: ``float`` cannot convert the metric's value.
    """
    name = args.metric_for_best_model
    if name is None:
        return
    value = metrics.get(name if name.startswith("eval_") else f"eval_{name}", 0.0)
    try:
        float(value)
    except (TypeError, ValueError):
        raise ConfigError(
            f"metric_for_best_model is {name!r}, but evaluation returned {value!r} for it, which is not a number; "
            "return a number for it from compute_metrics, or name another metric."
        ) from None


GENERATING = ("GRPOTrainer", "RLOOTrainer")
_ON_TENSOR_RANKS = ("SFTTrainer", "DPOTrainer", *GENERATING)
BARE_REFERENCE = ("DPOTrainer", "KTOTrainer")
_TESTED = (*_ON_TENSOR_RANKS, "KTOTrainer", "RewardTrainer")

_REFUSED_OF_TRL: Mapping[str, str] = MappingProxyType({
    "use_transformers_continuous_batching": "completions come from eng.generate; remove it",
    "cache_implementation": "eng.generate chooses its own cache; remove it",
})  # fmt: skip
_REFUSED_PARTS_OF_TRL = ("tools", "environment_factory", "rollout_func")


def refuse_trl(kind: str | None, given: Mapping[str, Any], args: Any) -> None:
    """Refuses TRL trainers and settings that the engine does not support.

    Args:
        kind: class name of the TRL trainer; None: nothing is checked.
        given: keyword arguments of the trainer.
        args: ``TrainingArguments`` of the trainer.

    Raises:
        ConfigError: the trainer, an argument, a batch size or TRL's version is not supported.
    """
    if kind is None:
        return
    check_versions("trl")
    if kind not in _TESTED:
        served = f"{', '.join(_TESTED[:-1])} or {_TESTED[-1]}"
        raise ConfigError(f"{kind} of TRL is not tested over the engine; use {served}.")
    for name, remedy in _REFUSED_OF_TRL.items():
        if getattr(args, name, None):
            raise ConfigError(f"{type(args).__name__} has {name}, but {remedy}.")
    for name in _REFUSED_PARTS_OF_TRL:
        if given.get(name):
            raise ConfigError(
                f"{kind} was given {name}, by which ranks generate different numbers of times, but the engine "
                "generates on all ranks together; remove it."
            )
    if kind in GENERATING and args is not None:
        _check_generations(args)


def _check_generations(args: Any) -> None:
    """Raises if completions would be generated inside a step, between accumulated gradients."""
    every, accumulation = args.steps_per_generation * args.num_iterations, args.gradient_accumulation_steps
    if every % accumulation:
        raise ConfigError(
            f"{type(args).__name__} has steps_per_generation {args.steps_per_generation}, num_iterations "
            f"{args.num_iterations} and gradient_accumulation_steps {accumulation}, so completions would be generated "
            "inside a step; set steps_per_generation to a multiple of gradient_accumulation_steps."
        )


def rows_of_generation(args: Any, data_ranks: int) -> int:
    """Returns the number of completions that a TRL trainer generates for ``args.steps_per_generation`` microbatches,
    summed over the ``data_ranks`` data-parallel ranks.

    Raises:
        ConfigError: the number is no multiple of ``num_generations``.
    """
    rows = args.per_device_train_batch_size * data_ranks * args.steps_per_generation
    if rows % args.num_generations:
        raise ConfigError(
            f"{type(args).__name__} has num_generations {args.num_generations}, but {rows} rows are generated at a "
            f"time on {data_ranks} data rank(s); set per_device_train_batch_size to a multiple of num_generations."
        )
    return int(rows)


def _check_servers(kind: str, args: Any, config: Config) -> None:
    """Raises for vLLM without a server that follows the weights, or by another address."""
    servers = config.weights_out.servers if config.weights_out is not None else ()
    name = type(args).__name__
    if kind != "GRPOTrainer":
        raise ConfigError(
            f"{name} has use_vllm, but {kind} does not compare log-probabilities of vLLM and trainer; remove it, or "
            "use GRPOTrainer."
        )
    if args.vllm_mode != "server":
        raise ConfigError(
            f'{name} has vllm_mode "{args.vllm_mode}", but vLLM reads the weights as a server; set vllm_mode="server".'
        )
    if not servers:
        raise ConfigError(
            f"{name} has use_vllm, but engine_config names no vLLM server to which the weights go; set "
            'weights_out.to, such as [{"vllm": "http://vllm:8000"}].'
        )
    if args.vllm_server_base_url not in (None, *servers):
        raise conflict("weights_out.to", ", ".join(servers), "vllm_server_base_url", args.vllm_server_base_url)


def refuse_rewards(name: str, rewards: Any, count: int) -> None:
    """Refuses a result of the TRL reward function ``name`` unless it has a number or None for each completion.

    Args:
        rewards: the result.
        count: number of completions.

    Raises:
        EngineError: the result has another form or length.
    """
    listed = hasattr(rewards, "__len__") and hasattr(rewards, "__iter__") and not isinstance(rewards, str | Mapping)
    if not listed or len(rewards) != count:
        given = f"{len(rewards)} rewards" if listed else f"a {type(rewards).__name__}"
        raise EngineError(f"the reward function {name} returned {given} for {count} completions; return one for each.")
    for reward in rewards:
        if not (reward is None or isinstance(reward, Real | Tensor)):
            raise EngineError(
                f"the reward function {name} returned {reward!r} for a completion, which is not a number; return "
                "numbers, and None for a completion without a reward."
            )


def refuse_trl_grid(kind: str, args: Any, config: Config) -> None:
    """Refuses a parallel grid on which the TRL trainer ``kind`` with arguments ``args`` would compute wrong results.

    Raises:
        ConfigError: the trainer does not support the pipeline, the tensor ranks or the sharded parameters of
            ``config``; or ``use_vllm`` is set, and trainer, arguments or ``config`` do not fit it.
    """
    if config.pp > 1:
        raise ConfigError(
            f"{kind} of TRL was given parallel.pipeline {config.pp}, but its loss multiplies by the weight of the "
            "head, which only the last stage has; remove parallel.pipeline."
        )
    if config.tp > 1 and kind not in _ON_TENSOR_RANKS:
        raise ConfigError(
            f"{kind} of TRL was given parallel.tensor {config.tp}, but it counts every process as a data rank; remove "
            f"parallel.tensor, or use {', '.join(_ON_TENSOR_RANKS[:-1])} or {_ON_TENSOR_RANKS[-1]}."
        )
    if getattr(args, "use_vllm", False):
        _check_servers(kind, args, config)
    if getattr(args, "sync_ref_model", False) and (config.tp > 1 or config.zero_optimization.stage == 3):
        raise ConfigError(
            f"{type(args).__name__} has sync_ref_model, which reads full weights of the trained model on every rank, "
            "but a rank has a part of them; remove parallel.tensor and set zero_optimization.stage to 2, or remove "
            "sync_ref_model."
        )
