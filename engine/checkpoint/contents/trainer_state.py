"""What of a checkpoint goes on without a model: counters, registered objects, random generators.

States of the random generators that user code draws from, as bytes.

The engine's own randomness is keyed by seed and step and needs no state; a data loader that shuffles or augments
with the global generators does.

The state of a torch learning-rate scheduler as JSON: counters and rates, those of schedulers in it too.
"""

import json
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from engine.checkpoint.format.host_image import as_tensor
from engine.checkpoint.format.step_reader import StepReader
from engine.checkpoint.format.strict_json import Fields
from engine.errors import CheckpointError
from engine.parallel.grid import Grid
from engine.parallel.model.rng_streams import generators_of
from engine.step.update import Update

logger = logging.getLogger("trine")


@runtime_checkable
class Stateful(Protocol):
    """What can be registered for checkpointing; its state is JSON, the same on every rank."""

    def state_dict(self) -> Mapping[str, Any]:
        """What ``load_state_dict`` takes."""

    def load_state_dict(self, state: Any) -> Any:
        """Go on from there."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """How far a run is. It is restored when a load is asked for, even where the model waits for its first batch: that
    batch is drawn from a sampler, with generators, which have to be at their places by then."""

    update: Update
    tracked: Mapping[str, Stateful]
    grid: Grid
    device: torch.device

    def check(self, reader: StepReader) -> None:
        """Refuse a checkpoint that lacks what is registered; warn of what would be left behind.

        Raises:
            CheckpointError: names the first that is missing.
        """
        stored = Fields(reader.manifest.progress, str(reader.step)).object("tracked")
        missing = next((name for name in self.tracked if name not in stored), None)
        if missing is not None:
            raise CheckpointError(
                f"{reader.step} has nothing of {missing!r}, which is registered for checkpointing; register it under "
                "the name it was saved by, or load with load_module_only=True."
            )
        left = next((name for name in stored if name not in self.tracked), None)
        if left is not None and self.grid.rank == 0:
            logger.warning(
                "%s has the state of %r, which is not registered and starts anew; register it for checkpointing before "
                "load_checkpoint",
                reader.step,
                left,
            )

    def restore(self, reader: StepReader) -> dict[str, torch.Tensor]:
        """Go on from there; gives what was this rank's alone, see ``own_states``."""
        manifest = reader.manifest
        self.update.load_state_dict(_counters(manifest.progress["update"]))
        if self.update.made != manifest.step:
            raise CheckpointError(f"{reader.step} is damaged: step {manifest.step} after {self.update.made} updates.")
        for name, thing in self.tracked.items():
            thing.load_state_dict(reader.manifest.progress["tracked"][name])
        states = own_states(reader, self.grid)
        if states:
            restore_random_states(states, self.device)
        return states


def _counters(state: Any) -> dict[str, Any]:
    """The state of :class:`Update` as a checkpoint has it, checked.

    Raises:
        CheckpointError: a counter is missing or is no count.
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


def own_states(reader: StepReader, grid: Grid) -> dict[str, torch.Tensor]:
    """What was this rank's alone; empty on another grid, which has nobody's place."""
    saved = reader.manifest.info["grid"]
    if (grid.dp, grid.tp, grid.pp) != (saved["dp"], saved["tp"], saved["pp"]):
        return {}
    file = f"state/rank-{grid.rank:05d}.safetensors"
    found = reader.tensors_of(file)
    if not found:
        raise CheckpointError(f"{reader.step / file} holds no states of random generators; it is damaged.")
    return {key: as_tensor(data, kind) for key, (kind, data) in found.items()}


def random_states(device: torch.device) -> dict[str, Tensor]:
    """uint8 tensors: torch's generators, Python's, NumPy's global one."""
    states = {f"torch/{index}": generator.get_state() for index, generator in enumerate(generators_of(device))}
    states["python"] = _bytes(random.getstate())
    legacy: Any = np.random.get_state(legacy=False)
    inner = legacy["state"] | {"key": legacy["state"]["key"].tolist()}
    states["numpy"] = _bytes(legacy | {"state": inner})
    return states


def restore_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """The inverse, for as many generators as there were."""
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
