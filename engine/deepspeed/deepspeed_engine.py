"""DeepSpeed's engine object, implemented over Trine's engine."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from engine.checkpoint.format.filesystem import Files, replace_file
from engine.deepspeed.asked import AskedSettings, DeepSpeedMonitor, Throughput, Timers
from engine.deepspeed.engine_state import MicrobatchCount
from engine.deepspeed.missing import missing_attribute
from engine.deepspeed.returned import LastStep, returned_optimizer, returned_schedule
from engine.deepspeed.runtime.dataloader import loader_of_a_rank
from engine.deepspeed.scheduled import Scheduled, ScheduledMembers
from engine.deepspeed.utils.tensor_fragment import RepeatingLoader
from engine.deepspeed.utils.zero_to_fp32 import write_script, write_weights
from engine.engine import Engine
from engine.errors import EngineError
from engine.kernels.device import ACCELERATORS
from engine.parallel.comm.agreement import all_or_none

logger = logging.getLogger("trine")

_COUNTED = {"micro_steps", "client_state"}
"""Keys of the client state in a checkpoint of this class."""


class DeepSpeedEngine(ScheduledMembers, AskedSettings):
    """Engine with the methods and attributes of DeepSpeed's engine class, returned by ``deepspeed.initialize``.

    Attributes that it lacks are read from the model.
    """

    def __init__(
        self, engine: Engine, optimizer: Any, scheduler: Any, loader: DataLoader[Any] | None, scheduled: Scheduled,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:  # fmt: skip
        self.engine = engine
        self._scheduled = scheduled
        self.training_dataloader: Any = loader
        self._last = LastStep()
        self.optimizer: Any = returned_optimizer(engine, optimizer, self._last)
        self.lr_scheduler: Any = returned_schedule(engine, scheduler)
        self._items: Iterator[Any] | None = iter(RepeatingLoader(loader)) if loader is not None else None
        self._batch_fn: Callable[[Any], Any] | None = None
        self.collate_fn = collate_fn
        self.micro_steps = 0
        self._counted = MicrobatchCount(self.engine.config)
        self.tput_timer, self.timers, self.monitor = Throughput(), Timers(), DeepSpeedMonitor()
        self.at_end: list[Callable[[], None]] = []
        """Callbacks that ``destroy`` runs."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "engine" not in vars(self):
            raise AttributeError(name)
        try:
            return getattr(self.engine.module, name)
        except AttributeError:
            raise missing_attribute(self, self.engine.module, name) from None

    # ------------------------------------------------------------------ loop

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward of a microbatch; in training it adds the keyword arguments of the current step."""
        if self.module.training:
            args, kwargs = self._scheduled.call(args, kwargs, self.global_steps)
        return self.engine(*args, **kwargs)

    forward = __call__

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Runs the backward of one microbatch, and returns ``loss`` divided by ``gradient_accumulation_steps``.

        Gradients are averaged over the microbatches of a step. With ``scale_wrt_gas=False`` they are summed, and
        ``loss`` is returned unchanged.
        """
        steps = self.gradient_accumulation_steps()
        self.engine.backward(loss if scale_wrt_gas else loss * steps, retain_graph)
        self._counted.waiting += 1
        return loss / steps if scale_wrt_gas else loss

    def step(self, lr_kwargs: Any = None) -> None:
        """Ends a microbatch; after the last microbatch of a step, updates the weights.

        ``lr_kwargs`` has no effect.
        """
        self.micro_steps += 1
        self._counted.end_step()
        self._last.take(self.engine.step())

    def scale(self, loss: Tensor) -> Tensor:
        """Returns ``loss`` times the loss scale, for ``scale(loss).backward()``. The scale is 1 except in fp16 runs."""
        return self.engine.scale(loss)

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Runs one training step, and returns the mean loss of its microbatches as a 0-dim tensor. Collective.

        ``data_iter`` yields the microbatches of this data rank; None: the data passed to ``initialize`` or
        ``set_dataloader``.

        Raises:
            EngineError: there are no training data; or progressive layer drop or curriculum learning adds keyword
                arguments to forward, which this method cannot pass; call ``model_engine(...)``. A curriculum with a
                ``PipelineModule`` does not raise, and has no effect here.
        """
        self._scheduled.refuse_whole_steps()
        report = self.engine.train_batch(self._given(data_iter))
        self._last.take(report)
        self.micro_steps += self.gradient_accumulation_steps()
        self._counted.waiting = self.gradient_accumulation_steps()
        self._counted.end_step()
        return torch.tensor(report.loss, device=self.device)

    def eval_batch(
        self, data_iter: Iterator[Any], return_logits: bool = False, compute_loss: bool = True,
        reduce_output: str | None = "avg", bcast_loss: bool = True, num_micro_batches: int | None = None,
    ) -> Any:  # fmt: skip
        """Computes the mean loss of the next ``gradient_accumulation_steps`` microbatches of ``data_iter``, without an
        update. Collective.

        ``bcast_loss`` has no effect.

        Returns:
            The loss as a 0-dim tensor, equal on all ranks; (loss, output) with ``return_logits``; only the output if
                ``compute_loss`` is False. Rank 0 gets the model's output for all rows of rank 0; other ranks get None
                as output.

        Raises:
            EngineError: ``reduce_output`` is not "avg", or ``num_micro_batches`` differs from
                ``gradient_accumulation_steps``.
        """
        if reduce_output != "avg":
            raise EngineError(
                f"eval_batch(reduce_output={reduce_output!r}): the loss is always a mean; leave reduce_output out."
            )
        if num_micro_batches not in (None, steps := self.gradient_accumulation_steps()):
            raise EngineError(
                f"eval_batch(num_micro_batches={num_micro_batches}): a call reads the {steps} microbatches of a step; "
                "leave num_micro_batches out, and call eval_batch as often as needed."
            )
        if not return_logits and compute_loss:
            return torch.tensor(self.engine.eval_batch(self._given(data_iter)).loss, device=self.device)
        report, output = self.engine.eval_batch(self._given(data_iter), return_output=True)
        return (torch.tensor(report.loss, device=self.device), output) if compute_loss else output

    def _given(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        items = data_iter if data_iter is not None else self._items
        if items is None:
            raise EngineError("train_batch() has neither data_iter nor training_data; pass one of them.")
        return items if self._batch_fn is None else map(self._batch_fn, items)

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Makes ``train_batch`` read its microbatches from ``loader``, which restarts at its end."""
        self.training_dataloader, self._items = loader, iter(RepeatingLoader(loader))

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Makes ``train_batch`` read its microbatches from ``iterator``."""
        self.training_dataloader, self._items = None, iterator

    def deepspeed_io(
        self, dataset: Dataset[Any], batch_size: int | None = None, route: str = "train", pin_memory: bool = True,
        data_sampler: Sampler[Any] | None = None, collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:  # fmt: skip
        """Returns a DataLoader over this data rank's rows of ``dataset``, in microbatches.

        Args:
            batch_size: rows of a microbatch; None: the configured number.
            route: "train" shuffles the rows; "eval" and "predict" do not.
            pin_memory: True: copies batches to page-locked memory, if there is an accelerator.
            data_sampler: sampler that yields only this rank's rows, and ignores ``route``; None: torch's
                DistributedSampler, or no sampler for an iterable dataset, which must yield this rank's rows.
            collate_fn: callback that makes a batch from a list of rows; None: the function passed to ``initialize``.
            num_local_io_workers: number of reader processes; None: this process reads.
        """
        return loader_of_a_rank(
            dataset,
            self.engine.grid,
            batch_size or self.train_micro_batch_size_per_gpu(),
            collate_fn or self.collate_fn,
            route == "train",
            data_sampler,
            pin_memory=pin_memory and self.device.type in ACCELERATORS,
            num_workers=num_local_io_workers or 0,
        )

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Makes ``train_batch`` and ``eval_batch`` replace each microbatch by ``fn(microbatch)``."""
        self._batch_fn = fn

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Checks that ``train_batch_size`` equals the configured number of rows per step.

        Raises:
            EngineError: the two numbers differ.
        """
        self._refuse_size("train_batch_size", train_batch_size, self.train_batch_size())

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Checks that ``micro_batch_size`` equals the configured number of rows per microbatch.

        Raises:
            EngineError: the two numbers differ.
        """
        self._refuse_size("train_micro_batch_size_per_gpu", micro_batch_size, self.train_micro_batch_size_per_gpu())

    def _refuse_size(self, key: str, wanted: int, present: int) -> None:
        if wanted != present:
            raise EngineError(
                f"{key} {wanted} instead of {present}: the plan of a run is made for one size; save a checkpoint, and "
                "continue from it with an engine of that size."
            )

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Returns a context manager without effect."""
        return nullcontext()

    def zero_grad(self) -> None:
        """Drops the gradients accumulated since the last update."""
        self.engine.zero_grad()

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context manager in which ``backward`` does not reduce gradients over ranks; ``step`` reduces them
        later.

        With ZeRO 2 or 3 and ``zero_optimization.reduce`` set to "microbatch", gradients are still reduced.

        Raises:
            EngineError: the model is split into pipeline stages.
        """
        return self.engine.no_sync()

    def train(self, mode: bool = True) -> "DeepSpeedEngine":
        """Sets the model to training mode, or to evaluation mode if ``mode`` is False; returns this engine."""
        self.engine.module.train(mode)
        return self

    def eval(self) -> "DeepSpeedEngine":
        """Sets the model to evaluation mode; returns this engine."""
        return self.train(False)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Returns True if the next ``step`` updates the weights, and False if it only ends a microbatch."""
        return self.engine.is_gradient_accumulation_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Makes all later ``step`` calls update the weights if ``is_boundary`` is True, or only end a microbatch if
        False.
        """
        self.engine.set_gradient_accumulation_boundary(is_boundary)

    def was_step_applied(self) -> bool:
        """Returns True if the last ``step`` updated the weights; False if it only ended a microbatch or was skipped."""
        return self._last.applied

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(
        self, save_dir: str | os.PathLike[str], tag: str | int | None = None, client_state: Any = None,
        save_latest: bool = True, exclude_frozen_parameters: bool = False,
    ) -> bool:  # fmt: skip
        """Saves a checkpoint in the folder ``save_dir/tag``, and returns True. Collective.

        Args:
            tag: name of the folder; None: ``global_stepN`` after N steps.
            client_state: JSON value that ``load_checkpoint`` returns.
            save_latest: True: writes ``tag`` into the file ``save_dir/latest``.
        """
        if save_dir is None or not os.fspath(save_dir):
            raise EngineError(
                f"save_checkpoint was given save_dir {save_dir!r}, which names no folder; pass the path of the folder "
                "for the run's checkpoints."
            )
        tag = str(tag if tag is not None else f"global_step{self.global_steps}")
        counted = {"micro_steps": self.micro_steps, "client_state": client_state or {}} | self._counted.kept()
        self.engine.save_checkpoint(Path(save_dir, tag), counted, exclude_frozen_parameters).wait()
        with all_or_none(self.engine.comm, self.engine.device, f"could not write the files next to {tag}"):
            if self.global_rank == 0:
                write_script(Path(save_dir))
                if save_latest:
                    replace_file(Files(), Path(save_dir, "latest"), tag.encode())
        return True

    def load_checkpoint(
        self, load_dir: str | os.PathLike[str], tag: str | int | None = None, load_module_strict: bool = True,
        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True, load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:  # fmt: skip
        """Loads the checkpoint ``load_dir/tag``, saved by this engine or by DeepSpeed. Collective.

        ``tag=None``: the tag in the file ``latest`` or ``latest_universal`` of ``load_dir``. Without
        ``load_module_strict``, parameters that the checkpoint lacks are unchanged; with it, they raise an error.
        ``load_module_only`` loads only weights and buffers.

        Returns:
            (folder of the checkpoint, ``client_state`` of ``save_checkpoint``), or (None, None) if ``tag`` is None and
                both files are missing.

        Raises:
            EngineError: ``custom_load_fn`` is passed.
        """
        _refuse_load_fn("load_checkpoint", custom_load_fn)
        hints = (Path(load_dir, name) for name in ("latest", "latest_universal"))
        latest = next((path for path in hints if path.is_file()), None)
        if tag is None and latest is None:
            return None, None
        folder = Path(
            load_dir, str(tag) if latest is None or tag is not None else latest.read_text(encoding="utf-8").strip()
        )
        found = self.engine.load_checkpoint(
            folder,
            load_module_only=load_module_only,
            load_optimizer_states=load_optimizer_states,
            strict=load_module_strict,
            load_lr_scheduler_states=load_lr_scheduler_states,
        )
        self._counted.restore(found, self.global_steps)
        if found.keys() - {MicrobatchCount.KEY} != _COUNTED:  # DeepSpeed's own checkpoint does not count microbatches
            self.micro_steps = self.global_steps * self.gradient_accumulation_steps()
            return str(folder), dict(found.items())
        self.micro_steps = found["micro_steps"]
        return str(folder), found["client_state"]

    def save_16bit_model(
        self, save_dir: str | os.PathLike[str], save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> bool:  # fmt: skip
        """Writes the full weights, in the model's dtypes, into the safetensors file ``save_dir/save_filename``; returns
        True.

        Collective; only rank 0 writes. The suffix of ``save_filename`` is replaced by ``.safetensors``.
        """
        weights = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        if self.global_rank == 0:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            write_weights(weights, Path(save_dir, save_filename).with_suffix(".safetensors"))
        return True

    save_fp16_model = save_16bit_model

    def module_state_dict(
        self, destination: Any = None, prefix: str = "", keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Returns the state dict of the whole model on rank 0, and an empty dict on other ranks. Collective.

        Raises:
            EngineError: ``destination``, ``prefix`` or ``keep_vars`` is passed.
        """
        if destination is not None or prefix or keep_vars:
            raise EngineError(
                "module_state_dict got destination, prefix or keep_vars, but it returns copies of the full weights by "
                "the model's own names; rename them in the result."
            )
        whole = self.engine.full_state_dict()
        named = self.engine.module.named_parameters(remove_duplicate=False)
        frozen = {name for name, parameter in named if exclude_frozen_parameters and not parameter.requires_grad}
        return {name: value for name, value in whole.items() if name not in frozen}

    def load_module_state_dict(
        self, state_dict: Mapping[str, Tensor], strict: bool = True, custom_load_fn: Any = None,
        fetch_z3_params: bool = False,
    ) -> None:  # fmt: skip
        """Copies full parameters and buffers from ``state_dict`` into the model. Collective.

        ``state_dict`` is read on rank 0. Without ``strict``, missing and unknown names are ignored.
        ``fetch_z3_params`` has no effect.

        Raises:
            EngineError: ``custom_load_fn`` is passed, or a tensor has another shape than in the model. With ``strict``,
                also if ``state_dict`` lacks a parameter or has unknown names.
        """
        _refuse_load_fn("load_module_state_dict", custom_load_fn)
        self.engine.load_full_state_dict(state_dict, strict)

    # ------------------------------------------------------------------ memory and compilation

    def offload_states(
        self,
        include: Iterable[object] | None = None,
        device: object = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Moves weights, gradients and optimizer state to host memory until ``reload_states`` is called.

        Args:
            include: state to move: "optim_states" (moments), "hp_params" (fp32 master weights), "lp_params"
                (parameters), "lp_grads" (gradients); None: all.
            device: "cpu", the only supported device.
            pin_memory: True: uses page-locked memory.
            non_blocking: True: copies may still run when the call returns.
        """
        self.engine.offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Moves state from host memory, where ``offload_states`` has put it, back to the device.

        With ``non_blocking``, copies may still run when the call returns; later work on the device waits for them.
        """
        self.engine.reload_states(non_blocking)

    def empty_partition_cache(self) -> None:
        """Does nothing, because gathered parameters are freed after each use."""

    @property
    def is_compiled(self) -> bool:
        """True if the model's blocks run under torch.compile."""
        return self.engine.config.compile

    def compile(self, *_: Any, **__: Any) -> None:
        """Does nothing if ``compile`` is configured, because the model is then compiled already.

        Raises:
            EngineError: ``compile`` is not configured.
        """
        if not self.is_compiled:
            raise EngineError(
                'compile() was called after initialize, which has placed the model; set "compile": true in the config.'
            )

    def destroy(self) -> None:
        """Closes the engine: removes its hooks from the model, and ends its process groups."""
        self.engine.close()
        while self.at_end:
            self.at_end.pop()()


def _refuse_load_fn(call: str, custom_load_fn: Any) -> None:
    if custom_load_fn is not None:
        raise EngineError(
            f"{call} was given custom_load_fn, but the engine loads each weight only into the parameter with the same "
            "name; rename the weights in a dict, and pass the dict to load_module_state_dict without custom_load_fn."
        )
