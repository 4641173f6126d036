"""The engine's configuration under a training loop that the user has, in which the loop owns what it says itself.

The loop owns optimizer, schedule, accumulation and precision. The configuration leaves them out, says "auto", or says
the same; it owns the grid, ZeRO and what the loop has no word for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from engine.config import Config, load_config
from engine.errors import ConfigError
from engine.huggingface.arguments import conflict

_SECTIONS: Mapping[str, str] = MappingProxyType({"bf16": "torch_autocast", "fp16": "fp16"})
"""What a loop asks for -> the section that does it where the configuration has none."""
_AUTOMATIC = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """What a loop says itself."""

    owner: str
    """The object that says it, for errors."""
    accumulation: tuple[str, int]
    """Microbatches of a step: their name there, and the number."""
    clipping: tuple[str, float] | None = None
    """Norm to which gradients are clipped; None: the loop says it at each step, or not at all."""
    precision: str = "no"
    """"bf16" or "fp16" as the loop asks for it; "no" leaves precision to the configuration."""
    micro: int | None = None
    """Rows of a data rank in a microbatch; None: not known yet."""

    def configuration(self, raw: Mapping[str, Any], world_size: int) -> Config:
        """The engine's configuration on so many ranks.

        Raises:
            ConfigError: a value that the loop contradicts; an optimizer or a schedule; any mistake of the
                configuration itself.
        """
        for section in ("optimizer", "scheduler"):
            if raw.get(section) is not None:
                raise ConfigError(
                    f"{section} in engine_config, and the loop of {self.owner} has its own; leave it out of "
                    "engine_config."
                )
        config = {key: value for key, value in raw.items() if not (key in _AUTOMATIC and value == "auto")}
        self._take(config, "gradient_accumulation_steps", self.accumulation)
        if self.clipping is not None:
            self._take(config, "gradient_clipping", self.clipping)
        config.setdefault("gradient_clipping", 0.0)  # a loop that does not clip is not clipped
        if self.micro is not None and not self._is_cut(config):
            self._take(config, "train_micro_batch_size_per_gpu", ("batch_size of the data loader", self.micro))
        elif "train_batch_size" not in config:
            config.setdefault("train_micro_batch_size_per_gpu", 1)
        self._take_precision(config)
        return load_config({"initial_weights": "rank0"} | config | {"optimizer": None, "scheduler": None}, world_size)

    def _is_cut(self, config: Mapping[str, Any]) -> bool:
        """Whether a batch of the loader goes through a pipeline in equal parts, as the configuration has them."""
        rows, pipeline = part_rows(config), (config.get("parallel") or {}).get("pipeline", 1)
        cut = rows is not None and self.micro is not None and rows < self.micro and self.micro % rows == 0
        return cut and pipeline != 1

    def _take(self, config: dict[str, Any], key: str, owned: tuple[str, float]) -> None:
        name, value = owned
        if config.get(key) is not None and config[key] != value:
            raise conflict(key, config[key], name, value, self.owner)
        config[key] = value

    def _take_precision(self, config: dict[str, Any]) -> None:
        """bf16 of the loop is autocast over fp32 weights, unless the configuration has a section for it."""
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
    """Rows of the parts in which a batch goes through a pipeline; None if the configuration does not say it."""
    rows = raw.get("train_micro_batch_size_per_gpu")
    return rows if isinstance(rows, int) and rows > 0 else None


_PLACING: Mapping[str, str] = MappingProxyType({
    "deepspeed_plugin": "engine_config says what DeepSpeed's file does",
    "deepspeed_plugins": "engine_config says what DeepSpeed's file does",
    "fsdp_plugin": "give zero_optimization in engine_config",
    "megatron_lm_plugin": "give parallel in engine_config",
    "torch_tp_plugin": "give parallel in engine_config",
    "parallelism_config": "give parallel in engine_config",
    "dynamo_backend": 'give "compile": true in engine_config',
    "dynamo_plugin": 'give "compile": true in engine_config',
})  # fmt: skip
_SWITCHES = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG")
"""What ``accelerate launch`` may switch on by a variable."""


def of_accelerator(given: Mapping[str, Any], environ: Mapping[str, str]) -> LoopSettings:
    """What arguments of ``accelerate.Accelerator`` and the variables of ``accelerate launch`` say.

    Raises:
        ConfigError: one of them places the model in another way; fp8.
    """
    for name, remedy in _PLACING.items():
        if given.get(name) is not None:
            raise ConfigError(f"Accelerator was given {name}, and the engine places the model: {remedy}.")
    for name in _SWITCHES:
        if environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true":
            raise ConfigError(
                f"ACCELERATE_USE_{name} is set, and the engine places the model: start with torchrun, or choose no "
                "such plugin in accelerate config."
            )
    plugin, counted = given.get("gradient_accumulation_plugin"), given.get("gradient_accumulation_steps", 1)
    steps = plugin.num_steps if plugin is not None else environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", counted)
    precision = str(given.get("mixed_precision") or environ.get("ACCELERATE_MIXED_PRECISION", "no")).lower()
    if precision not in ("no", *_SECTIONS):
        raise ConfigError(
            f"mixed_precision is {precision} in Accelerator, and the engine computes in fp32, bf16 or fp16; give "
            '"no", "bf16" or "fp16".'
        )
    return LoopSettings(
        owner="Accelerator", accumulation=("gradient_accumulation_steps", int(steps)), precision=precision
    )
