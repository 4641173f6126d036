"""Text generation with the sharded model: caches of keys and values, sampling, and requests in one batch.

SamplingOptions, GenerationRequest     sampling: what ``Engine.generate`` and ``Engine.generate_requests`` take
Completion, GeneratedText              sampling, generator: what they return
"""

from engine.generation.generator import GeneratedText
from engine.generation.sampling import Completion, GenerationRequest, SamplingOptions

__all__ = ["Completion", "GeneratedText", "GenerationRequest", "SamplingOptions"]
