"""Remarks on training steps that run, but hardly as their user means them. Rank 0 makes each of them once.

the model is in eval mode        dropout is off, running statistics stand
every step has the same batch    an iterator that each call makes anew gives its first batch for ever
"""

import logging
from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from engine.program.batch import Batch, named_tensors
from engine.step.batch_check import glimpse, small_digest

logger = logging.getLogger("trine")
_ALIKE = 8
"""So many equal batches in a row are no chance, and more than the passes over one batch of most algorithms."""
_EVERY = 32
"""After the start, a batch of so many steps is glanced at, and the next one: a few kilobytes that lie on the host."""


class Remarks:
    """Looks at the training steps of one engine."""

    def __init__(self, model: nn.Module, speaks: bool) -> None:
        self._model, self._speaks = model, speaks
        self._training: bool | None = None
        """The mode in which the model was last looked at."""
        self._modes_told = False
        self._digest = 0
        self._alike: int | None = 0
        """Steps in a row with one batch; None: batches differ, and are compared at the next glance."""
        self._steps = 0
        self._glimpse: int | None = None
        self._batches_told = False

    def look(self, microbatches: Sequence[Batch]) -> None:
        """Look at a step before its first forward; ``microbatches``: its batch, or the first part of it."""
        if not self._speaks:
            return
        if not self._modes_told and self._model.training is not self._training:
            self._look_at_modes()
        self._steps += 1
        if self._alike is not None:
            self._look_at_batch(microbatches)
        elif self._steps % _EVERY < 2 and not self._batches_told:
            self._glance(microbatches)

    def _look_at_modes(self) -> None:
        self._training, idle = self._model.training, list(idle_in_eval_mode(self._model))
        self._modes_told = bool(idle)
        if idle:
            logger.warning(
                "the model trains in eval mode, so %s%s does nothing; call model.train() before the step "
                "(from_pretrained returns a model in eval mode), or set its rate to 0 if it is to do nothing.",
                idle[0],
                f" and {len(idle) - 1} more" * (len(idle) > 1),
            )

    def _glance(self, microbatches: Sequence[Batch]) -> None:
        before, self._glimpse = self._glimpse, glimpse(microbatches[0])
        if self._steps % _EVERY and self._glimpse is not None and self._glimpse == before:
            self._alike = self._digest = 0
            self._look_at_batch(microbatches)

    def _look_at_batch(self, microbatches: Sequence[Batch]) -> None:
        digest = small_digest(microbatches) if any(True for part in microbatches for _ in named_tensors(part)) else 0
        self._digest = self._digest or digest
        self._alike = self._alike + 1 if digest and digest == self._digest and self._alike is not None else None
        if self._alike == _ALIKE:
            self._alike, self._batches_told = None, True
            logger.warning(
                "%d steps in a row were given the same batch; if the data has more, make the iterator once: batches = "
                "iter(loader), then train_batch(batches) or train_batch(next(batches)).",
                _ALIKE,
            )


def idle_in_eval_mode(model: nn.Module) -> Iterator[str]:
    """What training in eval mode switches off: dropout with a rate, and the update of running statistics.

    A part that is in eval mode alone, inside of one that trains, is so on purpose, and so is a part without parameters
    that are trained.
    """
    modules = dict(model.named_modules())
    for path, module in modules.items():
        outer = modules[path.rpartition(".")[0]]
        if module.training or outer.training or not any(p.requires_grad for p in outer.parameters()):
            continue
        if isinstance(module, _DropoutNd):
            if module.p > 0:
                yield f"dropout ({path})"
        elif module._buffers.get("running_mean") is not None:
            yield f"the update of running statistics ({path})"
        else:
            rates = (name for name, value in vars(module).items() if "drop" in name.lower() and _is_rate(value))
            yield from (f"dropout ({path}.{name})" for name in rates)


def _is_rate(value: object) -> bool:
    return isinstance(value, float) and 0.0 < value < 1.0
