"""``HfDeepSpeedConfig`` of ``transformers.integrations``, for scripts that need one while they build a model."""

from collections.abc import Mapping
from typing import Any

from engine.config import load_raw


class HfDeepSpeedConfig:
    """Replacement of transformers' ``HfDeepSpeedConfig``: a DeepSpeed configuration with getters.

    Unlike transformers' class, it does not shard models while they are built; ``initialize`` shards them.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config: dict[str, Any] = dict(load_raw(config_file_or_dict))

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Returns the configuration value at the dotted path ``ds_key_long``; ``default`` if there is none."""
        found: Any = self.config
        for key in ds_key_long.split("."):
            if not isinstance(found, Mapping) or key not in found:
                return default
            found = found[key]
        return found

    def is_true(self, ds_key_long: str) -> bool:
        """Returns True if the configuration value at the dotted path ``ds_key_long`` is true."""
        return bool(self.get_value(ds_key_long, False))

    def is_false(self, ds_key_long: str) -> bool:
        """Returns True if the configuration value at the dotted path ``ds_key_long`` exists and is false."""
        found = self.get_value(ds_key_long)
        return found is not None and not found

    def is_zero2(self) -> bool:
        """Returns True if the ZeRO stage is 2."""
        return int(self.get_value("zero_optimization.stage", -1)) == 2

    def is_zero3(self) -> bool:
        """Returns True if the ZeRO stage is 3."""
        return int(self.get_value("zero_optimization.stage", -1)) == 3

    def is_offload(self) -> bool:
        """Returns True if optimizer state or parameters are offloaded to host memory or disk."""
        places = ("offload_optimizer", "offload_param")
        return any(self.get_value(f"zero_optimization.{each}.device") in ("cpu", "nvme") for each in places)
