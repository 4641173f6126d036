"""State of one rank that checkpoints save and load.

wait for the previous save -> copy this rank's state -> in the background: write, commit, delete old checkpoints
"""

import json
import logging
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from engine.checkpoint.contents.local_tensors import LocalTensors, ModelTensor, SaveOwnership, model_tensors
from engine.checkpoint.contents.optimizer_state import describe_optimizer, moments_by_bucket, parameter_scalars
from engine.checkpoint.contents.snapshot import Contents, Ours
from engine.checkpoint.contents.trainer_state import TrainerState, random_states, schedule_state
from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.host_image import kind_of
from engine.checkpoint.format.safetensors_file import DTYPES
from engine.checkpoint.format.step_folders import FolderLocks
from engine.checkpoint.full_state import FullState
from engine.checkpoint.huggingface import with_dtype
from engine.checkpoint.published_keys import published_parts
from engine.config import Config
from engine.errors import CheckpointError
from engine.parallel.comm.comm import Comm
from engine.step.parts import StepPart
from engine.step.runtime import RankRuntime
from engine.zero.optim.master_weights import sync_masters

logger = logging.getLogger("trine")

_DEPTH = 100
"""Levels of a state that are searched for invalid keys; real states have fewer."""
WORTH_A_LINE = 0.1
"""Seconds from which waiting for the previous save is logged."""


@dataclass(frozen=True)
class RunState:
    """Model, optimizer and counters of an engine on one rank, for a save to read and a load to write."""

    model: nn.Module
    config: Config
    comm: Comm
    device: torch.device
    trainer_state: TrainerState
    runtime: RankRuntime
    full_state: FullState
    model_files: Mapping[str, bytes]
    """Contents of files of ``model/`` without tensors, such as "config.json", by name."""
    files: Files = field(default_factory=Files)
    locks: FolderLocks = field(default_factory=FolderLocks)

    @cached_property
    def ownership(self) -> SaveOwnership:
        """Assignment of the parameters' elements to the ranks that save them."""
        return SaveOwnership(self.runtime.plan)

    @cached_property
    def keys(self) -> dict[str, list[str]]:
        """Keys of each parameter and persistent buffer in ``model.state_dict()``, by name ("param/..." or
        "buffer/..."). A tied parameter has several keys; checkpoints use the first of them.
        """
        keys: dict[str, list[str]] = {f"param/{row.name}": [] for row in self.runtime.plan.table}
        for key, entry in self.full_state.entries.items():
            if entry.kind in ("parameter", "buffer"):
                folder = "param" if entry.kind == "parameter" else "buffer"
                keys.setdefault(f"{folder}/{entry.name}", []).append(key)
        return {name: given or [name.partition("/")[2]] for name, given in keys.items()}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Persistent buffers of the model on this rank, by name ("buffer/...")."""
        live = dict(self.model.named_buffers())
        return {name: live[name.partition("/")[2]] for name in self.keys if name.startswith("buffer/")}

    @cached_property
    def tensors(self) -> tuple[ModelTensor, ...]:
        """All parameters and persistent buffers, each with the rank that writes it into a checkpoint's folder
        ``model/``; equal on all ranks.
        """
        parameters = {n.partition("/")[2]: given[0] for n, given in self.keys.items() if n.startswith("param/")}
        kinds = {name: (self.keys[name][0], kind_of(buffer)) for name, buffer in self.buffers.items()}
        found = model_tensors(self.ownership, parameters, {n.partition("/")[2]: kind for n, kind in kinds.items()})
        parts = published_parts(self.model, {one.key: one.kind.shape for one in found})  # {} with adapters
        return tuple(replace(one, parts=parts.get(one.key, ())) for one in found)

    @cached_property
    def stored(self) -> tuple[ModelTensor, ...]:
        """Parameters and buffers that a checkpoint stores. Frozen parameters are left out if ``checkpoint.frozen`` is
        false.
        """
        return self.tensors if self.config.checkpoint.frozen else self.trained

    @cached_property
    def trained(self) -> tuple[ModelTensor, ...]:
        """Trainable parameters, and buffers."""
        return tuple(tensor for tensor in self.tensors if tensor.row is None or tensor.row.trainable)

    @property
    def local_tensors(self) -> LocalTensors:
        """Views of this rank's live weights, fp32 master weights and optimizer state."""
        return LocalTensors(self.ownership, self.comm.grid.coord(), self.runtime.inventory)

    @property
    def residuals(self) -> dict[str, Tensor]:
        """Rounding errors of this rank's quantized gradients, by name ("residual/..."). Later gradients include
        them.
        """
        return {f"residual/{name}": residual for name, residual in self.runtime.reducer.residuals.items()}

    def own_state(self) -> dict[str, Tensor]:
        """Returns the tensors that only this rank has, by name, such as states of random generators."""
        parts = self.runtime.parts.having(StepPart.state)
        states = {name: tensor for part in parts for name, tensor in part.state().items()}
        return random_states(self.device) | states | self.residuals

    def ours(self, weights_only: bool = False) -> Ours:
        """Returns the state that this rank contributes to a save, as views of the live tensors. ``weights_only``: True
        for weights and buffers alone.
        """
        for flat in self.runtime.buckets:
            sync_masters(flat)
        local_tensors = self.local_tensors
        weights = [*local_tensors.weights()]
        if weights_only:
            return Ours(weights, self.buffers, pieces=(), state={}, numbers={})
        moments = local_tensors.state(moments_by_bucket(self.runtime.optimizer))
        apart = [held for each in self.runtime.optimizer.whole for held in local_tensors.apart(each)]
        pieces = [*local_tensors.masters(), *moments, *apart, *local_tensors.companions()]
        numbers = parameter_scalars(self.runtime.optimizer, self.runtime.plan.table)
        return Ours(weights, self.buffers, pieces, self.own_state(), numbers)

    def contents(self, user: Any, tensors: tuple[ModelTensor, ...]) -> Contents:
        """Returns the metadata of a checkpoint of ``tensors``, with ``user`` as its ``client_state``."""
        scheduler = self.runtime.learning_rate.scheduler
        progress = {
            "update": self.trainer_state.update.state_dict(),
            "scheduler": schedule_state(scheduler.state_dict()) if scheduler is not None else None,
            "tracked": {
                name: _json(f"state of {name!r}", thing.state_dict())
                for name, thing in self.trainer_state.tracked.items()
            },
        }
        names = {name: given for name, given in self.keys.items() if len(given) > 1}
        return Contents(
            step=self.trainer_state.update.made,
            aliases={other: given[0] for given in names.values() for other in given[1:]},
            info=self._info(tensors == self.tensors),
            progress=progress,
            optimizer=describe_optimizer(
                self.runtime.optimizer, self.runtime.plan.table, self.runtime.learning_rate.governs
            ),
            user=_json("client_state", user),
            model_files=with_dtype(self.model_files if tensors == self.tensors else {}, self.dtype()),
        )

    def _info(self, whole: bool) -> dict[str, Any]:
        grid, config = self.comm.grid, self.config.to_json()
        config["checkpoint"]["frozen"] &= whole  # a load then expects no frozen parameter
        return {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
            "grid": {
                **grid.sizes,
                "ep": grid.experts,
                "order": grid.order,
                "zero": self.config.zero_optimization.stage,
            },
            "places": self.runtime.plan.places,
            "config": config,
        }

    def dtype(self) -> str:
        """Returns the most frequent dtype of the model's tensors, by bytes, as a torch name such as "bfloat16"."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors:
            sizes[tensor.kind.dtype] = sizes.get(tensor.kind.dtype, 0) + tensor.kind.bytes
        return DTYPES[max(sizes, key=lambda code: sizes[code])] if sizes else "float32"


def _other_key(value: Any, depth: int = 0) -> tuple[Any] | None:
    """Returns a key that is no string, alone in a tuple, or None; JSON itself refuses deeper nesting."""
    if depth > _DEPTH:
        return None
    if isinstance(value, Mapping):
        if others := [key for key in iter(value.keys()) if not isinstance(key, str)]:
            return (others[0],)
        value = value.values()
    elif not isinstance(value, list | tuple):
        return None
    return next((found for each in value if (found := _other_key(each, depth + 1)) is not None), None)


def _json(what: str, value: Any) -> Any:
    """Returns a copy in JSON types, so that the caller may change the original while it is written.

    Raises:
        CheckpointError: the value cannot be expressed in JSON, whose keys are strings.
    """
    if (key := _other_key(value)) is not None:
        raise CheckpointError(
            f"the {what} has the key {key[0]!r} ({type(key[0]).__name__}), but keys are strings in JSON; use "
            "a string, or a list of pairs in place of the dict."
        )
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the {what} cannot be saved as JSON: {error}; use dicts, lists, strings and finite numbers."
        ) from error
