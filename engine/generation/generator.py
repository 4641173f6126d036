"""Generation of one engine: prompts or requests in, tokens or completions out, equal on the ranks of each replica."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import EngineError
from engine.generation.requests import Completions, RequestBatch, refuse_empty
from engine.generation.sampling import Completion, GenerationRequest, SamplingOptions
from engine.generation.steps import base_model, left_padded
from engine.generation.transformers_generate import Generation
from engine.parallel.comm.agreement import all_or_none, gather_from_all
from engine.step.failed_ranks import note_failure
from engine.step.runner import StepRunner
from engine.step.runtime import RankRuntime


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """Result of a generation with log-probabilities: token ids of all rows, and a :class:`Completion` for each row."""

    tokens: Tensor
    """Prompts, padded on the left, and their completions, padded on the right: int64 [rows * samples, tokens]."""
    completions: list[Completion]
    """Completion of each row of ``tokens``."""


class TextGenerator:
    """Generator of text with the weights of one engine. Its methods are collective over all ranks."""

    def __init__(self, model: nn.Module, runtime: RankRuntime, runner: StepRunner) -> None:
        self._model, self._runtime, self._runner = model, runtime, runner
        self._notes: set[str] = set()

    def by_transformers(self, inputs: object, options: Mapping[str, Any]) -> Any:
        """Returns the result of a Hugging Face model's ``generate``, with forwards over the sharded model.

        Args:
            inputs: prompts of this data rank: token ids [rows, tokens].
            options: further keyword arguments of the model's ``generate``.

        Raises:
            EngineError: ``inputs`` are no token ids, or the model has no Hugging Face ``generate``.
        """
        generation = Generation(self._model, self._runner, self._runtime, self._notes)
        with self._checking():
            checked = generation.checked(inputs)
        with self._noting_failures():
            return generation.run(checked, options)

    def sampled(
        self, inputs: Tensor | Sequence[Sequence[int]], sampling: SamplingOptions | Sequence[SamplingOptions],
        mask: Tensor | None,
    ) -> Tensor | GeneratedText:  # fmt: skip
        """Returns the prompts, padded on the left, with their completions, padded on the right: int64 [completions,
        tokens].

        The result is a :class:`GeneratedText` if any options ask for log-probabilities.

        Args:
            inputs: prompts of this data rank: token ids [rows, tokens], or a list of ids for each prompt.
            sampling: options of all prompts, or a sequence with options for each prompt.
            mask: for a tensor of prompts, 0 at padding and 1 at tokens; None: no padding.

        Raises:
            EngineError: prompts, mask or ``sampling`` have a wrong shape or length, or a prompt is empty.
        """
        with self._checking(self._runtime.comm.grid.row_ranks > 1):
            prompts = _prompts(inputs, mask)
            refuse_empty(prompts)
            if not isinstance(sampling, SamplingOptions) and len(sampling) != len(prompts):
                raise EngineError(
                    f"generate was given {len(sampling)} SamplingOptions for {len(prompts)} prompts; give one for each "
                    "prompt, or one for all."
                )
        if isinstance(sampling, SamplingOptions):
            requests = [
                GenerationRequest(tokens=prompt, sampling=sampling, stream=stream)
                for stream, prompt in enumerate(prompts, self._first_row(len(prompts)))
            ]
        else:
            pairs = zip(prompts, sampling, strict=True)
            requests = [GenerationRequest(tokens=prompt, sampling=options) for prompt, options in pairs]
        made = self._complete(requests)
        rows = [(request, each) for request, found in zip(requests, made, strict=True) for each in found]
        tokens = self._joined([request.tokens for request, _ in rows], [each.tokens for _, each in rows])
        asked = any(r.sampling.logprobs is not None or r.sampling.prompt_logprobs for r in requests)
        return GeneratedText(tokens, [each for _, each in rows]) if asked else tokens

    def complete(self, requests: Sequence[GenerationRequest]) -> Completions:
        """Returns one list for each request, with a completion for each sample. All requests run as one batch.

        Each data rank passes its own requests, equal on its tensor and pipeline ranks.

        Raises:
            EngineError: there is no request, or a prompt is empty.
        """
        with self._checking(self._runtime.comm.grid.row_ranks > 1):
            refuse_empty([request.tokens for request in requests])
        return self._complete(requests)

    def _complete(self, requests: Sequence[GenerationRequest]) -> Completions:
        batch = RequestBatch(requests, self._pad, self._ends)
        with self._noting_failures():
            return batch.complete(self._model, self._runtime, self._runner, self._notes)

    @property
    def _ends(self) -> list[int]:
        """Tokens that end a completion: ``eos_token_id`` of the model's ``generation_config``."""
        found = getattr(getattr(base_model(self._model), "generation_config", None), "eos_token_id", None)
        return [] if found is None else [found] if isinstance(found, int) else list(found)

    @property
    def _pad(self) -> int:
        found = getattr(getattr(base_model(self._model), "generation_config", None), "pad_token_id", None)
        return found if found is not None else next(iter(self._ends), 0)

    def _first_row(self, rows: int) -> int:
        """Returns the global index of this data rank's first row; 8 bytes a rank over the axis of rows."""
        grid = self._runtime.comm.grid
        if grid.row_ranks == 1:
            return 0
        mine, device = torch.tensor([rows]), self._runtime.program.device
        counts = gather_from_all(mine, self._runtime.comm, device, "generate", grid.rows).flatten().tolist()
        return sum(counts[: grid.row_rank])

    def _joined(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> Tensor:
        longest, device = max(map(len, completions)), self._runtime.program.device
        given, _ = left_padded(prompts, self._pad, device)
        rows = [[*tokens, *[self._pad] * (longest - len(tokens))] for tokens in completions]
        return torch.cat([given, torch.tensor(rows, device=device)], dim=-1)

    @contextmanager
    def _checking(self, waits: bool = False) -> Iterator[None]:
        """Opens a check of this rank's prompts; if it fails on any rank, all ranks raise before a forward.

        One all-reduce of 8 bytes over the world if forwards communicate, or with ``waits``: the engine's sampler
        communicates between data ranks if a model has no usable cache.
        """
        runtime = self._runtime
        self._runner.begin()  # refuses after a call that has spoiled the engine, and parameters that were replaced
        with (
            all_or_none(runtime.comm, runtime.program.device, "refused its prompts, so no rank generates")
            if waits or runtime.communicates
            else nullcontext()
        ):
            yield

    @contextmanager
    def _noting_failures(self) -> Iterator[None]:
        """Opens a call in which a rank that fails leaves others waiting; each raises the error of the first."""
        runtime = self._runtime
        issued = runtime.comm.issued
        try:
            yield
        except BaseException as error:
            alike = runtime.pipeline is None or runtime.comm.issued <= issued + 1
            if runtime.communicates and (told := note_failure("generate", error, runtime.comm, alike)) is not None:
                raise told from error
            raise


def _prompts(inputs: Tensor | Sequence[Sequence[int]], mask: Tensor | None) -> list[list[int]]:
    """Returns the tokens of each prompt without padding."""
    if not isinstance(inputs, Tensor):
        return [list(map(int, prompt)) for prompt in inputs]
    if inputs.ndim != 2 or inputs.is_floating_point():
        raise EngineError(
            f"generate was given a Tensor of shape {tuple(inputs.shape)}, {inputs.dtype}; give the token ids of the "
            "prompts, [rows, tokens]."
        )
    if mask is None:
        return inputs.tolist()
    if mask.shape != inputs.shape:
        raise EngineError(
            f"generate was given an attention_mask of shape {tuple(mask.shape)} for prompts of shape "
            f"{tuple(inputs.shape)}; give a mask with one entry for each token."
        )
    return [row[seen.bool()].tolist() for row, seen in zip(inputs, mask, strict=True)]
