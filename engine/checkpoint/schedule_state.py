"""The state of a torch learning-rate scheduler as JSON: counters and rates, those of schedulers in it too."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

_LEAVES = (bool, int, float, str, type(None))


def schedule_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """What of ``scheduler.state_dict()`` JSON can hold, copied; functions are built anew by who resumes."""
    return {key: _plain(value) for key, value in state.items() if _is_plain(value)}


def joined(fresh: Any, stored: Any) -> Any:
    """``fresh``, the state of a scheduler just built, with what is stored in its place."""
    if isinstance(fresh, Mapping) and isinstance(stored, Mapping):
        return {**fresh, **{key: joined(fresh.get(key), value) for key, value in stored.items()}}
    if isinstance(fresh, list) and isinstance(stored, list) and len(fresh) == len(stored):
        return [joined(*pair) for pair in zip(fresh, stored, strict=True)]
    return tuple(stored) if isinstance(fresh, tuple) else stored


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):  # what is in there is chosen key by key
        return all(isinstance(key, str) for key in value)
    return isinstance(value, _LEAVES)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return schedule_state(value) if isinstance(value, Mapping) else value
