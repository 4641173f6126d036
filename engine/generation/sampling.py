"""Options of sampling, and the choice of tokens from logits; pure functions on local tensors.

logits -> divided by temperature -> the top_k largest -> the smallest set with probability top_p -> one uniform number

The uniform number of a token is a hash of (seed, stream, sample, position), so that a token depends neither on the
grid nor on other rows of the batch. Shape suffixes: R rows, V vocabulary, K alternatives, L positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from engine.errors import EngineError
from engine.parallel.model.rng_streams import derive_seed

_SEEDS = 2.0**63
"""Number of seeds that ``derive_seed`` returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Options for drawing the completions of one prompt.

    Raises:
        EngineError: an option is outside its range.
    """

    max_new_tokens: int = 32
    temperature: float = 1.0
    """Divisor of the logits; 0 takes the likeliest token."""
    top_k: int = 0
    """Number of likeliest tokens to draw from; 0: all. Tokens that tie with the last one stay."""
    top_p: float = 1.0
    """Probability of the smallest set of likeliest tokens to draw from, after ``top_k``."""
    seed: int = 0
    stop: Sequence[int | Sequence[int]] | None = None
    """Tokens, or sequences of them, that end a completion, which includes them; None: the model's ``eos_token_id``."""
    samples: int = 1
    """Number of completions of the prompt."""
    logprobs: int | None = None
    """Number of likeliest tokens with log-probabilities at each position, next to the drawn one; None: none at all."""
    prompt_logprobs: bool = False
    """True: returns log-probabilities of the prompt's tokens."""

    def __post_init__(self) -> None:
        rules = (
            ("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.temperature, 0 <= self.temperature < float("inf"), "finite and not negative"),
            ("top_k", self.top_k, self.top_k >= 0, "not negative"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("seed", self.seed, -(2**63) <= self.seed < 2**63, "a 64-bit integer"),
            ("samples", self.samples, self.samples >= 1, "at least 1"),
            ("logprobs", self.logprobs, self.logprobs is None or self.logprobs >= 0, "None or not negative"),
        )
        for name, value, holds, rule in rules:
            if not holds:
                raise EngineError(f"SamplingOptions was given {name} {value}, but {name} must be {rule}; change it.")
        if any(not isinstance(end, int) and not len(end) for end in self.stop or ()):
            raise EngineError("SamplingOptions was given an empty stop sequence; give at least one token for each.")

    def ends(self, default: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Returns the token sequences that end a completion: the option ``stop``, or else each token of ``default``."""
        return tuple(
            (end,) if isinstance(end, int) else tuple(end) for end in (default if self.stop is None else self.stop)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Prompt with the sampling options of its completions."""

    tokens: Sequence[int]
    """Token ids of the prompt, without padding."""
    sampling: SamplingOptions
    stream: int = 0
    """Number of the random stream below the seed; equal requests with different streams draw different tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Generated tokens that follow one prompt, and the reason of their end."""

    tokens: list[int]
    end: Literal["stop", "length"]
    """Reason of the end: a stop sequence, or ``max_new_tokens``."""
    logprobs: list[float] | None = None
    """Natural log-probability of each token under the model, before temperature, ``top_k`` and ``top_p``."""
    alternatives: list[list[tuple[int, float]]] | None = None
    """Likeliest tokens of each position with their log-probabilities, the likeliest first."""
    prompt_logprobs: list[float] | None = None
    """Log-probability of each token of the prompt after the ones before it; the first is NaN."""


class RowOptions(NamedTuple):
    """Sampling options of R rows as tensors [R] on the device of the logits."""

    temperatures: Tensor
    """fp64 [R]."""
    top_k: Tensor
    """int64 [R]."""
    top_p: Tensor
    """fp64 [R]."""
    draws: bool
    """True if any row has a temperature above 0."""
    filters: tuple[bool, bool]
    """True if any row has a ``top_k``; True if any row has a ``top_p`` below 1."""

    @staticmethod
    def of(options: Sequence[SamplingOptions], device: torch.device) -> "RowOptions":
        """Returns the options of all rows, in their order, as tensors on ``device``."""
        drawn = [each for each in options if each.temperature > 0]
        return RowOptions(
            torch.tensor([each.temperature for each in options], dtype=torch.float64, device=device),
            torch.tensor([each.top_k for each in options], device=device),
            torch.tensor([each.top_p for each in options], dtype=torch.float64, device=device),
            bool(drawn),
            (any(each.top_k for each in drawn), any(each.top_p < 1 for each in drawn)),
        )


def uniform(seed: int, stream: int, sample: int, position: int) -> float:
    """Returns a pseudo-random number in [0, 1) to draw one token; it is a hash of the arguments.

    Args:
        stream: number that separates prompts with the same seed.
        sample: index of the completion among the completions of its prompt.
        position: position of the token, from 0 at the prompt's begin.
    """
    return derive_seed(seed, stream, sample, position) / _SEEDS


def draw_tokens(logits_RV: Tensor, options: RowOptions, uniform_R: Sequence[float]) -> Tensor:
    """Returns the next token of each of R rows, int64 [R], after temperature, top-k and top-p.

    A row with temperature 0 gets its likeliest token, the lowest id among equals.

    Args:
        logits_RV: logits [R, V] over the vocabulary of V tokens, in any float dtype.
        options: temperature, top-k and top-p of each row.
        uniform_R: random number in [0, 1) of each row; may be empty if all temperatures are 0.
    """
    logits_RV = logits_RV.float()
    likeliest_R = logits_RV.argmax(dim=-1)
    if not options.draws:
        return likeliest_R
    greedy_R = options.temperatures == 0
    # the largest logit is subtracted before the division, because a tiny temperature would make it infinite
    scaled_RV = (logits_RV - logits_RV.amax(dim=-1, keepdim=True)).double()
    scaled_RV /= torch.where(greedy_R, 1.0, options.temperatures).unsqueeze(-1)
    if options.filters[0]:
        scaled_RV = keep_largest(scaled_RV, options.top_k)
    chances_RV = scaled_RV.softmax(dim=-1)
    if options.filters[1]:
        chances_RV = keep_nucleus(chances_RV, options.top_p)
    sums_RV = chances_RV.cumsum(dim=-1)
    targets_R = torch.tensor(uniform_R, dtype=torch.float64, device=logits_RV.device) * sums_RV[:, -1]
    drawn_R = torch.searchsorted(sums_RV, targets_R.unsqueeze(-1), right=True).squeeze(-1)
    # a product that rounds up to the last sum would fall behind the last token with a probability
    last_R = chances_RV.shape[-1] - 1 - (chances_RV > 0).flip(-1).int().argmax(dim=-1)
    return torch.where(greedy_R, likeliest_R, torch.minimum(drawn_R, last_R))


def keep_largest(scores_RV: Tensor, top_k_R: Tensor) -> Tensor:
    """Returns ``scores_RV``, [rows, vocabulary], with -inf for every score below the k-th largest of its row.

    ``top_k_R`` has the k of each row; 0 leaves the row unchanged.
    """
    counts_R = torch.where(top_k_R == 0, scores_RV.shape[-1], top_k_R).clamp(max=scores_RV.shape[-1])
    largest = int(torch.where(top_k_R == 0, 1, counts_R).max())
    ordered_RK = scores_RV.topk(largest, dim=-1).values
    bounds_R1 = ordered_RK.gather(-1, (counts_R - 1).clamp(max=largest - 1).unsqueeze(-1))
    bounds_R1 = bounds_R1.masked_fill((top_k_R == 0).unsqueeze(-1), -torch.inf)
    return scores_RV.masked_fill(scores_RV < bounds_R1, -torch.inf)


def keep_nucleus(chances_RV: Tensor, top_p_R: Tensor) -> Tensor:
    """Returns a copy of ``chances_RV``, probabilities [rows, vocabulary], with 0 for tokens outside of their row's
    nucleus.

    Other probabilities are unchanged.

    The nucleus (Holtzman et al. 2020) is the smallest set of likeliest tokens with a total of at least p; ``top_p_R``
    has the p of each row.
    """
    ordered_RV, places_RV = chances_RV.sort(dim=-1, descending=True, stable=True)
    before_RV = ordered_RV.cumsum(dim=-1) - ordered_RV
    top_p_R1 = top_p_R.unsqueeze(-1)
    outside_RV = (before_RV >= top_p_R1) & (top_p_R1 < 1)
    return chances_RV.masked_fill(torch.zeros_like(outside_RV).scatter_(-1, places_RV, outside_RV), 0.0)


def token_logprobs(logits_RV: Tensor, tokens_R: Tensor, alternatives: int) -> Tensor:
    """Returns log-probabilities for each of R rows: of one token, and of the K = ``alternatives`` likeliest tokens.

    The result is fp64 [R, 1 + 2K]: log-probability of the token in ``tokens_R``, K largest log-probabilities, ids of
    these K tokens. If the vocabulary has fewer than K tokens, the rest is -inf and id 0.
    """
    logprobs_RV = logits_RV.float().log_softmax(dim=-1)
    likeliest_RK, tokens_RK = logprobs_RV.topk(min(alternatives, logprobs_RV.shape[-1]), dim=-1)
    fill = (0, alternatives - likeliest_RK.shape[-1])
    parts = (
        logprobs_RV.gather(-1, tokens_R.unsqueeze(-1)),
        functional.pad(likeliest_RK, fill, value=-torch.inf),
        functional.pad(tokens_RK, fill),
    )
    return torch.cat([part.double() for part in parts], dim=-1)


def sequence_logprobs(logits_LV: Tensor, tokens_L: Tensor) -> Tensor:
    """Returns the log-probability of each token of one sequence, given the tokens before it: fp32 [L], first element
    NaN.

    Args:
        logits_LV: logits [L, V] of L positions over the vocabulary of V tokens.
        tokens_L: token ids of the sequence, int64 [L].
    """
    logprobs_LV = logits_LV[:-1].float().log_softmax(dim=-1)
    rest_L = logprobs_LV.gather(-1, tokens_L[1:].unsqueeze(-1)).squeeze(-1)
    return torch.cat([rest_L.new_full((1,), torch.nan), rest_L])
