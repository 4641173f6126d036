"""``deepspeed.pipe``: the names of ``runtime.pipe.module``."""

from engine.deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
