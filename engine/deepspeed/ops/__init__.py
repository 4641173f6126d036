"""``deepspeed.ops``: optimizers under the names of DeepSpeed's compiled ones; the engine's kernels run the updates."""

from engine.deepspeed.ops import adagrad, adam

__all__ = ["adagrad", "adam"]
