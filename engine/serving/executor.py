"""Executor: runs every command of the service on this rank, with the engines of its tenants.

Each rank has one; all run the same commands in one order, so the calls of the engines are collective. Errors of a
client are results; they are raised before any communication, equal on all ranks.
"""

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from engine.engine import Engine, ServedFunction
from engine.errors import ConfigError, EngineError, first_line
from engine.parallel.comm.agreement import take_from
from engine.parallel.grid import Grid
from engine.serving.commands import (
    Adapter,
    BackwardTensors,
    CallFunction,
    Command,
    CreateModel,
    DefineLoss,
    DropTicket,
    DropWeights,
    Failure,
    ForwardBackward,
    ForwardTensors,
    LoadWeights,
    OptimStep,
    PlainOutput,
    Result,
    SampleTokens,
    SaveWeights,
    UnloadModel,
)
from engine.serving.loss_graph import LossGraph
from engine.serving.losses import GoneError, ServedError
from engine.serving.sampling import sample
from engine.serving.tensor_calls import TensorCalls
from engine.serving.training import TenantTrainer
from engine.serving.vllm_samples import VllmSamples

logger = logging.getLogger("trine")

ABOUT = "served.json"
"""File that describes the tenant of saved weights, in their folder."""
SAMPLERS = 4
"""Number of saved weights that stay loaded for sampling."""
_LOSSES = 1024
"""Maximum number of uploaded losses."""


class EnginePool(Protocol):
    """Interface of a pool with one engine for each client's model. All ranks call its methods in the same order."""

    @property
    def base(self) -> Engine:
        """Engine of the base model."""

    def create(self, model_id: str, adapter: Adapter | None) -> Engine:
        """Creates the model ``model_id`` and returns its engine.

        With an ``adapter``, the model trains a LoRA adapter over the frozen base; with None, it trains all parameters.
        """

    def get(self, model_id: str) -> Engine:
        """Returns the engine of the model ``model_id``, after moving the model's state to the device if necessary."""

    def drop(self, model_id: str) -> None:
        """Removes the model ``model_id`` and frees its memory."""

    def close(self) -> None:
        """Closes the engines of all models and of the base."""


class CommandExecutor:
    """Executor of the service's commands on this rank, with the models of all clients.

    Args:
        pool: engines of the clients' models and of their base model.
        folder: folder of saved weights, shared by all ranks.
        functions: functions that clients call by name; arguments and results are tensors by name.
        staleness: maximum number of weight updates between a forward and its backward; a later backward fails.
        vllm: address of the vLLM server that samples from full-parameter models; None: the ranks sample.
    """

    def __init__(
        self,
        pool: EnginePool,
        folder: Path,
        functions: Mapping[str, ServedFunction] | None = None,
        staleness: int = 0,
        vllm: str | None = None,
    ) -> None:
        self._pool, self._folder = pool, folder
        self._served = VllmSamples(vllm, pool.base) if vllm is not None else None
        self._trainers: dict[str, TenantTrainer] = {}
        self._adapters: dict[str, Adapter | None] = {}
        self._graphs: dict[str, LossGraph] = {}
        self._samplers: dict[str, None] = {}
        """Ids of tenants that are saved weights for sampling, the least recently used first."""
        self._spoilt: set[str] = set()
        self._tensors = TensorCalls(functions or {}, staleness)
        self._runs: Final[Mapping[type, Callable[[Any], Result]]] = {
            CreateModel: self._create,
            ForwardBackward: lambda command: self._trainer(command.model).forward_backward(command),
            OptimStep: lambda command: self._tensors.update(self._trainer(command.model), command),
            SaveWeights: self._save,
            LoadWeights: self._load,
            DropWeights: self._drop_weights,
            UnloadModel: self._unload,
            DefineLoss: self._define,
            SampleTokens: self._sample,
            ForwardTensors: lambda command: self._tensors.forward(self._trainer(command.model), command),
            BackwardTensors: lambda command: self._tensors.backward(self._trainer(command.model), command),
            DropTicket: lambda command: self._tensors.drop(command),
            CallFunction: lambda command: self._tensors.call(command),
        }

    @property
    def grid(self) -> Grid:
        """Grid of the base model's engine: the sizes of its parallel axes and the position of this rank."""
        return self._pool.base.grid

    def retained_bytes(self) -> int:
        """Returns the bytes of autograd graphs and old weights that this rank stores for later backwards."""
        return self._tensors.retained_bytes

    def adopt(self, model: str, engine: Engine) -> None:
        """Adds ``engine`` as the model with the id ``model``, in which all parameters are trainable."""
        self._trainers[model], self._adapters[model] = TenantTrainer(engine, self._graphs), None

    def run(self, command: Command) -> Result:
        """Runs ``command`` on this rank and returns its result; an error becomes a :class:`Failure`.

        All ranks run the same commands in the same order.
        """
        try:
            return self._runs[type(command)](command)
        except GoneError as error:
            return Failure(str(error), "gone")
        except EngineError as error:  # a sentence about the request, or about this service
            return Failure(str(error), "user")
        except Exception as error:  # the other ranks have failed alike, or the loop finds out
            logger.exception("%s failed", type(command).__name__)
            return Failure(f"{type(command).__name__} failed: {first_line(error)}", "server")

    def spoil(self, command: Command) -> None:
        """Marks the model of ``command`` as unusable until weights are loaded into it.

        Call it if the outcome of ``command`` differs between ranks.
        """
        if (model := getattr(command, "model", None)) is not None:
            self._spoilt.add(model)

    def close(self) -> None:
        """Closes the engines of all models and of the base model."""
        self._trainers.clear()
        self._pool.close()

    # ------------------------------------------------------------------ tenants

    def _trainer(self, model: str) -> TenantTrainer:
        if model in self._spoilt:
            raise ServedError(f"model {model} failed on some ranks only; load saved weights into it.")
        return self._resident(model)

    def _resident(self, model: str) -> TenantTrainer:
        if model not in self._trainers:
            raise ServedError(f"there is no model {model}; create it, or load saved weights as a new model.")
        self._pool.get(model)
        return self._trainers[model]

    def _create(self, command: CreateModel) -> PlainOutput:
        engine = self._made(command.model, command.adapter)
        self._trainers[command.model] = TenantTrainer(engine, self._graphs)
        self._adapters[command.model] = command.adapter
        return PlainOutput({"model": command.model})

    def _unload(self, command: UnloadModel) -> PlainOutput:
        self._resident(command.model)
        self._tensors.forget(command.model)
        self._pool.drop(command.model)
        del self._trainers[command.model], self._adapters[command.model]
        self._spoilt.discard(command.model)
        return PlainOutput({"model": command.model})

    def _save(self, command: SaveWeights) -> PlainOutput:
        trainer = self._trainer(command.model)
        engine, adapter = trainer.engine, self._adapters[command.model]
        about = {"adapter": asdict(adapter) if adapter is not None else None, "version": trainer.version}
        edition = torch.tensor([len(self._editions(command.name))], dtype=torch.int64, device=engine.device)
        take_from(edition, engine.grid.rank == 0, engine.comm, "world", "edition of saved weights")
        folder = self._folder / command.name / str(int(edition))
        size = trainer.save(folder)
        if engine.grid.rank == 0:  # the last file: without it, nothing was saved
            (folder / ABOUT).write_text(json.dumps(about), encoding="utf-8")
        if self._served is not None and adapter is None and not command.optimizer:
            self._served.push(command.name, engine)
        return PlainOutput({"name": command.name, "bytes": size, "version": trainer.version})

    def _load(self, command: LoadWeights) -> PlainOutput:
        trainer, adapter = self._resident(command.model), self._adapters[command.model]
        saved, folder = self._saved(command.name)
        if saved != adapter:
            raise ServedError(
                f"{command.name} was saved from {_worded(saved)} and the model has {_worded(adapter)}; load it into a "
                "model of its own."
            )
        self._tensors.forget(command.model)
        if not command.optimizer and trainer.version:  # a fresh optimizer
            version = trainer.version
            self._unload(UnloadModel(command.model))
            self._create(CreateModel(command.model, "", adapter))
            trainer = self._trainers[command.model]
            trainer.version = version
        trainer.load(folder, command.optimizer)
        self._spoilt.discard(command.model)
        return PlainOutput({"name": command.name, "version": trainer.version})

    def _drop_weights(self, command: DropWeights) -> PlainOutput:
        if self.grid.rank == 0:
            shutil.rmtree(self._folder / command.name, ignore_errors=True)
        return PlainOutput()

    def _editions(self, name: str) -> list[Path]:
        """Returns the folders saved under a name, the newest last."""
        folder = self._folder / name
        found = [one for one in folder.iterdir() if one.name.isdigit()] if folder.is_dir() else []
        return sorted(found, key=lambda one: int(one.name))

    def _saved(self, name: str) -> tuple[Adapter | None, Path]:
        """Returns the adapter and the folder of the newest weights saved under a name.

        Raises:
            ServedError: there are none.
        """
        complete = [folder for folder in self._editions(name) if (folder / ABOUT).is_file()]
        if not complete:
            raise ServedError(f"no weights are saved as {name}; save them first.")
        about = json.loads((complete[-1] / ABOUT).read_text(encoding="utf-8"))
        return Adapter(**about["adapter"]) if about["adapter"] is not None else None, complete[-1]

    # ------------------------------------------------------------------ losses and samples

    def _define(self, command: DefineLoss) -> PlainOutput:
        if len(self._graphs) >= _LOSSES:
            raise ServedError(f"{_LOSSES} custom losses exist, which is the limit; start another server.")
        self._graphs[command.loss] = LossGraph(command.graph, command.inputs)
        return PlainOutput({"loss": command.loss})

    def _sample(self, command: SampleTokens) -> Result:
        if not command.source:
            return sample(self._pool.base, command)
        if command.source in self._trainers:
            return sample(self._trainer(command.source).engine, command)
        if self._served is not None and self._saved(command.source)[0] is None:
            return self._served.sample(command)
        return sample(self._sampler(command.source), command)

    def _sampler(self, name: str) -> Engine:
        """Returns the engine of the newest weights saved under a name; the last :data:`SAMPLERS` stay loaded."""
        adapter, folder = self._saved(name)
        model = f"sampler/{folder.relative_to(self._folder)}"
        if model in self._samplers:
            del self._samplers[model]
        else:
            if len(self._samplers) >= SAMPLERS:
                self._drop_sampler()
            TenantTrainer(self._made(model, adapter), {}).load(folder, optimizer=False)
        self._samplers[model] = None
        return self._pool.get(model)

    def _made(self, model: str, adapter: Adapter | None) -> Engine:
        """Creates a tenant; samplers give way to it if the pool is full."""
        while True:
            try:
                return self._pool.create(model, adapter)
            except ConfigError:
                if not self._samplers:
                    raise
                self._drop_sampler()

    def _drop_sampler(self) -> None:
        oldest = next(iter(self._samplers))
        del self._samplers[oldest]
        self._pool.drop(oldest)


def _worded(adapter: Adapter | None) -> str:
    return "all parameters" if adapter is None else f"an adapter of rank {adapter.rank}"
