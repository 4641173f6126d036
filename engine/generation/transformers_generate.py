"""Hugging Face's ``generate`` with the sharded model: its forwards are the engine's.

generate   runs on a shallow copy of the model with another forward
  forward    -> GenerationForwards.run with the cache that ``generate`` made; each stage keeps that of its layers
             -> without a cache StepRunner.predict: full logits of the whole sequence on every rank of a replica
  encoder    -> hands its tokens on to forward, which runs encoder and decoder
data ranks end at different lengths: a finished rank joins the forwards of the others until all are finished
"""

import copy
import inspect
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from engine.errors import EngineError
from engine.generation.caches import CACHE_NAMES, StageCaches, is_transformers_generator
from engine.generation.forwards import GenerationForwards
from engine.generation.steps import base_model, usable_protocol
from engine.parallel.comm.agreement import take_from
from engine.parallel.model.rng_streams import generators_of
from engine.parallel.tensor.logits.sharded_logits import gather_logits
from engine.step.runner import StepRunner
from engine.step.runtime import RankRuntime

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
_OF_TRANSFORMERS = frozenset({
    "input_ids", "token_type_ids", "position_ids", "decoder_input_ids", "decoder_position_ids", "cache_position",
    "inputs_embeds", "decoder_inputs_embeds",
})  # fmt: skip
"""Arguments of a forward that transformers' ``generate`` makes itself."""


class Generation:
    """One call of Hugging Face's ``generate`` on a sharded model.

    Args:
        runner: runner of forwards without a key-value cache.
        notes: messages already logged; new ones are added.
    """

    def __init__(self, model: nn.Module, runner: StepRunner, runtime: RankRuntime, notes: set[str]) -> None:
        self._model, self._runner, self._runtime, self._notes = base_model(model), runner, runtime, notes
        self._comm, self._device = runtime.comm, runtime.program.device
        self._last: dict[str, Tensor] = {}
        """The batch of the last forward without a cache."""

    def run(self, inputs: Tensor, options: Mapping[str, Any]) -> Any:
        """Returns the result of Hugging Face's ``generate``. Collective over the world.

        The ranks of a replica (one full copy of the model) take over the random state of its first rank.

        Args:
            inputs: prompts of this data rank: token ids [rows, tokens].
            options: further keyword arguments of ``generate``.
        """
        self._draw_alike()
        if self._caches(options):
            forwards = GenerationForwards(self._runtime)
            mask = options.get("attention_mask")
            with forwards.opened((inputs, mask) if isinstance(mask, Tensor) else (inputs,)):
                cached = _CachedForward(forwards)
                return self._generate(_shell(self._model, cached.forward), inputs, options)
        shell: Any = _shell(self._model, self._forward)
        if getattr(getattr(self._model, "config", None), "is_encoder_decoder", False):
            object.__setattr__(shell, "get_encoder", lambda *_, **__: _PassedOn())
        result = self._generate(shell, inputs, _without_cache(options))
        while self._runner.accompany(self._last):
            pass
        return result

    def _generate(self, shell: Any, inputs: Tensor, options: Mapping[str, Any]) -> Any:
        return shell.generate(inputs.to(self._device), **options)

    def checked(self, inputs: object) -> Tensor:
        """Returns ``inputs`` after a check that they are token ids [rows, tokens].

        Raises:
            EngineError: ``inputs`` are no token ids, or the model has no Hugging Face ``generate``.
        """
        if not is_transformers_generator(self._model):
            raise EngineError(
                f"generate: the model is a {type(self._model).__name__}, not a Hugging Face model that generates; pass "
                "sampling=SamplingOptions(...), or call eng.predict(batch) for the logits of each step."
            )
        if not isinstance(inputs, Tensor) or inputs.ndim != 2 or not inputs.numel() or inputs.is_floating_point():
            shape = f" of shape {tuple(inputs.shape)}, {inputs.dtype}" if isinstance(inputs, Tensor) else ""
            given = f"a {type(inputs).__name__}{shape}"
            raise EngineError(f"generate was given {given}; give the token ids of the prompts, [rows, tokens].")
        return inputs

    def _caches(self, options: Mapping[str, Any]) -> bool:
        """Returns True if forwards have a cache: the model takes one, ranks have one stage, and options allow it."""
        config = options.get("generation_config") or getattr(self._model, "generation_config", None)
        asked = options.get("use_cache", getattr(config, "use_cache", None))
        if asked is False or len(self._runtime.plan.schedule.stages_of_rank[0]) > 1:
            return False
        return usable_protocol(self._model, self._runtime, self._notes) is not None

    def _draw_alike(self) -> None:
        """Gives the ranks of a replica the random state of its first one, so that all sample the same tokens."""
        for generator in generators_of(self._device):
            state = generator.get_state().to(self._device)
            take_from(state, self._comm.grid.is_first("replica"), self._comm, "replica", "generate")
            generator.set_state(state.cpu())

    def _forward(self, **given: Any) -> Any:
        """Returns the model's output for the sequences so far; passes on the arguments of a forward that are tensors of
        the rows."""
        mask = given.get("attention_mask")
        plain = mask is None or bool(mask.all())  # then positions count from 0 too
        names = ("input_ids", "token_type_ids", *(() if plain else ("attention_mask", "position_ids")))
        if (passed := given.get("encoder_outputs")) is not None:
            names = ("input_ids", "decoder_input_ids", *(() if plain else ("attention_mask",)))
            given["input_ids"] = passed[0].squeeze(-1)
        self._last = {name: given[name] for name in names if isinstance(given.get(name), Tensor)}
        self._last |= _others_of_rows(given, len(given["input_ids"]))
        return self._runner.predict(self._last, together=True)


class _CachedForward:
    """Forward of the model in a ``generate`` that passes a cache."""

    def __init__(self, forwards: GenerationForwards) -> None:
        self._forwards = forwards
        self._caches: StageCaches | None = None

    def forward(self, **given: Any) -> Any:
        """Returns the model's output, with the cache that was passed."""
        name = next((name for name in CACHE_NAMES if given.get(name) is not None), None)
        if name is not None and (self._caches is None or self._caches.shown() is not given[name]):
            self._caches = StageCaches(name, given[name])
        caches = self._caches if name is not None else None
        arguments = {key: value for key, value in given.items() if value is not None and key != name}
        output = self._forwards.run(arguments, caches, _plain_output, everywhere=True)
        if name is not None:
            output[name] = given[name]
        return output


def _plain_output(output: Any) -> Any:
    """Returns the output with gathered logits, and without its cache, which stays on this stage."""
    for name, value in list(output.items()):
        if name in CACHE_NAMES:
            output[name] = None
        elif type(value) is not Tensor:
            output[name] = gather_logits(value)
    return output


def _without_cache(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of ``generate`` without a cache; ``generate`` accepts a ``generation_config`` only alone."""
    given = options.get("generation_config")
    if given is None:
        return {**options, "use_cache": False}
    plain = copy.deepcopy(given)
    plain.use_cache = False
    return {**options, "generation_config": plain}


def _others_of_rows(given: Mapping[str, Any], rows: int) -> dict[str, Tensor]:
    """Returns the tensors of a model's own arguments, such as the image of each row."""
    others = {
        name: value
        for name, value in given.items()
        if isinstance(value, Tensor) and name not in _OF_TRANSFORMERS and not name.endswith("attention_mask")
    }
    for name, value in others.items():
        if not value.ndim or len(value) != rows:
            raise EngineError(
                f"generate was given {name} of shape {list(value.shape)} for {rows} rows, but without a cache dim 0 of "
                f"each tensor must be {rows}; leave {name} out, or set parallel.context to 1 and use_cache to True."
            )
    return others


class _PassedOn(nn.Module):
    """In the place of an encoder: its states are the token ids, which beams repeat and reorder as they do states."""

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        """Returns "states" [rows, tokens, 1] for token ids [rows, tokens]."""
        from transformers.modeling_outputs import BaseModelOutput

        states: Any = input_ids.unsqueeze(-1)
        return BaseModelOutput(last_hidden_state=states)


def _shell(model: nn.Module, forward: Any) -> nn.Module:
    """Returns a shallow copy of ``model`` with another forward and without hooks; it shares everything else."""
    shell: Any = type(model).__new__(type(model))
    shell.__setstate__(dict(vars(model)))  # copy.copy asks as pickle does, which a model refuses while it is trained
    for name in _HOOKS:
        object.__setattr__(shell, name, OrderedDict())

    def replaced(*args: Any, **kwargs: Any) -> Any:
        return forward(**(dict(zip(names, args, strict=False)) | kwargs))

    original = inspect.signature(type(model).forward)
    names = list(original.parameters)[1:]
    replaced.__signature__ = original.replace(  # type: ignore[attr-defined]
        parameters=[original.parameters[name] for name in names]
    )
    object.__setattr__(shell, "forward", replaced)
    return shell  # type: ignore[no-any-return]
