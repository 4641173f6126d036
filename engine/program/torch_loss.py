"""Losses of torch, which take an output and its targets, in the place of a loss function of the engine's form."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from engine.errors import EngineError
from engine.parallel.model.user_code import call_user_code
from engine.program.batch import Batch
from engine.program.forward_inputs import ForwardInputs
from engine.program.loss import LossFunction


@dataclass(frozen=True, slots=True)
class TorchLoss:
    """A loss of ``torch.nn`` on the output and on the one tensor of the batch that forward is not given."""

    loss: Callable[..., Any]
    inputs: ForwardInputs

    def __call__(self, output: Any, batch: Batch) -> Any:
        rest = self.inputs.rest(batch)
        if len(rest) != 1 or not isinstance(rest[0], Tensor):
            found = "1 part, which is no tensor" if len(rest) == 1 else f"{len(rest)} parts" if rest else "no part"
            raise EngineError(
                f"loss_fn={_name(self.loss)} of torch compares an output with targets, and the batch has {found} that "
                "forward is not given; pass a function of (output, batch), such as "
                f"loss_fn=lambda output, batch: {_name(self.loss)}(output, batch[1]), or name the others by inputs=."
            )
        return call_user_code(self.loss, (output, rest[0]), {})


def with_targets(loss_fn: LossFunction | None, inputs: ForwardInputs) -> LossFunction | None:
    """``loss_fn`` as the engine calls it; a loss module or function of torch gets the targets in place of the batch."""
    inner: Any = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    of_torch = isinstance(inner, _Loss) or getattr(inner, "__module__", None) == nn.functional.__name__
    return TorchLoss(loss_fn, inputs) if of_torch and loss_fn is not None else loss_fn


def _name(loss: Any) -> str:
    inner = loss.func if isinstance(loss, partial) else loss
    return str(getattr(inner, "__name__", type(inner).__name__))
