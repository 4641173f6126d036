"""All stages of a cut in one process, one after the other, values handed over by a dict."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.parallel.model.forward_patch import ForwardPatches
from engine.parallel.model.placeholders import replace_absent
from engine.parallel.pipeline.partition.partition import Partition
from engine.parallel.pipeline.runtime.stage import Stage
from engine.parallel.trace.model_trace import ModelTrace
from tests.parallel.pipeline.zoo import Case

Gradients = dict[str, Tensor | None]


def batches_of(case: Case, count: int, seed: int = 3) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [case.batch(generator) for _ in range(count)]


def whole(case: Case, model: nn.Module, batches: Sequence[Any]) -> tuple[list[Any], Gradients]:
    """What one process computes: losses, and gradients summed over microbatches."""
    losses = []
    for batch in batches:
        loss, weight = case.run(model, batch)
        loss.backward()
        losses.append((loss.detach(), weight))
    return losses, {name: parameter.grad for name, parameter in model.named_parameters()}


class Play:
    """The stages of a cut, each rank with its own copy of the model in which all else is NaN.

    ``ranks``: the rank of each stage; default: one each. ``prepare`` sees each copy before it is used.
    """

    def __init__(
        self,
        case: Case,
        model: nn.Module,
        cut: Partition,
        ranks: Sequence[int] = (),
        prepare: Callable[[nn.Module], Any] = lambda model: None,
    ) -> None:
        self.case, self.cut = case, cut
        self.ranks = list(ranks or range(len(cut.stages)))
        self.prepared: dict[nn.Module, Any] = {}
        copies = [copy.deepcopy(model) for _ in range(max(self.ranks) + 1)]
        for rank, copied in enumerate(copies):
            plans = [plan for plan in cut.stages if self.ranks[plan.stage] == rank]
            replace_absent(copied, frozenset[str]().union(*(plan.parameters for plan in plans)))
            self.prepared[copied] = prepare(copied)
        self.patches = ForwardPatches()
        stages = [Stage(copied, torch.device("cpu"), self.patches) for copied in copies]
        self.models = [copies[rank] for rank in self.ranks]
        self.stages = [stages[rank] for rank in self.ranks]

    def forward(
        self, timeline: ModelTrace, cut: Partition, batch: Any
    ) -> tuple[Any, list[tuple[dict[int, Tensor], dict[int, Tensor]]]]:
        """The result of the last stage, and what each received and sent."""
        travelling: dict[int, Tensor] = {}
        moved = []
        result: Any = None
        for plan, stage, model in zip(cut.stages, self.stages, self.models, strict=True):
            received = {
                number: travelling[number].detach().clone().requires_grad_(timeline.values[number].grad)
                for number in plan.receives
            }
            outcome = stage.forward(timeline, plan, partial(self.case.run, model, batch), received)
            travelling.update(outcome.sent)
            moved.append((received, outcome.sent))
            result = outcome.result
        return result, moved

    def backward(self, timeline: ModelTrace, cut: Partition, result: Any, moved: Any) -> None:
        """From the last stage to the first."""
        coming: dict[int, list[Tensor]] = {}
        for plan, (received, sent) in reversed(list(zip(cut.stages, moved, strict=True))):
            roots = [result[0]] if plan.last else [sent[number] for number in sent if number in coming]
            gradients = [None] if plan.last else [sum(coming[number]) for number in sent if number in coming]
            torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]
            for number, tensor in received.items():
                if tensor.grad is not None:
                    coming.setdefault(number, []).append(tensor.grad)

    def train(self, timeline: ModelTrace, batches: Sequence[Any]) -> tuple[list[Any], Gradients]:
        """Forward of every microbatch, then the backwards."""
        runs = [self.forward(timeline, self.cut, batch) for batch in batches]
        for result, moved in runs:
            self.backward(timeline, self.cut, result, moved)
        return [(result[0].detach(), result[1]) for result, _ in runs], self.gradients()

    def gradients(self) -> Gradients:
        """Of every parameter, summed over the stages that hold it."""
        found: Gradients = {}
        for name, owners in self.cut.owners.items():
            holders = {self.ranks[stage]: self.models[stage] for stage in owners}
            parts = [dict(holder.named_parameters())[name].grad for holder in holders.values()]
            given = [part for part in parts if part is not None]
            found[name] = torch.stack(given).sum(0) if len(given) > 1 else given[0] if given else None
        return found
