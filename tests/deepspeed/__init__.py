"""Scripts as people write them for DeepSpeed, run with the engine's names; losses are those of the real DeepSpeed."""
