"""Samples from vLLM servers that have a published version.

Each prompt is one request to ``/inference/v1/generate``. vLLM's reply has the version of the weights for each span of
tokens, so tokens of another version are refused by name.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from engine.errors import EngineError, first_line
from engine.outer.messages import StoreRefusedError
from engine.weights_out.consumers.vllm import VllmServer

GENERATE = "/inference/v1/generate"
_AT_ONCE = 64
"""Number of prompts of one call that a server has at the same time; it batches them."""


class VllmSample(NamedTuple):
    """One sampled completion of a prompt: its tokens and their log-probabilities."""

    tokens: Sequence[int]
    log_probs: Sequence[float | None]
    """Log-probability of each token under the weights that sampled it; None where vLLM has computed NaN."""
    stopped: bool
    """True if a stop token or string has ended it, False if its length has."""


class VllmSampler:
    """Sampler that divides prompts over one or several vLLM servers.

    Args:
        servers: connections to the servers.
    """

    def __init__(self, servers: Sequence[VllmServer]) -> None:
        self._servers = servers

    def sample(
        self, prompts: Sequence[Sequence[int]], settings: Mapping[str, Any], number: int, seconds: float
    ) -> list[list[VllmSample]]:
        """Samples completions of ``prompts``, and checks that version ``number`` of the weights produced every token.

        Returns a list of completions for each prompt.

        Args:
            prompts: token ids of each prompt.
            settings: vLLM's sampling parameters by their names, such as "n" and "max_tokens".
            number: number of the published version.
            seconds: time within which all completions must arrive.

        Raises:
            EngineError: a server refuses a prompt, does not answer in time, or has other weights.
        """
        for server in self._servers:
            server.limit(seconds)
        count = len(self._servers)

        def ask(index: int) -> list[VllmSample]:
            body = {"token_ids": list(prompts[index]), "sampling_params": {**settings, "logprobs": 0}}
            return _samples(self._servers[index % count], body, number, seconds)

        with ThreadPoolExecutor(_AT_ONCE * count, "samples") as pool:
            try:
                return list(pool.map(ask, range(len(prompts))))
            except StoreRefusedError as refusal:
                raise EngineError(first_line(refusal)) from refusal

    def modes(self, seconds: float) -> list[str]:
        """Returns the value of the option ``--logprobs-mode`` of each vLLM server, such as "raw_logprobs".

        Raises EngineError if a server fails or does not answer within ``seconds``.
        """
        found = []
        for server in self._servers:
            server.limit(seconds)
            try:
                info = server.call("GET", "/server_info?config_format=json")
            except StoreRefusedError as refusal:
                raise EngineError(first_line(refusal)) from refusal
            found.append(str(info["vllm_config"]["model_config"]["logprobs_mode"]))
        return found


def _samples(server: VllmServer, body: Mapping[str, Any], number: int, seconds: float) -> list[VllmSample]:
    """Returns the completions of one prompt, after a check of their version."""
    choices = server.call("POST", GENERATE, body, longest=seconds)["choices"]
    for choice in choices:
        spans = choice.get("weight_versions")
        if spans is None:
            raise EngineError(
                f"the vLLM server {server.url} names no version of its tokens' weights; start vLLM 0.32 or later."
            )
        if other := [span["version"] for span in spans if span["version"] != str(number)]:
            raise EngineError(
                f"the vLLM server {server.url} has sampled tokens from version {other[0]!r}, but version {number} was "
                "published for them; let no other training publish to this server."
            )
    return [
        VllmSample(
            choice["token_ids"],
            [token["logprob"] for token in choice["logprobs"]["content"]],
            choice["finish_reason"] == "stop",
        )
        for choice in choices
    ]
