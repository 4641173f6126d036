"""Configuration of the engine in a loop of accelerate or Lightning.

Optimizer, schedule, accumulation and precision come from the loop. The configuration omits them, sets "auto", or
repeats them; the grid, ZeRO and all other settings come from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from engine.config import Config, load_config
from engine.errors import ConfigError
from engine.hosting.arguments import conflict

_SECTIONS: Mapping[str, str] = MappingProxyType({"bf16": "torch_autocast", "fp16": "fp16"})
"""Precision that a loop sets -> the section that implements it if the configuration has none."""
_AUTOMATIC = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """Settings of another library's training loop that replace settings of the engine's configuration."""

    owner: str
    """Name of the object with these settings, for errors."""
    accumulation: tuple[str, int]
    """Name of the setting in the loop, and number of microbatches per step."""
    clipping: tuple[str, float] | None = None
    """Name of the setting, and L2 norm to which gradients are clipped; None if the loop passes it in each step, or does
    not clip.
    """
    precision: str = "no"
    """"bf16" or "fp16" if the loop sets it; "no" leaves precision to the configuration."""
    micro: int | None = None
    """Rows of a microbatch on a data rank; None: unknown."""

    def configuration(self, raw: Mapping[str, Any], world_size: int) -> Config:
        """Returns the engine's configuration for ``world_size`` ranks: ``raw`` with the settings of this object.

        Raises:
            ConfigError: a value of ``raw`` contradicts a setting of this object; or ``raw`` has an optimizer, a
                schedule, or an invalid key or value.
        """
        for section in ("optimizer", "scheduler"):
            if raw.get(section) is not None:
                raise ConfigError(
                    f"{section} is set in engine_config, but the loop of {self.owner} has its own; remove it from "
                    "engine_config."
                )
        config = {key: value for key, value in raw.items() if not (key in _AUTOMATIC and value == "auto")}
        self._take(config, "gradient_accumulation_steps", self.accumulation)
        if self.clipping is not None:
            self._take(config, "gradient_clipping", self.clipping)
        config.setdefault("gradient_clipping", 0.0)  # without clipping in the loop there is none
        if self.micro is not None and not self._is_cut(config):
            self._take(config, "train_micro_batch_size_per_gpu", ("batch_size of the data loader", self.micro))
        elif "train_batch_size" not in config:
            config.setdefault("train_micro_batch_size_per_gpu", 1)
        self._take_precision(config)
        return load_config({"initial_weights": "rank0"} | config | {"optimizer": None, "scheduler": None}, world_size)

    def _is_cut(self, config: Mapping[str, Any]) -> bool:
        """Returns True if a batch of the loader passes the pipeline in equal parts of the configured size."""
        rows, parallel = part_rows(config), config.get("parallel")
        pipeline = parallel.get("pipeline", 1) if isinstance(parallel, Mapping) else 1
        cut = rows is not None and self.micro is not None and rows < self.micro and self.micro % rows == 0
        return cut and pipeline != 1

    def _take(self, config: dict[str, Any], key: str, owned: tuple[str, float]) -> None:
        name, value = owned
        if config.get(key) is not None and config[key] != value:
            raise conflict(key, config[key], name, value, self.owner)
        config[key] = value

    def _take_precision(self, config: dict[str, Any]) -> None:
        """Maps bf16 of the loop to autocast over fp32 weights, unless the configuration has a section for it."""
        for key in ("bf16", "fp16"):
            if isinstance(config.get(key), Mapping) and config[key].get("enabled") == "auto":
                config[key] = {**config[key], "enabled": key == self.precision}
        if self.precision == "no":
            return
        for key in ("bf16", "fp16"):
            given, asked = config.get(key), key == self.precision
            if isinstance(given, Mapping) and bool(given.get("enabled")) != asked:
                raise conflict(f"{key}.enabled", bool(given.get("enabled")), "precision", self.precision, self.owner)
        if self.precision not in config:
            config[_SECTIONS[self.precision]] = {"enabled": True}


def part_rows(raw: Mapping[str, Any]) -> int | None:
    """Returns "train_micro_batch_size_per_gpu" of ``raw``; None if it is not set to a number."""
    rows = raw.get("train_micro_batch_size_per_gpu")
    return rows if isinstance(rows, int) and rows > 0 else None


_PLACING: Mapping[str, str] = MappingProxyType({
    "deepspeed_plugin": "engine_config takes the place of DeepSpeed's file",
    "deepspeed_plugins": "engine_config takes the place of DeepSpeed's file",
    "fsdp_plugin": "set zero_optimization in engine_config",
    "megatron_lm_plugin": "set parallel in engine_config",
    "torch_tp_plugin": "set parallel in engine_config",
    "parallelism_config": "set parallel in engine_config",
    "dynamo_backend": 'set "compile": true in engine_config',
    "dynamo_plugin": 'set "compile": true in engine_config',
})  # fmt: skip
_SWITCHES = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG")
"""Plugins that ``accelerate launch`` may enable by a variable."""


def of_accelerator(given: Mapping[str, Any], environ: Mapping[str, str]) -> LoopSettings:
    """Returns the settings of an ``accelerate.Accelerator``, from its arguments ``given`` and accelerate's variables in
    ``environ``.

    Raises:
        ConfigError: a setting shards or compiles the model outside the engine (FSDP, DeepSpeed), or selects fp8.
    """
    for name, remedy in _PLACING.items():
        if given.get(name) is not None:
            raise ConfigError(f"Accelerator was given {name}, but the engine places the model: {remedy}.")
    for name in _SWITCHES:
        if environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true":
            raise ConfigError(
                f"ACCELERATE_USE_{name} is set, but the engine places the model: start with torchrun, or choose no "
                "such plugin in accelerate config."
            )
    plugin, counted = given.get("gradient_accumulation_plugin"), given.get("gradient_accumulation_steps", 1)
    steps = plugin.num_steps if plugin is not None else environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", counted)
    precision = str(given.get("mixed_precision") or environ.get("ACCELERATE_MIXED_PRECISION", "no")).lower()
    if precision not in ("no", *_SECTIONS):
        raise ConfigError(
            f"mixed_precision is {precision} in Accelerator, but the engine computes in fp32, bf16 or fp16; set "
            '"no", "bf16" or "fp16".'
        )
    return LoopSettings(
        owner="Accelerator", accumulation=("gradient_accumulation_steps", int(steps)), precision=precision
    )


_OF_LIGHTNING: Mapping[str, str] = MappingProxyType({"32-true": "no", "bf16-mixed": "bf16"})
"""``precision`` of Lightning's Trainer -> ``precision`` of :class:`LoopSettings`."""


def of_lightning(trainer: Any) -> LoopSettings:
    """Returns the settings of ``trainer``, a Trainer of Lightning.

    Raises:
        ConfigError: the trainer clips gradients by value, or has a precision that casts weights or scales the loss.
    """
    precision, clipping = str(trainer.precision), trainer.gradient_clip_val
    if precision not in _OF_LIGHTNING:
        raise ConfigError(
            f'precision is "{precision}" in Trainer, whose plugin would cast the weights or scale the loss; set '
            '"32-true" or "bf16-mixed", and bf16 or fp16 in engine_config.'
        )
    if clipping and str(getattr(trainer.gradient_clip_algorithm, "value", "norm")) != "norm":
        raise ConfigError('gradient_clip_algorithm is "value" in Trainer, but the engine clips by the norm; remove it.')
    return LoopSettings(
        owner="Trainer",
        accumulation=("accumulate_grad_batches", trainer.accumulate_grad_batches),
        clipping=("gradient_clip_val", float(clipping)) if clipping else None,
        precision=_OF_LIGHTNING[precision],
    )


def trained_child(module: nn.Module, name: str | None) -> str:
    """Returns the name of the submodule that the engine shards: ``name`` or, if None, the only child with trainable
    parameters.

    If nothing is trainable, it is the only child with parameters.

    Raises:
        ConfigError: ``name`` does not exist; ``name`` is None, and no or several children qualify; or parameters
            outside the submodule are trainable.
    """
    kind = type(module).__name__
    if name is None:
        children = dict(module.named_children())
        trained = [each for each, child in children.items() if any(p.requires_grad for p in child.parameters())]
        found = trained or [each for each, child in children.items() if next(child.parameters(), None) is not None]
        if len(found) != 1:
            listed = ", ".join(found) or "no child"
            raise ConfigError(
                f"{kind} has parameters in {listed}, but the engine places one module; put them into one, as "
                "self.model, or name it in Strategy(module=...)."
            )
        (name,) = found
    elif name not in dict(module.named_modules()):
        raise ConfigError(f"Strategy was given module {name!r}, which {kind} does not have; name one of its modules.")
    beside = [each for each, p in module.named_parameters() if p.requires_grad and not each.startswith(f"{name}.")]
    if beside:
        raise ConfigError(
            f"{kind} has the trainable parameter {beside[0]!r} outside its module {name!r}, but the engine trains only "
            f"parameters inside {name!r}; move it into that module, or freeze it with requires_grad_(False)."
        )
    return name


def replace_child(module: nn.Module, name: str, child: nn.Module) -> None:
    """Replaces the submodule of ``module`` at the dotted path ``name`` by ``child``, in place."""
    parent, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(parent), leaf, child)


def move_others(module: nn.Module, name: str, device: torch.device) -> None:
    """Moves the direct children of ``module`` to ``device``, except for the one that is or has submodule ``name``."""
    top = name.partition(".")[0]
    for each, child in module.named_children():
        if each != top:
            child.to(device)
