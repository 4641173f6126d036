"""DeepSpeed's counters, client state, loss scaler and scheduler in our terms."""

from collections.abc import Mapping
from typing import Any

from engine.checkpoint.foreign.pickle_values import Inert, plain
from engine.checkpoint.foreign.torch_file import numbers_of
from engine.errors import CheckpointError

_OWN = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "num_experts",
    "checkpoint_parallel_dimensions", "ds_config", "ds_version", "universal_checkpoint_info", "autotp_uc_info",
})  # fmt: skip
"""Keys that DeepSpeed writes; all others are the user's client state."""


def count_of(state: Mapping[str, Any], key: str, default: int = 0) -> int:
    """A counter; ``default`` where it was not written."""
    value = state.get(key, default)
    return numbers_of([default if value is None else value], key)[0]


def zero_stage_of(optimizer: Mapping[str, Any]) -> int:
    """The ZeRO stage; 1 for the optimizer of bf16 runs, which does not write it."""
    value = optimizer.get("zero_stage", 1)
    value = value.arguments[0] if isinstance(value, Inert) and value.arguments else value
    return value if isinstance(value, int) else 1


def client_state(state: Mapping[str, Any], dropped: list[str]) -> Any:
    """What the user passed to ``save_checkpoint``, as JSON; paths of what is no JSON are put into ``dropped``."""
    return plain({key: value for key, value in state.items() if key not in _OWN}, dropped)


def first_flat(options: Mapping[str, Any], index: int) -> int:
    """Index of the state that belongs to a group; ``index`` where the group does not say."""
    params = options.get("params")
    first = params[0] if isinstance(params, list) and params else index
    return first if isinstance(first, int) else index


def loss_scale_state(scaler: Any) -> dict[str, Any] | None:
    """A dynamic loss scale in our counters; None for any other."""
    if not isinstance(scaler, Inert) or scaler.get("dynamic") is not True:
        return None
    value, window = scaler.get("cur_scale"), scaler.get("scale_window")
    last, now = scaler.get("last_overflow_iter"), scaler.get("cur_iter")
    counts = (window, last, now, scaler.get("delayed_shift"), scaler.get("cur_hysteresis"))
    if not isinstance(value, int | float) or not all(isinstance(count, int) for count in counts) or not window:
        raise CheckpointError("the loss scaler of the checkpoint has something else where its counters belong.")
    return {"value": float(value), "forgiven": max(0, counts[3] - counts[4]), "good": (now - last - 1) % window}


def scheduler_state(state: Any) -> dict[str, Any] | None:
    """The state of a scheduler object in the terms of torch's schedulers."""
    if not isinstance(state, dict):
        return None
    found: dict[str, Any] = plain(state, [])
    if isinstance(last := found.get("last_batch_iteration"), int):
        return {"last_epoch": last + 1, "_step_count": last + 2}
    return found
