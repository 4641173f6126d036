"""Samples of a service through a vLLM server, which has the weights that were saved for sampling last.

push      a saved full-parameter model is published; the server takes it over under a number
sample    rank 0 asks the server; tokens of another number are refused, and so are weights saved earlier
"""

import json

import numpy as np

from engine.engine import Engine
from engine.parallel.comm.agreement import from_first
from engine.parallel.comm.world import patience_seconds
from engine.serving.commands import SampledOutput, SampledSequence, SampleTokens, SamplingParameters
from engine.serving.losses import ServedError
from engine.web.json_text import dump_json

_SECONDS = 300.0
"""Time within which all sequences of a request must arrive."""
RAW = "raw_logprobs"
"""Log-probabilities under the model, before temperature, top_k and top_p, as the engine's sampler returns them."""


class VllmSamples:
    """Sampler that asks a vLLM server for samples from published weights. All ranks call its methods in the same order.

    Args:
        url: address of the vLLM server.
        base: engine through which the ranks communicate.
    """

    def __init__(self, url: str, base: Engine) -> None:
        from engine.weights_out.consumers.vllm import VllmServer  # needs the packages of a server
        from engine.weights_out.consumers.vllm_sampler import VllmSampler

        self._url, self._base = url, base
        self._sampler = VllmSampler([VllmServer(url)])
        self._number = 0
        self._name = ""
        """Name of the saved weights in the server; empty: none, or unknown."""
        self._is_raw = False

    def push(self, name: str, engine: Engine) -> None:
        """Publishes the weights of ``engine`` as ``name``, and waits until the vLLM server has them. All ranks call it.

        Raises:
            EngineError: the server does not load the weights.
        """
        self._name = ""
        pending = engine.publish_weights()
        pending.wait()
        self._name, self._number = name, pending.number

    def sample(self, command: SampleTokens) -> SampledOutput:
        """Samples from the last published weights; all ranks get the same result.

        Rank 0 asks the server, and broadcasts the sequences to all ranks.

        Raises:
            ServedError: the server lacks the weights named ``command.source``, or does not support a sampling
                parameter.
            EngineError: the server does not answer, or has sampled from another version.
        """
        if command.source != self._name:
            has = f"the weights {self._name}" if self._name else "none that this service has pushed"
            raise ServedError(
                f"the weights {command.source} are not in the vLLM server, which has {has}; save them for sampling "
                "again."
            )
        settings, base = _settings(command.parameters), self._base
        tokens = command.prompt.tolist()

        def drawn() -> bytes:
            if not self._is_raw and (modes := self._sampler.modes(_SECONDS)) != [RAW]:
                raise ServedError(
                    f"the vLLM server {self._url} has --logprobs-mode {modes[0]}, and clients get log-probabilities "
                    f"under the model; start it with {RAW}."
                )
            self._is_raw = True
            (found,) = self._sampler.sample([tokens], settings, self._number, _SECONDS)
            return dump_json(found)

        # ranks that are threads wait without a limit
        patience = patience_seconds() if base.comm.reports is not None else None
        found = json.loads(from_first(drawn, base.comm, base.device, patience))
        return SampledOutput(
            tuple(
                SampledSequence(np.array(tokens, np.int32), np.array(values, np.float32), stopped)
                for tokens, values, stopped in found
            )
        )


def _settings(parameters: SamplingParameters) -> dict[str, object]:
    """Returns vLLM's sampling parameters.

    Raises:
        ServedError: a parameter has no counterpart, or no token may be drawn.
    """
    lacking = {
        "prompt_logprobs": parameters.prompt_logprobs or parameters.top_prompt_logprobs,
        "topk_sample_logprobs": parameters.top_sample_logprobs,
        "a stop sequence of several tokens": any(len(stop) != 1 for stop in parameters.stops),
        "max_tokens 0": not parameters.max_tokens,
    }
    if given := next((name for name, is_given in lacking.items() if is_given), None):
        raise ServedError(f"asample was given {given}, which is not sampled through vLLM; leave it out.")
    return {
        "n": parameters.samples, "max_tokens": parameters.max_tokens, "temperature": parameters.temperature,
        "top_k": max(0, parameters.top_k), "top_p": parameters.top_p, "seed": parameters.seed, "ignore_eos": True,
        "stop_token_ids": [token for (token,) in parameters.stops],
    }  # fmt: skip
