"""Calls of the second door: a model runs on a client's tensors, and continues the client's backward.

    forward    tensors -> outputs; the graph is retained under a ticket
    backward   gradients of the outputs -> gradients of the floating inputs; gradients of weights accumulate
    update     optional, after the backward, by AdamW

The rows of a call are split over the data ranks; a rank without rows runs the first row again, with a gradient of zero.
A retained graph belongs to the weights of its forward. Its backward runs on these weights, up to ``staleness`` updates
later; then it is refused.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from engine.engine import Engine, ServedFunction
from engine.errors import EngineError, first_line
from engine.program.batch import tensors_by_path
from engine.serving.commands import (
    Array,
    BackwardTensors,
    CallFunction,
    DropTicket,
    ForwardTensors,
    OptimStep,
    PlainOutput,
    TensorOutput,
)
from engine.serving.losses import GoneError, ServedError
from engine.serving.training import TenantTrainer, client_tensor, failing_together
from engine.step.held_weights import HeldWeights

_SENTENCES = 4096
"""Sentences about forwards that an update or a load has ended, the newest ones."""


@dataclass(slots=True)
class _Retained:
    """Forward of a client that waits for its backward."""

    model: str
    version: int
    inputs: dict[str, Tensor]
    """Inputs of this rank; floating ones require gradients."""
    outputs: dict[str, Tensor]
    rows: "_Rows"
    weights: HeldWeights
    storages: Mapping[int, int]
    """Bytes of each storage of the graph, by its number."""


class TensorCalls:
    """Executor, on this rank, of clients' requests with tensors: forwards, backwards and calls of functions.

    It stores the autograd graph of a forward until the client sends gradients.

    Args:
        functions: functions that clients call, by name.
        staleness: maximum number of weight updates between a forward and its backward.
    """

    def __init__(self, functions: Mapping[str, ServedFunction], staleness: int = 0) -> None:
        self._functions, self._staleness = functions, staleness
        self._retained: dict[str, _Retained] = {}
        self._users: Counter[int] = Counter()
        """Retained forwards that refer to each storage."""
        self._graphs = 0
        self._ended: OrderedDict[str, str] = OrderedDict()
        """Why a forward serves no backward any more."""

    @property
    def retained_bytes(self) -> int:
        """Bytes of autograd graphs and old weights that this rank stores for later backwards."""
        weights = {id(one.weights): one.weights.bytes for one in self._retained.values()}
        return self._graphs + sum(weights.values())

    def forward(self, trainer: TenantTrainer, command: ForwardTensors) -> TensorOutput:
        """Runs the model's forward on the tensors of ``command``; returns the outputs of all rows by name.

        Tensors named "0", "1" etc. are positional arguments. Data-parallel ranks divide the rows (dim 0). With a
        nonempty ``command.ticket``, the autograd graph is stored under this name for a backward; else there is no
        graph. All ranks of the grid call it.

        Raises:
            ServedError: the model fails on the tensors, or several data ranks cannot divide the rows of the tensors or
                join the rows of the outputs.
        """
        engine = trainer.engine
        given = {name: client_tensor(value, engine.device) for name, value in command.tensors.items()}
        rows = _Rows.of(given, engine)
        own = {name: rows.own(value) for name, value in given.items()}
        wanted = bool(command.ticket)
        if wanted:
            for value in own.values():
                value.requires_grad_(value.is_floating_point())
        args, kwargs = _arguments(own)
        saved: list[Tensor] = []
        noted = _noted(saved) if wanted else nullcontext()
        with torch.set_grad_enabled(wanted), noted, failing_together(engine):
            outputs = dict(_outputs(_called(engine, args, kwargs)))
            for value in outputs.values():
                rows.check(value)
        joined = {name: rows.joined(value.detach(), engine) for name, value in outputs.items()}
        if wanted:
            storages = _storages([*saved, *own.values(), *outputs.values()], engine.module)
            self._retain(
                command.ticket,
                _Retained(command.model, trainer.version, own, outputs, rows, engine.hold_weights(), storages),
            )
        return TensorOutput({name: _array(value) for name, value in joined.items()}, trainer.version)

    def backward(self, trainer: TenantTrainer, command: BackwardTensors) -> TensorOutput:
        """Runs the backward of the stored forward ``command.ticket``, with the weights that the forward used.

        Accumulates weight gradients, drops the autograd graph and, with ``command.step``, updates the weights. Returns
        the gradients of floating-point inputs by name. All ranks of the grid call it.

        Raises:
            GoneError: there is no such forward, or too many updates have followed it.
            ServedError: a gradient does not fit its output.
        """
        engine, retained = trainer.engine, self._retained.get(command.ticket)
        if retained is None or retained.model != command.model:
            known = self._ended.get(command.ticket, f"there is no forward {command.ticket!r} that waits for gradients")
            raise GoneError(f"{known}; call forward again.")
        self._release(command.ticket)
        loss = self._loss(retained, command.gradients, engine)
        with retained.weights.restored():
            trainer.accumulate(loss)
        gradients = {
            name: retained.rows.joined(_gradient(value), engine)
            for name, value in retained.inputs.items()
            if value.requires_grad
        }
        if command.step is not None:
            del loss, retained  # its weights need no copy
            self.update(trainer, OptimStep(command.model, command.step))
        return TensorOutput({name: _array(value) for name, value in gradients.items()}, trainer.version)

    def update(self, trainer: TenantTrainer, command: OptimStep) -> PlainOutput:
        """Updates the model's weights by AdamW with the accumulated gradient.

        Returns "grad_norm" and "version"; the version is the number of updates and loads of the weights. Drops stored
        forwards that become more than ``staleness`` updates old. All ranks of the grid call it.
        """
        trainer.complete_gradient()  # before forwards are dropped: it may refuse the update
        self._drop_early(command.model, trainer.version + 1)
        return trainer.optim_step(command)

    def _drop_early(self, model: str, following: int) -> None:
        """Drops forwards of a model that are too early for a backward at version ``following``. Nothing refers to them
        afterwards, so that the update copies no weights for them.
        """
        for ticket, one in list(self._retained.items()):
            if one.model == model and following - one.version > self._staleness:
                self._end(
                    ticket,
                    f"forward {ticket!r} used version {one.version} of the weights and they are at version {following} "
                    f"or later; serve.held.staleness allows {self._staleness} between",
                )

    def drop(self, command: DropTicket) -> PlainOutput:
        """Drops the autograd graph of the forward ``command.ticket``.

        The result's "dropped" is True, or False if there was no such forward.
        """
        there = command.ticket in self._retained
        if there:
            self._release(command.ticket)
        return PlainOutput({"dropped": there})

    def forget(self, model: str) -> None:
        """Drops all stored autograd graphs of ``model``.

        Call it before the model is unloaded or gets other weights.
        """
        for ticket in [ticket for ticket, one in self._retained.items() if one.model == model]:
            self._end(ticket, f"forward {ticket!r} came before its model was loaded or unloaded")

    def _retain(self, ticket: str, one: _Retained) -> None:
        if ticket in self._retained:
            self._release(ticket)
        self._retained[ticket] = one
        self._graphs += sum(size for key, size in one.storages.items() if not self._users[key])
        self._users.update(one.storages.keys())

    def _release(self, ticket: str) -> None:
        one = self._retained.pop(ticket)
        self._users.subtract(one.storages.keys())
        ended = [key for key in one.storages if not self._users[key]]
        self._graphs -= sum(one.storages[key] for key in ended)
        for key in ended:
            del self._users[key]

    def _end(self, ticket: str, why: str) -> None:
        self._release(ticket)
        self._ended[ticket] = why
        while len(self._ended) > _SENTENCES:
            self._ended.popitem(last=False)

    def call(self, command: CallFunction) -> TensorOutput:
        """Calls the function ``command.name`` with ``command.tensors``; returns the function's result tensors.

        All ranks call it.

        Raises:
            ServedError: there is no function of this name.
        """
        if command.name not in self._functions:
            known = ", ".join(sorted(self._functions)) or "none"
            raise ServedError(f"there is no function {command.name!r}; this server has {known}.")
        given = {name: torch.from_numpy(np.array(value)) for name, value in command.tensors.items()}
        return TensorOutput({name: _array(value) for name, value in self._functions[command.name](given).items()})

    @staticmethod
    def _loss(retained: _Retained, gradients: Mapping[str, Array], engine: Engine) -> Tensor:
        """Returns a scalar; its gradient at each output is the client's."""
        total = torch.zeros((), device=engine.device)
        for name, value in gradients.items():
            output = retained.outputs.get(name)
            if output is None or not output.requires_grad:
                known = ", ".join(name for name, one in retained.outputs.items() if one.requires_grad)
                raise ServedError(f"a gradient was sent for output {name!r}; outputs with gradients are {known}.")
            if tuple(value.shape) != (wanted := retained.rows.joined_shape(output)):
                raise ServedError(
                    f"the gradient of output {name!r} has shape {tuple(value.shape)}, and the output {wanted}; send a "
                    "gradient of the output's shape."
                )
            given = retained.rows.own(client_tensor(value, engine.device), filler=0.0)
            total = total + (output * given.to(output.dtype)).sum()
        if not total.requires_grad:
            raise ServedError("no gradient was sent; send one for an output.")
        return total


@contextmanager
def _noted(saved: list[Tensor]) -> Iterator[None]:
    """Adds the tensors to ``saved`` that graphs save inside the context. As in torch, a backward raises if one of them
    was written since.
    """

    def pack(tensor: Tensor) -> tuple[Tensor, int]:
        saved.append(tensor)
        return tensor, tensor._version

    def unpack(packed: tuple[Tensor, int]) -> Tensor:
        tensor, version = packed
        if tensor._version != version:
            raise ServedError(
                f"a tensor {list(tensor.shape)} that this backward needs was written since its forward; call forward "
                "again."
            )
        return tensor

    with saved_tensors_hooks(pack, unpack):
        yield


def _storages(tensors: Iterable[Tensor], model: nn.Module) -> dict[int, int]:
    """Returns the bytes of each storage below ``tensors`` by its number, without storages of the model."""
    with torch._C.DisableTorchFunctionSubclass():
        own = {value.untyped_storage()._cdata for value in (*model.parameters(), *model.buffers())}
        found = [tensor.untyped_storage() for tensor in tensors]
    return {one._cdata: one.nbytes() for one in found if one._cdata not in own}


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a call on this data rank; without a split, the first rank has all and the others repeat them."""

    count: int
    """Rows of the call; 0: its tensors have no common number of rows."""
    ranks: int
    rank: int

    @staticmethod
    def of(given: Mapping[str, Tensor], engine: Engine) -> "_Rows":
        sizes = {value.shape[0] if value.ndim else 0 for value in given.values()}
        count = sizes.pop() if len(sizes) == 1 else 0
        if not count and engine.grid.row_ranks > 1:
            raise ServedError(
                f"the tensors have no common number of rows to split over {engine.grid.row_ranks} data ranks; send "
                "tensors [rows, ...] with equal rows."
            )
        return _Rows(count, engine.grid.row_ranks, engine.grid.row_rank)

    def own(self, value: Tensor, filler: float | None = None) -> Tensor:
        """Returns this rank's rows; if it has none, the first row, or a row of ``filler``."""
        if self.ranks == 1:
            return value
        part = torch.tensor_split(value, self.ranks)[self.rank]
        if part.shape[0]:
            return part.clone()
        return value[:1].clone() if filler is None else torch.full_like(value[:1], filler)

    def check(self, value: Tensor) -> None:
        """Raises ServedError unless ``value`` has as many rows as the inputs, so that those of data ranks join."""
        if self.ranks > 1 and (not value.ndim or value.shape[0] != max(1, self._sizes()[self.rank])):
            raise ServedError("an output has no rows, so those of data ranks cannot be joined; use one data rank.")

    def joined_shape(self, value: Tensor) -> tuple[int, ...]:
        """Returns the shape of an output over all data ranks; ``value`` is this rank's part."""
        return tuple(value.shape) if self.ranks == 1 else (self.count, *value.shape[1:])

    def _sizes(self) -> list[int]:
        """Returns the number of rows of each data rank."""
        return [len(part) for part in torch.tensor_split(torch.empty(self.count), self.ranks)]

    def joined(self, value: Tensor, engine: Engine) -> Tensor:
        """Returns the rows of all data ranks in order, on every rank. One all-reduce over data."""
        if self.ranks == 1:
            return value
        sizes = self._sizes()
        full = value.new_zeros(self.count, *value.shape[1:])
        start = sum(sizes[: self.rank])
        full[start : start + sizes[self.rank]] = value[: sizes[self.rank]]
        engine.comm.all_reduce(full, engine.grid.rows, "served rows").wait()
        return full


def _arguments(given: Mapping[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    places = sorted((name for name in given if name.isdigit()), key=int)
    if places != [str(index) for index in range(len(places))]:
        raise ServedError(f"positional tensors are named {', '.join(places)}; name them 0, 1, 2 without gaps.")
    return [given[name] for name in places], {name: value for name, value in given.items() if not name.isdigit()}


def _called(engine: Engine, args: list[Tensor], kwargs: dict[str, Tensor]) -> Any:
    """Returns the model's output; its own errors, such as about shapes, are the client's."""
    try:
        return engine(*args, **kwargs)
    except EngineError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        why = first_line(error).rstrip(".")
        raise ServedError(f"the model failed on these tensors: {why}; send the arguments of its forward.") from error


def _outputs(output: Any) -> Iterable[tuple[str, Tensor]]:
    if isinstance(output, Tensor):
        return [("output", output)]
    return [(".".join(map(str, path)), tensor) for path, tensor in tensors_by_path(output)]


def _gradient(value: Tensor) -> Tensor:
    return value.grad if value.grad is not None else torch.zeros_like(value)


def _array(value: Tensor) -> Array:
    plain = value.detach().cpu()
    return plain.float().numpy() if plain.dtype is torch.bfloat16 else plain.numpy()
