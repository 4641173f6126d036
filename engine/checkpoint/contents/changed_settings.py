"""What a run that goes on trains with otherwise than the one that was saved: settings as they were and as they are.

Grid, batch, memory and folders are not among them: they change no update, or are told apart.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.config.wording import join_path, shown_value

TRAINING = (
    "optimizer", "scheduler", "ema", "gradient_clipping", "seed", "bf16", "fp16", "torch_autocast",
    "communication_data_type", "keep_fp32", "quantize_frozen", "wire", "zero_optimization.zero_quantized_weights",
    "zero_optimization.zero_quantized_gradients", "zero_optimization.zero_gradient_error_feedback",
)  # fmt: skip
"""Keys on which the numbers of an update depend."""
RATES = ("scheduler", "optimizer")
"""Sections from which learning rates follow."""
_REPLACED = frozenset({"optimizer.type", "optimizer.params"})
"""Keys that an optimizer from code replaces."""


def changed_settings(
    before: Mapping[str, Any], now: Mapping[str, Any], own_optimizer: bool, among: Sequence[str] = TRAINING
) -> list[str]:
    """Changes such as "optimizer.params.lr 0.001 -> 0.002", of the keys that both configurations have.

    Args:
        before, now: the configurations as JSON.
        own_optimizer: an optimizer from code replaces type and params of the section.
        among: dotted paths of the keys that are compared.
    """
    now, found = json.loads(json.dumps(now)), list[str]()
    for path in among:
        pair = (_at(before, path), _at(now, path))
        if not any(each is _ABSENT for each in pair):
            found += [told for at, told in _changes(*pair, path) if not (own_optimizer and _replaced(at))]
    return found


_ABSENT = object()


def _at(config: Mapping[str, Any], path: str) -> Any:
    found: Any = config
    for key in path.split("."):
        found = found.get(key, _ABSENT) if isinstance(found, Mapping) else _ABSENT
    return found


def _changes(before: Any, now: Any, at: str) -> Iterator[tuple[str, str]]:
    """Paths, and what has changed there; a section of another ``type`` has params of its own, which are left out."""
    if before == now:
        return
    if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
        yield at, f"{at} {_shown(before)} -> {_shown(now)}"
        return
    other = before.get("type") != now.get("type")
    for key in [key for key in before if key in now and not (other and key == "params")]:
        yield from _changes(before.get(key), now.get(key), join_path(at, key))


def _shown(value: Any) -> str:
    """A value, of a section that has a type its name."""
    return str(value["type"]) if isinstance(value, Mapping) and "type" in value else shown_value(value)


def _replaced(path: str) -> bool:
    return any(path == each or path.startswith(f"{each}.") for each in _REPLACED)


def kept_options(
    groups: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]], scheduled: frozenset[str]
) -> list[str]:
    """Options of an optimizer from code that go on as saved, where the code has others; not those of a schedule."""
    found = []
    for index, (group, own) in enumerate(zip(groups, before, strict=True)):
        driven = scheduled | ({"lr", "momentum", "betas"} if "initial_lr" in group else set())
        for name in (name for name in own if name in group and name not in driven):
            if _differs(group[name], own[name]):
                found.append(f"{name} {_text(group[name])} of group {index} (the code has {_text(own[name])})")
    return found


def _differs(one: Any, other: Any) -> bool:
    return _text(one) != _text(other)


def _text(value: Any) -> str:
    return shown_value(value.tolist() if hasattr(value, "tolist") else value)
