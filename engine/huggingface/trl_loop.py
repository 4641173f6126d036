"""Overrides for TRL's trainers, which call more methods than ``transformers.Trainer``.

generate             completions come from ``eng.generate``, collectively, or from the servers in weights_out.to
rows                 rewards, logs and draws count data ranks, not all processes
log-probabilities    forwards without gradients, which TRL calls on the bare model, run through the engine
fused head           tensor ranks compute on their shards of the logits, which are never gathered
"""

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
import transformers
from accelerate.utils import set_seed
from torch import Tensor, nn

from engine.config import Config
from engine.errors import ConfigError
from engine.hosting.arguments import (
    BARE_REFERENCE,
    GENERATING,
    refuse_rewards,
    refuse_trl_grid,
    rows_of_generation,
)
from engine.huggingface.accelerator import EngineAccelerator
from engine.huggingface.served_generation import ServedGeneration
from engine.parallel.comm.agreement import all_or_none
from engine.parallel.tensor.logits.token_values import token_values

_IGNORED = -100


class TrlLoop(transformers.Trainer):
    """Base class of the engine's Trainer; runs TRL's trainers on the engine. No effect without a TRL base class."""

    accelerator: EngineAccelerator
    _sharded: bool
    """True if a rank has a part of each parameter; set once a TRL trainer is found among the bases."""
    _servers: Sequence[str] = ()
    """Addresses of the vLLM servers that follow the weights."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        first = _of_trl(cls)
        if first is not None and cls.__mro__.index(first) < cls.__mro__.index(TrlLoop):
            raise ConfigError(
                f"class {cls.__name__} lists TRL's {first.__name__} before the engine's Trainer, so none of Trainer's "
                f"methods is called; write class {cls.__name__}(Trainer, {first.__name__})."
            )

    @classmethod
    def trl_kind(cls) -> str | None:
        """Returns the name of the TRL trainer among the bases of ``cls``, such as "GRPOTrainer"; None without one."""
        kind = _of_trl(cls)
        return None if kind is None else kind.__name__

    def _check_trl(self, config: Config) -> None:
        """Raises for a grid on which the TRL trainer would compute something else."""
        if (kind := self.trl_kind()) is not None:
            refuse_trl_grid(kind, self.args, config)
            self._sharded = config.tp > 1 or config.zero_optimization.stage == 3
            if config.weights_out is not None:
                self._servers = config.weights_out.servers
        if kind in GENERATING:
            args: Any = self.args
            args.generation_batch_size = rows_of_generation(args, self.accelerator.num_processes)

    def _check_reference(self) -> None:
        """Routes TRL's reference, a call of the bare model without its adapters, through the engine.

        Raises:
            ConfigError: the reference is a copy of the adapters, and a rank has only a part of the model.
        """
        model: Any = self.model
        adapters, reference = getattr(model, "peft_config", None), getattr(self, "ref_model", self)
        if self.trl_kind() not in BARE_REFERENCE or adapters is None or reference is not None or not self._sharded:
            return
        if "ref" in adapters:
            raise ConfigError(
                f"{self.trl_kind()} was given a model with adapters and no ref_model, so TRL computes the reference "
                "by a copy of the adapters in the full model, but each rank has only a part of the weights; pass "
                "ref_model, or remove parallel.tensor and set zero_optimization.stage to 2."
            )
        _route_reference(model, self.accelerator)

    def _plan_tokens(self) -> dict[str, Any]:
        """Returns tokens for the plan, if the dataset has no microbatch before the first forward."""
        args: Any = self.args
        lengths = (getattr(args, name, None) for name in ("max_completion_length", "max_length"))
        length = next((each for each in lengths if each), 16)
        return plan_inputs({"input_ids": torch.zeros(args.per_device_train_batch_size, length, dtype=torch.int64)})

    def _prepare_trl_model(self, model: nn.Module) -> None:
        """Replaces TRL's fused head by one for a sharded vocabulary, before the engine places the model."""
        if self.trl_kind() is not None and self.accelerator.grid.tp > 1:
            shard_fused_head(model)

    @contextmanager
    def _making_trl(self) -> Iterator[None]:
        """Replaces TRL's vLLM by servers that follow the weights, while TRL's trainer is made."""
        with _replaced(type(self), VLLMGeneration=lambda **given: ServedGeneration(self._servers, **given)):
            yield
        if self.trl_kind() in GENERATING and self.accelerator.grid.size("replica") > 1:
            set_seed(self.args.seed + self.accelerator.process_index)  # TRL has drawn a seed for each process

    def _check_rewards(self) -> None:
        """Wraps reward functions so that an error on one rank ends every rank, which would otherwise wait for it."""
        functions: Any = getattr(self, "reward_funcs", None)
        for index, function in enumerate(functions or ()):
            awaited = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
            if not isinstance(function, nn.Module) and not awaited:
                functions[index] = _checked_reward(function, self.accelerator)

    # ------------------------------------------------------------------ calls of TRL

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        """Generates and scores completions; rewards and logs are gathered over data ranks. Collective."""
        host: Any = super()
        counted = {"gather": self.accelerator.gather, "gather_object": self.accelerator.gather_objects}
        with _replaced(type(self), **counted):
            return host._generate_and_score_completions(*args, **kwargs)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Generates completions of this data rank's prompts by the engine. Collective."""
        host: Any = super()
        with _generating(self.model, self.accelerator):
            return host._generate_single_turn(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Computes log-probabilities by the engine if TRL calls the bare model, which may have shards only."""
        host: Any = super()
        hosted = self.accelerator.hosted
        asked = hosted if hosted is not None and model is self.model else model
        return host._get_per_token_logps_and_entropies(asked, *args, **kwargs)


def _route_reference(model: Any, accelerator: EngineAccelerator) -> None:
    """Routes calls of ``model`` without its adapters through the engine."""
    own = model.disable_adapter

    @contextmanager
    def disable_adapter() -> Iterator[None]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            del model.forward  # the engine calls the model's own forward
            try:
                return accelerator.hosted(*args, **kwargs) if accelerator.hosted else model(*args, **kwargs)
            finally:
                model.forward = forward

        with own():
            model.forward = forward
            try:
                yield
            finally:
                del model.forward

    model.disable_adapter = disable_adapter


def _of_trl(cls: type) -> type | None:
    """Returns the first TRL class among ``cls`` and its bases."""
    return next((kind for kind in cls.__mro__ if kind.__module__.startswith("trl.")), None)


@contextmanager
def _replaced(cls: type, **values: Any) -> Iterator[None]:
    """Replaces names of the module of ``cls``'s TRL trainer inside the context, where it has them."""
    kind = _of_trl(cls)
    module = None if kind is None else sys.modules[kind.__module__]
    own = {name: value for name, value in vars(module).items() if name in values} if module is not None else {}
    try:
        for name in own:
            setattr(module, name, values[name])
        yield
    finally:
        for name, value in own.items():
            setattr(module, name, value)


def _checked_reward(function: Any, accelerator: EngineAccelerator) -> Any:
    """Wraps ``function`` so that its errors are raised on all ranks; one all-reduce over the world a call."""
    name = getattr(function, "__name__", type(function).__name__)

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        engine = accelerator.trained
        with all_or_none(engine.comm, engine.device, "could not compute its rewards"):
            rewards = function(*args, **kwargs)
            refuse_rewards(name, rewards, len(kwargs["completions"]))
        return rewards

    return checked


def plan_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns example keyword arguments of the model's forward, made from ``inputs``, a TRL trainer's batch.

    ``labels`` equal ``input_ids``; a missing ``attention_mask`` is ones.
    """
    ids = inputs["input_ids"]
    return {"input_ids": ids, "attention_mask": inputs.get("attention_mask", torch.ones_like(ids)), "labels": ids}


@contextmanager
def _generating(model: Any, accelerator: EngineAccelerator) -> Iterator[None]:
    """Replaces ``model.generate`` by the engine's inside the context."""

    def generate(input_ids: Tensor, **options: Any) -> Any:
        del model.generate  # the engine calls the model's own generate
        return accelerator.trained.generate(input_ids, **options)

    model.generate = generate
    try:
        yield
    finally:
        vars(model).pop("generate", None)


def shard_fused_head(model: nn.Module) -> None:
    """Replaces TRL's fused language-model head of ``model``, if it has one. The new head computes log-probabilities
    from logits that are sharded over tensor ranks.
    """
    base: Any = model
    whole = base.get_base_model() if hasattr(base, "get_base_model") else base
    fused = vars(whole).get("forward")
    if not isinstance(fused, MethodType):
        return
    settings = inspect.getclosurevars(fused.__func__).nonlocals
    if not {"original_forward", "outputs", "temperature"} <= settings.keys():
        return

    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return fused(*args, **kwargs)
        return _scored(self, settings, args, kwargs)

    forward.__signature__ = inspect.signature(fused.__func__)  # type: ignore[attr-defined]
    whole.forward = MethodType(forward, whole)


def _scored(model: Any, settings: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the output of TRL's fused head for the same arguments."""
    from trl.trainer.utils import FusedCausalLMOutput

    labels, shifted, count = (kwargs.pop(name, None) for name in ("labels", "shift_labels", "num_items_in_batch"))
    output = settings["original_forward"](*args, **kwargs | {"use_cache": False})
    logits_BSV, wanted_BS = output.logits, shifted
    if shifted is None:
        logits_BSV, wanted_BS = logits_BSV[:, :-1], labels[:, 1:]
    mask_BS = wanted_BS != _IGNORED
    found = token_values(logits_BSV, wanted_BS.clamp(min=0), settings["outputs"], settings["temperature"])
    found = {name: value_BS.masked_fill(~mask_BS, 0) for name, value_BS in found.items()}
    loss = -found["log_probs"].sum() / (mask_BS.sum().clamp(min=1) if count is None else count)
    auxiliary = getattr(output, "aux_loss", None)
    if auxiliary is not None:
        loss = loss + getattr(model.config.get_text_config(), "router_aux_loss_coef", 0.0) * auxiliary
    return FusedCausalLMOutput(loss=loss, label_mask=mask_BS, aux_loss=auxiliary, **found)
