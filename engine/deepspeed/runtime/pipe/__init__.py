"""Package of ``deepspeed.runtime.pipe``."""

from engine.deepspeed.runtime.pipe import topology

__all__ = ["topology"]
