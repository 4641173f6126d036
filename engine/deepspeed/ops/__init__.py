"""``deepspeed.ops``: optimizers by the names of DeepSpeed's compiled ones; the engine's kernels make the updates."""

from engine.deepspeed.ops import adagrad, adam

__all__ = ["adagrad", "adam"]
