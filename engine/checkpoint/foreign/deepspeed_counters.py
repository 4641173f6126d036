"""DeepSpeed's optimizer groups, loss scaler and scheduler in our terms."""

from collections.abc import Mapping, Sequence
from typing import Any

from engine.checkpoint.foreign.foreign_step import ParameterGroup
from engine.checkpoint.foreign.pickle_values import Inert, plain
from engine.checkpoint.foreign.torch_file import TorchTensor
from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.safetensors_file import DTYPES
from engine.errors import CheckpointError


def first_flat(options: Mapping[str, Any], index: int) -> int:
    """Index of the state that belongs to a group; ``index`` where the group does not say."""
    params = options.get("params")
    first = params[0] if isinstance(params, list) and params else index
    return first if isinstance(first, int) else index


def described_group(
    params: Sequence[str], options: Mapping[str, Any], state: Mapping[Any, Any], files: Files
) -> ParameterGroup:
    """A group with the numbers of one state of it."""
    kept = plain({key: value for key, value in options.items() if key != "params"}, [])
    numbers: dict[str, list[Any]] = {}
    for key, value in state.items():
        if isinstance(value, TorchTensor) and (key == "step" or not value.kind.shape):
            number = value.number(files)
            if number is not None:
                numbers[str(key)] = [number, DTYPES[value.kind.dtype]]
        elif isinstance(value, bool | int | float):
            numbers[str(key)] = [value, None]
    step = numbers.get("step", [kept.get("step", 0)])[0]
    step = int(step) if isinstance(step, int | float) and 0 <= step < 2**53 else 0
    return ParameterGroup(params=params, options=kept | {"step": step}, numbers=numbers)


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
