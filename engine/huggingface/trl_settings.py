"""Settings of TRL's trainers, and what their loops cannot do over an engine.

Each refusal is made before TRL acts on the setting, or before anything is sent.
"""

from collections.abc import Mapping
from numbers import Real
from types import MappingProxyType
from typing import Any

from torch import Tensor

from engine.config import Config
from engine.errors import ConfigError, EngineError
from engine.huggingface.versions import refuse_untested

GENERATING = ("GRPOTrainer", "RLOOTrainer")
_ON_TENSOR_RANKS = ("SFTTrainer", "DPOTrainer")
BARE_REFERENCE = ("DPOTrainer", "KTOTrainer")
_TESTED = (*_ON_TENSOR_RANKS, *GENERATING, "KTOTrainer", "RewardTrainer")

_REFUSED: Mapping[str, str] = MappingProxyType({
    "use_vllm": "completions come from the engine's weights, which vLLM does not see; leave it out",
    "use_transformers_continuous_batching": "completions come from eng.generate; leave it out",
    "cache_implementation": "eng.generate keeps no keys and values; leave it out",
})  # fmt: skip
_REFUSED_PARTS = ("tools", "environment_factory", "rollout_func")


def refuse_trl(kind: str | None, given: Mapping[str, Any], args: Any) -> None:
    """Refuse what no trainer of TRL over an engine can do, before TRL acts on it.

    ``kind``: name of the trainer; ``given``: its keyword arguments; ``args``: its settings.

    Raises:
        ConfigError: a trainer, an argument or a size that is not served; a version that is not tested.
    """
    if kind is None:
        return
    refuse_untested("trl")
    if kind not in _TESTED:
        served = f"{', '.join(_TESTED[:-1])} or {_TESTED[-1]}"
        raise ConfigError(f"{kind} of TRL is not tested over the engine; use {served}.")
    for name, remedy in _REFUSED.items():
        if getattr(args, name, None):
            raise ConfigError(f"{type(args).__name__} has {name}, and {remedy}.")
    for name in _REFUSED_PARTS:
        if given.get(name):
            raise ConfigError(
                f"{kind} was given {name}, by which ranks generate different numbers of times, and the engine "
                "generates on all ranks together; leave it out."
            )
    if kind in GENERATING and args is not None:
        _check_generations(args)


def _check_generations(args: Any) -> None:
    """Refuse to generate between the microbatches of one step, whose gradients would be half summed."""
    every, accumulation = args.steps_per_generation * args.num_iterations, args.gradient_accumulation_steps
    if every % accumulation:
        raise ConfigError(
            f"{type(args).__name__} has steps_per_generation {args.steps_per_generation}, num_iterations "
            f"{args.num_iterations} and gradient_accumulation_steps {accumulation}, so that completions would be "
            "generated inside a step; give steps_per_generation that is a multiple of gradient_accumulation_steps."
        )


def refuse_rewards(name: str, rewards: Any, count: int) -> None:
    """Refuse what a reward function of TRL's has returned for ``count`` completions.

    Raises:
        EngineError: no list, another number of rewards, or one that is not a number.
    """
    listed = hasattr(rewards, "__len__") and hasattr(rewards, "__iter__") and not isinstance(rewards, str | Mapping)
    if not listed or len(rewards) != count:
        given = f"{len(rewards)} rewards" if listed else f"a {type(rewards).__name__}"
        raise EngineError(f"the reward function {name} returned {given} for {count} completions; return one for each.")
    for reward in rewards:
        if not (reward is None or isinstance(reward, Real | Tensor)):
            raise EngineError(
                f"the reward function {name} returned {reward!r} for a completion, which is not a number; return "
                "numbers, and None where there is no reward."
            )


def refuse_trl_grid(kind: str, args: Any, config: Config) -> None:
    """Refuse a grid on which a trainer of TRL would compute something else.

    Raises:
        ConfigError: stages, tensor ranks, or sharded parameters, that it does not know of.
    """
    if config.pp > 1:
        raise ConfigError(
            f"{kind} of TRL with parallel.pipeline {config.pp}: its loss multiplies by the weight of the head, which "
            "the last stage alone has; leave parallel.pipeline out."
        )
    if config.tp > 1 and kind not in _ON_TENSOR_RANKS:
        raise ConfigError(
            f"{kind} of TRL with parallel.tensor {config.tp}: it counts every process as a data rank; leave "
            f"parallel.tensor out, or use {' or '.join(_ON_TENSOR_RANKS)}."
        )
    if getattr(args, "sync_ref_model", False) and (config.tp > 1 or config.zero_optimization.stage == 3):
        raise ConfigError(
            f"{type(args).__name__} has sync_ref_model, which reads whole weights of the trained model on every rank, "
            "and a rank has a part of them; leave parallel.tensor out and give zero_optimization.stage 2, or leave it "
            "out."
        )
