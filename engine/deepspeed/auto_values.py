"""Values "auto" of a configuration, filled from arguments with the names of the Hugging Face ``TrainingArguments``.

What the arguments do not have stays "auto": sizes of batches then follow from each other, and anything else is refused
by the configuration's own sentence.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any


def _pair(args: Any) -> list[float]:
    return [args.adam_beta1, args.adam_beta2]


def _warmup(args: Any) -> int:
    """``get_warmup_steps`` of TrainingArguments counts a ratio too."""
    count = getattr(args, "get_warmup_steps", None)
    return int(count(args.max_steps) if count is not None else args.warmup_steps)


def _all_steps(args: Any) -> int:
    if args.max_steps <= 0:
        raise AttributeError("max_steps")  # epochs do not say how many steps there are
    return int(args.max_steps)


_FILLED: Mapping[str, Callable[[Any], Any]] = MappingProxyType({
    "train_micro_batch_size_per_gpu": lambda args: args.per_device_train_batch_size,
    "gradient_accumulation_steps": lambda args: args.gradient_accumulation_steps,
    "gradient_clipping": lambda args: args.max_grad_norm,
    "fp16.enabled": lambda args: bool(args.fp16),
    "bf16.enabled": lambda args: bool(args.bf16),
    "optimizer.params.lr": lambda args: args.learning_rate,
    "optimizer.params.betas": _pair,
    "optimizer.params.eps": lambda args: args.adam_epsilon,
    "optimizer.params.weight_decay": lambda args: args.weight_decay,
    "scheduler.params.warmup_min_lr": lambda args: 0.0,
    "scheduler.params.warmup_max_lr": lambda args: args.learning_rate,
    "scheduler.params.warmup_num_steps": _warmup,
    "scheduler.params.total_num_steps": _all_steps,
})  # fmt: skip


def fill_auto(raw: Mapping[str, Any], args: Any, at: str = "") -> dict[str, Any]:
    """A copy of a configuration in which each "auto" that ``args`` has a value for is that value."""
    if not at and "distributed_type" in raw and "deepspeed_config" in raw:
        raw = {"train_micro_batch_size_per_gpu": "auto", **raw}  # as Accelerate makes it of its own file
    filled: dict[str, Any] = {}
    for key, value in raw.items():
        path = f"{at}.{key}" if at else key
        filled[key] = value
        if isinstance(value, Mapping):
            filled[key] = fill_auto(value, args, path)
        elif value == "auto" and path in _FILLED:
            try:
                filled[key] = _FILLED[path](args)
            except AttributeError:
                continue
    return filled
