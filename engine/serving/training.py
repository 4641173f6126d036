"""Training calls of one tenant on every rank: forward_backward and optim_step through an engine's own loop.

Datum i since the last update belongs to data rank i modulo their number, which runs its data in order, each with a
backward of its own. A gradient's bits thus depend neither on how a client cuts its requests nor on other tenants.

    forward     eng(tokens padded to a multiple of LENGTH) -> log-probabilities of the datum's targets
    loss        a sum: the first datum of an update weighs 1 and the others 0, so that the engine divides by 1
    backward    eng.backward, inside an accumulation that ends with optim_step
    results     summed over data ranks, of which each knows its own data
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from engine.engine import Engine
from engine.errors import EngineError, first_line
from engine.parallel.comm.agreement import first_rank, gather_from_all
from engine.serving.commands import (
    Array,
    Datum,
    ForwardBackward,
    LossCall,
    OptimStep,
    PlainOutput,
    TrainedOutput,
)
from engine.serving.loss_graph import LossGraph
from engine.serving.losses import TARGETS, ServedError, check_inputs, served_loss

LENGTH = 32
"""Token rows are padded to a multiple of this, so that a pipeline traces few shapes."""
CUSTOM = "custom"
"""Name of a loss that an uploaded graph computes."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Datum on the device."""

    tokens: Tensor
    """Token ids padded to a multiple of :data:`LENGTH`, int64 [1, padded]."""
    targets: Tensor
    """int64 [n] or [n, k]."""
    inputs: Mapping[str, Tensor]


def _prepare(datum: Datum, device: torch.device) -> _Prepared:
    """Moves a datum to the device.

    Raises:
        ServedError: there are no tokens, or no targets of their length.
    """
    count = len(datum.tokens)
    if not count:
        raise ServedError("a datum has no tokens; send at least one.")
    if TARGETS not in datum.inputs:
        raise ServedError("a datum has no loss_fn_inputs['target_tokens']; send the token that follows each token.")
    padded = np.zeros((1, -(-count // LENGTH) * LENGTH), np.int64)
    padded[0, :count] = datum.tokens
    inputs = {name: client_tensor(value, device) for name, value in datum.inputs.items()}
    targets = inputs[TARGETS].to(torch.int64)
    if targets.ndim not in (1, 2) or targets.shape[0] != count:
        raise ServedError(
            f"target_tokens has shape {tuple(targets.shape)} for {count} tokens; send [n] or [n, k] for n tokens."
        )
    return _Prepared(torch.from_numpy(padded).to(device), targets, inputs)


class _Metrics:
    """Sums of metrics over the data of a request; a name ends in its reduction, such as "loss:sum"."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loss = torch.zeros((), dtype=torch.float64, device=engine.device)
        self._values: dict[str, float] = {}

    def add(self, loss: Tensor, metrics: Mapping[str, float]) -> None:
        """Adds the loss and the metrics of a datum."""
        self._loss += loss.detach()
        for name, value in metrics.items():
            self._values[name] = self._values.get(name, 0.0) + value

    def total(self, count: int) -> dict[str, float]:
        """Returns the metrics over ``count`` data of all data ranks; names that end in ":mean" are divided by it.

        Gathers each rank's metrics over the world.
        """
        engine, grid = self._engine, self._engine.grid
        own = {"loss:sum": float(self._loss)} | self._values if grid.is_first("replica") else {}
        sums: dict[str, float] = {}
        for metrics in _gathered(own, engine):
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + value
        return {name: value / (count if name.endswith(":mean") else 1) for name, value in sums.items()}


@dataclass(slots=True)
class _Retained:
    """Forward of a request without a backward; its graph waits for a request with the same data."""

    digest: str
    logprobs: list[Tensor]
    """Log-probabilities of this rank's data, with their graphs."""


class TenantTrainer:
    """Trainer of one client's model on this rank, with the model's engine and its version (updates and loads).

    The trainer stores the log-probabilities of its last forward-only pass, with their autograd graphs. A
    ``forward_backward`` with the same data reuses them.
    """

    def __init__(self, engine: Engine, graphs: Mapping[str, LossGraph]) -> None:
        self.engine = engine
        self.version = 0
        """Number of updates and loads of the weights."""
        self.forwards = 0
        """Number of forwards of data on this rank, without fillers."""
        self._graphs = graphs
        self._seen = 0
        """Data since the last update."""
        self._backwards = 0
        """Backwards since the beginning of the last request."""
        self._retained: _Retained | None = None
        if engine.config.pp > 1:
            engine.open_pipeline()

    def forward_backward(self, command: ForwardBackward) -> TrainedOutput:
        """Computes the losses of the data in ``command`` and, unless ``forward_only``, accumulates gradients.

        Returns the log-probabilities of all targets, and metrics over all data, on every rank. All ranks of the grid
        call it; they all-reduce the log-probabilities over the data-parallel ranks, and gather the metrics.

        Raises:
            ServedError: the data do not fit the loss. All ranks raise it, for a built-in loss before any forward, for
                a custom loss after the forward of a datum.

        If the call fails after the backward of its first datum, it drops all gradients since the last update.
        """
        data = [_prepare(datum, self.engine.device) for datum in command.data]
        for one in data:
            self._check(one, command.loss)
        digest = _digest(f"{self.version} {self._seen % self.engine.grid.row_ranks}", command.data)
        kept, self._retained = self._retained, None
        places = self._places(len(data))
        logprobs = kept.logprobs if kept is not None and kept.digest == digest else None
        results: dict[int, Tensor] = {}
        sums = _Metrics(self.engine)
        if command.forward_only:
            self._retained = _Retained(digest, [])
        with self._whole_gradient():
            for turn, place in enumerate(places):
                datum = data[place] if place is not None else None
                found = logprobs[turn] if logprobs is not None else self._logprobs(datum)
                if datum is not None and place is not None:
                    results[place] = found.detach()
                with failing_together(self.engine) if command.loss.name == CUSTOM else nullcontext():
                    loss = self._loss(found, datum, command.loss, sums)
                if self._retained is not None:
                    self._retained.logprobs.append(found)
                else:
                    self._backward(loss, place)
        if not command.forward_only:
            self._seen += len(data)
        return self._output(data, results, sums)

    def optim_step(self, command: OptimStep) -> PlainOutput:
        """Updates the weights by AdamW with the accumulated gradient (zero if there is none), and clears the gradient.

        The result has "grad_norm" and "version", the number of updates and loads. All ranks of the grid call it.

        Raises:
            ServedError: no gradient was accumulated, and a zero gradient cannot be made, because the model takes no
                token ids.
        """
        engine = self.engine
        self._retained = None
        self.complete_gradient()
        adam = command.adam
        for group in engine.optimizer.param_groups:
            group["lr"], group["betas"] = adam.lr, (adam.beta1, adam.beta2)
            group["eps"], group["weight_decay"] = adam.eps, adam.weight_decay
        engine.set_gradient_accumulation_boundary(True)
        report = engine.step(max_norm=adam.max_norm)
        self.version, self._seen = self.version + 1, 0
        norm = report.grad_norm if report is not None else math.nan
        return PlainOutput({"grad_norm": norm, "version": self.version})

    def complete_gradient(self) -> None:
        """Accumulates a zero gradient, by a pass over filler tokens, if none was accumulated since the last update.

        The next update then moves the weights by AdamW's moments and weight decay. All ranks of the grid call it.

        Raises:
            ServedError: the model takes no token ids.
        """
        if not self._seen:
            self._backward(self._filler(), 0)
            self._seen = 1

    def accumulate(self, loss: Tensor) -> None:
        """Runs the backward of ``loss``, this rank's 0-dim loss, and accumulates the gradients.

        All ranks of the grid call it.
        """
        self._backward(loss, 0 if self.engine.grid.row_rank == 0 else None)
        self._seen += 1

    def save(self, folder: Path) -> int:
        """Saves weights and optimizer state in ``folder``; returns the total bytes of the files.

        All ranks of the grid call it.
        """
        state = {"version": self.version}
        self.engine.save_checkpoint(folder, state, without_frozen=True).wait()
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())

    def load(self, folder: Path, optimizer: bool) -> None:
        """Loads weights and, with ``optimizer``, the optimizer state; drops accumulated gradients.

        This trainer's ``version`` grows by 1, or becomes the saved version if this is higher. Without ``optimizer``,
        AdamW's moments do not change, so such a load must precede the first update. All ranks of the grid call it.
        """
        if self._seen:
            self.engine.zero_grad()
        saved = int(self.engine.load_checkpoint(folder, load_module_only=not optimizer)["version"])
        self.version, self._seen, self._retained = max(self.version + 1, saved), 0, None

    # ------------------------------------------------------------------ one datum

    def _places(self, count: int) -> list[int | None]:
        """Returns the indices of this data rank's data, in turns that all data ranks make; None: a filler."""
        grid = self.engine.grid
        ranks, rank = grid.row_ranks, grid.row_rank
        first = self._seen % ranks
        own = [place for place in range(count) if (first + place) % ranks == rank]
        turns = max((len(range((other - first) % ranks, count, ranks)) for other in range(ranks)), default=0)
        return [*own, *[None] * (turns - len(own))]

    def _check(self, datum: _Prepared, loss: LossCall) -> None:
        if loss.name == CUSTOM:
            self._graph(loss)
        else:
            served_loss(loss.name)
            check_inputs(loss.name, datum.inputs, datum.targets, loss.options)

    def _graph(self, loss: LossCall) -> LossGraph:
        found = self._graphs.get(str(loss.options.get("loss_id")))
        if found is None:
            raise ServedError(
                f"no custom loss has the id {loss.options.get('loss_id')!r}; call create_custom_loss first."
            )
        return found

    def _logprobs(self, datum: _Prepared | None) -> Tensor:
        """Returns the log-probabilities of the datum's targets, fp32, of their shape; a filler has one target."""
        engine = self.engine
        tokens = datum.tokens if datum is not None else torch.zeros(1, LENGTH, dtype=torch.int64, device=engine.device)
        targets = datum.targets if datum is not None else torch.zeros(1, dtype=torch.int64, device=engine.device)
        self.forwards += datum is not None
        logits = _logits(engine({"input_ids": tokens}))[0, : len(targets)].float()
        if targets.ndim == 1:
            return -functional.cross_entropy(logits, targets, reduction="none")
        return torch.log_softmax(logits, -1).gather(-1, targets)

    def _filler(self) -> Tensor:
        """Returns a loss without a gradient."""
        try:
            return self._logprobs(None).sum() * 0.0
        except EngineError:
            raise
        except (RuntimeError, TypeError, ValueError, LookupError) as error:
            raise ServedError(
                "an update came without a gradient since the last one, and this model takes no token ids; send a "
                "backward before it."
            ) from error

    @contextmanager
    def _whole_gradient(self) -> Iterator[None]:
        """Runs the block, the passes of a request; drops all gradients if it fails after it has accumulated some."""
        self._backwards = 0
        try:
            yield
        except (EngineError, RuntimeError) as error:
            self._retained = None
            if not self._backwards:
                raise
            self.engine.zero_grad()
            self._seen = 0
            kind = ServedError if isinstance(error, EngineError) else RuntimeError
            raise kind(
                f"{first_line(error).rstrip('.')}; all gradients since the last update were dropped, because some data "
                "of this request were accumulated already; send the data of this update again."
            ) from error

    def _loss(self, logprobs: Tensor, datum: _Prepared | None, loss: LossCall, sums: _Metrics) -> Tensor:
        if datum is None:
            return logprobs.sum() * 0.0
        if loss.name == CUSTOM:
            value, metrics = self._graph(loss).run(logprobs, datum.inputs)
        else:
            value, metrics = served_loss(loss.name)(logprobs, datum.inputs, loss.options), {}
        sums.add(value, metrics)
        return value

    def _backward(self, loss: Tensor, place: int | None) -> None:
        engine = self.engine
        self._backwards += 1
        engine.set_gradient_accumulation_boundary(False)
        first = place is not None and self._seen + place == 0
        engine.backward((loss, 1.0 if first else 0.0))
        engine.step()  # ends the microbatch

    # ------------------------------------------------------------------ results

    def _output(self, data: Sequence[_Prepared], results: Mapping[int, Tensor], sums: _Metrics) -> TrainedOutput:
        """Returns log-probabilities and metrics of all data ranks, equal on every rank. One all-reduce over data."""
        engine = self.engine
        sizes = [datum.targets.numel() for datum in data]
        total = torch.zeros(sum(sizes), dtype=torch.float32, device=engine.device)
        parts = torch.split(total, sizes)
        for place, found in results.items():
            parts[place].copy_(found.flatten())
        engine.comm.all_reduce(total, engine.grid.rows, "served log-probabilities").wait()
        host = [part.cpu().numpy() for part in parts]
        outputs = tuple(
            {"logprobs": values.reshape(tuple(datum.targets.shape))} for values, datum in zip(host, data, strict=True)
        )
        return TrainedOutput(outputs, sums.total(len(data)))


@contextmanager
def failing_together(engine: Engine) -> Iterator[None]:
    """Runs the block on every rank; if a client's mistake ends it on any rank, every rank raises the first one's error.

    All-reduces 8 bytes over the world and, after an error, gathers its text.
    """
    problem: ServedError | None = None
    try:
        yield
    except ServedError as error:
        problem = error
    first = first_rank(problem is not None, engine.comm, engine.device, "served mistakes")
    if first is not None:
        text = _gathered({"error": "" if problem is None else str(problem)}, engine)[first]["error"]
        raise ServedError(text) from problem


def _gathered(own: dict[str, Any], engine: Engine) -> list[dict[str, Any]]:
    """Returns the values of every rank."""
    text = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
    length = torch.tensor([len(text)], dtype=torch.int64)
    lengths = gather_from_all(length, engine.comm, engine.device, "served metrics").flatten().tolist()
    padded = functional.pad(text, (0, max(lengths) - len(text)))
    rows = gather_from_all(padded, engine.comm, engine.device, "served metrics")
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, lengths, strict=True)]


def client_tensor(value: Array, device: torch.device) -> Tensor:
    """Returns a copy of a client's array as a tensor on ``device``."""
    return torch.from_numpy(np.array(value)).to(device)


def _logits(output: Any) -> Tensor:
    found = getattr(output, "logits", output)
    if not isinstance(found, Tensor):
        raise ServedError(
            f"the model returned a {type(output).__name__} without logits, so it has no log-probabilities."
        )
    return found


def _digest(begin: str, data: Sequence[Datum]) -> str:
    digest = hashlib.sha256(begin.encode())
    for datum in data:
        for value in (datum.tokens, datum.inputs[TARGETS]):
            digest.update(f"{value.dtype.str}{value.shape}".encode())
            digest.update(value.tobytes())
    return digest.hexdigest()
