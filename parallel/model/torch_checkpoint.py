"""Activation checkpointing (``torch.utils.checkpoint``) in a forward of which only a part runs here.

A region that code between units checkpoints may hold calls of other stages: run again in backward, it would run them
for real. So the region itself runs in the open, and each of its calls that runs here is recomputed alone.

    checkpoint(f, x)     f = call a, glue, call b
    here                 checkpoint(a), glue, and nothing for b of another stage
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils import checkpoint as module
from torch.utils.checkpoint import CheckpointFunction, checkpoint

Function = Callable[..., Any]
_GENERATOR = "_checkpoint_without_reentrant_generator"


class Regions(Protocol):
    """A forward that knows whether a unit runs, and keeps the options of the regions around."""

    inside: bool
    regions: list[dict[str, Any]]


@contextmanager
def open_checkpoints(recompute: bool) -> Iterator[None]:
    """Within, a reentrant checkpoint runs its function in the open: as the other kind, or without recomputing.

    The reentrant kind hides the calls inside from autograd: a value that leaves the stage from inside would
    have no history, and a received one would lose its own.
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
    """Within, a checkpoint outside units runs in the open and leaves its options in ``run.regions`` meanwhile."""
    original = getattr(module, _GENERATOR)

    def generator(function: Function, preserve: bool, context_fn: Function, *rest: Any, **kwargs: Any) -> Iterator[Any]:
        if run.inside:
            yield from original(function, preserve, context_fn, *rest, **kwargs)
            return
        run.regions.append({"preserve_rng_state": preserve, "context_fn": context_fn})
        try:
            yield
        finally:
            run.regions.pop()

    setattr(module, _GENERATOR, generator)
    try:
        yield
    finally:
        setattr(module, _GENERATOR, original)


def recomputed(forward: Function, options: dict[str, Any]) -> Function:
    """``forward``, run again in backward as the region around it asked for."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return run
