"""A first forward with inputs of another kind than the example's, under sequence parallelism.

A parameter that meets activations cut along the sequence has on each tensor rank a part of its gradient, and the parts
are summed once a step. If other inputs (a picture beside the text) take it to whole activations as well, that gradient
is whole on every rank, and the sum would count it once for each.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from engine.batch import Batch
from engine.errors import PlanError
from engine.parallel.pipeline.absent import trainable
from engine.parallel.tensor.cuts import TensorPlan
from engine.parallel.tensor.reads import PlainReads

_KINDS = 1024
"""Kinds of inputs that are remembered; with more, all are looked at anew."""


class FirstUse:
    """Watches the first forward of each kind of inputs; ``plan``: None without tensor parallelism."""

    def __init__(self, model: nn.Module, plan: TensorPlan | None) -> None:
        names = plan.beside if plan is not None else frozenset[str]()
        self._parameters = {name: p for name, p in model.named_parameters() if name in names and trainable(p)}
        self._seen: set[object] = set()

    def watch(self, microbatch: Batch, run: Callable[[], Any]) -> Any:
        """What ``run`` gives; the same on all tensor ranks.

        Raises:
            PlanError: these inputs take a parameter to whole activations that the example took to cut ones only.
        """
        if not self._parameters or not torch.is_grad_enabled():
            return run()
        kind = _kind(microbatch)
        if kind in self._seen:
            return run()
        reads = PlainReads(self._parameters)
        with reads:
            result = run()
        for name in reads.names:
            raise PlanError(
                f"parameter {name!r} is used on whole activations with these inputs, but in the example on activations "
                "cut along the sequence only, and its gradient would be wrong; give an example_batch that takes both "
                "ways, or switch sequence_parallel off."
            )
        if len(self._seen) >= _KINDS:
            self._seen.clear()
        self._seen.add(kind)
        return result


def _kind(microbatch: Batch) -> object:
    leaves, spec = pytree.tree_flatten(microbatch)
    return str(spec), tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves)
