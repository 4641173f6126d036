"""``deepspeed.runtime``: schedules and topologies under the paths that scripts import."""

from engine.deepspeed.runtime import lr_schedules, pipe

__all__ = ["lr_schedules", "pipe"]
