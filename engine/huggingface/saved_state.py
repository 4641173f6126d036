"""The state of a loop of the user's own on disk, by the calls of accelerate.

FOLDER/                        the host's own files: schedules, random state, registered objects
FOLDER/engine/step-N/          the engine's checkpoint, from which a run goes on on any grid
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from engine.errors import CheckpointError
from engine.huggingface.accelerator import EngineAccelerator, HostedScheduler

_STATE = "engine"
"""Folder of the engine's checkpoint inside one of the host's."""
_STEP = "accumulated"
"""Microbatches that the host has counted."""
_RANKS = "data_ranks"
"""Number of data ranks, in which the host's schedules count."""


class SavedState(EngineAccelerator):
    """An accelerator whose model and optimizer the engine saves and loads."""

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """The whole state on rank 0 and an empty dict on others, of the engine's model. Collective."""
        if self.hosted is None or model not in (self.hosted, self.hosted.module):
            return super().get_state_dict(model, unwrap)
        return self.trained.full_state_dict()

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """The host's files without weights and optimizer, which are in the engine's checkpoint beside them. Collective.

        Hooks are given no weights, as under DeepSpeed.
        """
        models, hooks = self._models, self._save_model_state_pre_hook
        with self._without_engine():
            folder = super().save_state(output_dir, safe_serialization, **kwargs)
        for hook in hooks.values():
            hook(models, [], folder)
        self.trained.save_checkpoint(Path(folder, _STATE), {_STEP: self.step, _RANKS: self.num_processes}).wait()
        return folder

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Go on from ``save_state``, saved on any grid. Collective.

        Raises:
            CheckpointError: the folder has no checkpoint of the engine.
        """
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            input_dir = _newest(Path(self.project_dir, "checkpoints"))
        if input_dir is not None and not Path(input_dir, _STATE).is_dir():
            raise CheckpointError(
                f"{input_dir} has no folder {_STATE!r} with the engine's state, from which training goes on; give a "
                "folder that save_state of this Accelerator has written."
            )
        models, hooks = self._models, self._load_model_state_pre_hook
        with self._without_engine():
            super().load_state(input_dir, load_kwargs, **kwargs)
        for hook in hooks.values():
            hook(models, input_dir)
        found: Any = self.trained.load_checkpoint(Path(str(input_dir), _STATE))
        self.step = found[_STEP]
        for each in self._schedulers:
            schedule = each.scheduler
            if isinstance(each, HostedScheduler):
                each.move_from(found.get(_RANKS, self.num_processes))
            for group, rate in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
                group["lr"] = rate

    @contextmanager
    def _without_engine(self) -> Iterator[None]:
        """Inside, the host knows neither model nor optimizer, which the engine saves and loads."""
        names = ("_models", "_optimizers", "_save_model_state_pre_hook", "_load_model_state_pre_hook")
        kept = {name: getattr(self, name) for name in names}
        for name, value in kept.items():
            setattr(self, name, type(value)())
        try:
            yield
        finally:
            for name, value in kept.items():
                setattr(self, name, value)


def _newest(folder: Path) -> str:
    """The checkpoint of the largest number in a folder that the host names by itself."""
    return str(max(folder.iterdir(), key=lambda each: int(each.name.rpartition("_")[2])))
