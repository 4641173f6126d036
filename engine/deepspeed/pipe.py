"""``deepspeed.pipe``: what ``runtime.pipe.module`` has."""

from engine.deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
