"""Activation checkpointing (``torch.utils.checkpoint``) in a forward that spans several stages.

A checkpointed region in code between units may contain calls of other stages, which a recomputation in backward would
really run. So the code of the region is not checkpointed, and each call that runs on this stage is recomputed alone.

    checkpoint(f, x)     f = call a, glue, call b
    here                 checkpoint(a), glue; another stage runs b
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils import checkpoint as module
from torch.utils.checkpoint import CheckpointFunction, checkpoint

Function = Callable[..., Any]
_GENERATOR = "_checkpoint_without_reentrant_generator"
AGAIN = "_runs_again"
"""Attribute of the function of a block that the engine recomputes, with the state of its forward: what is called in the
forward of each unit, and returns the context of its recomputation, or None.
"""
ENDS = "_ends_run"
"""Attribute of the ``context_fn`` of a region: function called with the output of each unit at the end of its first
run, before code between units can write it.
"""


class CheckpointedRegion(NamedTuple):
    """A ``torch.utils.checkpoint`` call in progress."""

    options: dict[str, Any]
    restores: bool
    """True if a recomputation finds the state of the first run, as in blocks that the engine recomputes. In the user's
    own calls it finds the present state, as without a pipeline.
    """
    again: Callable[[], Callable[[], Any]] | None = None
    """Called in the forward of each unit; returns the context in which the unit runs again."""


class Regions(Protocol):
    """Interface of a running forward, such as the forward of a pipeline stage, for :func:`spread_checkpoints`.

    ``inside``: True while a unit runs: a module that the trace records as one call. ``regions``: the
    ``torch.utils.checkpoint`` calls in progress.
    """

    inside: bool
    regions: list[CheckpointedRegion]


@contextmanager
def open_checkpoints(recompute: bool) -> Iterator[None]:
    """Makes reentrant calls of ``torch.utils.checkpoint`` non-reentrant inside the context.

    ``recompute`` False: the calls run without recomputation.
    """

    def apply(function: Function, preserve: bool, *args: Any) -> Any:
        if not recompute:
            return function(*args)
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)

    original = torch.autograd.Function.__dict__["apply"]
    before = vars(CheckpointFunction).get("apply", original)
    CheckpointFunction.apply = staticmethod(apply)  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is original:  # inherited
            del CheckpointFunction.apply
        else:
            CheckpointFunction.apply = before  # type: ignore[method-assign]


@contextmanager
def spread_checkpoints(run: Regions) -> Iterator[None]:
    """Disables the recomputation of ``torch.utils.checkpoint`` calls inside the context while ``run.inside`` is False.

    ``run``: forward in progress; ``run.regions`` contains these calls while they run.
    """
    original = getattr(module, _GENERATOR)

    def generator(function: Function, preserve: bool, context_fn: Function, *rest: Any, **kwargs: Any) -> Iterator[Any]:
        if run.inside:
            yield from original(function, preserve, context_fn, *rest, **kwargs)
            return
        options = {"preserve_rng_state": preserve, "context_fn": context_fn}
        run.regions.append(CheckpointedRegion(options, hasattr(function, AGAIN), getattr(function, AGAIN, None)))
        try:
            yield
        finally:
            run.regions.pop()

    setattr(module, _GENERATOR, generator)
    try:
        yield
    finally:
        setattr(module, _GENERATOR, original)


def recomputed(forward: Function, region: CheckpointedRegion) -> Function:
    """Returns a function that runs ``forward`` under a non-reentrant ``torch.utils.checkpoint`` with the options of
    ``region``."""

    def run(*args: Any, **kwargs: Any) -> Any:
        out = checkpoint(forward, *args, use_reentrant=False, **region.options, **kwargs)
        if (end := getattr(region.options["context_fn"], ENDS, None)) is not None:
            end(out)
        return out

    return run
