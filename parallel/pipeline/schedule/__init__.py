"""The order in which ranks work on stages and microbatches, as pure data: no tensors, no processes, no torch."""
