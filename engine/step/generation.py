"""Text generation with the sharded model: Hugging Face's ``generate``, with predictions of the engine as its forwards.

generate   runs on a shallow copy of the model with another forward
  forward    -> StepRunner.predict: every grid, full logits on every rank of a replica
  encoder    -> hands its tokens on to forward, which runs encoder and decoder
data ranks end at different lengths: a finished rank joins the forwards of the others until all are finished
"""

import copy
import inspect
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import EngineError
from engine.parallel.comm.agreement import take_from
from engine.parallel.comm.comm import Comm
from engine.parallel.model.rng_streams import generators_of
from engine.step.runner import StepRunner

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")


class Generation:
    """Call of Hugging Face's ``generate`` on one rank, with the engine's ``predict`` as the model's forward."""

    def __init__(self, model: nn.Module, runner: StepRunner, comm: Comm, device: torch.device) -> None:
        self._model, self._runner, self._comm, self._device = model, runner, comm, device
        self._last: dict[str, Tensor] = {}
        """The batch of the last forward."""

    def run(self, inputs: Tensor, options: Mapping[str, Any]) -> Any:
        """Returns the result of Hugging Face's ``generate`` for this data rank's token ids ``inputs``. Collective over
        the world.
        """
        self._check(inputs, options)
        self._draw_alike()
        model = self._generating
        shell: Any = _shell(model, self._forward)
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            object.__setattr__(shell, "get_encoder", lambda *_, **__: _PassedOn())
        result = shell.generate(inputs.to(self._device), **_without_cache(options))
        while self._runner.accompany(self._last):
            pass
        return result

    @property
    def _generating(self) -> nn.Module:
        """The model that runs ``generate``: of a ``PeftModel`` the one with its adapters."""
        found: Any = getattr(self._model, "get_base_model", None)
        return found() if callable(found) else self._model

    def _check(self, inputs: object, options: Mapping[str, Any]) -> None:
        kind = type(self._generating).__name__
        if not any(base.__name__ == "GenerationMixin" for base in type(self._generating).__mro__):
            raise EngineError(
                f"generate: the model is a {kind}, not a Hugging Face model that generates; call eng.predict(batch) "
                "for the logits of each step."
            )
        if not isinstance(inputs, Tensor) or inputs.ndim != 2 or not inputs.numel() or inputs.is_floating_point():
            shape = f" of shape {tuple(inputs.shape)}, {inputs.dtype}" if isinstance(inputs, Tensor) else ""
            given = f"a {type(inputs).__name__}{shape}"
            raise EngineError(f"generate was given {given}; give the token ids of the prompts, [rows, tokens].")
        if options.get("use_cache"):
            raise EngineError("generate(use_cache=True): this engine caches no keys and values; leave use_cache out.")

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
        return self._runner.predict(self._last, together=True)


def _without_cache(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of ``generate`` without a cache; ``generate`` accepts a ``generation_config`` only alone."""
    given = options.get("generation_config")
    if given is None:
        return {**options, "use_cache": False}
    plain = copy.deepcopy(given)
    plain.use_cache = False
    return {**options, "generation_config": plain}


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
