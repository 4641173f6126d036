"""The members of DeepSpeed's engine object, each over one of Trine's engine."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from engine.deepspeed import comm
from engine.deepspeed.asked import AskedSettings, DeepSpeedMonitor, Throughput, Timers
from engine.deepspeed.engine_state import MicrobatchCount
from engine.deepspeed.missing import missing_attribute
from engine.deepspeed.returned import LastStep, returned_optimizer, returned_schedule
from engine.deepspeed.runtime.dataloader import loader_of_a_rank
from engine.deepspeed.scheduled import Scheduled, ScheduledMembers
from engine.deepspeed.utils.tensor_fragment import RepeatingLoader
from engine.deepspeed.utils.zero_to_fp32 import write_script
from engine.engine import Engine
from engine.errors import EngineError
from engine.kernels.device import ACCELERATORS

logger = logging.getLogger("trine")

_COUNTED = {"micro_steps", "client_state"}
"""What a checkpoint of this class has as client state."""


class DeepSpeedEngine(ScheduledMembers, AskedSettings):
    """What ``deepspeed.initialize`` returns first; attributes that it lacks are the model's."""

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
        """Calls of ``destroy``."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "engine" not in vars(self):
            raise AttributeError(name)
        try:
            return getattr(self.engine.module, name)
        except AttributeError:
            raise missing_attribute(self, self.engine.module, name) from None

    # ------------------------------------------------------------------ loop

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of a microbatch; in training with the keyword arguments that follow the step."""
        if self.module.training:
            args, kwargs = self._scheduled.call(args, kwargs, self.global_steps)
        return self.engine(*args, **kwargs)

    forward = __call__

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Backward; returns the loss divided by the accumulation, which is this microbatch's part of the step.

        With ``scale_wrt_gas`` False, nothing is divided: the gradient is summed over the microbatches of a step.
        """
        steps = self.gradient_accumulation_steps()
        self.engine.backward(loss if scale_wrt_gas else loss * steps, retain_graph)
        self._counted.waiting += 1
        return loss / steps if scale_wrt_gas else loss

    def step(self, lr_kwargs: Any = None) -> None:
        """Update at the end of an accumulation, else nothing."""
        self.micro_steps += 1
        self._counted.end_step()
        self._last.take(self.engine.step())

    def scale(self, loss: Tensor) -> Tensor:
        """The loss, scaled for a backward of one's own."""
        return self.engine.scale(loss)

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """A step over the microbatches of ``data_iter`` (default: of the training data); the mean loss."""
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
        """The mean loss over as many microbatches as a step has; with ``return_logits`` (loss, outputs).

        Without ``compute_loss``, the outputs. Every rank has them: ``bcast_loss`` changes nothing.

        Raises:
            EngineError: another reduction than the mean, or another number of microbatches.
        """
        if reduce_output != "avg":
            raise EngineError(f"eval_batch(reduce_output={reduce_output!r}): the loss is a mean here; leave it out.")
        if num_micro_batches not in (None, steps := self.gradient_accumulation_steps()):
            raise EngineError(
                f"eval_batch(num_micro_batches={num_micro_batches}): a call takes the {steps} microbatches of a step; "
                "call it as often as needed."
            )
        if not return_logits and compute_loss:
            return torch.tensor(self.engine.eval_batch(self._given(data_iter)).loss, device=self.device)
        report, output = self.engine.eval_batch(self._given(data_iter), return_output=True)
        return (torch.tensor(report.loss, device=self.device), output) if compute_loss else output

    def _given(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        items = data_iter if data_iter is not None else self._items
        if items is None:
            raise EngineError("train_batch() without data_iter and without training_data; give one of them.")
        return items if self._batch_fn is None else map(self._batch_fn, items)

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """The microbatches of ``train_batch`` from now on, from the start again at the end."""
        self.training_dataloader, self._items = loader, iter(RepeatingLoader(loader))

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """The microbatches of ``train_batch`` from now on."""
        self.training_dataloader, self._items = None, iterator

    def deepspeed_io(
        self, dataset: Dataset[Any], batch_size: int | None = None, route: str = "train", pin_memory: bool = True,
        data_sampler: Sampler[Any] | None = None, collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:  # fmt: skip
        """A loader of this data rank's rows of ``dataset``, in microbatches.

        Args:
            route: "train" shuffles the rows; "eval" and "predict" keep their order.
            data_sampler: rows of this rank, in place of the loader's own.
            num_local_io_workers: processes that read; None: this one reads.
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
        """Apply ``fn`` to each microbatch of ``train_batch`` and ``eval_batch``."""
        self._batch_fn = fn

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Refused, unless it is the size that the run has.

        Raises:
            EngineError: the plan holds for one size.
        """
        self._refuse_size("train_batch_size", train_batch_size, self.train_batch_size())

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Refused, unless it is the size that the run has.

        Raises:
            EngineError: the plan holds for one size.
        """
        self._refuse_size("train_micro_batch_size_per_gpu", micro_batch_size, self.train_micro_batch_size_per_gpu())

    def _refuse_size(self, key: str, wanted: int, present: int) -> None:
        if wanted != present:
            raise EngineError(
                f"{key} {wanted} instead of {present}: the plan of a run holds for one size; save a checkpoint, and go "
                "on from it with an engine of that size."
            )

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Several backwards inside are reduced together, which the engine does anyway."""
        return nullcontext()

    def zero_grad(self) -> None:
        """Drop the gradients of an unfinished step."""
        self.engine.zero_grad()

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backwards reduce nothing."""
        return self.engine.no_sync()

    def train(self, mode: bool = True) -> "DeepSpeedEngine":
        """Training mode of the model."""
        self.engine.module.train(mode)
        return self

    def eval(self) -> "DeepSpeedEngine":
        """Evaluation mode of the model."""
        return self.train(False)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next step updates."""
        return self.engine.is_gradient_accumulation_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide whether the next steps update."""
        self.engine.set_gradient_accumulation_boundary(is_boundary)

    def was_step_applied(self) -> bool:
        """Whether the last step made an update."""
        return self._last.applied

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(
        self, save_dir: str | os.PathLike[str], tag: str | int | None = None, client_state: Any = None,
        save_latest: bool = True, exclude_frozen_parameters: bool = False,
    ) -> bool:  # fmt: skip
        """Save into ``save_dir/tag``, and name the tag in ``save_dir/latest``; it is written at the end. Collective."""
        if save_dir is None or not os.fspath(save_dir):
            raise EngineError(f"save_checkpoint was given save_dir {save_dir!r}; give the folder of the run.")
        tag = str(tag if tag is not None else f"global_step{self.global_steps}")
        counted = {"micro_steps": self.micro_steps, "client_state": client_state or {}} | self._counted.kept()
        self.engine.save_checkpoint(Path(save_dir, tag), counted, exclude_frozen_parameters).wait()
        if save_latest and self.global_rank == 0:
            Path(save_dir, "latest").write_text(tag, encoding="utf-8")
        if self.global_rank == 0:
            write_script(Path(save_dir))
        comm.wait_for_all()
        return True

    def load_checkpoint(
        self, load_dir: str | os.PathLike[str], tag: str | int | None = None, load_module_strict: bool = True,
        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True, load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:  # fmt: skip
        """Continue from a checkpoint, also one of DeepSpeed's: (its folder, client state).

        (None, None) if ``load_dir`` has no ``latest``.

        Raises:
            EngineError: ``custom_load_fn``.
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
        """Write the whole model's weights into one safetensors file, whatever ending the name has. Collective."""
        weights = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        if self.global_rank == 0:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            apart = {name: value.clone() for name, value in weights.items()}  # tied weights share memory
            save_file(apart, Path(save_dir, save_filename).with_suffix(".safetensors"))
        return True

    save_fp16_model = save_16bit_model

    def module_state_dict(
        self, destination: Any = None, prefix: str = "", keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Tensor]:  # fmt: skip
        """The whole model on rank 0, an empty dict on others. Collective.

        Raises:
            EngineError: one of the first three arguments, of which torch's ``state_dict`` makes use.
        """
        if destination is not None or prefix or keep_vars:
            raise EngineError(
                "module_state_dict with destination, prefix or keep_vars: it gives copies of the whole weights by the "
                "model's own names; rename them in what it returns."
            )
        whole = self.engine.full_state_dict()
        named = self.engine.module.named_parameters(remove_duplicate=False)
        frozen = {name for name, parameter in named if exclude_frozen_parameters and not parameter.requires_grad}
        return {name: value for name, value in whole.items() if name not in frozen}

    def load_module_state_dict(
        self, state_dict: Mapping[str, Tensor], strict: bool = True, custom_load_fn: Any = None,
        fetch_z3_params: bool = False,
    ) -> None:  # fmt: skip
        """Write the model's weights and buffers. Collective; every rank passes whole values.

        Raises:
            EngineError: ``strict``, and names differ; ``custom_load_fn``.
        """
        _refuse_load_fn("load_module_state_dict", custom_load_fn)
        with self.engine.full_parameters() as parameters, torch.no_grad():
            known = dict(self.engine.module.named_parameters(remove_duplicate=False)) | dict(parameters)
            missing, other = sorted(known.keys() - state_dict.keys()), sorted(state_dict.keys() - known.keys())
            buffers = dict(self.engine.module.named_buffers())
            other = [name for name in other if name not in buffers]
            if strict and (missing or other):
                raise EngineError(
                    f"load_module_state_dict: the state lacks {missing[:3]} and has {other[:3]} beside the model's; "
                    "pass the state of this model, or strict=False."
                )
            for name, value in (known | buffers).items():
                if name in state_dict:
                    value.copy_(state_dict[name])

    # ------------------------------------------------------------------ memory and compilation

    def offload_states(
        self,
        include: Iterable[object] | None = None,
        device: object = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move state to host memory until ``reload_states``, at every stage; see :meth:`Engine.offload_states`."""
        self.engine.offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what ``offload_states`` has moved."""
        self.engine.reload_states(non_blocking)

    def empty_partition_cache(self) -> None:
        """Nothing: gathered parameters are freed after their use."""

    @property
    def is_compiled(self) -> bool:
        """Whether blocks run under torch.compile."""
        return self.engine.config.compile

    def compile(self, *_: Any, **__: Any) -> None:
        """Refused, unless the configuration has compiled the model's blocks.

        Raises:
            EngineError: the model is placed already.
        """
        if not self.is_compiled:
            raise EngineError(
                'compile() after initialize, when the model is placed; give "compile": true in the config.'
            )

    def destroy(self) -> None:
        """End the engine; the module may then be given to ``initialize`` again."""
        self.engine.close()
        while self.at_end:
            self.at_end.pop()()


def _refuse_load_fn(call: str, custom_load_fn: Any) -> None:
    if custom_load_fn is not None:
        raise EngineError(
            f"{call}(custom_load_fn=...): weights are read into their places by name; read the file yourself, and pass "
            "the renamed weights to load_module_state_dict."
        )
