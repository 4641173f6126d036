"""``accelerate.Accelerator`` over an engine: the methods that the Trainer's loop and a user's own loop call.

gather, num_processes    of data ranks, because the ranks of a replica work on the same rows
backward                 eng.backward; the last backward of an accumulation carries the weight of the step
finish_step              eng.step, which clips and updates; its norm is then in ``grad_norm``
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, Self

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import gather_object, recursively_apply
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from engine.engine import Engine
from engine.errors import ConfigError, EngineError
from engine.hosting.hosted_model import HostedModel
from engine.kernels.device import is_host
from engine.parallel.comm.world import read_world
from engine.parallel.grid import Grid
from engine.reporting.step_report import StepReport


class EngineAccelerator(accelerate.Accelerator):  # type: ignore[misc]
    """``accelerate.Accelerator`` that runs backward, clipping and update on the engine.

    ``num_processes`` is the number of data ranks, and gathers take one value from each data rank: tensor and pipeline
    ranks that share rows are one data rank.
    """

    grid: Grid
    hosted: HostedModel | None
    """Module that the loop calls; None until the engine is made."""
    grad_norm: Tensor
    """L2 norm of the last step's gradient before clipping, 0-dim; NaN before the first step."""
    skipped: bool
    """True if the last step was skipped because of a non-finite gradient."""
    weighed: bool
    """True after the backward of this step that passes the loss weight."""
    whole_steps: bool
    """True if steps on a pipeline run by ``eng.train_batch``."""

    @classmethod
    def around(cls, host: accelerate.Accelerator, grid: Grid) -> Self:
        """Returns an EngineAccelerator for the ranks of ``grid``, with the attributes of ``host``, the accelerator of
        transformers' Trainer.

        Raises:
            ConfigError: ``host`` found another number of ranks or kind of device than the launcher.
        """
        made = cls.__new__(cls)
        made.__dict__.update(vars(host))
        made.begin(grid, "TrainingArguments", "use_cpu")
        return made

    def begin(self, grid: Grid, owner: str, on_cpus: str) -> None:
        """Binds the accelerator to ``grid``; the engine is made later.

        Args:
            grid: grid of ranks, with the position of this rank.
            owner: name, for errors, of the object that chose ranks and device, such as "TrainingArguments".
            on_cpus: name, for errors, of the setting of ``owner`` that selects CPUs, such as "use_cpu".

        Raises:
            ConfigError: accelerate found another number of ranks or kind of device than the launcher.
        """
        world = read_world()
        if world.size != self.state.num_processes:
            raise ConfigError(
                f"the launcher has started {world.size} rank(s), but {owner} found {self.state.num_processes} "
                f"process(es), and both numbers must be equal; on CPUs set {on_cpus}=True in {owner}, and on GPUs "
                "start the script with torchrun."
            )
        if is_host(world.device) != is_host(self.device):
            raise ConfigError(
                f"{owner} put the model on {self.device}, and the engine computes on {world.device}; remove {on_cpus}, "
                "or hide the other devices from the process."
            )
        self.grid, self.hosted, self.skipped, self.weighed = grid, None, False, False
        self.whole_steps = False
        self.grad_norm = torch.full((), math.nan, device=self.device)

    @property
    def trained(self) -> Engine:
        """Engine that trains the model.

        Raises:
            EngineError: neither training nor evaluation has begun.
        """
        if self.hosted is None:
            raise EngineError(
                "the engine was read before train() or evaluate(), which makes it; call one of them first."
            )
        return self.hosted.trained

    # ------------------------------------------------------------------ ranks

    @property
    def num_processes(self) -> int:
        """Number of data ranks; ranks that train on the same rows count as one."""
        return self.grid.row_ranks

    @property
    def process_index(self) -> int:
        """Index of this rank among the data ranks, from 0; equal on ranks that train on the same rows."""
        return self.grid.row_rank

    def gather(self, tensor: Any) -> Any:
        """Returns the tensors of all data ranks, concatenated along dim 0 in rank order, on every rank. All-gathers
        over the world.

        Args:
            tensor: a tensor, or a nested structure of tensors.
        """
        return recursively_apply(self._of_replicas, super().gather(tensor))

    def _of_replicas(self, gathered: Tensor) -> Tensor:
        if self.grid.size("replica") == 1:
            return gathered
        parts = gathered.chunk(self.grid.world_size)
        return torch.cat([parts[rank] for rank in self.grid.peers(self.grid.rows, 0)])

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Returns ``tensor`` reduced over the data ranks. All-reduces over the world; ranks with the same rows count
        once.

        Args:
            tensor: a tensor, or a nested structure of tensors.
            reduction: "sum", "mean" or "max"; "none": the sum over all ranks of the world.
            scale: has no effect.
        """
        reduced, copies = super().reduce(tensor, reduction, scale), self.grid.size("replica")
        if reduction != "sum" or copies == 1:
            return reduced
        return recursively_apply(lambda each: each / copies if each.is_floating_point() else each // copies, reduced)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Returns the rows of ``input_data`` from all data ranks, in rank order, on every rank.

        Rows that accelerate repeats to fill the last batch are dropped.

        Args:
            input_data: tensors, or a list of other objects.
            use_gather_object: True: tensors are pickled, as other objects are, so their shapes may differ between
                ranks.
        """
        if self.grid.size("replica") == 1 or not (use_gather_object or _has_others(input_data)):
            return super().gather_for_metrics(input_data, use_gather_object)
        rows = self.gather_objects(input_data)
        ends, remainder = self.gradient_state.end_of_dataloader, self.gradient_state.remainder
        return rows[:remainder] if ends and remainder > 0 else rows

    def gather_objects(self, objects: Sequence[Any]) -> list[Any]:
        """Returns one list of the elements of ``objects`` from all data ranks, in rank order, on every rank.
        All-gathers over the world.
        """
        gathered = gather_object([objects])
        return [each for rank in self.grid.peers(self.grid.rows, 0) for each in gathered[rank]]

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Returns a context manager that yields this rank's part of ``inputs``, if every rank is a data rank.

        Args:
            inputs: a list, tuple, dict of lists, or tensor.
            apply_padding: True: repeats the last element of ``inputs`` in shorter parts, up to the length of the
                longest.

        Raises:
            ConfigError: several ranks, such as tensor or pipeline ranks, work on the same rows.
        """
        if (copies := self.grid.size("replica")) > 1:
            raise ConfigError(
                f"split_between_processes would pass different inputs to the {copies} ranks of a replica, but these "
                "ranks need equal inputs; use inputs[accelerator.process_index :: accelerator.num_processes], because "
                "process_index counts replicas here, not ranks."
            )
        with super().split_between_processes(inputs, apply_padding) as part:
            yield part

    # ------------------------------------------------------------------ prepare

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Returns ``model``.

        With ``evaluation_mode``, a model that the engine does not train is first moved to this rank's device, unless
        ``device_placement`` is False.
        """
        placed = isinstance(model, HostedModel) or (self.hosted is not None and model is self.hosted.module)
        return model if placed or not evaluation_mode or device_placement is False else model.to(self.device)

    def prepare_data_loader(self, data_loader: DataLoader[Any], *args: Any, **kwargs: Any) -> Any:
        """Returns accelerate's wrapper of ``data_loader``, which yields the batches of this data rank."""
        start: Any = data_loader.worker_init_fn
        if isinstance(start, partial) and "rank" in start.keywords:
            ranked = start.keywords | {"rank": self.process_index}
            data_loader.worker_init_fn = partial(start.func, *start.args, **ranked)
        if self.grid.size("replica") > 1:
            self.dataloader_config.dispatch_batches = False  # rank 0 would send each rank different rows
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: Any = None) -> AcceleratedOptimizer:
        """Returns a wrapper of ``optimizer``; its ``step`` and ``zero_grad`` act on the engine."""
        if not isinstance(optimizer, HostedOptimizer):
            optimizer = HostedOptimizer(optimizer, self.finish_step, self.drop_gradients)
        if not any(each is optimizer for each in self._optimizers):
            self._optimizers.append(optimizer)
        return optimizer

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Returns the user's own module, which shares its parameters with the engine.

        A model that the engine does not train is unwrapped as accelerate does.
        """
        return model.module if isinstance(model, HostedModel) else super().unwrap_model(model, *args, **kwargs)

    # ------------------------------------------------------------------ a step

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Runs the backward of a microbatch's 0-dim ``loss`` on the engine; gradients add up until the step ends.

        Args:
            kwargs: ``retain_graph``, as in ``Tensor.backward``; others have no effect.
        """
        last = bool(self.sync_gradients)
        self.trained.set_gradient_accumulation_boundary(last)
        weight, self.weighed = float(last and not self.weighed), self.weighed or last
        self.trained.backward((loss, weight), bool(kwargs.get("retain_graph")))
        if not last:
            self.trained.step()

    def finish_step(self) -> bool:
        """Lets the engine clip gradients and update the weights, unless ``train_batch`` already has done so.

        Returns True if the update was skipped because of a non-finite gradient.
        """
        self.weighed = False
        if not self.whole_steps and (report := self.trained.step()) is not None:
            self.record(report)
        return self.skipped

    def drop_gradients(self) -> None:
        """Drops the gradients accumulated since the last update. Does nothing before the engine is made."""
        self.weighed = False
        if self.hosted is not None:
            self.hosted.zero_grad()

    def record(self, report: StepReport) -> None:
        """Stores ``grad_norm`` and ``skipped`` of ``report``. Reading a parameter's ``grad`` then raises an error until
        ``zero_grad`` is called.
        """
        self.grad_norm.fill_(report.grad_norm)
        self.skipped = report.skipped
        self.trained.guard_gradients()  # callbacks read gradients until zero_grad


class HostedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """accelerate's wrapper of an optimizer that the engine steps.

    Args:
        optimizer: the wrapped optimizer.
        update: callback of ``step``; clips and updates, and returns True if the update was skipped.
        drop: callback of ``zero_grad``; drops the engine's gradients.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, update: Callable[[], bool], drop: Callable[[], None]) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self._update, self._drop = update, drop

    def step(self, closure: Any = None) -> None:
        """Clips gradients and updates the weights after the last microbatch of a step; otherwise does nothing.

        ``closure`` has no effect.
        """
        if self.gradient_state.sync_gradients:
            self._is_overflow = self._update()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drops the engine's gradients after the last microbatch of a step; otherwise does nothing."""
        if self.gradient_state.sync_gradients:
            self._drop()


class HostedScheduler(AcceleratedScheduler):  # type: ignore[misc]
    """accelerate's wrapper of a learning-rate scheduler; after each update it makes ``data_ranks`` scheduler steps, one
    for each data rank.
    """

    data_ranks: int
    """Number of scheduler steps per update."""

    def __init__(self, scheduler: Any, optimizers: Any, linked: bool, split_batches: bool, data_ranks: int) -> None:
        super().__init__(scheduler, optimizers, linked, split_batches)
        self.data_ranks = data_ranks
        groups = scheduler.optimizer.param_groups
        self._begin = deepcopy(scheduler.state_dict()), [_scheduled(group) for group in groups]

    def move_from(self, data_ranks: int) -> None:
        """Multiplies a restored schedule's step number by this run's number of data ranks over ``data_ranks``, the
        number of the saved run.

        The step number is unchanged if the saved learning rate belongs to it, but not to the product.
        """
        schedule: Any = self.scheduler
        saved, rates = schedule.last_epoch, list(schedule.get_last_lr())
        if data_ranks == self.data_ranks or self.split_batches or not self.step_with_optimizer:
            return
        same_update = saved * self.data_ranks // data_ranks
        for steps in (same_update, saved):
            self._put(steps)
            if all(math.isclose(*pair, rel_tol=1e-6) for pair in zip(schedule.get_last_lr(), rates, strict=True)):
                return
        self._put(same_update)

    def _put(self, steps: int) -> None:
        """Moves the schedule to its state after ``steps`` steps."""
        schedule: Any = self.scheduler
        state, groups = self._begin
        for group, options in zip(schedule.optimizer.param_groups, groups, strict=True):
            group.update(options)
        schedule.load_state_dict(deepcopy(state))
        schedule.optimizer._opt_called = True  # silences torch's warning about steps without updates between them
        for _ in range(min(steps, getattr(schedule, "total_steps", steps)) - schedule.last_epoch):
            schedule.step()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Makes ``data_ranks`` scheduler steps after an update, and none after a skipped update or before a step's last
        microbatch.

        With accelerate's ``split_batches=True`` or ``step_scheduler_with_optimizer=False``, calls accelerate's ``step``
        instead.
        """
        if not self.step_with_optimizer or self.split_batches or not self.gradient_state.sync_gradients:
            super().step(*args, **kwargs)
        elif not any(each.step_was_skipped for each in self.optimizers):
            for _ in range(self.data_ranks):
                if self.scheduler._step_count <= getattr(self.scheduler, "total_steps", self.scheduler._step_count):
                    self.scheduler.step(*args, **kwargs)


def _scheduled(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a group that a scheduler changes."""
    return {name: group[name] for name in ("lr", "betas", "momentum") if name in group}


def _has_others(data: Any) -> bool:
    """Returns True if a leaf is no tensor."""
    return not all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(data))
