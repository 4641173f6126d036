"""Run of a user's script up to its first use of an engine: records its calls of ``engine.initialize``, and its rows.

    engine.initialize(...)      is recorded, and returns a stand-in
    eng.train_batch(batch)      provides the rows, and ends the script; so does everything else that needs an engine
    eng.grid, eng.module        exist, since samplers and optimizers read them

A second call of ``initialize`` (teacher and student) is recorded like the first one. Nothing is trained or written.
"""

import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from engine.build.answered_calls import answered_by
from engine.config import Config
from engine.errors import EngineError, PlanError, first_line
from engine.parallel.grid import Grid
from engine.program.batch import Batch, map_tensors
from engine.program.forward_inputs import batch_of_call


class _EndOfScript(BaseException):
    """End of a script; an ``except Exception`` of the script does not catch it."""


@dataclass(slots=True, kw_only=True)
class ScriptCall:
    """Arguments of one call of ``engine.initialize`` in a user's script, and the batch of the script's first step."""

    model: Any
    config: Any
    loss_fn: Any
    more: Mapping[str, Any]
    """Other arguments for the comparison."""
    rows: Batch | None
    """Rows with data that the script passed to a step; None: it passed none."""
    notes: tuple[str, ...] = ()
    example: Batch = None
    """Example microbatch as passed; only shapes on the meta device."""


@dataclass(slots=True)
class _Calls:
    """Handler of all calls of a script."""

    resolve: Callable[[Any], Config]
    found: list[ScriptCall] = field(default_factory=list)

    def answer(self, arguments: Mapping[str, Any]) -> "EngineStandIn":
        """Records a call."""
        optimizer, scheduler = arguments["optimizer"], arguments["lr_scheduler"]
        own = isinstance(optimizer, torch.optim.Optimizer)
        given = {"optimizer": optimizer, "lr_scheduler": scheduler} if not own else {}
        notes = ("the script's optimizer is bound to its model; the configured one is compared",) if own else ()
        call = ScriptCall(
            model=arguments["model"],
            config=arguments["config"],
            loss_fn=arguments["loss_fn"],
            more=given | {"inputs": arguments["inputs"], "whole": arguments["whole"]},
            rows=_with_content(arguments["example_batch"]),
            notes=notes,
            example=arguments["example_batch"],
        )
        self.found.append(call)
        return EngineStandIn(call, self.resolve)


class EngineStandIn:
    """Substitute for the engine in a user's script; the script is ended at the first use that needs a real engine."""

    def __init__(self, call: ScriptCall, resolve: Callable[[Any], Config]) -> None:
        self._call, self._resolve = call, resolve
        self.module = call.model

    @property
    def grid(self) -> Grid:
        """Grid of ranks in the script's configuration, with the coordinates of rank 0."""
        config = self._resolve(self._call.config)
        return config.grid(0)

    def train_batch(self, batch: Any, **options: Any) -> None:
        """Records ``batch``, or its first item if it is an iterator, as example rows; then ends the script."""
        given = next(batch) if isinstance(batch, Iterator) else batch
        if (rows := _with_content(given)) is not None:
            self._call.rows = rows
        raise _EndOfScript

    eval_batch = train_batch

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Records the batch, or the arguments of the model's forward, as example rows; then ends the script."""
        nameless = args and kwargs and not isinstance(self.module, nn.Module)  # a function that builds the model
        self.train_batch(None if nameless else batch_of_call(self.module, args, kwargs))

    def __enter__(self) -> "EngineStandIn":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        raise _EndOfScript


def _with_content(batch: Any) -> Batch | None:
    """Returns the batch on the host; None unless it has at least two rows with content."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    rows = {len(tensor) if tensor.dim() else 0 for tensor in tensors}
    if not tensors or min(rows) < 2 or len(rows) > 1 or any(tensor.is_meta for tensor in tensors):
        return None
    return map_tensors(batch, lambda tensor: tensor.detach().cpu())


def calls_of_script(script: Path, arguments: Sequence[str], resolve: Callable[[Any], Config]) -> list[ScriptCall]:
    """Runs ``script`` with ``arguments`` until it first uses an engine, as for a training step; returns the script's
    calls of ``engine.initialize``.

    Args:
        resolve: callback that converts the script's configuration to a :class:`Config`.

    Raises:
        PlanError: the script fails before it uses an engine, or never calls ``engine.initialize``.
    """
    calls = _Calls(resolve)
    try:
        with answered_by(calls.answer), started_as(script, arguments):
            runpy.run_path(str(script), run_name="__main__")
    except _EndOfScript:
        pass
    except SystemExit as error:
        if not calls.found and error.code not in (None, 0):
            raise PlanError(
                f"{script} exits with {error.code} before it calls engine.initialize; give the arguments of the script "
                f"after two dashes: trine verify {script} -- ARGUMENTS."
            ) from None
    except EngineError:
        raise
    except Exception as error:
        when = "after" if calls.found else "before"
        raise PlanError(
            f"{script} raises {type(error).__name__} {when} engine.initialize: {first_line(error)}; give a script that "
            "starts as one process, with its arguments after two dashes."
        ) from error
    if not calls.found:
        raise PlanError(
            f"{script} ends without a call of engine.initialize; give the script that trains, or MODEL and CONFIG."
        )
    return calls.found


@contextmanager
def started_as(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Returns a context with ``sys.argv`` and ``sys.path`` as for ``python script arguments``."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
