"""What of a checkpoint goes on without a model: counters, registered objects, random generators."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from engine.checkpoint.image import as_tensor
from engine.checkpoint.json_text import Fields
from engine.checkpoint.random_state import restore_random_states
from engine.checkpoint.reader import StepReader
from engine.errors import CheckpointError
from engine.parallel.grid import Grid
from engine.update import Update

logger = logging.getLogger("trine")


@runtime_checkable
class Stateful(Protocol):
    """What can be registered for checkpointing; its state is JSON, the same on every rank."""

    def state_dict(self) -> Mapping[str, Any]:
        """What ``load_state_dict`` takes."""

    def load_state_dict(self, state: Any) -> Any:
        """Go on from there."""


@dataclass(frozen=True, slots=True)
class Progress:
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
        self.update.load_state_dict(manifest.progress["update"])
        if self.update.made != manifest.step:
            raise CheckpointError(f"{reader.step} is damaged: step {manifest.step} after {self.update.made} updates.")
        for name, thing in self.tracked.items():
            thing.load_state_dict(reader.manifest.progress["tracked"][name])
        states = own_states(reader, self.grid)
        if states:
            restore_random_states(states, self.device)
        return states


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
