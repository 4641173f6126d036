"""``deepspeed.runtime.dataloader``: a loader that never ends."""

from engine.deepspeed.utils.tensor_fragment import RepeatingLoader

__all__ = ["RepeatingLoader"]
