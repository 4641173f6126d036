"""Completions of a list of requests, in one batch with options of its own for each row.

    logits   --draw_tokens-->   tokens   --stop sequence or max_new_tokens?-->   row ends
       ^                   |
       +---- one forward --+    until all rows have ended; ended rows get padding

One rank of the last stage draws, and sends the tokens to its replica: 8 bytes a row over the axis "replica". A row's
result depends on the other rows only through the rounding of a product with more rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor, nn

from engine.errors import EngineError
from engine.generation.forwards import GenerationForwards
from engine.generation.sampling import (
    Completion,
    GenerationRequest,
    RowOptions,
    draw_tokens,
    sequence_logprobs,
    token_logprobs,
    uniform,
)
from engine.generation.steps import (
    CachedSequences,
    NextLogits,
    WholeSequences,
    base_model,
    left_padded,
    usable_protocol,
)
from engine.parallel.comm.agreement import first_rank, take_from
from engine.parallel.model.rng_streams import keyed_generators
from engine.step.runner import StepRunner
from engine.step.runtime import RankRuntime

Completions = list[list[Completion]]
"""Completions of each request, one for each sample."""


@dataclass(slots=True)
class _Row:
    """One completion in the making."""

    request: GenerationRequest
    sample: int
    ends: tuple[tuple[int, ...], ...]
    tokens: list[int] = field(default_factory=list)
    stopped: bool = False

    @property
    def ended(self) -> bool:
        return self.stopped or len(self.tokens) == self.request.sampling.max_new_tokens

    @property
    def uniform(self) -> float:
        """The random number of the next token."""
        request, position = self.request, len(self.request.tokens) + len(self.tokens)
        return uniform(request.sampling.seed, request.stream, self.sample, position)

    def add(self, token: int) -> None:
        """Appends a token, unless the row has ended."""
        if not self.ended:
            self.tokens.append(token)
            self.stopped = any(tuple(self.tokens[-len(end) :]) == end for end in self.ends)


def refuse_empty(prompts: Sequence[Sequence[int]]) -> None:
    """Raises EngineError if there is no prompt, or an empty one."""
    if not prompts or not all(map(len, prompts)):
        raise EngineError(
            "generate was given an empty prompt, or none; give at least one prompt, of at least one token each."
        )


class RequestBatch:
    """Generation requests of one data rank, which run as one batch. All ranks of a replica (one full copy of the model)
    have equal requests.

    Args:
        requests: at least one, without an empty prompt.
        pad: token id that fills shorter rows.
        ends: token ids that end a completion if its options have no ``stop``.
    """

    def __init__(self, requests: Sequence[GenerationRequest], pad: int, ends: Sequence[int]) -> None:
        self.requests, self.pad = requests, pad
        self.rows = [
            _Row(request, sample, request.sampling.ends(ends))
            for request in requests
            for sample in range(request.sampling.samples)
        ]
        options = [row.request.sampling for row in self.rows]
        self.alternatives = max((each.logprobs for each in options if each.logprobs is not None), default=None)
        self.prompts = any(each.prompt_logprobs for each in options)

    def complete(self, model: nn.Module, runtime: RankRuntime, runner: StepRunner, notes: set[str]) -> Completions:
        """Generates the completions, and returns a list of them for each request, equal on all ranks of a replica (one
        full copy of the model). Collective over the world.

        Args:
            runner: runner of forwards for a model without a usable key-value cache.
            notes: messages already logged; new ones are added.
        """
        device, prompts = runtime.program.device, [row.request.tokens for row in self.rows]
        host, given = base_model(model), left_padded(prompts, self.pad, device)
        protocol = usable_protocol(host, runtime, notes)
        if protocol is not None and not protocol.pads:  # a cache without a mask has no place for padding of any rank
            padded = first_rank(not bool(given[1].all()), runtime.comm, device, "generate")
            protocol = protocol if padded is None else None
        with keyed_generators(device, 0), torch.no_grad():
            if protocol is None:
                whole = WholeSequences(runner, host, prompts, self.pad)
                found = self._play(whole, runtime, decides=True)
                whole.finish()
                return self._completions(*found)
            forwards = GenerationForwards(runtime)
            with forwards.opened(given):
                found = self._play(CachedSequences(forwards, host, protocol, given), runtime, forwards.decides)
            return self._completions(*found)

    def _play(self, steps: NextLogits, runtime: RankRuntime, decides: bool) -> tuple[Tensor, Tensor]:
        """Runs the rows to their ends; returns the log-probabilities [R, T, 1 + 2K] of T tokens and [R, L] of the
        prompts, fp64, filled on the left.
        """
        device, coord = runtime.program.device, runtime.comm.grid.coord()
        replicas = runtime.comm.grid.size("replica")
        decides = decides and coord.tp == coord.cp == 0 and coord.pp == runtime.plan.last_rank
        options = RowOptions.of([row.request.sampling for row in self.rows], device)
        logits = steps.first(self.prompts)
        prompts, drawn = self._prompt_logprobs(logits if decides else None, device), list[Tensor]()
        if self.prompts and logits is not None:
            logits = logits[:, -1]
        while True:
            tokens_R = torch.zeros(len(self.rows), dtype=torch.int64, device=device)
            if decides:
                assert logits is not None, "ranks of the last stage have the logits"
                tokens_R = draw_tokens(logits, options, [row.uniform for row in self.rows] if options.draws else ())
            if self.alternatives is not None:
                drawn.append(self._token_logprobs(logits if decides else None, tokens_R, self.alternatives))
            if replicas > 1:
                take_from(tokens_R, decides, runtime.comm, "replica", "generate")
            tokens = tokens_R.tolist()
            for row, token in zip(self.rows, tokens, strict=True):
                row.add(token)
            if all(row.ended for row in self.rows):
                break
            logits = steps.next([None if row.ended else row.tokens[-1] for row in self.rows])
        found = torch.stack(drawn, dim=1) if self.alternatives is not None else torch.empty(len(self.rows), 0)
        if self.alternatives is not None:
            take_from(found, decides, runtime.comm, "replica", "generate")
        if self.prompts:
            take_from(prompts, decides, runtime.comm, "replica", "generate")
        return found.cpu(), prompts.cpu()

    def _token_logprobs(self, logits: Tensor | None, tokens_R: Tensor, alternatives: int) -> Tensor:
        if logits is not None:
            return token_logprobs(logits, tokens_R, alternatives)
        return tokens_R.new_zeros(len(self.rows), 1 + 2 * alternatives, dtype=torch.float64)

    def _prompt_logprobs(self, logits: Tensor | None, device: torch.device) -> Tensor:
        longest = max(len(row.request.tokens) for row in self.rows)
        found = torch.zeros(len(self.rows), longest, dtype=torch.float64, device=device)
        if self.prompts and logits is not None:
            for place, row in enumerate(self.rows):
                tokens = torch.tensor(row.request.tokens, device=device)
                found[place, longest - len(tokens) :] = sequence_logprobs(logits[place, -len(tokens) :], tokens)
        return found

    def _completions(self, drawn: Tensor, prompts: Tensor) -> Completions:
        made = map(self._completion, self.rows, drawn.tolist(), prompts.tolist())
        return [list(islice(made, request.sampling.samples)) for request in self.requests]

    def _completion(self, row: _Row, numbers: list[list[float]], prompt: list[float]) -> Completion:
        asked, numbers, most = row.request.sampling, numbers[: len(row.tokens)], self.alternatives or 0
        logprobs = alternatives = None
        if asked.logprobs is not None:
            logprobs, count = [each[0] for each in numbers], asked.logprobs
            alternatives = [
                [(int(each[1 + most + k]), each[1 + k]) for k in range(count) if each[1 + k] > -math.inf]
                for each in numbers
            ]
        return Completion(
            tokens=row.tokens,
            end="stop" if row.stopped else "length",
            logprobs=logprobs,
            alternatives=alternatives,
            prompt_logprobs=prompt[-len(row.request.tokens) :] if asked.prompt_logprobs else None,
        )
