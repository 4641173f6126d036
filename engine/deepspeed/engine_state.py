"""Attributes of DeepSpeed's engine object: ranks, batch sizes, counters, learning rates."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from engine.config import Config
from engine.deepspeed import comm
from engine.deepspeed.returned import LastStep
from engine.deepspeed.runtime.pipe.topology import PipelineParallelGrid
from engine.engine import Engine
from engine.errors import EngineError
from engine.parallel.comm.launcher import local_rank


class MicrobatchCount:
    """Counter of the microbatches of all steps so far."""

    KEY = "microbatches"

    def __init__(self, config: Config) -> None:
        self._steps = config.accumulation or 1
        self.waiting = 0
        """Backwards since the last step."""
        self.taken = None if config.managed_gradient_accumulation else 0
        """Microbatches of all steps; None: each step has the same number."""

    def end_step(self) -> None:
        """Increases the count by the number of backwards since the last call of this method."""
        if self.taken is not None:
            self.taken += self.waiting
        self.waiting = 0

    def kept(self) -> dict[str, int]:
        """Returns {"microbatches": count} for a checkpoint; {} if each step has the configured number of them."""
        return {} if self.taken is None else {self.KEY: self.taken}

    def restore(self, found: Mapping[str, Any], steps: int) -> None:
        """Restores the count of microbatches from ``found``, the client state of a checkpoint, in which the saved run
        stored the result of :meth:`kept`.

        If ``found`` has no count, the count is ``steps`` times the configured number of microbatches.
        """
        if self.taken is not None:
            self.taken = int(found.get(self.KEY, steps * self._steps))


class EngineState:
    """Base class of ``DeepSpeedEngine`` with getters of ranks, batch sizes, counters and learning rates."""

    engine: Engine
    optimizer: Any
    _last: LastStep
    _counted: MicrobatchCount

    @property
    def module(self) -> nn.Module:
        """User's model, with its parameters sharded in place."""
        return self.engine.module

    @property
    def device(self) -> torch.device:
        """Device of this rank's parameters."""
        return self.engine.device

    @property
    def config(self) -> dict[str, Any]:
        """Configuration of the engine as a dict of JSON values, with all defaults."""
        return dict(self.engine.config.to_json())

    @property
    def global_rank(self) -> int:
        """Rank of this process among all processes, from 0."""
        return self.engine.grid.rank

    @property
    def local_rank(self) -> int:
        """Rank of this process on its node, from 0."""
        return local_rank(os.environ, self.global_rank)

    @property
    def world_size(self) -> int:
        """Number of processes of the job."""
        return self.engine.grid.world_size

    @property
    def dp_world_size(self) -> int:
        """Number of ranks on the data axis."""
        return self.engine.grid.row_ranks

    @property
    def mp_world_size(self) -> int:
        """Number of ranks on the tensor axis."""
        return self.engine.grid.tp

    def get_data_parallel_rank(self) -> int:
        """Returns this rank's index on the data axis, from 0."""
        return self.engine.grid.row_rank

    def get_model_parallel_rank(self) -> int:
        """Returns this rank's index on the tensor axis, from 0."""
        return self.engine.grid.coord().tp

    get_tensor_parallel_rank = get_model_parallel_rank

    def get_pipeline_parallel_rank(self) -> int:
        """Returns this rank's index on the pipeline axis, from 0."""
        return self.engine.grid.coord().pp

    @property
    def global_steps(self) -> int:
        """Number of training steps so far, including steps skipped because of non-finite gradients."""
        return self.engine.step_count + self.engine.skipped_steps

    @property
    def global_samples(self) -> int:
        """Number of batch rows in all training steps so far, over all ranks."""
        if (taken := self._counted.taken) is None:
            return self.global_steps * self.train_batch_size()
        return taken * self.train_batch_size() // self.gradient_accumulation_steps()

    @property
    def skipped_steps(self) -> int:
        """Number of steps so far that were skipped because of non-finite gradients."""
        return self.engine.skipped_steps

    @property
    def cur_scale(self) -> float:
        """Loss scale of the next step; 1 except in an fp16 run."""
        return self.engine.loss_scale

    @property
    def loss_scale(self) -> float:
        """Loss scale of the next step; 1 except in an fp16 run."""
        return self.cur_scale

    def train_batch_size(self) -> int:
        """Returns the number of rows in a step, over all data ranks."""
        return self.engine.config.train_batch_size or 0

    def train_micro_batch_size_per_gpu(self) -> int:
        """Returns the number of rows that a data rank has in one microbatch."""
        return self.engine.config.micro or 0

    def gradient_accumulation_steps(self) -> int:
        """Returns the number of microbatches per data rank in a step."""
        return self.engine.config.accumulation or 0

    def get_batch_info(self) -> tuple[int, int, int]:
        """Returns (rows of a step, rows of a microbatch on a data rank, microbatches of a step on a data rank)."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def zero_optimization_stage(self) -> int:
        """Returns the ZeRO stage, 0 to 3."""
        return self.engine.config.zero_optimization.stage

    def zero_optimization(self) -> bool:
        """Returns True if ZeRO is on (stage 1 to 3)."""
        return self.zero_optimization_stage() > 0

    def fp16_enabled(self) -> bool:
        """Returns True if parameters are in fp16."""
        return self.engine.config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Returns True if parameters are in bf16."""
        return self.engine.config.bf16.enabled

    def gradient_clipping(self) -> float:
        """Returns the L2 norm to which larger gradients are clipped; 0: no clipping."""
        return self.engine.config.gradient_clipping

    def get_lr(self) -> list[float]:
        """Returns the learning rate of each parameter group; an empty list without an optimizer."""
        return [float(group["lr"]) for group in self._groups]

    def get_mom(self) -> list[Any]:
        """Returns the ``betas`` or else the ``momentum`` of each parameter group; None for a group without either."""
        return [group.get("betas", group.get("momentum")) for group in self._groups]

    def get_global_grad_norm(self) -> float | None:
        """Returns the L2 norm of the full gradient in the last step, before clipping; None before the first step."""
        return self._last.norm

    @property
    def data_parallel_group(self) -> Any:
        """torch.distributed group of all ranks; None in a single process.

        Raises:
            EngineError: there are tensor or pipeline ranks.
        """
        grid = self.engine.grid
        if grid.row_ranks != grid.world_size:
            raise EngineError(
                f"data_parallel_group was read on {grid}, but it exists only if every rank is a data rank; to sum a "
                'tensor over the data ranks, call eng.engine.comm.all_reduce(tensor, "dp", "my sum").wait().'
            )
        return comm.world_group()

    @property
    def grid(self) -> PipelineParallelGrid:
        """Object with the methods of DeepSpeed's ``mpu``: ranks on each parallel axis, and this rank's coordinates."""
        return PipelineParallelGrid(self.engine.grid)

    def is_first_stage(self) -> bool:
        """Returns True if this rank runs the first pipeline stage."""
        return self.engine.grid.coord().pp == 0

    def is_last_stage(self) -> bool:
        """Returns True if this rank runs the last pipeline stage."""
        return self.engine.grid.coord().pp == self.engine.grid.pp - 1

    def get_type(self) -> list[Any]:
        """Returns, for each parameter group, its value under the key "type", or None without this key."""
        return [group.get("type") for group in self._groups]

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else list(self.optimizer.param_groups)
