"""Training state without the model: counters, registered objects, random generators, learning-rate scheduler.

tracked      state of every registered object, as JSON, equal on all ranks
generators   random generators of torch, Python and NumPy, of each rank, which user code draws from; the engine's own
             random numbers are keyed by seed and step
scheduler    counters and rates of a torch scheduler, and of schedulers nested in it, as JSON
"""

import json
import logging
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from engine.checkpoint.format.host_image import as_tensor
from engine.checkpoint.format.step_reader import OpenCheckpoint
from engine.checkpoint.format.strict_json import Fields, as_finite, from_finite
from engine.config.wording import join_path, shown_value
from engine.errors import COPY_AGAIN, CheckpointError
from engine.parallel.grid import Grid, saved_order
from engine.parallel.model.rng_streams import generators_of
from engine.step.update import Update

logger = logging.getLogger("trine")


@runtime_checkable
class Stateful(Protocol):
    """Interface of objects that can be registered for checkpointing, such as a data sampler.

    The state consists of JSON values, equal on every rank.
    """

    def state_dict(self) -> Mapping[str, Any]:
        """Returns the object's state as JSON values, which ``load_state_dict`` accepts."""

    def load_state_dict(self, state: Any) -> Any:
        """Restores the object's state from ``state``, which ``state_dict`` has returned in the saved run."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Counters, registered objects and random generators of a run.

    A load restores them before the model, since a model that is sharded at its first batch needs the restored sampler.
    """

    update: Update
    tracked: Mapping[str, Stateful]
    grid: Grid
    device: torch.device
    late: tuple[str, ...] = ()
    """Names of objects that are registered when the model is built, and that a checkpoint may lack."""

    def check(self, reader: OpenCheckpoint) -> None:
        """Checks that the checkpoint has the state of every registered object. If another framework, such as DeepSpeed,
        saved the checkpoint, missing state is only logged as a warning.

        Also logs a warning about saved state of an unregistered object.

        Raises:
            CheckpointError: names the first registered object without saved state.
        """
        stored = Fields(reader.manifest.progress, str(reader.step)).object("tracked")
        missing = next((name for name in self.tracked if name not in stored and name not in self.late), None)
        if missing is not None and "origin" in reader.manifest.info:
            if self.grid.rank == 0:
                logger.warning(
                    "%s is of another engine, so registered objects such as %r start afresh", reader.step, missing
                )
        elif missing is not None:
            raise CheckpointError(
                f"{reader.step} has no state of {missing!r}, which is registered for checkpointing; register it under "
                "its saved name, or load with load_module_only=True."
            )
        left = next((name for name in stored if name not in {*self.tracked, *self.late}), None)
        if left is not None and self.grid.rank == 0:
            logger.warning(
                "%s has the state of %r, which is not registered and starts afresh; register it for checkpointing "
                "before load_checkpoint",
                reader.step,
                left,
            )

    def restore(self, reader: OpenCheckpoint) -> dict[str, torch.Tensor]:
        """Restores counters, registered objects and random generators from a checkpoint.

        Returns the tensors that only this rank saved, by key; {} if the checkpoint was saved on another grid of ranks.
        """
        manifest = reader.manifest
        self.update.load_state_dict(_counters(manifest.progress["update"]))
        if self.update.made != manifest.step:
            raise CheckpointError(
                f"{reader.step} is damaged: it is of step {manifest.step}, but its counters have {self.update.made} "
                f"updates; {COPY_AGAIN}"
            )
        self._restore_tracked(reader, self.tracked.keys())
        states = own_states(reader, self.grid)
        if states:
            restore_random_states(states, self.device)
        return states

    def restore_late(self, reader: OpenCheckpoint) -> None:
        """Restores the objects that were registered only when the model was built. Skips an object without saved
        state.
        """
        self._restore_tracked(reader, self.late)

    def _restore_tracked(self, reader: OpenCheckpoint, names: Iterable[str]) -> None:
        stored = reader.manifest.progress["tracked"]
        for name in names:
            if name in stored and name in self.tracked:
                self.tracked[name].load_state_dict(stored[name])


def _counters(state: Any) -> dict[str, Any]:
    """Returns the state of :class:`Update` in a checkpoint, checked.

    Raises:
        CheckpointError: a counter is missing, or is not an integer of at least 0.
    """
    fields = Fields(state, "the counters of the run")
    counters: dict[str, Any] = {
        name: fields.count(name) for name in ("made", "skipped", "in_a_row", "tokens", "samples")
    }
    scale = None if fields.any("scale") is None else Fields(fields.any("scale"), "the loss scale")
    counters["scale"] = None if scale is None else {
        "value": scale.positive("value"), "forgiven": scale.count("forgiven"), "good": scale.count("good")
    }  # fmt: skip
    return counters


def own_states(reader: OpenCheckpoint, grid: Grid) -> dict[str, torch.Tensor]:
    """Returns the tensors that only this rank saved, such as random states, by key.

    Returns {} if the checkpoint was saved on another grid of ranks.
    """
    saved = reader.manifest.info["grid"]
    if ({axis: saved.get(axis, 1) for axis in grid.sizes}, saved_order(saved)) != (grid.sizes, grid.order):
        return {}
    file = f"state/rank-{grid.rank:05d}.safetensors"
    found = reader.tensors_of(file)
    if not found:
        raise CheckpointError(f"{reader.step / file} is damaged: it has no states of random generators; {COPY_AGAIN}")
    return {key: as_tensor(data, kind) for key, (kind, data) in found.items()}


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Returns the random states of torch (CPU and ``device``), Python and NumPy, as uint8 tensors by key."""
    states = {f"torch/{index}": generator.get_state() for index, generator in enumerate(generators_of(device))}
    states["python"] = _bytes(random.getstate())
    legacy: Any = np.random.get_state(legacy=False)
    inner = legacy["state"] | {"key": legacy["state"]["key"].tolist()}
    states["numpy"] = _bytes(legacy | {"state": inner})
    return states


def restore_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Sets the random generators of torch (CPU and ``device``), Python and NumPy to ``states``.

    A torch generator without an entry is left unchanged.
    """
    for index, generator in enumerate(generators_of(device)):
        if f"torch/{index}" in states:
            generator.set_state(states[f"torch/{index}"])
    version, words, gauss = json.loads(states["python"].numpy().tobytes())
    random.setstate((version, tuple(words), gauss))
    legacy = json.loads(states["numpy"].numpy().tobytes())
    legacy["state"]["key"] = np.array(legacy["state"]["key"], dtype=np.uint32)
    np.random.set_state(legacy)


def _bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


_LEAVES = (bool, int, float, str, type(None))


def schedule_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a scheduler's ``state_dict()`` that JSON can express, also from nested dicts. One-element
    tensors become numbers.
    """
    return {key: _plain(value) for key, value in state.items() if _is_plain(value)}


def joined(fresh: Any, stored: Any) -> Any:
    """Merges the saved state of a scheduler into the state of a new scheduler, and returns the result.

    Saved values win. Nested dicts, and lists of equal length, are merged entry by entry.
    """
    if isinstance(fresh, Mapping) and isinstance(stored, Mapping):
        return {**fresh, **{key: joined(fresh.get(key), value) for key, value in stored.items()}}
    if isinstance(fresh, list) and isinstance(stored, list) and len(fresh) == len(stored):
        return [joined(*pair) for pair in zip(fresh, stored, strict=True)]
    found = from_finite(stored)
    return tuple(found) if isinstance(fresh, tuple) else found


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):  # ``schedule_state`` selects its entries key by key
        return all(isinstance(key, str) for key in value)
    return isinstance(value, _LEAVES)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return as_finite(value.item())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return schedule_state(value) if isinstance(value, Mapping) else as_finite(value)


TRAINING = (
    "optimizer", "scheduler", "ema", "gradient_clipping", "seed", "bf16", "fp16", "torch_autocast",
    "communication_data_type", "keep_fp32", "quantize_frozen", "wire", "zero_optimization.zero_quantized_weights",
    "zero_optimization.zero_quantized_gradients", "zero_optimization.zero_gradient_error_feedback",
)  # fmt: skip
"""Configuration keys on which the values of an update depend."""
RATES = ("scheduler", "optimizer")
"""Configuration sections on which learning rates depend."""
_REPLACED = frozenset({"optimizer.type", "optimizer.params"})
"""Keys that an optimizer from code replaces."""


def changed_settings(
    before: Mapping[str, Any], now: Mapping[str, Any], own_optimizer: bool, among: Sequence[str] = TRAINING
) -> list[str]:
    """Returns a text for each setting that differs between two configurations, such as "optimizer.params.lr 0.001 ->
    0.002".

    A key that only one of them has is not compared.

    Args:
        before, now: the configurations as JSON.
        own_optimizer: True if the script passed an optimizer, so that the configured type and params are not compared.
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
    """Yields paths with their changes; a section with another ``type`` has other params, which are not compared."""
    if before == now:
        return
    if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
        yield at, f"{at} {_shown(before)} -> {_shown(now)}"
        return
    other = before.get("type") != now.get("type")
    for key in [key for key in before if key in now and not (other and key == "params")]:
        yield from _changes(before.get(key), now.get(key), join_path(at, key))


def _shown(value: Any) -> str:
    """Returns the text of a value; for a section with a type, the type."""
    return str(value["type"]) if isinstance(value, Mapping) and "type" in value else shown_value(value)


def _replaced(path: str) -> bool:
    return any(path == each or path.startswith(f"{each}.") for each in _REPLACED)


def kept_options(
    groups: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]], scheduled: frozenset[str]
) -> list[str]:
    """Returns a text for each optimizer option that a load has restored in place of the script's value.

    Args:
        groups: parameter groups after the load.
        before: the script's options of each group.
        scheduled: options that a schedule sets; they are not compared.
    """
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
