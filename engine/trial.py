"""An update that is launched before the host knows whether it is made: the device decides, from what all ranks sum."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.adamw import Decision
from engine.lr import LearningRate
from engine.zero.clip import factor_on_device
from engine.zero.fused import Bookkeeping
from engine.zero.optimizer import ShardedOptimizer


@dataclass(frozen=True, slots=True)
class Condition:
    """When a step is made, beside that no rank has a problem and that it has a weight."""

    scale: float
    """Loss scale: what summed gradients are divided by, with the weight."""
    max_norm: float
    """0: no clipping."""
    finite: bool
    """Its gradient norm has to be."""
    loss: bool
    """Its loss must be a number, or else the host looks first whether the forward has changed."""

    def decide(self, values: Tensor) -> Decision:
        """From the control sums, fp64 on the device, by the formulas of the host. No host synchronization."""
        loss, weight, squared_norm, _, problems, _ = values.unbind()
        divisor = weight * self.scale
        norm, factor = factor_on_device(squared_norm, divisor, self.max_norm)
        go = (problems == 0) & (divisor != 0)
        if self.finite:
            go = go & norm.isfinite()
        if self.loss:
            go = go & loss.isnan().logical_not()
        return Decision(factor, go.to(values.dtype))


class Trial:
    """Launched when it is made; ``read`` waits for the control sums only, not for the update."""

    def __init__(self, values: Tensor, condition: Condition, optimizer: ShardedOptimizer) -> None:
        self._optimizer, self._before = optimizer, Bookkeeping.of(optimizer.inner)
        self._decision = condition.decide(values)
        self._host = torch.cat([values, self._decision.go.view(1)]).to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if values.is_cuda else None  # type: ignore[no-untyped-call]
        if self._copied is not None:
            self._copied.record()

    def launch(self, rate: LearningRate, update: int) -> None:
        """Update number ``update`` and its gathers over dp, label "parameters"."""
        rate.prepare(update)
        self._optimizer.launch(self._decision)

    def read(self) -> tuple[list[float], bool]:
        """(control sums, whether the update was made)."""
        if self._copied is not None:
            self._copied.synchronize()
        *values, go = self._host.tolist()
        return values, bool(go)

    def put_back(self) -> None:
        """It was not made: nothing tells of it any more."""
        self._before.put_back(self._optimizer.inner)
