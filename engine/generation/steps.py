"""Logits of the next token of every row of a batch: with a cache, or by a forward of whole sequences.

CachedSequences   prompts padded on the left; afterwards one token a row
WholeSequences    sequences padded on the right, which a causal model does not see; ``predict`` of the step runner
"""

import inspect
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine.generation.caches import CacheProtocol, StageCaches, find_cache_protocol, is_transformers_generator
from engine.generation.forwards import GenerationForwards, logits_of
from engine.program.forward_inputs import ForwardSignature
from engine.step.runner import StepRunner
from engine.step.runtime import RankRuntime

logger = logging.getLogger("trine")


class NextLogits(Protocol):
    """Interface of a source that returns the next logits of R sequences, token by token."""

    def first(self, whole: bool) -> Tensor | None:
        """Returns the logits [R, V] after each of R prompts; V is the vocabulary size.

        With ``whole``, returns the logits [R, L, V] of prompts padded on the left to L positions. Pipeline ranks
        without the model's output get None.
        """

    def next(self, tokens: Sequence[int | None]) -> Tensor | None:
        """Appends one token to each of R sequences, and returns the logits [R, V] of the next one; V is the vocabulary
        size.

        Pipeline ranks without the model's output get None.

        Args:
            tokens: token of each sequence; None: the sequence has ended, and its logits mean nothing.
        """


def left_padded(prompts: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns (token ids, mask) of all prompts, padded on the left with ``pad``, both int64 [R, L].

    The mask is 1 at tokens and 0 at padding.
    """
    longest = max(map(len, prompts))
    ids = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def base_model(model: nn.Module) -> nn.Module:
    """Returns the inner model of a ``PeftModel``, with the adapter layers in it; otherwise ``model`` itself."""
    found = getattr(model, "get_base_model", None)
    return found() if callable(found) else model


def usable_protocol(model: nn.Module, runtime: RankRuntime, notes: set[str]) -> CacheProtocol | None:
    """Returns the name of forward's argument for a key-value cache, with a function that makes an empty cache; None if
    no cache can be used.

    Without a cache, each token needs a forward over the whole sequence, and rank 0 logs this.

    Args:
        notes: messages already logged; a new one is added.
    """
    protocol = find_cache_protocol(model)
    if protocol is not None and runtime.comm.grid.cp == 1:
        return protocol
    why = "context ranks divide sequences" if protocol is not None else f"{type(model).__name__} takes no cache"
    note = f"generate: {why}, so each token costs a forward over the whole sequence."
    if note not in notes and runtime.comm.grid.rank == 0:
        logger.info(note)
    notes.add(note)
    return None


class CachedSequences:
    """Source of logits that continues sequences with a key-value cache: each forward computes only the newest tokens.

    Args:
        protocol: argument of the model's forward for the cache, and the function that makes an empty cache.
        given: token ids of the prompts, padded on the left, and their mask (0 at padding); both int64 [R, L].
    """

    def __init__(self, forwards: GenerationForwards, model: Any, protocol: CacheProtocol, given: tuple[Tensor, Tensor]):
        self._forwards, self._model = forwards, model
        self._ids, self._mask = given
        self._taken = inspect.signature(type(model).forward).parameters
        self._caches, self._pads = StageCaches(protocol.name, protocol.make()), protocol.pads
        self._is_transformers = is_transformers_generator(model)
        self._positions = (self._mask.cumsum(-1) - 1).clamp_(min=0) if "position_ids" in self._taken else None

    def first(self, whole: bool) -> Tensor | None:
        """Runs the forward over R prompts, and returns the logits [R, V] after each; V is the vocabulary size.

        With ``whole``, returns the logits [R, L, V] of prompts padded on the left to L positions. Pipeline ranks
        without the model's output get None.
        """
        keeps = {"logits_to_keep": 1} if "logits_to_keep" in self._taken and not whole else {}
        logits = self._run(None, keeps)
        return logits if whole or logits is None else logits[:, -1]

    def next(self, tokens: Sequence[int | None]) -> Tensor | None:
        """Appends a token to each of R sequences, and returns the logits [R, V] after it; V is the vocabulary size.

        ``tokens`` has None for a sequence that has ended. Pipeline ranks without the model's output get None.
        """
        # a masked token, so that positions of a row that has ended do not grow beyond those that the model has
        pairs = [(0, 0) if token is None else (token, 1) for token in tokens]
        column, grows = torch.tensor(pairs, device=self._ids.device).unsqueeze(-1).unbind(1)
        self._ids = torch.cat([self._ids, column], dim=-1)
        self._mask = torch.cat([self._mask, grows], dim=-1)
        if self._positions is not None:
            self._positions = torch.cat([self._positions, self._positions[:, -1:] + grows], dim=-1)
        logits = self._run(1, {})
        return None if logits is None else logits[:, -1]

    def _run(self, count: int | None, keeps: dict[str, int]) -> Tensor | None:
        arguments = self._prepared(count) if self._is_transformers else self._plain(count)
        found = self._forwards.run({**arguments, **keeps}, self._caches, logits_of, everywhere=False)
        assert found is None or isinstance(found, Tensor)
        return found

    def _plain(self, count: int | None) -> dict[str, Any]:
        mask = {"attention_mask": self._mask} if self._pads else {}
        return {"input_ids": self._ids[:, -(count or 0) :], **mask}

    def _prepared(self, count: int | None) -> dict[str, Any]:
        """Returns the arguments that transformers' own ``generate`` passes, without the cache."""
        positions = {} if self._positions is None else {"position_ids": self._positions}
        cache = self._caches.shown()
        given = self._model.prepare_inputs_for_generation(
            self._ids, next_sequence_length=count, is_first_iteration=count is None, attention_mask=self._mask,
            use_cache=True, **positions, **{self._caches.name: cache},
        )  # fmt: skip
        return {
            name: value
            for name, value in given.items()
            if value is not None and name not in (self._caches.name, "is_first_iteration")
        }


class WholeSequences:
    """Source of logits that continues sequences without a cache: each token needs a forward over the whole sequences.

    Args:
        runner: runner of the forwards.
        pad: token id that fills shorter sequences on the right.
    """

    def __init__(self, runner: StepRunner, model: nn.Module, prompts: Sequence[Sequence[int]], pad: int) -> None:
        self._runner, self._pad = runner, pad
        self._rows = [list(prompt) for prompt in prompts]
        names = ForwardSignature.of(model).keywords
        self._named = names is None or "input_ids" in names

    def first(self, whole: bool) -> Tensor | None:
        """Runs the forward over R prompts, and returns the logits [R, V] after each; V is the vocabulary size.

        With ``whole``, returns the logits [R, L, V] of prompts padded on the left to L positions.
        """
        logits = self._run()
        if not whole:
            return self._last(logits)
        longest = logits.shape[1]
        return torch.stack([row.roll(longest - len(ids), 0) for row, ids in zip(logits, self._rows, strict=True)])

    def next(self, tokens: Sequence[int | None]) -> Tensor | None:
        """Appends a token to each of R sequences, and returns the logits [R, V] after it; V is the vocabulary size.

        ``tokens`` has None for a sequence that has ended.
        """
        for row, token in zip(self._rows, tokens, strict=True):
            row += [] if token is None else [token]
        return self._last(self._run())

    def finish(self) -> None:
        """Takes part in the forwards of data ranks that still generate; returns when all have finished."""
        while self._runner.accompany(self._batch()):
            pass

    def _run(self) -> Tensor:
        return logits_of(self._runner.predict(self._batch(), together=True))

    def _batch(self) -> Any:
        longest = max(map(len, self._rows))
        ids = torch.tensor([row + [self._pad] * (longest - len(row)) for row in self._rows])
        return {"input_ids": ids} if self._named else ids

    def _last(self, logits: Tensor) -> Tensor:
        ends = torch.tensor([len(row) - 1 for row in self._rows], device=logits.device)
        return logits[torch.arange(len(self._rows), device=logits.device), ends]
