"""Parameters of other pipeline stages: placeholders without values, which code outside the engine must not read.

Their NaNs would travel silently into what a user makes of ``eng.module`` on one rank: an output, a moving average of
the weights, a file of ``torch.save``. While the engine runs the model, glue may compute on them; what it makes is
compared with the trace and replaced by received values.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from torch import nn

from engine.errors import EngineError
from engine.parallel.trace.guarded_parameter import conceal


class AbsentParameters:
    """Guards of the parameters of ``model`` that are not in ``present``, from now on; ties count by identity.

    Args:
        stages: the pipeline ranks that hold each parameter, by name.
        rank: this pipeline rank.
    """

    def __init__(
        self, model: nn.Module, present: Collection[str], stages: Mapping[str, Collection[int]], rank: int
    ) -> None:
        self._rank = rank
        self._running = self._closed = False
        kept = {id(parameter) for name, parameter in model.named_parameters() if name in present}
        for name, parameter in model.named_parameters():
            if id(parameter) not in kept:
                where = f"on pipeline rank {' and '.join(map(str, sorted(stages[name])))}"
                conceal(parameter, partial(self._read, name, where), where)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context of the engine's own passes, whose code between units may read absent parameters."""
        before, self._running = self._running, True
        try:
            yield
        finally:
            self._running = before

    def retire(self) -> None:
        """Mark the engine as closed; reads then say so."""
        self._closed = True

    def _read(self, name: str, where: str) -> None:
        if self._running:
            return
        absent = f"parameter {name!r} is {where} and has no values on this rank, which is pipeline rank {self._rank}"
        if self._closed:
            raise EngineError(f"{absent}, and its engine is closed; call eng.full_state_dict() before closing it.")
        raise EngineError(
            f"{absent}; run the model by eng.train_batch(batch) or eng.eval_batch(batch, return_output=True), and read "
            "weights by eng.full_state_dict(), eng.save_pretrained(folder) or, those of this rank alone, by "
            "`with eng.full_parameters() as parameters:`."
        )
