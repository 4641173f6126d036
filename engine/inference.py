"""Outputs of the sharded model: predictions and generated text, on every grid, without labels or loss."""

from typing import Any

import torch
from torch import Tensor

from engine.engine_parts import EngineParts
from engine.errors import EngineError
from engine.program.batch import Batch
from engine.step.generation import Generation


class Inference:
    """The calls of the engine that give the model's outputs to the user."""

    _parts: EngineParts

    @torch.no_grad()
    def predict(self, batch: Batch, rows: int | None = None) -> Any:
        """The model's output for this data rank's rows, in eval mode, without a loss; the random state is restored.

        Args:
            batch: tensor, tuple, list or mapping of any number of rows, which may differ between data ranks; labels
                are not needed.
            rows: of the microbatches in which it runs, all but the last; None: ``train_micro_batch_size_per_gpu``.
                Give the rows of the batch where a tensor in it belongs to rows without being cut as they are
                (patches of pictures).

        Every rank of a replica gets the full output: logits are gathered over tp, and the last stage sends them to the
        others over pp, label "outputs". Collective; ZeRO 3 agrees over dp on the number of forwards (8 bytes).

        Raises:
            EngineError: the batch is bad, or differs from that of its replica; the same on all of its ranks.
        """
        self._open("predict")
        with self._parts.evaluated():
            return self._parts.runner.predict(batch, rows)

    @torch.no_grad()
    def generate(self, inputs: Tensor, **options: Any) -> Any:
        """Generate with a Hugging Face model, by its own ``generate``: greedy, sampling, beams, stopping criteria.

        Args:
            inputs: token ids of this data rank's prompts [rows, tokens]; rows and tokens may differ between data ranks.
            options: those of ``generate``, such as ``max_new_tokens`` and ``attention_mask``.

        Returns what ``generate`` returns, equal on the ranks of a replica: its ranks sample with the random state of
        the first one. Every token costs a forward over the whole sequence, without a cache of keys and values.
        Collective; besides ``predict`` of each token, data ranks agree on who has forwards left (8 bytes over dp).

        Raises:
            EngineError: the model does not generate, the prompts are no token ids, or an accumulation is unfinished.
        """
        self._open("generate")
        parts = self._parts
        if parts.loop is not None and parts.loop.unfinished:
            raise EngineError(
                f"generate inside an accumulation of {parts.loop.unfinished} microbatch(es); call eng.step() before, "
                "or eng.zero_grad() to drop their gradients."
            )
        with parts.evaluated():
            return Generation(parts.model, parts.runner, parts.comm, parts.device).run(inputs, options)

    def _open(self, call: str) -> None:
        self._parts.resources.refuse_closed(call)
        if self._parts.built is None:
            raise EngineError(
                f"{call} before the plan, for which a batch without labels is not enough; pass example_batch=... to "
                "engine.initialize, or train a batch first."
            )
        self._parts.comm.join(call)
