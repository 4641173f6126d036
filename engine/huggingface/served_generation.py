"""Completions of TRL's trainers from vLLM servers that follow the engine's weights.

TRL's own ``VLLMGeneration`` gathers whole parameters on rank 0 and sends them by NCCL. In its place:

sync_weights    ``eng.publish_weights()``: the servers read each rank's shard; the number of the version is kept
generate        rank 0 asks the servers for the prompts of all data ranks; each rank takes its own completions

TRL compares the log-probabilities of the tokens with the trainer's, and logs ``sampling/sampling_logp_difference``.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

from accelerate.utils import broadcast_object_list

from engine.errors import ConfigError, EngineError
from engine.huggingface.accelerator import EngineAccelerator
from engine.parallel.comm.agreement import from_first
from engine.parallel.comm.world import patience_seconds
from engine.parallel.model.adapters import is_peft_model
from engine.web.json_text import dump_json

_SETTINGS: Mapping[str, str] = MappingProxyType({
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_completion_length": "max_tokens",
})  # fmt: skip
"""Settings of TRL's generation -> vLLM's sampling parameters."""


class ServedGeneration:
    """Replacement of TRL's ``VLLMGeneration``: vLLM servers with the engine's published weights generate the
    completions.

    Args:
        servers: URLs of the vLLM servers.
        accelerator: accelerator of the trainer.
        given: keyword arguments of ``VLLMGeneration``. Only ``model``, ``server_timeout`` and the settings of sampling,
            except ``logprobs``, have an effect.

    Raises:
        ConfigError: the model has adapters, or a server does not answer; every rank raises it.
    """

    def __init__(self, servers: Sequence[str], accelerator: EngineAccelerator, **given: Any) -> None:
        from engine.weights_out.consumers.vllm import VllmServer  # needs the packages of a server
        from engine.weights_out.consumers.vllm_sampler import VllmSampler

        if is_peft_model(given["model"]):
            raise ConfigError(
                "GRPOTrainer was given a model with adapters and use_vllm, but vLLM loads whole models; remove "
                "use_vllm or peft_config."
            )
        self._accelerator, self._seconds = accelerator, float(given["server_timeout"])
        own = {name: given[key] for key, name in _SETTINGS.items() if given[key] is not None}
        if (pattern := given.get("structured_outputs_regex")) is not None:
            own["structured_outputs"] = {"regex": pattern}
        self._settings = own | dict(given.get("generation_kwargs") or {})
        self._sampler = VllmSampler([VllmServer(url) for url in servers]) if accelerator.is_main_process else None
        self._number = 0
        self.vllm_client = self
        """Object that TRL asks for the server's settings."""
        self._modes = self._read_modes()

    def _read_modes(self) -> list[str]:
        """Returns how each server computes log-probabilities, on all ranks. Broadcasts over the world."""
        told: list[Any] = [None, None]
        if self._sampler is not None:
            try:
                told = [self._sampler.modes(self._seconds), None]
            except EngineError as error:
                told = [None, str(error)]
        broadcast_object_list(told)
        modes, problem = told
        if problem is not None:
            raise ConfigError(problem)
        return list(modes)

    def get_server_info(self) -> Mapping[str, Any]:
        """Returns ``{"model_config": {"logprobs_mode": mode}}`` for TRL.

        ``mode`` is "processed_logprobs" if all servers have it, otherwise the first other mode.
        """
        others = [mode for mode in self._modes if mode != "processed_logprobs"]
        return {"model_config": {"logprobs_mode": (others or self._modes)[0]}}

    def sync_weights(self) -> None:
        """Publishes the engine's weights as a new version, and waits until all servers have loaded it. Collective.

        Raises:
            EngineError: a server has not loaded the version.
        """
        pending = self._accelerator.trained.publish_weights()
        pending.wait()
        self._number = pending.number

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        images: Any,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> tuple[Any, ...]:
        """Generates a completion for each of this data rank's prompts on the vLLM servers, by requests of rank 0.
        Collective.

        Args:
            prompts: token ids of each row. Over all data ranks, every ``num_generations`` successive rows have the same
                prompt.
            images: must be None.
            num_generations: number of completions of each different prompt.
            profiler: context manager around the requests.

        Returns:
            Four lists with an element for each row: ``prompts``, token ids of the completion as [id, ...], their
                log-probabilities as [[value], ...], and the completion's token ids again, as [[id], ...].

        Raises:
            EngineError: a row has an image, or a server does not answer or lacks the last published weights.
        """
        eng, rows = self._accelerator.trained, self._accelerator.gather_objects(list(prompts))
        if any(self._accelerator.gather_objects([images is not None])):
            raise EngineError("GRPOTrainer was given prompts with images, which are not sent to vLLM; remove use_vllm.")

        def sampled() -> bytes:
            assert self._sampler is not None, "rank 0 has it"
            settings = self._settings | {"n": num_generations}
            with profiler or nullcontext():
                found = self._sampler.sample(rows[::num_generations], settings, self._number, self._seconds)
            return dump_json([[each.tokens, each.log_probs] for samples in found for each in samples])

        found = json.loads(from_first(sampled, eng.comm, eng.device, patience_seconds()))
        begin = self._accelerator.process_index * len(prompts)
        tokens, values = zip(*found[begin : begin + len(prompts)], strict=True)
        alone = [[[value] for value in row] for row in values], [[[token] for token in row] for row in tokens]
        return list(prompts), list(tokens), *alone
